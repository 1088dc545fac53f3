"""One loader, measured and checked: the only place where images are counted.

A subject is anything that yields batches. It is first *verified* (untimed: does it deliver as many
images as there are, of the right shape and dtype, and different ones?), then measured in windows
of a few seconds. A window starts when a batch arrives and ends when one arrives, epochs follow one
another inside it, and what it costs to start an epoch counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from . import system

__all__ = [
    "Check",
    "DishonestError",
    "Expectation",
    "Subject",
    "Window",
    "check_batch",
    "check_count",
    "check_distinct",
    "check_labels",
    "cold_window",
    "distinct_share",
    "on_host",
    "probe",
    "rows",
    "verify",
    "wait_until_idle",
    "warm_window",
    "whole_epochs",
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
    label_counts: Sequence[int] | None = None
    """How many images each class has, sorted; None: not known."""
    ceiling: bool = False
    """A ceiling is not a loader: its shape and content are its own affair."""


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
    """Return which share of `values` differ from one another; 1 where there are none.

    >>> distinct_share([b"cat", b"dog", b"cat", b"cat"])
    0.5
    """
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
    if sorted(counts.tolist()) != list(expected.label_counts):  # a list, where JSON brought it
        raise DishonestError(
            f"its labels fall into {len(counts)} classes of sizes other than "
            f"those of the {len(expected.label_counts)} in the source: not every image came once"
        )


_PROBED_IMAGES = 8  # of each timed batch: 8 × 48 values, a copy of about 10 µs
_MINIMUM_BATCHES = 6  # loaders with workers deliver in bursts; fewer batches measure the burst


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What the untimed pass found out about a subject."""

    images: int
    """Delivered and looked at."""
    epochs: int
    """Complete ones; 0 when the set was too large to be seen whole."""
    distinct: float
    """Share of different images."""
    startup_seconds: float
    """From asking for the first batch ever to having it: workers started, code compiled."""
    private_bytes: int | None
    """Peak memory of the process tree, without file pages."""
    mapped_bytes: int | None
    """File pages mapped at that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One timed stretch."""

    images: int
    seconds: float
    first_batch_seconds: float
    """From asking for an epoch to its first batch, workers already running."""
    warmup_images: int
    """Delivered before the clock started."""
    cpu_seconds: float
    """Of the process and its children, within the stretch."""
    read_bytes: int | None
    """From the disk, within the stretch; in a cold one from its first image on."""
    lost_share: float | None = None
    """Share of an epoch's time that passed between its last batch and its end, where a loader may
    be making batches that are thrown away. None if no epoch ended."""

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / self.seconds


@dataclass(slots=True)
class _Seen:
    """What the untimed pass has seen so far."""

    rows: list[bytes]
    startup: float = 0.0
    images: int = 0
    epochs: int = 0


def _look_at_epoch(
    subject: Subject, expected: Expectation, seen: _Seen, enough: Callable[[], bool]
) -> None:
    """Check one epoch batch by batch; leave it early once eight batches are `enough`."""
    start = time.perf_counter()
    before, batches, epoch_labels = seen.images, 0, []
    for images, labels in subject.epoch():
        if not seen.images:
            subject.synchronize()
            seen.startup = time.perf_counter() - start
        if not expected.ceiling:
            check_batch(images, labels, subject, expected)
            seen.rows += rows(probe(images, subject.layout))
        if labels is not None:
            epoch_labels.append(on_host(labels).reshape(-1).copy())
        seen.images, batches = seen.images + len(images), batches + 1
        if enough() and (seen.epochs or batches >= 8):
            return
    seen.epochs += 1
    if not expected.ceiling:
        check_count(seen.images - before, expected)
        if seen.images - before == expected.images:
            check_labels(epoch_labels, expected)


def verify(subject: Subject, expected: Expectation, seconds: float) -> Check:
    """Run `subject` untimed for about `seconds` (which also warms it up) and check what it does.

    Raises:
        DishonestError: Wrong number, shape, dtype or labels, or the same images over and over.
    """
    start = time.perf_counter()
    seen = _Seen([])

    def enough() -> bool:
        return time.perf_counter() - start > seconds

    with system.MemoryPeak() as watch:
        while not (enough() and seen.images):
            _look_at_epoch(subject, expected, seen, enough)
    share = distinct_share(seen.rows)
    check_distinct(share, "images")
    peak = watch.peak
    return Check(
        images=seen.images,
        epochs=seen.epochs,
        distinct=share,
        startup_seconds=seen.startup,
        private_bytes=peak.private if peak else None,
        mapped_bytes=peak.mapped if peak else None,
    )


@dataclass(slots=True)
class _Ends:
    """Seconds in epochs that ended, and of them those after the last batch."""

    epochs: float = 0.0
    after: float = 0.0

    @property
    def share(self) -> float | None:
        return self.after / self.epochs if self.epochs else None


def _endless(subject: Subject, expected: Expectation, ends: _Ends) -> Generator[Any, None, None]:
    """Yield the images of one epoch after another, counting each and timing its end."""
    while True:
        count, begin = 0, time.perf_counter()
        asked = begin
        for images, _ in subject.epoch():
            count += len(images)
            yield images
            asked = time.perf_counter()
        now = time.perf_counter()
        ends.epochs, ends.after = ends.epochs + now - begin, ends.after + now - asked
        if not expected.ceiling:
            check_count(count, expected)


def whole_epochs(
    subject: Subject, expected: Expectation, *, seconds: float
) -> list[tuple[float, float]]:
    """Return (images per second, CPU seconds per image) of the whole epochs that `seconds` begin.

    One at least, from asking for it to its end: what a short window leaves out, how an epoch
    starts and how it ends, counts in full.

    Raises:
        DishonestError: An epoch of another length.
    """
    found: list[tuple[float, float]] = []
    start = time.perf_counter()
    while not found or time.perf_counter() - start < seconds:
        cpu, begin = system.cpu_seconds(), time.perf_counter()
        count = sum(len(images) for images, _ in subject.epoch())
        subject.synchronize()
        rate = count / (time.perf_counter() - begin)
        found.append((rate, (system.cpu_seconds() - cpu) / count))
        if not expected.ceiling:
            check_count(count, expected)
    return found


def warm_window(
    subject: Subject, expected: Expectation, *, seconds: float, settle: float
) -> Window:
    """Measure for about `seconds`, after a warm-up of `settle` seconds and two batches.

    Raises:
        DishonestError: An epoch of another length, or batches that repeat.
    """
    ends = _Ends()
    batches = _endless(subject, expected, ends)
    start = time.perf_counter()
    warmup = len(next(batches))
    first = time.perf_counter() - start
    while (time.perf_counter() - start < first + settle) or warmup < 3 * expected.batch_size:
        warmup += len(next(batches))
    subject.synchronize()
    cpu, read, begin = system.cpu_seconds(), system.read_bytes(), time.perf_counter()
    count, probes = _consume(batches, subject, expected, seconds)
    subject.synchronize()
    window = Window(
        images=count,
        seconds=time.perf_counter() - begin,
        first_batch_seconds=first,
        warmup_images=warmup,
        cpu_seconds=system.cpu_seconds() - cpu,
        read_bytes=_since(read),
        lost_share=ends.share,
    )
    batches.close()  # ends the epoch it is in
    check_distinct(distinct_share([on_host(one).tobytes() for one in probes]), "batches")
    return window


def _consume(
    batches: Iterator[Any], subject: Subject, expected: Expectation, seconds: float
) -> tuple[int, list[Any]]:
    """Take batches for `seconds`; return the images in them and a probe of each batch."""
    begin = now = time.perf_counter()
    count = batch = 0
    probes: list[Any] = []
    while now - begin < seconds or (batch < _MINIMUM_BATCHES and now - begin < 4 * seconds):
        images = next(batches)
        count, batch = count + len(images), batch + 1
        if not expected.ceiling:
            step = max(len(images) // _PROBED_IMAGES, 1)
            probes.append(probe(images, subject.layout, step))
        now = time.perf_counter()
    return count, probes


def cold_window(subject: Subject, *, seconds: float) -> Window:
    """Measure the first epoch of a fresh subject, or `seconds` of it, from its first batch on.

    So neither starting processes nor compiling counts as reading. Where several workers begin a
    batch each, all but one of these come as a gift: workers − 1 batches in an epoch.
    """
    start = time.perf_counter()
    read = system.read_bytes()
    count = first = 0
    cpu, begin = system.cpu_seconds(), start
    for images, _ in subject.epoch():
        subject.synchronize()
        if not first:
            first, begin, cpu = len(images), time.perf_counter(), system.cpu_seconds()
            continue
        count += len(images)
        if time.perf_counter() - begin > seconds:
            break
    return Window(
        images=count,
        seconds=max(time.perf_counter() - begin, 1e-9),
        first_batch_seconds=begin - start,
        warmup_images=first,
        cpu_seconds=system.cpu_seconds() - cpu,
        read_bytes=_since(read),
    )


def _since(before: int | None) -> int | None:
    now = system.read_bytes()
    return None if before is None or now is None else now - before


def wait_until_idle(patience: float = 5.0, calm: float = 0.06) -> bool:
    """Wait until the process tree stops computing ahead; False if it never does.

    A loader that is left mid-epoch fills its queues: that work would slow the next subject. Two
    calm stretches are asked for: on a busy machine a worker may get no turn in one.
    """
    deadline = time.perf_counter() + patience
    quiet = 0
    while quiet < 2:
        before = system.cpu_seconds()
        time.sleep(calm)
        # Looking costs a millisecond or two; a child's time comes in ticks of 10 ms.
        quiet = quiet + 1 if system.cpu_seconds() - before < 0.1 * calm else 0
        if time.perf_counter() > deadline:
            return False
    return True
