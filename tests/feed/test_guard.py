import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from h5feed.feed.dataset import H5Dataset
from h5feed.feed.guard import Guard
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
    ds = H5Dataset(path, transform=transform)
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
    ds = H5Dataset(path, transform=LateWriter(first))
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
        ds = H5Dataset(path, transform=LateWriter(12, make))
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
    ds = H5Dataset(path, transform=fail)
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

    ds = H5Dataset(path, transform=sometimes)
    epochs = []
    for _ in range(2):
        random.seed(3)
        epochs.append([image.clone() for image, _ in ds])
    assert all(map(torch.equal, *epochs))


def test_a_transform_that_only_reads_gets_the_view_itself(packed):
    path, _ = packed
    ds = H5Dataset(path, transform=lambda image: image)
    for i in range(8):
        ds[i]
    plain = H5Dataset(path)
    again = ds[9][0]
    assert again.untyped_storage().nbytes() == plain[9][0].untyped_storage().nbytes()
    again[:] = 0  # seen through the same pages, so it is the view
    assert (ds[9][0] == 0).all()


def test_masks_are_guarded_too(tmp_path):
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
        ds = H5Dataset(path, transform=LateWriter(30))
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda i, ds=ds: ds[i][0], range(400)))
        for image, source in zip(got, images, strict=True):
            assert torch.equal(image, chw(source)) or torch.equal(image, chw(~source))
        ds.transform = None
        assert same([image for image, _ in ds], images)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_dataloader_every_epoch_is_the_same(packed, workers):
    path, images = packed
    ds = H5Dataset(path, transform=LateWriter(11))
    ds.transform.first = 0
    loader = DataLoader(ds, 8, num_workers=workers, persistent_workers=workers > 0)
    for _ in range(3):
        assert same(torch.cat([batch for batch, _ in loader]), [~image for image in images])


def test_the_guard_stops_copying_what_is_only_read():
    copies = []
    guard = Guard(lambda view: copies.append(view.data_ptr()) or view, lambda index: None)
    view = torch.zeros(4, dtype=torch.uint8)
    for _ in range(20):
        guard(view, 0)
    assert [pointer == view.data_ptr() for pointer in copies] == [False] * 8 + [True] * 12
