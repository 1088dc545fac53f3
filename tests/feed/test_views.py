"""Multi-crop: views with ops and sizes of their own."""

import pickle

import numpy as np
import pytest
import torch

from h5feed import H5Dataset, H5Loader, UsageError, augment
from h5feed.feed.image import JpegItems
from h5feed.store.fields import FieldType, FieldValues
from loaders import KINDS, assert_same, by_index, write_kind
from packed import random_images, write_packed

GLOBAL = [
    augment.RandomResizedCrop(24, scale=(0.4, 1.0)),
    augment.RandomHorizontalFlip(),
    augment.ColorJitter(0.4),
]
LOCAL = [augment.RandomResizedCrop((10, 12), scale=(0.05, 0.4)), augment.RandomHorizontalFlip()]
VIEWS = [GLOBAL, GLOBAL, *[LOCAL] * 3]
SHAPES = [(3, 24, 24), (3, 24, 24), *[(3, 10, 12)] * 3]


def load(ds, batch_size=5, **options):
    given = {"shuffle": True, "views": VIEWS, "num_workers": 2, **options}
    with H5Loader(ds, batch_size, with_index=True, **given) as loader:
        return by_index(loader)


@pytest.fixture
def ds(tmp_path):
    return H5Dataset(write_kind(tmp_path / "a.h5", "raw"))


@pytest.mark.parametrize("kind", KINDS)
def test_each_view_is_what_its_ops_make(tmp_path, kind):
    """The view of that number which a loader of as many equal views makes."""
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    found = load(ds)
    alone = [load(ds, augment=ops, views=len(VIEWS)) for ops in (GLOBAL, LOCAL)]
    for index, (views, _) in found.items():
        assert [tuple(view.shape) for view in views] == SHAPES
        for number, view in enumerate(views):
            expected = alone[0 if number < 2 else 1][index][0][number]
            if kind == "jpeg" or kind.endswith(" jpeg") or kind == "original":
                # More of the image is decoded for all views, with other edges of the part.
                assert (view.int() - expected.int()).abs().float().mean() < 2
            else:
                assert torch.equal(view, expected)
        assert not torch.equal(views[0], views[1])
        assert not torch.equal(views[2], views[3])


def test_neither_workers_nor_batches_nor_engines_nor_ranks_change_a_view(ds):
    expected = load(ds)
    assert_same(load(ds, 3, num_workers=1), expected)
    assert_same(load(ds, 4, engine="process"), expected)
    ranks = [load(ds, 2, rank=rank, world_size=2) for rank in (0, 1)]
    assert_same(ranks[0] | ranks[1], expected)
    there = load(ds, augment_on="device")
    for index, (views, _) in expected.items():
        for one, other in zip(views, there[index][0], strict=True):
            assert (one.int() - other.int()).abs().max() <= 2


def test_a_batch_is_a_tuple_of_contiguous_images_and_memory_is_used_again(ds):
    with H5Loader(ds, 4, views=VIEWS, shuffle=True) as loader:
        for images, labels in loader:
            assert [tuple(view.shape) for view in images] == [(4, *shape) for shape in SHAPES]
            assert all(view.is_contiguous(memory_format=torch.channels_last) for view in images)
            assert labels.shape == (4,)
        stats = loader.stats()
    assert (stats["images"], stats["batches"]) == (12, 3)
    assert stats["slots"] <= len(VIEWS) * (loader.prefetch + 2)


def test_it_resumes_and_pickles(ds):
    options = {"views": VIEWS, "shuffle": True, "with_index": True, "seed": 3}
    with H5Loader(ds, 4, **options) as loader, pickle.loads(pickle.dumps(loader)) as again:
        whole = by_index(again)
        first = next(iter(loader))[2].tolist()
        state = loader.state_dict()
    left = {index: found for index, found in whole.items() if index not in first}
    with H5Loader(ds, 3, **{**options, "seed": 0}) as other:
        other.load_state_dict(state)
        assert_same(by_index(other), left)


def test_masks_boxes_and_floats_follow_each_view(tmp_path):
    """A bright square: its mask, and its box, are where the square is in each view."""
    images, masks, boxes = [], [], []
    for k in range(8):
        image, mask = np.full((48, 48, 3), 20, np.uint8), np.zeros((48, 48, 1), np.uint8)
        y, x = 10 + k, 22 - k
        image[y : y + 16, x : x + 16], mask[y : y + 16, x : x + 16] = 250, 1
        images.append(image)
        masks.append(mask)
        boxes.append(np.float32([[x, y, x + 16, y + 16]]))
    kind = FieldType(kind="boxes", dtype="float32", shape=(4,))
    path = write_packed(
        tmp_path / "m.h5",
        images,
        masks=masks,
        further={"boxes": FieldValues.of_arrays(boxes, kind)},
    )
    floats = [augment.ToDtype(torch.float32, scale=True)]
    views = [
        [augment.RandomResizedCrop(40, scale=(0.5, 1)), augment.RandomHorizontalFlip(), *floats],
        [augment.RandomResizedCrop(20, scale=(0.5, 1)), augment.RandomHorizontalFlip(), *floats],
    ]
    ds = H5Dataset(path, target=("mask", "boxes"))
    with H5Loader(ds, 8, views=views) as loader:
        ((seen, target),) = list(loader)
    assert [view.dtype for view in seen] == [torch.float32] * 2
    for side, view, mask, moved in zip(
        (40, 20), seen, target["mask"], target["boxes"], strict=True
    ):
        assert view.shape == (8, 3, side, side)
        assert mask.shape == (8, side, side)
        bright = view[:, 0] > 0.5
        assert ((mask == 1) == bright).float().mean() > 0.93
        for rows, inside in zip(moved, bright, strict=True):
            ((left, top, right, bottom),) = rows.round().int().tolist()
            box = torch.zeros(side, side, dtype=torch.bool)
            box[top:bottom, left:right] = True
            assert (box == inside).float().mean() > 0.9


def test_a_jpeg_is_decoded_once_for_all_views(tmp_path, monkeypatch):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "jpeg"))
    decoded, decode = [], JpegItems.decode_regions

    def counted(self, indices, *args):
        decoded.extend(indices.tolist())
        return decode(self, indices, *args)

    monkeypatch.setattr(JpegItems, "decode_regions", counted)
    load(ds)
    assert sorted(decoded) == list(range(12))


def test_what_cannot_be_is_one_sentence(ds):
    def refused(match, **options):
        with pytest.raises(UsageError, match=match):
            H5Loader(ds, 4, **options)

    refused(r"augment=\[RandomHorizontal.*\] and a list of views both say what happens to images",
            views=VIEWS, augment=[augment.RandomHorizontalFlip()])  # fmt: skip
    refused(r"views=\[\] is neither a number nor a list of the ops of each view", views=[])
    refused("views='two' is neither a number nor a list", views="two")
    refused("views=0 must be a whole number of at least 1", views=0)
    refused(r"augment=RandomHorizontalFlip\(p=0.5\) is one op: give a list",
            views=[augment.RandomHorizontalFlip()])  # fmt: skip
    refused(r"MixUp\(.*\) mixes labels: use it with views=1, not 2",
            views=[GLOBAL, [*GLOBAL, augment.MixUp()]])  # fmt: skip
    refused(r"views=.* makes torch.uint8 of one view and torch.float32 of another: end all of",
            views=[GLOBAL, [*GLOBAL, augment.ToDtype(torch.float32, scale=True)]])  # fmt: skip
    loader = H5Loader(ds, 4, views=VIEWS)
    with pytest.raises(UsageError, match="size=32: the 5 views have ops and sizes of their own"):
        loader.set_size(32)


def test_a_view_that_leaves_several_sizes_is_named(tmp_path):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "keep"))
    with pytest.raises(
        UsageError, match=r"augment=\(RandomHorizontalFlip\(p=0.5\),\) leaves images"
    ):
        H5Loader(ds, 4, views=[GLOBAL, [augment.RandomHorizontalFlip()]])


def test_views_without_ops_are_as_many(tmp_path):
    ds = H5Dataset(write_packed(tmp_path / "a.h5", random_images(4)))
    images, _ = next(iter(H5Loader(ds, 4, views=2)))
    assert torch.equal(images[0], images[1])
    assert images[0][1].permute(1, 2, 0).equal(torch.from_numpy(random_images(4)[1]))
