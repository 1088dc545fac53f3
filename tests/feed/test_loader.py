import dataclasses
import gc
import itertools
import json
import os
import subprocess
import sys
import textwrap
import weakref

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from h5feed import H5Dataset, H5Loader, UsageError, augment
from h5feed.feed import image as feed_image
from h5feed.feed.random import SeededDraws
from h5feed.feed.rows import Augmented, WholeItems
from images import smooth
from loaders import KINDS, ONE_SIZE, assert_same, by_index, write_kind
from packed import random_images, write_packed, write_sparse

CROP = (augment.RandomResizedCrop(16), augment.RandomHorizontalFlip())
NORMALIZE = augment.Normalize(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.2))


@pytest.fixture
def ds(tmp_path):
    return H5Dataset(write_kind(tmp_path / "a.h5", "raw"))


def load(ds, batch_size=5, **options):
    options.setdefault("shuffle", "sampler" not in options)
    with H5Loader(ds, batch_size, with_index=True, **options) as loader:
        return by_index(loader)


def test_a_batch_is_what_it_says(ds):
    with H5Loader(ds, 5, shuffle=True, augment=CROP, num_workers=2) as loader:
        batches = list(loader)
        assert len(loader) == len(batches) == 3
    assert [len(images) for images, _ in batches] == [5, 5, 2]
    for images, labels in batches:
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (3, 16, 16)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64
        assert labels.shape == (len(images),)


def test_drop_last(ds):
    with H5Loader(ds, 5, shuffle=True, drop_last=True) as loader:
        assert len(loader) == 2
        assert [len(images) for images, _ in loader] == [5, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_once_with_its_label(tmp_path, kind):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    found = load(ds, augment=CROP, num_workers=3)
    assert sorted(found) == list(range(12))
    assert [found[i][1].item() for i in range(12)] == ds.targets


@pytest.mark.parametrize("kind", ONE_SIZE)
@pytest.mark.parametrize("on", ["cpu", "device"])
def test_without_ops_images_come_as_they_are_stored(tmp_path, kind, on):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    found = load(ds, augment_on=on)
    for index, (views, _) in found.items():
        difference = (views[0].int() - ds[index][0].int()).abs()
        assert difference.max() <= (2 if kind == "yuv420" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_the_pipeline(tmp_path, kind):
    """Against the pipeline fed one image at a time from H5Dataset."""
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind), output="numpy")
    files = ds.files
    found = load(H5Dataset(files.paths), augment=CROP, seed=3)
    for index, (views, _) in found.items():
        pipeline = augment.Pipeline(CROP)
        yuv = files.specs["images"].encoding == "yuv420"
        stored = files.stored_shapes[[index]]
        pipeline.bind(tuple(stored[0].tolist()), encoding="yuv420" if yuv else "raw")
        params = pipeline.draw(
            SeededDraws(3, 0, np.array([index])),
            stored,
            stored if kind == "crop" else files.source_shapes[[index]],
            files.rows("letterbox", np.array([index])) if files.has_letterbox else None,
        )
        out = np.empty((1, 16, 16, 3), np.uint8)
        image = files.item("images", index) if yuv else ds[index][0]
        pipeline.run_cpu(params, 0, [image], out)
        np.testing.assert_array_equal(views[0].permute(1, 2, 0).numpy(), out[0])


@pytest.mark.parametrize("kind", ONE_SIZE)
def test_device_and_cpu_agree(tmp_path, kind):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    here, there = (load(ds, augment=CROP, augment_on=on) for on in ("cpu", "device"))
    for index in here:
        difference = (here[index][0][0].float() - there[index][0][0].float()).abs()
        assert difference.max() <= 2
        assert difference.mean() <= 0.5


OPS = {
    "resize": (augment.Resize((20, 24)),),
    "center": (augment.CenterCrop(20),),
    "crop": (augment.RandomCrop(32, padding=4),),
    "resized crop": (augment.RandomResizedCrop(16),),
    "horizontal": (augment.RandomHorizontalFlip(),),
    "vertical": (augment.RandomVerticalFlip(),),
    "reflected": (
        augment.RandomCrop(32, padding=4, padding_mode="reflect"),
        augment.AlternatingFlip(),
    ),
    "tones": (
        augment.RandomInvert(),
        augment.RandomPosterize(4),
        augment.RandomSolarize(128),
        augment.RandomAutocontrast(),
    ),
    "equalize": (augment.RandomEqualize(),),
    "sharpness": (augment.RandomAdjustSharpness(2),),
    "bicubic": (augment.RandomResizedCrop(16, interpolation="bicubic"),),
    "affine": (augment.RandomAffine(30, (0.2, 0.2), (0.8, 1.2), 10, "bilinear"),),
    "rotation": (augment.RandomRotation(30, "bilinear"),),
    "perspective": (augment.RandomPerspective(0.3),),
    "policies": (augment.RandAugment(), augment.TrivialAugmentWide(), augment.AutoAugment()),
    "mixed chains": (augment.AugMix(),),
    "some": (augment.RandomApply([augment.RandomInvert(), augment.RandomCrop(32, 4)]),),
    "one of them": (augment.RandomChoice([augment.GaussianBlur(3), augment.RandomInvert()]),),
    "jitter": (augment.ColorJitter(0.4, 0.4, 0.4, 0.1),),
    "gray": (augment.Grayscale(),),
    "random gray": (augment.RandomGrayscale(0.5),),
    "blur": (augment.GaussianBlur(5),),
    "erasing": (augment.RandomErasing(0.7),),
    "erasing of floats": (
        augment.ToDtype(torch.float32, scale=True),
        augment.RandomErasing(0.7, value="random"),
    ),
    "normalize": (*CROP, augment.ToDtype(torch.float32, scale=True), NORMALIZE),
    "float16": (*CROP, augment.ToDtype(torch.float16, scale=True), augment.Normalize([0.5], [0.5])),
    "bfloat16": (*CROP, augment.ToDtype(torch.bfloat16, scale=True)),
}


def test_every_op_that_knows_no_batch_is_among_them():
    tried = {type(op).__name__ for ops in OPS.values() for op in ops}
    public = {name: getattr(augment, name) for name in augment.__all__}
    ops = {
        name
        for name, op in public.items()
        if isinstance(op, type) and dataclasses.is_dataclass(op) and issubclass(op, augment.Op)
    }
    assert ops - tried == {"MixUp", "CutMix", "MixUpOrCutMix", "SanitizeBoundingBoxes"}


@pytest.mark.parametrize("on", ["cpu", "device"])
@pytest.mark.parametrize("ops", OPS.values(), ids=OPS.keys())
def test_threads_batches_and_ranks_change_no_pixel(ds, ops, on, monkeypatch):
    where = {"augment": ops, "augment_on": on, "views": 2}
    expected = load(ds, num_workers=1, batch_size=12, **where)
    monkeypatch.setattr("h5feed.feed.rows._WORTH", 0)  # jobs of few images
    assert_same(load(ds, num_workers=8, batch_size=5, **where), expected)
    assert_same(load(ds, num_workers=2, batch_size=1, prefetch=5, **where), expected)
    ranks = [load(ds, 2, rank=rank, world_size=3, **where) for rank in range(3)]
    assert_same({k: v for found in ranks for k, v in found.items()}, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_batches_change_no_pixel_of_any_store(tmp_path, kind, monkeypatch):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    expected = load(ds, augment=CROP, num_workers=1, batch_size=12, views=2)
    monkeypatch.setattr("h5feed.feed.rows._WORTH", 0)  # jobs of few images
    assert_same(load(ds, augment=CROP, num_workers=8, batch_size=5, views=2), expected)
    assert_same(load(ds, augment=CROP, num_workers=2, batch_size=1, views=2), expected)


@pytest.mark.parametrize(
    ("ops", "side", "sizes"),
    [
        ((), 32, {256, 44}),
        ((augment.RandomCrop(32, padding=4), augment.RandomHorizontalFlip()), 32, {256, 44}),
        ((augment.ColorJitter(0.4),), 32, {38, 34}),  # real work: shared among the threads
        ((augment.RandomHorizontalFlip(),), 80, {38, 34}),
    ],
    ids=["bytes", "windows", "pixels", "large"],
)
def test_small_images_are_copied_many_by_a_job(tmp_path, monkeypatch, ops, side, sizes):
    ds = H5Dataset(write_packed(tmp_path / "a.h5", random_images(300, (side, side))))
    filled = []
    for field in (WholeItems, Augmented):
        fill = field.fill
        monkeypatch.setattr(
            field, "fill", lambda self, i, *rest, f=fill: (filled.append(len(i)), f(self, i, *rest))
        )
    with H5Loader(ds, 300, shuffle=True, augment=ops, num_workers=4) as loader:
        for _ in loader:
            pass
    assert sum(filled) == 300
    assert set(filled) == sizes


def test_threads_change_no_pixel_of_a_mixed_batch(ds):
    for mix in (augment.MixUp(), augment.CutMix()):
        found = [load(ds, 6, augment=(*CROP, mix), num_workers=threads) for threads in (1, 8)]
        assert_same(*found)


@pytest.mark.parametrize("option", [{"seed": 1}, {"epoch": 1}])
def test_seed_and_epoch_change_order_and_crops(ds, option):
    def epoch_of(seed=0, epoch=0):
        with H5Loader(ds, 12, shuffle=True, augment=CROP, seed=seed, with_index=True) as loader:
            loader.set_epoch(epoch)
            ((images, _, indices),) = loader
            return indices.tolist(), {i: images[k].clone() for k, i in enumerate(indices.tolist())}

    order, images = epoch_of()
    other_order, other_images = epoch_of(**option)
    assert order != other_order
    assert sum((images[i] == other_images[i]).all().item() for i in images) < 3


def test_float_batches(ds):
    with H5Loader(
        ds, 4, augment=(*CROP, augment.ToDtype(torch.float32, scale=True), NORMALIZE), shuffle=False
    ) as loader:
        images, _ = next(iter(loader))
    assert images.dtype == torch.float32
    with H5Loader(ds, 4, augment=CROP, shuffle=False) as loader:
        plain, _ = next(iter(loader))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (NORMALIZE.mean, NORMALIZE.std))
    torch.testing.assert_close(images, (plain / 255 - mean) / std)


@pytest.mark.parametrize("on", ["cpu", "device"])
def test_views_differ_and_each_is_a_function_of_the_sample(ds, on):
    found = load(ds, augment=CROP, views=2, augment_on=on)
    single = load(ds, augment=CROP, augment_on=on)
    same = 0
    for index, ((first, second), _) in found.items():
        assert (first == single[index][0][0]).all()
        same += (first == second).all().item()
    assert same < 3
    assert_same(load(ds, 12, augment=CROP, views=2, augment_on=on, num_workers=1), found)


@pytest.mark.parametrize(
    ("kind", "on", "decode"),
    [
        ("jpeg", "cpu", "decode_strictly"),
        ("original", "cpu", "decode_jpeg"),
        ("jpeg", "device", "decode_strictly"),
    ],
)
def test_views_are_made_of_one_decoding(tmp_path, monkeypatch, kind, on, decode):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    real, calls = getattr(feed_image, decode), []
    monkeypatch.setattr(
        feed_image, decode, lambda *args, **o: (calls.append(1), real(*args, **o))[1]
    )
    load(ds, augment=CROP, views=3, augment_on=on)
    assert len(calls) == 12


def test_views_of_bytes_for_a_device_are_read_once(ds, monkeypatch):
    copied, take = [], np.take
    monkeypatch.setattr(
        np, "take", lambda a, *rest, **o: (copied.append(a), take(a, *rest, **o))[1]
    )
    load(ds, augment=CROP, views=3, augment_on="device", batch_size=12)
    assert sum(a.ndim == 4 for a in copied) == 1


@pytest.fixture
def masked(tmp_path):
    """Images whose every channel is the mask itself."""
    rng = np.random.default_rng(0)
    masks = [rng.integers(0, 9, (32, 32, 1), dtype=np.uint8) for _ in range(10)]
    images = [np.repeat(mask, 3, axis=2) for mask in masks]
    return H5Dataset(write_packed(tmp_path / "m.h5", images, masks=masks))


@pytest.mark.parametrize("views", [1, 2])
def test_targets_come_in_target_dtype_and_padding_as_ignore_index(masked, views):
    ds = H5Dataset(masked.files.paths, target_dtype=torch.int64)
    ops = [augment.RandomCrop(32, padding=16, mask_fill=255)]
    with H5Loader(ds, 4, shuffle=True, augment=ops, views=views) as loader:
        for images, masks in loader:
            pairs = [(images, masks)] if views == 1 else zip(images, masks, strict=True)
            for image, mask in pairs:
                assert mask.dtype == torch.int64
                padded = mask == 255
                assert padded.any()
                assert torch.equal(image[:, 0][~padded].long(), mask[~padded])


def test_labels_come_in_target_dtype_and_so_to_target_transform(tmp_path):
    path = write_kind(tmp_path / "a.h5", "raw")
    ds = H5Dataset(path, target_dtype=torch.float32)
    for made in (load(ds), load(H5Dataset(path, target_dtype=torch.int32, target_transform=half))):
        assert {label.dtype for _, label in made.values()} == {torch.float32}
    assert [made[i][1].item() for i in range(12)] == [label / 2 for label in ds.targets]
    for one in H5Dataset(path, target_dtype=torch.int32, target_transform=half):
        assert one[1].dtype == torch.float32
    with pytest.raises(UsageError, match=r"target_dtype=torch\.float32 with .*MixUp.*: mixed targ"):
        H5Loader(ds, 4, shuffle=True, augment=[augment.MixUp()])


def half(label):
    return label / 2


@pytest.mark.parametrize("on", ["cpu", "device"])
def test_masks_have_their_images_geometry(masked, on):
    ops = (augment.RandomCrop(24), augment.RandomHorizontalFlip(), augment.RandomVerticalFlip())
    with H5Loader(masked, 4, shuffle=True, augment=ops, augment_on=on) as loader:
        for images, masks in loader:
            assert masks.dtype == torch.uint8
            assert masks.shape == (len(images), 24, 24)
            assert (images == masks[:, None]).all()


def test_masks_without_ops_and_with_views(masked):
    found = load(masked, shuffle=False)
    assert all((mask == masked[i][1]).all() for i, (_, mask) in found.items())
    with H5Loader(masked, 4, shuffle=True, augment=(augment.RandomCrop(24),), views=2) as loader:
        for images, masks in loader:
            assert all((i == m[:, None]).all() for i, m in zip(images, masks, strict=True))


def test_mixup_gives_soft_targets(ds):
    with H5Loader(ds, 6, shuffle=True, augment=(*CROP, augment.MixUp())) as loader:
        for _, labels in loader:
            assert labels.dtype == torch.float32
            assert labels.shape == (6, 2)
            torch.testing.assert_close(labels.sum(dim=1), torch.ones(6))


def test_mixup_on_cpu_and_device_agree(ds):
    ops = (*CROP, augment.MixUp())
    with (
        H5Loader(ds, 6, shuffle=True, augment=ops) as a,
        H5Loader(ds, 6, shuffle=True, augment=ops, augment_on="device") as b,
    ):
        for (here, labels), (there, others) in zip(a, b, strict=True):
            assert (here.float() - there.float()).abs().max() <= 3
            torch.testing.assert_close(labels, others)


def test_target_transform_and_float_targets(tmp_path):
    targets = np.random.default_rng(0).random((10, 3), np.float32)
    path = write_packed(tmp_path / "a.h5", random_images(10), labels=targets, classes=())
    found = load(H5Dataset(path))
    assert all((label.numpy() == targets[i]).all() for i, (_, label) in found.items())
    doubled = load(H5Dataset(path, target_transform=lambda t: t * 2))
    assert all((label.numpy() == targets[i] * 2).all() for i, (_, label) in doubled.items())
    path = write_packed(tmp_path / "b.h5", random_images(4))
    tens = load(H5Dataset(path, target_transform=lambda label: label * 10))
    assert sorted(label.item() for _, label in tens.values()) == [0, 0, 10, 10]


def test_several_files(tmp_path):
    images = [smooth(32, 32, k) for k in range(10)]
    paths = [write_packed(tmp_path / f"{k}.h5", images[5 * k : 5 * k + 5]) for k in range(2)]
    ds = H5Dataset(paths)
    for ops in ((), CROP):
        one = write_packed(tmp_path / "all.h5", images, labels=np.arange(10) % 5 % 2)
        assert_same(load(ds, augment=ops), load(H5Dataset(one), augment=ops))


# --- order --------------------------------------------------------------------------------------


def order_of(ds, **options):
    options.setdefault("shuffle", "sampler" not in options)
    with H5Loader(ds, 5, with_index=True, **options) as loader:
        return torch.cat([indices for *_, indices in loader]).tolist()


def test_orders(ds):
    with H5Loader(ds, 5, with_index=True) as loader:  # as torch's DataLoader: none unless asked for
        assert torch.cat([indices for *_, indices in loader]).tolist() == list(range(12))
    assert order_of(ds, shuffle=False) == list(range(12))
    assert sorted(order_of(ds)) == list(range(12))
    assert order_of(ds) != list(range(12))
    blocks = order_of(ds, shuffle="block", block=3, window=2)
    assert sorted(blocks) == list(range(12))
    assert len({i // 3 for i in blocks[:6]}) == 2


def test_indices_and_samplers(ds):
    assert order_of(ds, indices=[3, 1, 8], shuffle=False) == [3, 1, 8]
    assert sorted(order_of(ds, indices=[3, 1, 8])) == [1, 3, 8]
    assert order_of(ds, sampler=SequentialSampler(range(7))) == list(range(7))
    weighted = WeightedRandomSampler([1.0] * 12, 40)
    assert len(order_of(ds, sampler=weighted)) == 40
    assert order_of(ds, sampler=weighted) == order_of(ds, sampler=weighted)
    assert order_of(ds, sampler=weighted) != order_of(ds, sampler=weighted, seed=1)


def test_a_sampler_balances_classes(tmp_path):
    labels = np.array([0] * 90 + [1] * 10)
    ds = H5Dataset(write_packed(tmp_path / "a.h5", random_images(100), labels=labels))
    weights = 1 / np.bincount(labels)[labels]
    with H5Loader(ds, 50, sampler=WeightedRandomSampler(weights, 1000)) as loader:
        ones = sum(int(label.sum()) for _, label in loader)
    assert abs(ones - 500) < 4 * 1000**0.5 / 2  # standard deviations


def test_a_sampler_leaves_the_callers_random_numbers_alone(ds):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    order_of(ds, sampler=WeightedRandomSampler([1.0] * 12, 40))
    assert torch.equal(torch.rand(3), expected)


def test_a_sample_drawn_twice_is_augmented_twice(ds):
    with H5Loader(ds, 8, augment=CROP, sampler=[4] * 8) as loader:
        ((images, _),) = loader
    assert len({image.numpy().tobytes() for image in images}) > 5


def test_every_pass_is_the_next_epoch(ds):
    loader = H5Loader(ds, 12, shuffle=True, with_index=True)
    first, second, third = (next(iter(loader))[2].tolist() for _ in range(3))
    assert first != second != third != first
    loader.set_epoch(0)
    assert next(iter(loader))[2].tolist() == first
    for *_, indices in loader:
        assert indices.tolist() == second
    loader.set_epoch(1)
    assert next(iter(loader))[2].tolist() == second


def test_a_pass_counts_from_its_first_batch_on(ds):
    def order(passed):
        return [i for *_, indices in passed for i in indices.tolist()]

    loader = H5Loader(ds, 4, shuffle=True, with_index=True)
    first, second = order(loader), order(loader)
    assert first != second
    loader.set_epoch(0)
    begun = [iter(loader), iter(loader)]
    assert [order(one) for one in begun] == [first, first]
    loader.set_epoch(0)
    begun = [iter(loader)]
    loader.set_epoch(1)
    begun.append(iter(loader))
    assert [order(one) for one in begun] == [first, second]


def test_ranks_are_those_of_torch_distributed_when_a_pass_begins(ds, monkeypatch):
    loader, alone = (
        H5Loader(ds, 2, shuffle=True),
        H5Loader(ds, 2, shuffle=True, rank=0, world_size=1),
    )
    assert (loader.rank, loader.world_size, len(loader)) == (0, 1, 6)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert (loader.rank, loader.world_size, len(loader)) == (1, 3, 2)
    assert [len(batch) for batch, _ in loader] == [2, 2]
    assert (alone.rank, alone.world_size, len(alone)) == (0, 1, 6)
    assert sum(len(batch) for batch, _ in alone) == 12


def test_several_processes_without_a_group_are_an_error(ds, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = H5Loader(ds, 2, shuffle=True)  # the group may come later
    for use in (len, iter):
        with pytest.raises(UsageError) as caught:
            use(loader)
        assert str(caught.value) == (
            "WORLD_SIZE=2 in the environment, and torch.distributed has no process group: call "
            "torch.distributed.init_process_group() before the first pass or len(), or give the "
            "loader rank and world_size (0 and 1 where each process is to read everything)"
        )
    assert len(H5Loader(ds, 2, shuffle=True, rank=0, world_size=1)) == 6
    for value in ("1", "", "nonsense"):
        monkeypatch.setenv("WORLD_SIZE", value)
        assert len(loader) == 6


RANK = """
    import json, sys
    from torch import distributed
    from torch.utils.data import DataLoader, DistributedSampler
    from h5feed import H5Dataset, H5Loader
    path, meeting, rank = sys.argv[1:]
    loader = H5Loader(H5Dataset(path), 2, seed=3, with_index=True)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2
    )
    seen, places = [], []
    for _, _, indices in loader:
        seen += indices.tolist()
        places.append(loader.state_dict()["consumed"])
    ds = H5Dataset(path, aspect="stored")
    stock = DataLoader(ds, 2, sampler=DistributedSampler(ds, seed=3))
    sums = [int(image.long().sum()) for images, _ in stock for image in images]
    print(json.dumps([len(loader), seen, places, sums]))
    distributed.destroy_process_group()
"""


def test_a_loader_made_before_the_group_shares_its_epoch(ds, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(RANK), ds.files.paths[0]]
    ranks = [
        subprocess.Popen(
            [*command, str(tmp_path / "meeting"), str(rank)],
            stdout=subprocess.PIPE,
            env={**os.environ, "WORLD_SIZE": "2", "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    told = [json.loads(process.communicate(timeout=120)[0]) for process in ranks]
    assert [length for length, *_ in told] == [3, 3]
    assert sorted(told[0][1] + told[1][1]) == list(range(12))
    assert [places for *_, places, _ in told] == [[4, 8, 12]] * 2
    own = [int(image.long().sum()) for image, _ in H5Dataset(ds.root, aspect="stored")]
    assert len(set(own)) == 12
    assert [len(sums) for *_, sums in told] == [6, 6]  # a stock DataLoader's, of H5Dataset
    assert sorted(told[0][3] + told[1][3]) == sorted(own)


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_tails(tmp_path, tail):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=11))
    seen, repeated = [], 0
    for rank in range(3):
        with H5Loader(
            ds, 2, shuffle=True, rank=rank, world_size=3, tail=tail, with_index=True
        ) as loader:
            seen += torch.cat([indices for *_, indices in loader]).tolist()
            repeated += loader.stats()["repeated"]
    if tail == "pad":
        assert set(seen) == set(range(11))
        assert (len(seen), repeated) == (12, 1)
    else:
        assert (len(set(seen)), len(seen), repeated) == (9, 9, 0)


# --- memory -------------------------------------------------------------------------------------


def test_a_list_of_all_batches_is_right_and_warned_of_once(ds):
    loader = H5Loader(ds, 1, shuffle=True, augment=CROP, with_index=True)
    with pytest.warns(UserWarning, match="batches are held at once") as caught:
        batches = list(loader)
    assert len(caught) == 1
    assert "images.clone()" in str(caught[0].message)
    assert caught[0].filename == __file__
    found = by_index(batches)
    loader.set_epoch(0)
    assert_same(by_index(loader), found)
    assert loader.stats()["held_many"]


@pytest.mark.parametrize(
    "alias",
    [lambda t: t.detach(), lambda t: t.numpy(), lambda t: t[2:3], lambda t: t.view(-1)],
    ids=["detach", "numpy", "slice", "view"],
)
def test_what_the_caller_keeps_does_not_change(tmp_path, alias):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=60))
    with H5Loader(ds, 4, shuffle=True, augment=CROP) as loader:
        passed = iter(loader)
        kept = alias(next(passed)[0].permute(0, 2, 3, 1))
        copy = np.asarray(kept).copy()
        for _ in passed:
            pass
        for _ in loader:
            pass
        np.testing.assert_array_equal(np.asarray(kept), copy)


def test_memory_is_used_again(tmp_path):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=60))
    with H5Loader(ds, 4, shuffle=True, augment=CROP, prefetch=2) as loader:
        places = {images.data_ptr() for _ in range(4) for images, _ in loader}
        assert len(places) <= 4
        assert loader.stats()["slots"] <= 4


def test_small_sets_and_empty_ones(tmp_path):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=1))
    assert list(load(ds, 5, augment=CROP, num_workers=8)) == [0]
    assert load(ds, indices=[]) == {}
    assert len(H5Loader(ds, 5, shuffle=True, indices=[])) == 0


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"prefetch": 0}, "prefetch=0 must be"),
        ({"views": 0}, "views=0 must be"),
        ({"num_workers": -1}, 'num_workers=-1 must be "auto" or a whole number'),
        ({"num_workers": "many"}, "num_workers='many' must be"),
        (
            {"shuffle": "blocks"},
            'shuffle=\'blocks\' is none of True, "block", "shards" and False',
        ),
        ({"streams": 0}, "streams=0 must be a whole number of at least 1"),
        ({"rank": 1}, "rank=1 and world_size=None: give both or neither"),
        ({"rank": 2, "world_size": 2}, "rank=2 is not in 0 to world_size-1=1"),
        ({"augment_on": "gpu"}, "augment_on='gpu' is none of"),
        ({"device": "meta"}, "device='meta' is not one H5Loader sends to"),
        ({"device": "mps"}, "device='mps' is not one H5Loader sends to: cpu or cuda"),
        ({"tail": "cut"}, "tail='cut' is none of pad, drop"),
        ({"on_error": "ignore"}, "on_error='ignore' is none of raise, skip"),
        ({"lookahead": -1}, "lookahead=-1"),
        ({"indices": [12]}, "indices gives indices from 12 to 12; the dataset has 0 to 11"),
        ({"indices": [0.5]}, "indices must give one whole number per sample"),
        ({"sampler": [1], "shuffle": True}, "sampler decides the order alone"),
        ({"block": 0}, "block=0 must be a whole number of at least 1"),
        ({"window": 1.5}, "window=1.5 must be a whole number of at least 1"),
        ({"batch_size": True}, "batch_size=True must be a whole number of at least 1"),
        ({"batch_size": 4.0}, "batch_size=4.0 must be a whole number of at least 1"),
        ({"seed": "a"}, "seed='a' must be a whole number"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"rank": "0", "world_size": 2}, "rank='0' must be a whole number of at least 0"),
        ({"antialias": "no"}, "antialias='no' must be True, False or \"auto\""),
    ],
)
def test_refuses_a_wrong_argument(ds, options, message):
    with pytest.raises(UsageError) as caught:
        H5Loader(ds, **{"batch_size": 4, **options})
    assert message in str(caught.value)


@pytest.mark.parametrize("op", [augment.MixUp, augment.CutMix])
def test_mixing_needs_the_number_of_classes_of_a_file_that_has_none(tmp_path, op):
    images = random_images(8, (8, 8))
    path = write_packed(tmp_path / "n.h5", images, labels=np.arange(8) % 4, classes=())
    loader = H5Loader(H5Dataset(path), 4, shuffle=True, augment=[op()])
    with loader, pytest.raises(UsageError, match="how many classes there are: give num_classes"):
        list(loader)
    with H5Loader(H5Dataset(path), 4, shuffle=True, augment=[op(num_classes=4)]) as loader:
        assert all(targets.shape == (4, 4) for _, targets in loader)


def test_asking_a_sampler_leaves_the_generators_of_gpus_alone(ds, monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.random.get_rng_state()
    loader = H5Loader(ds, 4, sampler=WeightedRandomSampler([1.0] * 12, 12))
    assert sum(len(labels) for _, labels in loader) == 12
    assert seeded == []
    assert torch.equal(torch.random.get_rng_state(), before)


class RASampler(SequentialSampler):
    """As timm has some: no DistributedSampler, and split by rank all the same."""

    num_replicas, rank = 2, 0


def test_refuses_foreign_datasets_transforms_and_samplers(ds):
    with pytest.raises(UsageError, match="is not an H5Dataset, nor a Subset or ConcatD"):
        H5Loader([1, 2, 3], 4, shuffle=True)
    for sampler in (DistributedSampler(ds, num_replicas=2, rank=0), RASampler(ds)):
        text = f"sampler={type(sampler).__name__} would be split among the ranks twice: .* leave sa"
        with pytest.raises(UsageError, match=text):
            H5Loader(ds, 4, sampler=sampler)
    batches = BatchSampler(SequentialSampler(ds), 3, drop_last=False)
    with pytest.raises(UsageError, match="a BatchSampler is not a Sampler here"):
        iter(H5Loader(ds, 4, sampler=batches))
    batches = BatchSampler(SequentialSampler(ds), 5, drop_last=False)  # 5, 5 and 2
    with pytest.raises(UsageError, match="a BatchSampler is not a Sampler here"):
        iter(H5Loader(ds, 4, sampler=batches))
    ds = H5Dataset(ds.files.paths, transform=lambda image: image, aspect="stored")
    with pytest.raises(UsageError, match="use make_dataloader"):
        H5Loader(ds, 4, shuffle=True)


@pytest.mark.parametrize("output", ["tensor", "numpy", "pil"])
@pytest.mark.parametrize("aspect", ["stored", "source"])
def test_what_a_dataset_asks_for_is_done_or_refused(ds, output, aspect):
    ds = H5Dataset(ds.files.paths, output=output, aspect=aspect)
    if (output, aspect) == ("tensor", "stored"):
        assert len(H5Loader(ds, 4, shuffle=True)) == 3
        return
    with pytest.raises(UsageError) as caught:
        H5Loader(ds, 4, shuffle=True)
    assert str(caught.value) == (
        f"dataset has output={output!r} and aspect={aspect!r}, and H5Loader makes tensors of the "
        "images as they are stored; its crops are drawn in the source's proportions and undo "
        "fit=stretch: give it H5Dataset(path) with neither, or use make_dataloader"
    )


def test_batches_that_free_memory_does_not_hold_are_refused_in_a_sentence(tmp_path, monkeypatch):
    path = write_sparse(tmp_path / "h.h5", 32, 8192)  # a small file on the disk, and honest
    monkeypatch.setattr("h5feed.feed.memory.available_memory", lambda: 20 * 10**9)
    with pytest.raises(UsageError) as caught:
        H5Loader(H5Dataset(path), 32, shuffle=True)
    assert str(caught.value) == (
        "batch_size=32: 3 batches in memory, as prefetch has it, take 19.3 GB, and of the 20.0 GB "
        "that are free here they may take 80%; give a smaller batch_size or prefetch, or crop the "
        "images in augment"
    )
    H5Loader(H5Dataset(path), 26, shuffle=True).close()
    H5Loader(H5Dataset(path), 256, shuffle=True, augment=CROP, drop_last=False).close()
    monkeypatch.setattr("h5feed.feed.memory.available_memory", lambda: 0)
    H5Loader(H5Dataset(path), 1, shuffle=True).close()  # what is free may be more in a moment
    monkeypatch.setattr("h5feed.feed.memory.available_memory", lambda: None)
    monkeypatch.setattr("h5feed.feed.memory.total_memory", lambda: 20 * 10**9)
    with pytest.raises(UsageError, match=r"take 19\.3 GB"):
        H5Loader(H5Dataset(path), 32, shuffle=True)


@pytest.mark.parametrize("said", [5, 9])
def test_refuses_a_sampler_whose_len_is_not_what_it_gives(ds, said):
    class Wrong(SequentialSampler):
        def __iter__(self):
            return iter(range(7))

        def __len__(self):
            return said

    with pytest.raises(UsageError, match=rf"sampler gave 7 indices, and its len\(\) is {said}, by"):
        iter(H5Loader(ds, 4, sampler=Wrong(ds)))


@pytest.mark.parametrize("epoch", ["x", -1, 1.0, None])
def test_refuses_what_is_no_epoch(ds, epoch):
    with pytest.raises(UsageError) as caught:
        H5Loader(ds, 4, shuffle=True).set_epoch(epoch)
    assert str(caught.value) == f"epoch={epoch!r} must be a whole number of at least 0"


@pytest.mark.parametrize("kind", ["original", "keep"])
def test_refuses_images_of_several_sizes(tmp_path, kind):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    with pytest.raises(UsageError, match="leaves images of several sizes"):
        H5Loader(ds, 4, shuffle=True)
    with pytest.raises(UsageError, match='augment_on="device" needs images of one size'):
        H5Loader(ds, 4, shuffle=True, augment=CROP, augment_on="device")


def test_stats_say_what_was_done(ds):
    with H5Loader(ds, 5, shuffle=True, augment=CROP, num_workers=2) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert (stats["batches"], stats["images"], stats["skipped"], stats["repeated"]) == (3, 12, 0, 0)
    assert (stats["num_workers"], stats["prefetch"], stats["augment_on"]) == (2, 2, "cpu")
    assert stats["augment_on_reason"] == "batches stay on the CPU"
    assert 0 < stats["slots"] <= 4
    assert stats["slot_bytes"] == stats["slots"] * 5 * 16 * 16 * 3
    assert stats["wait_s"] > 0


@pytest.mark.parametrize(("side", "left"), [(256, 3), (257, 1)])
def test_cv2_threads_are_turned_off_for_large_images_only(ds, side, left):
    before = cv2.getNumThreads()
    try:
        cv2.setNumThreads(3)
        H5Loader(ds, 4, shuffle=True, augment=(augment.RandomResizedCrop(side),), num_workers=2)
        assert cv2.getNumThreads() == left
    finally:
        cv2.setNumThreads(before)


def test_the_loader_dies_with_its_last_reference(ds):
    loader = H5Loader(ds, 2, shuffle=True, augment=CROP)
    passed = iter(loader)
    next(passed)
    watch = weakref.ref(loader)
    del loader
    assert watch() is None
    assert len(list(itertools.islice(passed, 2))) == 2, "a pass goes on without it"
    del passed
    gc.collect()
