import errno
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, random_split

from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.loader import H5Loader
from mapped import is_view
from packed import random_images, write_packed

SIZES = [(16, 16), (64, 64)]  # five items on a page, and three pages an item


@pytest.fixture(params=SIZES, ids=["shared pages", "own pages"])
def packed(request, tmp_path):
    images = random_images(40, request.param)
    return write_packed(tmp_path / "a.h5", images), images


def pixels_of(path):
    return [image.permute(1, 2, 0).numpy() for image, _ in H5Dataset(path)]


def chw(image):
    return torch.from_numpy(image).permute(2, 0, 1)


def same(got, images):
    return all(torch.equal(a, chw(b)) for a, b in zip(got, images, strict=True))


IN_PLACE = {
    "itself": lambda image: image.bitwise_not_(),
    "through a crop": lambda image: [
        image[:, :8].bitwise_not_(),
        image[:, 8:].bitwise_not_(),
        image,
    ][2],
    "through numpy": lambda image: [np.invert(image.numpy(), out=image.numpy()), image][1],
    "through .data": lambda image: [image.data.bitwise_not_(), image][1],
    "through detach": lambda image: [image.detach().bitwise_not_(), image][1],
}


@pytest.mark.parametrize("transform", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_transform_that_writes_changes_nothing_that_is_read_later(packed, transform, mode):
    path, images = packed
    before = path.read_bytes()
    ds = H5Dataset(path, output="tensor", transform=transform)
    with mode():
        for _ in range(2):
            got = [image for image, _ in ds]
            assert same(got, [~image for image in images])
    ds.transform = None
    assert same([image for image, _ in ds], images)
    assert path.read_bytes() == before


class LateWriter:
    """Writes into item after item, but only from the n-th call on."""

    def __init__(self, first, make=lambda image: image):
        self.calls, self.first, self.make = 0, first, make

    def __call__(self, image):
        self.calls += 1
        if self.calls > self.first:
            image.bitwise_not_()
        return self.make(image)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("first", [0, 7, 8, 9, 20])
def test_one_that_starts_late_is_found_out_then(packed, first, mode):
    path, images = packed
    ds = H5Dataset(path, output="tensor", transform=LateWriter(first))
    with mode():
        got = [image for image, _ in ds]
        assert same(got[:first], images[:first])
        assert same(got[first:], [~image for image in images[first:]])
        ds.transform = None
        assert same([image for image, _ in ds], images)


def test_whatever_a_late_result_holds_of_the_view_keeps_its_contents(packed):
    path, images = packed
    parts = {
        "tuple": lambda image: (image, image[:, 2:9, 3:]),
        "dict": lambda image: {"a": image.flip(0), "b": [image[1]]},
        "view": lambda image: image.permute(1, 2, 0)[::2],
    }
    for make in parts.values():
        ds = H5Dataset(path, output="tensor", transform=LateWriter(12, make))
        got = [image for image, _ in ds]
        wanted = [make(chw(~image)) for image in images[12:]]
        assert str(got[12:]) == str(wanted)
        assert all(map(deep_equal, got[12:], wanted))


def deep_equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(deep_equal(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(deep_equal, a, b))


def test_one_that_writes_and_fails_leaves_the_file_s_pixels(packed):
    path, images = packed

    def fail(image):
        if len(seen) >= 10:
            image.zero_()
            raise RuntimeError("as transforms do")
        seen.append(image)
        return image

    seen = []
    ds = H5Dataset(path, output="tensor", transform=fail)
    for i in range(10):
        ds[i]
    with pytest.raises(RuntimeError, match="as transforms do"):
        ds[10]
    ds.transform = None
    assert same([image for image, _ in ds], images)


def test_a_random_writer_draws_the_same_under_the_same_seed(packed):
    path, _ = packed

    def sometimes(image):
        return image.bitwise_not_() if random.random() < 0.1 else image

    ds = H5Dataset(path, output="tensor", transform=sometimes)
    epochs = []
    for _ in range(2):
        random.seed(3)
        epochs.append([image.clone() for image, _ in ds])
    assert all(map(torch.equal, *epochs))


def test_masks_are_the_file_s_too(tmp_path):
    images = random_images(20, (16, 16))
    masks = [image[:, :, :1].copy() for image in images]
    path = write_packed(tmp_path / "m.h5", images, masks=masks)
    ds = H5Dataset(path, target_transform=LateWriter(10))
    for _ in ds:
        pass
    ds.target_transform = None
    for i, mask in enumerate(masks):
        assert np.array_equal(ds[i][1].numpy(), mask[:, :, 0])


def test_threads_that_write_into_neighbors_do_not_meet(tmp_path):
    images = random_images(400, (8, 8))
    path = write_packed(tmp_path / "t.h5", images)
    for _ in range(5):
        ds = H5Dataset(path, output="tensor", transform=LateWriter(30))
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda i, ds=ds: ds[i][0], range(400)))
        for image, source in zip(got, images, strict=True):
            assert torch.equal(image, chw(source)) or torch.equal(image, chw(~source))
        ds.transform = None
        assert same([image for image, _ in ds], images)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_dataloader_every_epoch_is_the_same(packed, workers):
    path, images = packed
    ds = H5Dataset(path, output="tensor", transform=LateWriter(11))
    ds.transform.first = 0
    loader = DataLoader(ds, 8, num_workers=workers, persistent_workers=workers > 0)
    for _ in range(3):
        assert same(torch.cat([batch for batch, _ in loader]), [~image for image in images])


class Painting(Dataset):
    """Someone's wrapper that paints into the image it is given."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        image, label = self.inner[index]
        image[:, 2:9, 3:].bitwise_not_()
        return image, label


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrapper_around_a_split_eats_no_image(packed, workers):
    path, _ = packed
    part, _ = random_split(H5Dataset(path), [30, 10], torch.Generator().manual_seed(0))
    loader = DataLoader(Painting(part), 8, num_workers=workers, persistent_workers=workers > 0)
    epochs = [torch.cat([batch for batch, _ in loader]) for _ in range(3)]
    assert torch.equal(epochs[1], epochs[0])
    assert torch.equal(epochs[2], epochs[0])
    wanted = torch.stack([image.clone() for image, _ in H5Dataset(path)])[part.indices]
    wanted[:, :, 2:9, 3:].bitwise_not_()
    assert torch.equal(epochs[0], wanted)


WRITES = {
    "torch": lambda image: image.zero_(),
    "numpy": lambda image: np.copyto(image.numpy(), 0),
    "data": lambda image: image.data.fill_(0),
    "one pixel": lambda image: image[2, 15, 15].zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_who_writes_into_an_item_has_it_alone(packed, write):
    path, images = packed
    ds = H5Dataset(path)
    held = [ds[i][0] for i in range(40)]
    write(held[3])
    kept = held[3].clone()
    assert torch.equal(ds[3][0], chw(images[3]))
    ds[3][0].zero_()
    assert torch.equal(ds[3][0], chw(images[3]))
    assert torch.equal(held[3], kept)
    assert same([image for image, _ in ds], images)


def test_forked_workers_do_not_inherit_what_was_written(packed):
    path, images = packed
    ds = H5Dataset(path)
    for image in [image for image, _ in ds]:
        image.zero_()
    loader = DataLoader(ds, 8, num_workers=1, multiprocessing_context="fork")
    assert same(torch.cat([batch for batch, _ in loader]), images)


def test_h5loader_reads_what_the_file_has(packed):
    path, images = packed
    ds = H5Dataset(path)
    for image in [image for image, _ in ds]:
        image.zero_()
    ds.images.zero_()
    for batch, _, indices in H5Loader(ds, 8, shuffle=True, with_index=True):
        assert same(batch, [images[i] for i in indices])


def test_all_images_at_once_are_the_file_s_at_every_access(packed):
    path, images = packed
    ds = H5Dataset(path)
    whole = ds.images
    whole.zero_()
    assert same(ds.images, images)
    assert same([image for image, _ in ds], images)
    assert not whole.any()


def test_while_nobody_writes_every_image_is_a_view(packed):
    path, _ = packed
    ds = H5Dataset(path, output="tensor", transform=lambda image: image)
    for _ in range(5):
        assert all(is_view(path, image.data_ptr(), image.nbytes) for image, _ in ds)


def test_no_memory_for_all_images_at_once_is_one_sentence(packed, monkeypatch):
    path, _ = packed
    ds = H5Dataset(path)

    def refuse(field):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(ds.files, "writable_whole", refuse)
    with pytest.raises(UsageError, match=r"a\.h5 \(Cannot allocate memory; vm.ov.*; use ds\[i\]"):
        ds.images  # noqa: B018
