"""Images to train on: given folders, repeated as often as it takes, or drawn; and packed."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from h5feed import pack
from h5feed.system import available_cores

__all__ = ["Photos", "draw_folder", "prepare_cifar", "prepare_photos", "repeat_folder"]

_SUFFIXES = {".jpg", ".jpeg", ".png"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Photos:
    """One set in the forms that the loaders read."""

    folder: Path
    raw: Path
    """Packed as pixels."""
    jpeg: Path
    """Packed as JPEG of the same size."""
    drawn: bool
    """Whether the images were drawn: speeds mean something then, accuracies nothing."""


def prepare_photos(given: Path | None, scratch: Path, *, count: int, side: int) -> Photos:
    """Return at least `count` photos, packed at `side` px, in `scratch` (used again if there)."""
    folder = scratch / f"{'drawn' if given is None else given.resolve().name}-{count}-{side}"
    with _whole(folder) as new:
        if new is not None and given is None:
            draw_folder(new, count, (side * 3 // 2, side * 2), classes=100)
        elif new is not None and given is not None:
            repeat_folder(given, new, count)
    raw, jpeg = (folder.with_name(f"{folder.name}.{store}.h5") for store in ("raw", "jpeg"))
    for path, store in ((raw, "raw"), (jpeg, "jpeg")):
        if not path.exists():
            pack(folder, path, size=str(side), store=store, overwrite=True)
    return Photos(folder=folder, raw=raw, jpeg=jpeg, drawn=given is None)


def prepare_cifar(given: Path | None, scratch: Path, *, count: int) -> tuple[Path, Path, bool]:
    """Return CIFAR-10 packed at 32 px, for training and for scoring, and whether it was drawn."""
    packed = []
    for split, part in (("train", count), ("test", max(1, count // 5))):
        folder = scratch / f"drawn-cifar-{split}-{part}" if given is None else given / split
        if given is None:
            with _whole(folder) as new:
                if new is not None:
                    draw_folder(new, part, (32, 32), classes=10)
        path = scratch / f"cifar-{split}{f'-drawn-{part}' if given is None else ''}.h5"
        if not path.exists():
            pack(folder, path, size="32", overwrite=True)
        packed.append(path)
    return packed[0], packed[1], given is None


@contextmanager
def _whole(folder: Path) -> Iterator[Path | None]:
    """Yield a folder to fill, which is called `folder` once it is full; None if that is there.

    So what an interrupted run had begun is never taken for the whole.
    """
    if folder.is_dir():
        yield None
        return
    new = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    new.rename(folder)


def repeat_folder(given: Path, folder: Path, count: int) -> None:
    """Fill `folder` with links to the images of `given`, each as often as `count` takes."""
    files = sorted(p for p in given.rglob("*") if p.suffix.lower() in _SUFFIXES)
    if not files:
        raise SystemExit(f"--photos {given} holds no images: give a folder of class folders")
    for number in range(max(count, len(files))):
        source = files[number % len(files)].resolve()
        place = folder / source.parent.name / f"{number // len(files)}-{source.name}"
        place.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(source, place)


def draw_folder(folder: Path, count: int, size: tuple[int, int], classes: int) -> None:
    """Draw `count` JPEGs of `size` (height, width) into class folders; the class can be seen."""
    for label in range(min(classes, count)):
        (folder / f"class{label:03}").mkdir(parents=True, exist_ok=True)
    draw = partial(_draw, folder, size, classes)
    with ProcessPoolExecutor(min(available_cores(), 16)) as pool:
        list(pool.map(draw, range(count), chunksize=64))


def _draw(folder: Path, size: tuple[int, int], classes: int, number: int) -> None:
    """Smooth noise, as photos have, around the color of the class."""
    rng, label = np.random.default_rng(number), number % classes
    color = np.random.default_rng(10_000 + label).integers(60, 196, 3)
    coarse = np.clip(color + rng.normal(0, 40, (12, 16, 3)), 0, 255).astype(np.uint8)
    image = Image.fromarray(coarse).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    noise = rng.integers(-8, 9, (*size, 1))
    pixels = np.clip(np.asarray(image, dtype=np.int16) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(folder / f"class{label:03}" / f"{number:06}.jpg", quality=90)
