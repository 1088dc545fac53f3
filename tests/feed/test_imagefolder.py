"""The one-line swap: torchvision's ImageFolder on the images, H5Dataset on the packed file."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from h5feed import H5Dataset, pack

SAMPLES = Path(__file__).parents[2] / "data_samples" / "images"
SIDE = 64


@pytest.fixture(scope="module")
def folder():
    return ImageFolder(str(SAMPLES))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The sample images with their short side at `SIDE`, proportions kept."""
    out = tmp_path_factory.mktemp("packed") / "samples.h5"
    pack(SAMPLES, out, size=str(SIDE), fit="keep", num_workers=1)
    return out


def differs_by_design(path):
    """ImageFolder's loader neither turns by EXIF orientation nor composites alpha on white."""
    with Image.open(path) as image:
        return image.getexif().get(0x0112, 1) != 1 or image.has_transparency_data


def test_the_same_classes_targets_length_and_order(folder, packed):
    ds = H5Dataset(packed)
    assert len(ds) == len(folder) >= 60
    assert ds.classes == folder.classes
    assert ds.class_to_idx == folder.class_to_idx
    assert ds.targets == folder.targets
    relative = [(os.path.relpath(path, SAMPLES), label) for path, label in folder.samples]
    assert ds.samples == relative
    assert ds.imgs == relative


def test_the_same_labels_item_by_item(folder, packed):
    ds = H5Dataset(packed, output="pil")
    for (image, label), wanted in zip(ds, folder.targets, strict=True):
        assert label == wanted
        assert type(label) is type(wanted)
        assert image.mode == "RGB"


@pytest.mark.parametrize("on", ["PIL images", "tensors"])
def test_keep_is_what_resize_gave(folder, packed, on):
    steps = [] if on == "PIL images" else [v2.PILToTensor()]
    resize = v2.Compose([*steps, v2.Resize(SIDE, antialias=True)])
    ds = H5Dataset(packed, output="numpy")
    compared = 0
    for i, (path, _) in enumerate(folder.samples):
        if differs_by_design(path):
            continue
        wanted = resize(folder[i][0])
        if isinstance(wanted, torch.Tensor):
            wanted = wanted.permute(1, 2, 0).numpy()
        got = ds[i][0]
        assert got.shape == np.asarray(wanted).shape, path
        assert np.abs(got.astype(int) - np.asarray(wanted).astype(int)).max() <= 2, path
        compared += 1
    assert 55 <= compared < len(folder)


def train(dataset):
    """A user's script after its dataset line: two epochs of training; what the model saw."""
    torch.manual_seed(0)
    dataset.transform = v2.Compose(
        [
            v2.ToImage(),
            v2.Resize(SIDE, antialias=True),
            v2.CenterCrop(SIDE),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.25] * 3, inplace=True),
        ]
    )
    features = 3 * SIDE * SIDE
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(features, len(dataset.classes)))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    seen = []
    for _ in range(2):
        for images, labels in DataLoader(dataset, batch_size=16, shuffle=True):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append((images, labels))
    return torch.cat([images for images, _ in seen]), torch.cat([labels for _, labels in seen])


@pytest.mark.parametrize("output", ["tensor", "pil"])
def test_a_training_script_changes_its_dataset_line_alone(folder, packed, output):
    wanted, labels = train(ImageFolder(str(SAMPLES)))
    got, same_labels = train(H5Dataset(packed, output=output))
    assert torch.equal(same_labels, labels)
    level = 1 / 255 / 0.25
    close = (got - wanted).abs().amax(dim=(1, 2, 3)) <= 2 * level + 1e-6
    by_design = sum(differs_by_design(path) for path, _ in folder.samples)
    assert close.sum() >= len(wanted) - 2 * by_design
    assert by_design < 5


def test_the_swap_shows_true_proportions_where_packing_squeezed(folder, tmp_path):
    out = tmp_path / "stretched.h5"
    pack(SAMPLES, out, size=str(SIDE), num_workers=1)
    usual = v2.Compose([v2.Resize(SIDE), v2.CenterCrop(SIDE)])
    swapped = H5Dataset(out, output="pil", transform=usual)
    squeezed = H5Dataset(out, output="pil", transform=usual, aspect="stored")
    off = []
    for i, (path, _) in enumerate(folder.samples):
        if not differs_by_design(path):
            wanted = np.asarray(usual(folder[i][0]), int)
            off.append([np.abs(np.asarray(ds[i][0]) - wanted).mean() for ds in (swapped, squeezed)])
    mine, asked_for = np.mean(off, axis=0)
    assert mine < 6
    assert asked_for > 4 * mine
