import re
from collections import namedtuple

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler, default_collate
from torchvision import tv_tensors

import h5feed
from h5feed.errors import UsageError
from h5feed.feed import dataloader
from h5feed.feed.dataloader import auto_workers, collate, make_dataloader
from h5feed.feed.dataset import H5Dataset
from in_workers import OpensLate, draw, invert, note_start, thread_counts
from packed import image_spec, random_images, write_packed

CONTEXTS = ["fork", "spawn", "forkserver"]


@pytest.fixture
def images():
    return random_images(22)


@pytest.fixture
def path(tmp_path, images):
    return write_packed(tmp_path / "a.h5", images, labels=np.arange(22), classes=["c"] * 22)


def epoch(loader):
    """All of an epoch, in the order of the labels."""
    batches = list(loader)
    labels = torch.cat([labels for _, labels in batches])
    pixels = torch.cat([images for images, _ in batches])
    return pixels[labels.argsort()].permute(0, 2, 3, 1).numpy(), labels


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("opens", [H5Dataset, OpensLate], ids=["opened before", "opened after"])
def test_a_stock_dataloader_reads_the_file_in_any_worker(path, images, context, opens):
    loader = DataLoader(
        opens(path, output="tensor", transform=invert),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    for _ in range(2):
        pixels, labels = epoch(loader)
        assert sorted(labels.tolist()) == list(range(22))
        assert np.array_equal(pixels, ~np.stack(images))


def test_without_workers_too(path, images):
    loader = DataLoader(H5Dataset(path, output="tensor", transform=invert), batch_size=4)
    for _ in range(2):
        assert np.array_equal(epoch(loader)[0], ~np.stack(images))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_whole_and_channels_last(path, images, workers):
    loader = make_dataloader(H5Dataset(path), 8, shuffle=True, num_workers=workers)
    assert len(loader) == 3
    orders = []
    for _ in range(2):
        for batch, _ in loader:
            assert batch.dtype == torch.uint8
            assert batch.is_contiguous(memory_format=torch.channels_last)
        pixels, labels = epoch(loader)
        orders.append(labels.tolist())
        assert np.array_equal(pixels, np.stack(images))
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(22))


def test_the_seed_is_the_order(path):
    ds = H5Dataset(path)
    orders = [
        epoch(make_dataloader(ds, 5, shuffle=True, num_workers=0, seed=seed))[1].tolist()
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    torch.manual_seed(99)
    assert (
        epoch(make_dataloader(ds, 5, shuffle=True, num_workers=0, seed=1))[1].tolist() == orders[0]
    )


def test_order_without_shuffle_and_with_a_sampler(path):
    ds = H5Dataset(path)
    loader = make_dataloader(ds, 8, num_workers=0, drop_last=True)
    assert [labels.tolist() for _, labels in loader] == [list(range(8)), list(range(8, 16))]
    assert epoch(make_dataloader(ds, 2, sampler=[3, 1, 2], num_workers=0))[1].tolist() == [3, 1, 2]
    some = SubsetRandomSampler([4, 5, 6])
    assert sorted(epoch(make_dataloader(ds, 2, sampler=some, num_workers=0))[1].tolist()) == [
        4,
        5,
        6,
    ]


def test_every_worker_draws_its_own_numbers_and_the_same_ones_again(path):
    def drawn(seed):
        ds = H5Dataset(path, output="tensor", transform=draw)
        loader = make_dataloader(ds, 11, shuffle=False, num_workers=2, seed=seed)
        return torch.cat([numbers for numbers, _ in loader])

    first = drawn(0)
    for generator in range(3):
        assert first[:, generator].unique().numel() == 22
    assert torch.equal(drawn(0), first)
    assert not torch.equal(drawn(1), first)


def test_workers_keep_one_thread_and_run_the_caller_s_start_too(path):
    ds = H5Dataset(path, output="tensor", transform=thread_counts)
    (counts, _) = next(iter(make_dataloader(ds, 22, shuffle=True, num_workers=1)))
    assert counts.unique().tolist() == [1]
    ds.transform = draw
    loader = make_dataloader(ds, 11, num_workers=2, worker_init_fn=note_start, shuffle=False)
    numbers = [batch[0, 2].item() for batch, _ in loader]
    expected = [__import__("random").Random(100 + worker).random() for worker in range(2)]
    assert numbers == pytest.approx(expected)


def test_workers_do_not_wait_for_threads_that_cv2_had_in_the_parent(path, monkeypatch):
    """Any number but 0 makes cv2 take down its pool, whose threads a fork did not bring along.

    Of 100 workers forked between two cv2 calls of the parent, 4 waited forever.
    """
    given = []
    monkeypatch.setattr(cv2, "setNumThreads", given.append)
    make_dataloader(H5Dataset(path), 11, shuffle=True, num_workers=2).worker_init_fn(0)
    assert given == [0]


def test_it_is_a_stock_dataloader_set_up(path):
    loader = make_dataloader(H5Dataset(path), 4, shuffle=True, num_workers=1, prefetch=5)
    assert type(loader) is DataLoader
    assert loader.persistent_workers
    assert loader.prefetch_factor == 5
    assert loader.pin_memory == torch.cuda.is_available()
    assert (
        make_dataloader(
            H5Dataset(path), 4, shuffle=True, num_workers=0, pin_memory=False
        ).num_workers
        == 0
    )
    assert h5feed.make_dataloader is make_dataloader


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size=0 is not a whole number of at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5 is not a whole number of at least 1"),
        ({"batch_size": True}, "batch_size=True is not"),
        ({"num_workers": -1}, "num_workers=-1 is not a whole number of at least 0"),
        (
            {"num_workers": "all"},
            "num_workers='all' is not a whole number of at least 0, or \"auto\"",
        ),
        ({"prefetch": 0}, "prefetch=0 is not a whole number of at least 1"),
        ({"shuffle": True, "sampler": [1]}, "sampler decides the order alone: leave shuffle out"),
        ({"seed": "x"}, "seed='x' is not a whole number of at least 0"),
    ],
)
def test_wrong_arguments_are_named(path, options, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        make_dataloader(H5Dataset(path), **{"batch_size": 4} | options)


@pytest.fixture
def machine(monkeypatch):
    """Pretend to a machine: machine(cores=…, shared=…)."""

    def pretend(cores, shared=1 << 40, ranks=None):
        monkeypatch.setattr(dataloader, "available_cores", lambda: cores)
        usage = namedtuple("usage", "total used free")(shared, 0, shared)
        monkeypatch.setattr(dataloader.shutil, "disk_usage", lambda place: usage)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return pretend


def test_auto_takes_a_core_each_where_there_is_work(path, machine):
    machine(cores=8)
    work = H5Dataset(path, output="tensor", transform=invert)
    assert auto_workers(work, 1) == 8
    assert auto_workers(Subset(work, range(20)), 1) == 8
    assert auto_workers(ConcatDataset([work, work]), 1) == 8
    assert auto_workers(H5Dataset(path, output="pil"), 1) == 8
    assert auto_workers(H5Dataset(path, aspect="source"), 1) == 8
    machine(cores=8, ranks=4)
    assert auto_workers(work, 1) == 2
    machine(cores=2, ranks=4)
    assert auto_workers(work, 1) == 1


def test_auto_takes_two_where_pixels_are_only_copied(path, tmp_path, machine):
    machine(cores=8)
    assert auto_workers(H5Dataset(path), 1) == 2
    assert auto_workers(Subset(H5Dataset(path), range(20)), 1) == 2
    nv12 = [np.zeros((12, 8), np.uint8)] * 9
    yuv = write_packed(tmp_path / "y.h5", nv12, spec=image_spec("yuv420", (8, 8)))
    assert auto_workers(H5Dataset(yuv), 1) == 8
    machine(cores=1)
    assert auto_workers(H5Dataset(path), 1) == 1


def test_auto_takes_no_more_than_batches_or_shared_memory_allow(path, tmp_path, machine):
    machine(cores=8)
    work = H5Dataset(path, output="tensor", transform=invert)
    assert auto_workers(work, 8) == 3
    batch = 2 * 32 * 32 * 3
    machine(cores=8, shared=batch * 2 * 3 + 1)
    assert auto_workers(work, 2) == 3
    assert auto_workers(work, 2, prefetch=4) == 1
    original = write_packed(
        tmp_path / "o.h5",
        [b"jpeg"] * 9,
        spec=image_spec("original", (0, 0)),
        stored_shapes=np.full((9, 2), 5000, np.int32),
    )
    assert auto_workers(H5Dataset(original), 2) == 5  # crops of unknown size
    machine(cores=8, shared=batch)
    assert auto_workers(work, 2) == 0
    assert make_dataloader(work, 2, shuffle=True).num_workers == 0


def test_auto_knows_nothing_of_a_foreign_dataset_but_its_length(machine):
    machine(cores=4)
    assert auto_workers(torch.utils.data.TensorDataset(torch.zeros(100)), 10) == 4


Pair = namedtuple("Pair", "image label")


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


def hwc(*shape, seed=0):
    pixels = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))
    return pixels.permute(2, 0, 1)


SAMPLES = {
    "labels": [(hwc(8, 6, 3, seed=i), i) for i in range(3)],
    "float targets": [(hwc(8, 6, 3, seed=i), torch.rand(5)) for i in range(3)],
    "masks": [(hwc(8, 6, 3, seed=i), torch.ones(8, 6, dtype=torch.uint8)) for i in range(3)],
    "floats": [(hwc(8, 6, 3, seed=i).float() / 255, i) for i in range(3)],
    "planes": [(hwc(8, 6, 3, seed=i).contiguous(), i) for i in range(3)],
    "mixed layouts": [(hwc(8, 6, 3), 0), (hwc(8, 6, 3).contiguous(), 1)],
    "vectors": [(torch.rand(7), i) for i in range(3)],
    "arrays": [(np.ones((8, 6, 3), np.uint8), i) for i in range(3)],
    "only images": [hwc(8, 6, 3), hwc(8, 6, 3)],
    "dicts": [{"image": hwc(8, 6, 3), "label": 1}] * 2,
    "lists": [[hwc(8, 6, 3), 1]] * 2,
    "dict targets": [(hwc(8, 6, 3), {"a": 1})] * 2,
    "three parts": [(hwc(8, 6, 3), 1, 2.0)] * 2,
    "image objects of torchvision": [(tv_tensors.Image(hwc(8, 6, 3)), 1)] * 2,
    "named tuples": [Pair(hwc(8, 6, 3), 1)] * 2,
    "one channel": [(hwc(8, 6, 1), 1)] * 2,
}


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_it_returns_what_default_collate_returns(samples):
    if isinstance(samples[0], dict):
        got, wanted = collate(samples), default_collate(samples)
        assert got.keys() == wanted.keys()
        assert all(same(got[key], wanted[key]) for key in got)
    elif isinstance(samples[0], tuple) and isinstance(samples[0][1], dict):
        got, wanted = collate(samples), default_collate(samples)
        assert same(got[0], wanted[0])
        assert torch.equal(got[1]["a"], wanted[1]["a"])
    else:
        assert same(collate(samples), default_collate(samples))


@pytest.mark.parametrize("name", ["labels", "masks", "floats"])
def test_views_of_hwc_become_a_channels_last_batch(name):
    images, _ = collate(SAMPLES[name])
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert not images.is_contiguous()


def test_planes_stay_planes():
    images, _ = collate(SAMPLES["planes"])
    assert images.is_contiguous()


def test_a_batch_is_a_copy_of_the_file(tmp_path):
    images = random_images(4)
    ds = H5Dataset(write_packed(tmp_path / "a.h5", images))
    batch, labels = collate(ds.__getitems__([0, 1, 2, 3]))
    assert labels.tolist() == [0, 1, 0, 1]
    batch.zero_()
    assert np.array_equal(ds[2][0].permute(1, 2, 0), images[2])


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_make_a_batch_without_a_warning(tmp_path):
    images = random_images(3)
    masks = [image[:, :, :1].copy() for image in images]
    path = write_packed(tmp_path / "m.h5", images, masks=masks)
    batch, targets = collate(H5Dataset(path, output="numpy").__getitems__([0, 1, 2]))
    assert np.array_equal(batch, np.stack(images))
    assert np.array_equal(targets, np.stack(masks)[..., 0])


def test_pil_images_in_a_batch_are_explained(path):
    for ds in (H5Dataset(path, output="pil"), H5Dataset(path, transform=lambda image: image)):
        with pytest.raises(UsageError, match=r"PIL images, .* ToTensor\(\), or output=\"tensor\"$"):
            next(iter(make_dataloader(ds, 4, num_workers=0)))


def test_images_of_different_sizes_are_explained(tmp_path):
    shapes = np.int32([[8, 12], [10, 8]])
    images = [np.zeros((h, w, 3), np.uint8) for h, w in shapes.tolist()]
    spec = image_spec(size=(8, 8), fit="keep")
    ds = H5Dataset(write_packed(tmp_path / "k.h5", images, spec=spec, stored_shapes=shapes))
    text = (
        "images of one batch have 2 different sizes, among them (3, 8, 12) and (3, 10, 8); give "
        "the dataset a transform that ends in one size, such as RandomResizedCrop(224)"
    )
    with pytest.raises(UsageError, match=re.escape(text)):
        collate(ds.__getitems__([0, 1]))
    assert collate([ds[0]])[0].shape == (1, 3, 8, 12)
    with pytest.raises(UsageError, match=r"2 different sizes, among them \(8, 12, 3\) and \(10, 8"):
        collate(H5Dataset(ds.root, output="numpy").__getitems__([0, 1]))
