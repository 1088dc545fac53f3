"""What all cases share: source folders, files packed from them undisturbed, and their contents."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from h5feed.cli import pack
from h5feed.packing import journal, workers
from h5feed.store.layout import segment_offsets

__all__ = [
    "Kind",
    "Material",
    "bytes_of",
    "make_image",
    "make_material",
    "sha256",
    "small_steps",
    "truth",
]

UInt8 = npt.NDArray[np.uint8]

PER_CLASS = 13
CLASSES = ("cats", "dögs")
BROKEN = b"\xff\xd8\xff\xe0 not an image"

OPTIONS: dict[str, tuple[str, ...]] = {
    "raw": ("--size", "32"),
    "wide": ("--size", "32x64"),
    "crop": ("--size", "32", "--fit", "crop"),
    "pad": ("--size", "32", "--fit", "pad"),
    "keep": ("--size", "32", "--fit", "keep"),
    "yuv420": ("--size", "32", "--store", "yuv420"),
    "keep-yuv420": ("--size", "32", "--fit", "keep", "--store", "yuv420"),
    "jpeg": ("--size", "64", "--store", "jpeg"),
    "keep-jpeg": ("--size", "64", "--fit", "keep", "--store", "jpeg", "--quality", "80"),
    "original": ("--store", "original", "--non-jpeg", "reencode"),
    "masks": ("--size", "32", "--masks", "MASKS"),
    "keep-masks": ("--size", "32", "--fit", "keep", "--masks", "MASKS"),
    "targets": ("--size", "32", "--manifest", "TARGETS"),
    "flat": ("--size", "32",),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to pack, and the file that it gives."""

    name: str
    source: Path
    options: tuple[str, ...]
    path: Path
    """The file, packed in one process without disturbance."""
    sha256: str

    @property
    def args(self) -> tuple[str, ...]:
        """What pack-h5 is given but for OUT."""
        return (str(self.source), *self.options)


@dataclass(frozen=True, slots=True)
class Material:
    """All kinds, by name."""

    kinds: dict[str, Kind]


def make_material(folder: Path) -> Material:
    """Make sources and files in `folder`. The same on every call, for one set of versions."""
    source, flat, masks = folder / "images", folder / "flat", folder / "masks"
    rows = []
    for number in range(PER_CLASS * len(CLASSES)):
        key = f"{CLASSES[number // PER_CLASS]}/{number:03}.{'png' if number % 5 == 4 else 'jpg'}"
        height, width = 30 + 7 * (number % 5), 40 + 5 * (number % 7)
        image = make_image(height, width, number)
        for path in (source / key, flat / Path(key).name):
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
        mask = (masks / key).with_suffix(".png")
        mask.parent.mkdir(parents=True, exist_ok=True)
        image.convert("L").point(lambda level: level // 32).save(mask)
        rows.append([key, number / 7, -number])
    (source / CLASSES[0] / "003.jpg").write_bytes(BROKEN)
    table = folder / "targets.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([["path", "target", "target_other"], *rows])
    named = {"MASKS": str(masks), "TARGETS": str(table)}
    kinds = {}
    for name, options in OPTIONS.items():
        given = tuple(named.get(option, option) for option in options)
        out = folder / f"{name}.h5"
        kinds[name] = Kind(
            name=name,
            source=flat if name == "flat" else source,
            options=given,
            path=out,
            sha256=_pack(flat if name == "flat" else source, out, given),
        )
    return Material(kinds)


def _pack(source: Path, out: Path, options: tuple[str, ...]) -> str:
    """Pack in a forked process: this one is to start no threads, or it could not be forked."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.stdout = sys.stderr
            status = pack.main([str(source), str(out), *options, "--workers", "0", "--json"])
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"campaign: pack-h5 cannot even pack {out.name} undisturbed")
    return sha256(out)


def make_image(height: int, width: int, seed: int) -> Image.Image:
    """Draw soft shapes: noise would make every JPEG setting look bad."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def small_steps() -> None:
    """Make blocks of a few images, saved without a pause: much can go wrong in a short run."""
    for module, name, value in (
        (workers, "_MOST_IMAGES", 3),
        (journal, "_SECONDS_BETWEEN_SYNCS", 0.0),
    ):
        if not hasattr(module, name):
            raise SystemExit(
                f"campaign: {module.__name__} has no {name} any more: mend small_steps"
            )
        setattr(module, name, value)


def sha256(path: Path) -> str:
    """Return a file's SHA-256 in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def bytes_of(path: Path) -> list[bytes]:
    """Return what is stored of each item, image, segments, then mask, as h5py alone reads it."""
    with h5py.File(path, "r") as file:
        readers = [_reader(file[name]) for name in ("images", "masks") if name in file]
        if "images/segments" in file:
            ends = segment_offsets(file["images/shapes"][()]).tolist()
            lengths = file["images/segments"][()].tobytes()
            readers.insert(1, lambda index: lengths[ends[index] : ends[index + 1]])
        return [b"".join(read(i) for read in readers) for i in range(len(file["labels"]))]


def _reader(field: Any) -> Callable[[int], bytes]:
    if isinstance(field, h5py.Dataset):
        pixels = field[()]
        return lambda index: pixels[index].tobytes()
    data, offsets = field["bytes"][()].tobytes(), field["offsets"][()].tolist()
    return lambda index: data[offsets[index] : offsets[index + 1]]


def truth(path: Path) -> list[tuple[UInt8, Any]]:
    """Return (image or mask, target) of each item, read and decoded without h5feed.

    Masks stand in for targets where there are any, as H5Dataset has it.
    """
    with h5py.File(path, "r") as file:
        images = _pixels(file, "images")
        targets = _pixels(file, "masks") if "masks" in file else list(file["labels"][()])
    return list(zip(images, targets, strict=True))


def _pixels(file: h5py.File, name: str) -> list[UInt8]:
    """Decode a field's items to (H, W, 3), or (H, W) for masks."""
    field, read = file[name], _reader(file[name])
    count, encoding = len(file["labels"]), field.attrs["encoding"]
    if isinstance(field, h5py.Group):
        shapes = field["shapes"][()].tolist()
    else:
        shapes = [(int(field.attrs["height"]), int(field.attrs["width"]))] * count
    found = []
    for index, (height, width) in enumerate(shapes):
        data = np.frombuffer(read(index), np.uint8)
        if encoding in (b"jpeg", b"original"):
            image = ImageOps.exif_transpose(Image.open(io.BytesIO(data.tobytes())))
            found.append(np.asarray(image.convert("RGB")))
        elif encoding == b"yuv420":
            found.append(cv2.cvtColor(data.reshape(height * 3 // 2, width), cv2.COLOR_YUV2RGB_NV12))
        else:
            found.append(
                data.reshape(height, width, -1) if name == "images" else data.reshape(height, width)
            )
    return found
