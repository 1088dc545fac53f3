"""What a packed file holds, in numbers a person asks for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from h5feed.feed.files import PackedFiles
from h5feed.feed.image import image_reader
from h5feed.store import FileIndex
from h5feed.system import available_cores

__all__ = ["ChannelStats", "channel_stats", "class_counts", "file_facts"]

_BLOCK = 64  # items a thread decodes and sums at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """Mean and standard deviation of each channel, over all pixels, on the scale 0 to 1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    images: int
    """How many images they were taken from."""


def channel_stats(
    pixels: PackedFiles,
    *,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ChannelStats:
    """Mean and standard deviation of red, green and blue of the stored images.

    With `limit`, at most that many images are read, evenly spaced.
    `progress(n)` is called as n more images are done.
    """
    read = image_reader(pixels, "images", output="numpy", aspect="stored")
    count = len(pixels) if limit is None else min(limit, len(pixels))
    chosen = np.linspace(0, len(pixels) - 1, count).round().astype(np.int64)
    total = np.zeros((3, 3))  # pixels, sum and sum of squares, by channel
    with ThreadPoolExecutor(available_cores()) as pool:
        blocks = [chosen[at : at + _BLOCK] for at in range(0, count, _BLOCK)]
        found = pool.map(lambda block: _sums(pixels, read, block), blocks)
        for block, sums in zip(blocks, found, strict=True):
            total += sums
            if progress is not None:
                progress(len(block))
    mean = total[1] / total[0]
    std = np.sqrt(np.maximum(total[2] / total[0] - mean**2, 0))
    return ChannelStats(mean=_triple(mean / 255), std=_triple(std / 255), images=count)


def class_counts(index: FileIndex) -> dict[str, int]:
    """Items of each class by name; "(none)" counts label −1, "(targets)" float targets."""
    if index.labels.ndim == 2:
        return {"(targets)": len(index)}
    # Not bincount: without classes a single label may be 10⁹.
    labels, counts = (array.tolist() for array in np.unique(index.labels, return_counts=True))
    by_label = dict(zip(labels, counts, strict=True))
    none = by_label.pop(-1, 0)
    found: dict[str, int] = {}
    if index.classes:
        for label, name in enumerate(index.classes):
            # ImageNet has two cranes, and two maillots.
            name = f"{name} (class {label})" if name in found else name
            found[name] = by_label.get(label, 0)
    else:
        found = {str(label): count for label, count in by_label.items()}
    return found | ({"(none)": none} if none else {})


def target_names(index: FileIndex) -> list[str]:
    """Return the names of float targets, as packing noted them; their numbers where it did not."""
    if index.labels.ndim == 1:
        return []
    count = index.labels.shape[1]
    noted = index.provenance.get("targets")
    if isinstance(noted, list) and len(noted) == count:
        return [str(name) for name in noted]
    return [str(number) for number in range(count)]


def file_facts(index: FileIndex) -> dict[str, Any]:
    """Return what `show-h5` tells of a file, as JSON values."""
    sides = index.source_shapes
    return {
        "path": index.path,
        "items": len(index),
        "file_bytes": index.size,
        "classes": len(index.classes),
        "class_counts": class_counts(index),
        "targets_per_item": int(index.labels.shape[1]) if index.labels.ndim == 2 else None,
        "targets": target_names(index),
        "fields": {
            name: extent.spec.attributes() | {"bytes": extent.nbytes}
            for name, extent in index.extents.items()
        },
        "source_height": _spread(sides[:, 0]),
        "source_width": _spread(sides[:, 1]),
        "provenance": index.provenance,
        "fingerprint": index.fingerprint,
    }


def _sums(
    pixels: PackedFiles, read: Callable[[int], Any], indices: np.ndarray[Any, np.dtype[np.int64]]
) -> Any:
    pixels.announce(indices, ["images"])
    sums = np.zeros((3, 3))
    for at in indices.tolist():
        image = read(at)
        count = image.shape[0] * image.shape[1]
        mean, std = (part.ravel() for part in cv2.meanStdDev(image))
        sums += count * np.stack([np.ones(3), mean, std**2 + mean**2])
    return sums


def _triple(values: Any) -> tuple[float, float, float]:
    red, green, blue = values.tolist()
    return red, green, blue


def _spread(values: Any) -> dict[str, int]:
    return {
        "min": int(values.min()),
        "median": int(np.median(values)),
        "max": int(values.max()),
    }
