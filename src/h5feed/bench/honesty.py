"""What an honest loader delivers, and how it is found out that one does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "DishonestError",
    "Expectation",
    "Subject",
    "check_batch",
    "check_count",
    "check_distinct",
    "check_labels",
    "distinct_share",
    "on_host",
    "probe",
    "rows",
]

_DISTINCT = 0.5  # real sets hold a few duplicates; who repeats a batch has one in many


class Subject(Protocol):
    """A loader under test. Opening it is its construction."""

    dtype: str
    """What its images are made of, as numpy names it ("uint8")."""
    layout: str
    """"NCHW" or "NHWC": the order of a batch's axes (not of its memory)."""
    note: str
    """What a reader of the table must know about it."""
    files: list[str]
    """What it reads (files or folders): evicted before a cold run, and its bytes on disk."""

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield one epoch of (images, labels); images have a shape and can be sliced."""

    def synchronize(self) -> None:
        """Return when the batches handed out are really there (a device works ahead)."""

    def close(self) -> None:
        """End its workers and release its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What an honest subject delivers."""

    images: int
    """In one epoch."""
    batch_size: int
    """A subject may drop the last, incomplete batch."""
    height: int
    """Of a delivered image."""
    width: int
    """Of a delivered image."""
    label_counts: tuple[int, ...] | None = None
    """How many images each class has, sorted; None: not known."""
    ceiling: bool = False
    """A ceiling is no loader: its shape and content are its own affair."""


class DishonestError(Exception):
    """A subject that does not do the work it is timed for."""


def probe(images: Any, layout: str, step: int = 1) -> Any:
    """Copy about 48 values of every `step`-th image, on the device where they are.

    A copy, because the loader may reuse the batch's memory at once; on the device, because
    fetching it would make a loader wait that works ahead.
    """
    height, width = images.shape[2:] if layout == "NCHW" else images.shape[1:3]
    rows, columns = (slice(size // 9, None, max(size // 4, 1)) for size in (height, width))
    part = images[::step, :, rows, columns] if layout == "NCHW" else images[::step, rows, columns]
    return part.clone() if hasattr(part, "clone") else part.copy()


def rows(probe: Any) -> list[bytes]:
    """Return the probed values of each image."""
    return [image.tobytes() for image in on_host(probe)]


def on_host(values: Any) -> npt.NDArray[Any]:
    """`values`, a tensor on any device or an array, as a numpy array."""
    array: npt.NDArray[Any] = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    return array


def distinct_share(values: list[bytes]) -> float:
    """Return which share of `values` differ from one another; 1 where there are none."""
    return len(set(values)) / len(values) if values else 1.0


def check_batch(images: Any, labels: Any, subject: Subject, expected: Expectation) -> None:
    """Check shape, dtype and labels of one batch."""
    shape = tuple(int(size) for size in images.shape)
    size = (expected.height, expected.width)
    right = (3, *size) if subject.layout == "NCHW" else (*size, 3)
    if len(shape) != 4 or shape[1:] != right:
        raise DishonestError(f"delivered a batch of shape {shape}; asked for (B, {right})")
    dtype = str(images.dtype).removeprefix("torch.")
    if dtype != subject.dtype:
        raise DishonestError(f"delivered {dtype}; it said {subject.dtype}")
    if labels is not None and len(labels) != shape[0]:
        raise DishonestError(f"delivered {shape[0]} images with {len(labels)} labels")


def check_count(images: int, expected: Expectation) -> None:
    """Check the images of a complete epoch; a last, incomplete batch may be missing."""
    whole = expected.images // expected.batch_size * expected.batch_size
    if images not in (expected.images, whole):
        raise DishonestError(
            f"delivered {images} images in one epoch of {expected.images} "
            f"(or {whole} without the last, incomplete batch)"
        )


def check_distinct(share: float, what: str) -> None:
    """Check that `what` ("images", "batches") does not repeat."""
    if share < _DISTINCT:
        raise DishonestError(
            f"only {share:.0%} of its {what} differ from one another: it repeats what it has"
        )


def check_labels(labels: list[Any], expected: Expectation) -> None:
    """Compare the class sizes of a whole epoch; each rival may number its classes as it likes."""
    if expected.label_counts is None or not labels:
        return
    counts = np.unique(np.concatenate(labels), return_counts=True)[1]
    if tuple(sorted(counts.tolist())) != expected.label_counts:
        raise DishonestError(
            f"its labels fall into {len(counts)} classes of sizes other than "
            f"those of the {len(expected.label_counts)} in the source: not every image came once"
        )
