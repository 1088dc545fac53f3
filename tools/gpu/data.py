"""Images to train on: given folders, repeated as often as it takes, or drawn; and packed."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from h5feed.system import available_cores
from harness import filled_once, link, packed

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
    with filled_once(folder) as new:
        if new is not None and given is None:
            draw_folder(new, count, (side * 3 // 2, side * 2), classes=100)
        elif new is not None and given is not None:
            repeat_folder(given, new, count)
    raw, jpeg = (
        packed(folder, folder.with_name(f"{folder.name}.{store}.h5"), size=side, store=store)
        for store in ("raw", "jpeg")
    )
    return Photos(folder=folder, raw=raw, jpeg=jpeg, drawn=given is None)


def prepare_cifar(given: Path | None, scratch: Path, *, count: int) -> tuple[Path, Path, bool]:
    """Return CIFAR-10 packed at 32 px, for training and for scoring, and whether it was drawn."""
    files = []
    for split, part in (("train", count), ("test", max(1, count // 5))):
        folder = scratch / f"drawn-cifar-{split}-{part}" if given is None else given / split
        if given is None:
            with filled_once(folder) as new:
                if new is not None:
                    draw_folder(new, part, (32, 32), classes=10)
        name = f"cifar-{split}{f'-drawn-{part}' if given is None else ''}.h5"
        files.append(packed(folder, scratch / name, size=32))
    return files[0], files[1], given is None


def repeat_folder(given: Path, folder: Path, count: int) -> None:
    """Fill `folder` with links to the images of `given`, each as often as `count` takes."""
    files = sorted(p for p in given.rglob("*") if p.suffix.lower() in _SUFFIXES)
    if not files:
        raise SystemExit(f"--photos {given} holds no images: give a folder of class folders")
    for number in range(max(count, len(files))):
        source = files[number % len(files)].resolve()
        link(source, folder / source.parent.name / f"{number // len(files)}-{source.name}")


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
