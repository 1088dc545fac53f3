"""Images that lie on the device, or page-locked: here the "device" is the CPU."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from h5feed import H5Dataset, H5Loader, UsageError, augment
from h5feed.feed import device
from h5feed.feed.device import HostTransfer, choose_residency
from loaders import assert_same, by_index, write_kind
from packed import random_images, write_packed

CROP = (augment.RandomResizedCrop(16), augment.RandomHorizontalFlip())
MODES = ["device", "pinned"]
GATHERED = ["raw", "yuv420", "pad", "crop"]


@pytest.fixture
def ds(tmp_path):
    return H5Dataset(write_kind(tmp_path / "a.h5", "raw"))


def make(ds, batch_size=5, **options):
    options = {
        "augment": CROP,
        "augment_on": "device",
        "with_index": True,
        "shuffle": True,
        **options,
    }
    return H5Loader(ds, batch_size, **options)


def passes(ds, count=2, **options):
    with make(ds, **options) as loader:
        return [list(loader) for _ in range(count)]


def assert_equal(found, expected):
    """Batch by batch, bit by bit."""
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected)
    else:
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", GATHERED)
def test_batches_are_those_of_a_stream(tmp_path, kind, mode):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    assert_equal(passes(ds, residency=mode, num_workers=3), passes(ds))


@pytest.mark.parametrize(
    "options",
    [
        {"augment": ()},
        {"views": 2},
        {"augment": (*CROP, augment.ToDtype(torch.float32, scale=True), augment.MixUp())},
        {"on_error": "skip", "drop_last": True, "shuffle": "block", "block": 3},
        {"rank": 1, "world_size": 3, "batch_size": 2},
        {"indices": [3, 1, 7, 9], "prefetch": 4},
    ],
    ids=str,
)
def test_every_option_means_the_same(ds, options):
    assert_equal(passes(ds, residency="device", **options), passes(ds, **options))


def test_labels_masks_and_several_files(tmp_path):
    rng = np.random.default_rng(0)
    paths = []
    for name in ("a.h5", "b.h5"):
        masks = [rng.integers(0, 5, (32, 32, 1), np.uint8) for _ in range(7)]
        images = random_images(7, seed=len(paths))
        paths.append(write_packed(tmp_path / name, images, masks=masks))
    ds = H5Dataset(paths, target_transform=lambda masks: masks + 1)
    assert_equal(passes(ds, residency="device"), passes(ds))


def test_images_that_do_not_divide_into_words(tmp_path):
    """An item of 27 bytes is moved byte by byte, one of 3,072 in words of eight."""
    ds = H5Dataset(write_packed(tmp_path / "a.h5", random_images(9, (3, 3))))
    assert_equal(passes(ds, augment=(), residency="device"), passes(ds, augment=()))
    with make(ds, augment=(), residency="device") as loader:
        assert loader._builder.resident._rows.dtype == torch.uint8


def test_a_copy_in_pieces_is_whole(ds, monkeypatch):
    monkeypatch.setattr(device, "_PIECE", 1000)
    assert_equal(passes(ds, residency="device"), passes(ds))


@pytest.mark.parametrize(("one", "other"), [("stream", "device"), ("device", "stream")])
def test_a_state_goes_on_in_another_mode(ds, one, other):
    expected = by_index(make(ds))
    loader = make(ds, residency=one)
    batches = iter(loader)
    done = by_index([next(batches)])
    left = make(ds, 3, residency=other)
    left.load_state_dict(loader.state_dict())
    assert_same(done | by_index(left), expected)


def test_a_batch_is_the_callers_own(ds):
    batches = [images for images, *_ in make(ds, residency="device")]
    copies = [images.clone() for images in batches]
    list(make(ds, residency="device"))
    assert_equal(batches, copies)
    batches[0].zero_()
    assert_same(by_index(make(ds, residency="device")), by_index(make(ds)))


def test_loaders_over_one_file_share_the_images(ds):
    one = make(ds, residency="device", indices=range(6))
    other = make(H5Dataset(ds.files.paths), residency="device", indices=range(6, 12))
    assert one._builder.resident is other._builder.resident
    assert one._builder.resident is not make(ds, residency="pinned")._builder.resident
    list(one)
    del one, other
    gc.collect()
    assert not device._SHARED


def test_nothing_is_left_for_threads_and_slots(ds):
    with make(ds, residency="device") as loader:
        assert loader.num_workers == 1
        list(loader)
        stats = loader.stats()
    assert (stats["residency"], stats["residency_reason"]) == ("device", "as asked")
    assert (stats["augment_on"], stats["augment_on_reason"]) == ("device", "the images are there")
    assert stats["resident_bytes"] == 12 * 32 * 32 * 3
    assert (stats["slots"], stats["slot_bytes"], stats["announced_bytes"]) == (0, 0, 0)
    with make(ds) as loader:
        assert loader.stats()["resident_bytes"] == 0
        assert loader.stats()["residency"] == "stream"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("jpeg", " (DaliLoader decodes JPEG on a GPU)"),
        ("original", " (DaliLoader decodes JPEG on a GPU)"),
        ("keep", ""),
    ],
)
def test_refuses_images_of_many_sizes(tmp_path, kind, mode, hint):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    spec = ds.files.specs["images"]
    with pytest.raises(UsageError) as caught:
        make(ds, residency=mode, augment_on="auto")
    assert str(caught.value) == (
        f'residency="{mode}": a device gathers images of one size in bytes, and '
        f"store={spec.encoding}, fit={spec.fit} has many; pack with --store raw or yuv420 and a "
        f'--fit other than keep, or use residency="stream"{hint}'
    )


def test_refuses_wrong_arguments(ds):
    with pytest.raises(UsageError, match="residency='gpu' is none of stream, device, pinned, auto"):
        make(ds, residency="gpu")
    with pytest.raises(UsageError) as caught:
        make(ds, residency="device", augment_on="cpu")
    assert str(caught.value) == (
        'residency="device": augment_on="cpu" needs the images in the loader\'s threads; leave '
        'augment_on out, or use residency="stream"'
    )


# auto


def transfer(free):
    return SimpleNamespace(device=torch.device("cuda", 1), free_bytes=lambda: free)


def chosen(ds, *, device, host, augment_on="auto", where=None):
    size = 12 * 32 * 32 * 3
    return choose_residency(
        "auto",
        ds.files,
        transfer(device * size) if where is None else where,
        augment_on=augment_on,
        free_host=lambda: host * size,
    )


def test_auto_takes_the_device_if_it_leaves_room_for_a_model(ds):
    mode, reason = chosen(ds, device=4, host=0)
    assert (mode, reason) == ("device", "0.0 GB of 0.0 GB that are free on cuda:1")
    mode, reason = chosen(ds, device=3.9, host=2)
    assert mode == "pinned"
    assert reason == "0.0 GB: too much for cuda:1, but not for the host"
    mode, reason = chosen(ds, device=3.9, host=1.9)
    assert mode == "stream"
    assert reason == "0.0 GB: too much for cuda:1 and for the host's memory"


def test_auto_counts_a_copy_for_each_process_of_the_host(ds, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert chosen(ds, device=4, host=0)[0] == "device"
    assert chosen(ds, device=0, host=16)[0] == "pinned"
    mode, reason = chosen(ds, device=0, host=15)
    assert mode == "stream"
    assert "in each of 8 processes" in reason


def test_auto_streams_what_cannot_be_gathered(ds, tmp_path):
    assert chosen(ds, device=9, host=9, augment_on="cpu")[0] == "stream"
    assert chosen(ds, device=9, host=9, where=HostTransfer()) == (
        "stream",
        "batches stay on the CPU",
    )
    jpeg = H5Dataset(write_kind(tmp_path / "j.h5", "jpeg"))
    mode, reason = chosen(jpeg, device=9, host=9)
    assert mode == "stream"
    assert reason.endswith("store=jpeg, fit=stretch has many")
    with make(jpeg, residency="auto", augment_on="auto") as loader:
        assert loader.stats()["residency_reason"] == reason


@pytest.mark.parametrize("mode", ["device", "pinned"])
def test_auto_streams_what_then_finds_no_room(ds, monkeypatch, mode):
    def reserve(self, size, *, pinned):
        raise UsageError(f'residency="{mode}": 0.1 GB could not be had; use residency="stream"')

    expected = passes(ds, augment_on="auto")
    monkeypatch.setattr(HostTransfer, "reserve", reserve)
    monkeypatch.setattr(
        device, "choose_residency", lambda asked, *_, **__: (mode, "as good as any")
    )
    with make(ds, residency="auto", augment_on="auto") as loader:
        stats = loader.stats()
        assert (loader.residency, stats["residency"]) == ("stream", "stream")
        assert stats["residency_reason"] == f'residency="{mode}": 0.1 GB could not be had'
        assert stats["augment_on_reason"] == "batches stay on the CPU"
        assert_equal([list(loader) for _ in range(2)], expected)
    with pytest.raises(UsageError, match="could not be had; use residency"):
        make(ds, residency=mode)
