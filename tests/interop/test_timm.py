"""timm's scripts, one line changed: batches of packed files, made as timm's transforms say."""

import importlib
import inspect
import sys

import pytest
import torch

from h5feed import H5Dataset, H5Loader, UsageError
from loaders import write_kind

pytest.importorskip("torchvision")
data = pytest.importorskip("timm.data")
from h5feed.interop import timm as ours  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed")
    write_kind(path / "train.h5", "keep", count=24)
    write_kind(path / "val.h5", "keep", count=10)
    return path


def train(create_dataset, create_loader, root, **options):
    """The lines of timm's train.py that make and use its loaders."""
    dataset = create_dataset(
        "", root=root, split="train", is_training=True, class_map="", download=False,
        batch_size=8, seed=42, repeats=0.0, input_img_mode="RGB", input_key=None, target_key=None,
        num_samples=None, trust_remote_code=False,
    )  # fmt: skip
    loader = create_loader(
        dataset, input_size=(3, 16, 16), batch_size=8, is_training=True, no_aug=False, re_prob=0.25,
        re_mode="pixel", re_count=1, re_split=False, train_crop_mode=None, scale=(0.3, 1.0),
        ratio=(0.75, 1.33), hflip=0.5, vflip=0.0, color_jitter=0.4, color_jitter_prob=None,
        grayscale_prob=0.0, gaussian_blur_prob=0.0, auto_augment=None, num_aug_repeats=0,
        num_aug_splits=0, interpolation="random", mean=(0.5,) * 3, std=(0.25,) * 3, num_workers=2,
        distributed=False, pin_memory=False, img_dtype=torch.float32, device=CPU,
        use_prefetcher=True, use_multi_epochs_loader=False, worker_seeding="all", **options,
    )  # fmt: skip
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for epoch in range(2):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        if epoch and loader.mixup_enabled:
            loader.mixup_enabled = False
        for images, target in loader:
            images = images.contiguous(memory_format=torch.channels_last)
            loss = torch.nn.functional.cross_entropy(model(images.mean((2, 3))), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert len(loader) == 3
    return losses, images, target, loader


def test_train_py_runs_with_one_line_more(folder):
    losses, images, target, loader = train(ours.create_dataset, ours.create_loader, folder)
    assert isinstance(loader, H5Loader)
    assert len(losses) == 6
    assert images.shape == (8, 3, 16, 16)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert target.dtype == torch.int64


def test_it_mixes_and_ends_mixing(folder):
    collate = data.FastCollateMixup(0.8, 1.0, num_classes=2, label_smoothing=0.1)
    _, _, target, loader = train(
        ours.create_dataset, ours.create_loader, folder, collate_fn=collate
    )
    assert not loader.mixup_enabled  # since its second epoch
    assert target.shape == (8, 2)
    assert target.sort().values.allclose(torch.tensor([0.05, 0.95]))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_an_evaluations_batches_are_timms(folder, interpolation):
    options = {
        "input_size": (3, 24, 24), "batch_size": 4, "crop_pct": 0.9, "interpolation": interpolation,
        "device": CPU, "num_workers": 0, "persistent_workers": False,
    }  # fmt: skip
    found = ours.create_loader(ours.create_dataset("", root=folder, split="validation"), **options)
    theirs = data.create_loader(H5Dataset(folder / "val.h5", output="pil"), **options)
    std = torch.tensor(data.IMAGENET_DEFAULT_STD).view(1, 3, 1, 1) * 255
    assert len(found) == len(theirs) == 3
    for (images, labels), (want, expected) in zip(found, theirs, strict=True):
        assert labels.tolist() == expected.tolist()
        levels = (images - want).abs() * std
        assert levels.max() <= 3  # Pillow rounds once more than torch
        assert levels.mean() <= 0.5


def test_half_precision_and_the_size_of_an_int(folder):
    loader = ours.create_loader(
        H5Dataset(folder / "val.h5"), 16, 4, img_dtype=torch.bfloat16, device="cpu"
    )
    images, _ = next(iter(loader))
    assert (images.dtype, images.shape) == (torch.bfloat16, (4, 3, 16, 16))


def test_every_argument_of_timms_is_known():
    theirs = set(inspect.signature(data.create_loader).parameters)
    named = set(inspect.signature(ours.create_loader).parameters)
    assert theirs - named <= {*ours._OF_TRANSFORM, *ours._WITHOUT_EFFECT, *ours._LEFT_OUT}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_aug_repeats": 3}, "num_aug_repeats=3 is not supported by h5feed.interop.timm.crea"),
        (
            {"workers": 3},
            "workers=3 is not an argument of h5feed.interop.timm.create_loader: leave i",
        ),
        (
            {"is_training": True, "auto_augment": "rand-m9-mstd0.5-inc1"},
            "augment: timm's RandAugment has no counterpart in h5feed.augment; leave it out",
        ),
        (
            {"collate_fn": print},
            "augment holds <built-in function print>, which is not an op of h5fe",
        ),
    ],
)
def test_what_has_no_counterpart_is_one_sentence(folder, options, message):
    with pytest.raises(UsageError) as caught:
        ours.create_loader(H5Dataset(folder / "val.h5"), 16, 4, device="cpu", **options)
    assert message in str(caught.value)


def test_a_missing_file_is_one_sentence(folder):
    with pytest.raises(UsageError) as caught:
        ours.create_dataset("", root=folder, split="test")
    place = folder / "test.h5"
    assert str(caught.value) == (
        f"root={str(folder)!r}, split='test': there is no packed file {place}; make it with "
        f"`pack-h5 FOLDER {place}`"
    )
    with pytest.raises(UsageError, match=r"class_map='a\.txt': classes are fixed when images are"):
        ours.create_dataset("", root=folder, split="val", class_map="a.txt")
    with pytest.raises(UsageError, match="root=None: give the packed file, or the folder of"):
        ours.create_dataset("")


def test_without_timm_the_extra_is_named(folder, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "timm", None)
    importlib.import_module("h5feed.interop.timm")
    with pytest.raises(ImportError, match=r'timm is not installed.*"h5feed\[train\]"'):
        ours.create_loader(H5Dataset(folder / "val.h5"), 16, 4, device="cpu")
