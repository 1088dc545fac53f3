"""Packed files and folders that something can be learned from, small enough for a test."""

from pathlib import Path

import numpy as np
from PIL import Image

from packed import write_packed

CLASSES = ("bottom left", "bottom right", "top left", "top right")


def make_images(count=48, size=16, seed=0):
    """Noise with one bright quarter; the label tells which: (images, labels)."""
    draws = np.random.default_rng(seed)
    images = draws.integers(0, 80, (count, size, size, 3), dtype=np.uint8)
    labels = np.arange(count) % 4
    half = size // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = (1 - label // 2) * half, (label % 2) * half
        image[top : top + half, left : left + half] += 150
    return images, labels.astype(np.int64)


def write_classes(path: Path, count=48, size=16, *, classes=CLASSES, unlabelled=0) -> Path:
    images, labels = make_images(count, size)
    labels[:unlabelled] = -1
    return write_packed(path, list(images), labels=labels, classes=classes)


def write_targets(path: Path, count=48, size=16, columns=2) -> Path:
    images, labels = make_images(count, size)
    targets = np.stack([labels * (k + 1) for k in range(columns)], 1).astype(np.float32)
    return write_packed(path, list(images), labels=targets, classes=())


def write_labels(path: Path, count=48, size=16, *, classes=("bottom", "left")) -> Path:
    """Any number of classes an image: whether the bright quarter lies below, and to the left."""
    images, labels = make_images(count, size)
    several = np.stack([labels < 2, labels % 2 == 0], 1).astype(np.float32)
    return write_packed(path, list(images), labels=several, classes=classes)


def write_scenes(path: Path, count=48, size=16, *, void=None, classes=2) -> Path:
    """Masks are 1 where the image is bright, `void` in the last row."""
    images, _ = make_images(count, size)
    masks = (images[..., :1] > 115).astype(np.uint8) * (classes - 1)
    if void is not None:
        masks[:, -1] = void
    return write_packed(
        path, list(images), labels=np.full(count, -1), classes=(), masks=list(masks)
    )


def write_folder(root: Path, count=48, size=16) -> Path:
    images, labels = make_images(count, size)
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        folder = root / CLASSES[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:03}.png")
    return root
