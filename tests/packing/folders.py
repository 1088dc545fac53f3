"""Folders of images that the tests of packing make, and what they look at afterwards."""

import hashlib
import io
import itertools
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from h5feed.packing import PackSummary, pack
from h5feed.packing.items import ImageSource
from h5feed.packing.sources import open_source
from h5feed.store import open_index, read_index

BROKEN = b"\xff\xd8\xff\xe0 not an image"


def make_image(path: Path, height: int, width: int, seed: int) -> None:
    """Write a smooth random image: noise would make every JPEG setting look bad."""
    path.parent.mkdir(parents=True, exist_ok=True)
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(path)


def png_bytes(seed: int) -> bytes:
    """Return a PNG file of noise."""
    rng = np.random.default_rng(seed)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (20 + seed, 24, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def make_folder(root: Path, *, per_class: int = 12, broken: tuple[int, ...] = ()) -> Path:
    """Make two classes of JPEG and PNG files of many sizes; `broken` ones cannot be decoded."""
    for label, name in enumerate(("cats", "dogs")):
        for number in range(per_class):
            ending = "png" if number % 5 == 4 else "jpg"
            path = root / name / f"{number:03}.{ending}"
            seed = label * per_class + number
            make_image(path, 30 + 7 * (seed % 5), 40 + 5 * (seed % 7), seed)
            if seed in broken:
                path.write_bytes(BROKEN)
    return root


def make_birds(root: Path) -> Path:
    """Make three birds and three dogs, which no folder of `make_folder` has."""
    for number in range(6):
        name = "birds" if number < 3 else "dogs"
        make_image(root / name / f"b{number}.jpg", 30, 40, 100 + number)
    return root


def make_masks(folder: Path, masks: Path) -> Path:
    """Make a mask of each image's size in `masks`, each of one class of its own."""
    for number, path in enumerate(sorted(folder.glob("*/*"))):
        target = masks / path.relative_to(folder).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            Image.new("L", image.size, number).save(target)
    return masks


def source_keys(source: ImageSource) -> list[str]:
    """Return the keys of a source's items."""
    return [os.fsdecode(source.key(index)) for index in range(len(source))]


def refusal(kind: type[Exception], *args: Any, **options: Any) -> str:
    """Return what `open_source` says as it refuses."""
    with pytest.raises(kind) as caught:
        open_source(*args, **options)
    return str(caught.value)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pack_set(folder: Path, out: Path, **options) -> PackSummary:
    """Pack a set of five shards of 32x32 pixels, unless `options` say otherwise."""
    given = {"size": 32, "num_workers": 0, "shards": 5}
    return pack(folder, out, **(given | options))


def bytes_of(folder: Path) -> dict[str, str]:
    """Return what tells each file of a folder from any other."""
    return {name: sha256(folder / name) for name in names(folder)}


def labelled(folder: Path) -> list[tuple[str, int]]:
    """Return (class, checksum) of a set's items in the order of the source."""
    index = open_index(folder)
    stored = index.columns["order"]
    return _named(index.classes, index.columns["labels"][stored], index.columns["crc32"][stored])


def packed_labels(path: Path) -> list[tuple[str, int]]:
    """Return (class, checksum) of a file's items."""
    index = read_index(path)
    return _named(index.classes, index.labels, index.crc32)


def _named(classes, labels, crc32) -> list[tuple[str, int]]:
    return [(classes[k], c) for k, c in zip(labels.tolist(), crc32.tolist(), strict=True)]


def keys(path: Path) -> list[str]:
    """Return the keys of a packed file's items."""
    with h5py.File(path) as file:
        blob, ends = file["keys/bytes"][:].tobytes(), file["keys/offsets"][:]
    return [blob[a:b].decode() for a, b in itertools.pairwise(ends)]
