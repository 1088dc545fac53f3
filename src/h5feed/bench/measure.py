"""One loader, measured and checked: the only place where images are counted.

A subject is anything that yields batches. It is first *verified* (untimed: does it deliver as many
images as there are, of the right shape and dtype, and different ones?), then measured in windows
of a few seconds. A window starts when a batch arrives and ends when one arrives, epochs follow one
another inside it, and what it costs to start an epoch counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from . import usage
from .honesty import (
    DishonestError,
    Expectation,
    Subject,
    check_batch,
    check_count,
    check_distinct,
    check_labels,
    distinct_share,
    on_host,
    probe,
    rows,
)

__all__ = [
    "Check",
    "DishonestError",
    "Expectation",
    "Subject",
    "Window",
    "cold_window",
    "verify",
    "wait_until_idle",
    "warm_window",
    "whole_epochs",
]

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
    """Of the time of the epochs that ended: what went by between the last batch and the end. A
    loader that makes batches which nobody gets does it there. None where none ended."""

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

    with usage.MemoryPeak() as watch:
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


def whole_epochs(subject: Subject, expected: Expectation, *, seconds: float) -> list[float]:
    """Return images per second of each of the whole epochs that `seconds` begin; one at least.

    From asking for an epoch to its end: what a short window leaves out, how an epoch starts and
    how it ends, counts in full.

    Raises:
        DishonestError: An epoch of another length.
    """
    rates: list[float] = []
    start = time.perf_counter()
    while not rates or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        count = sum(len(images) for images, _ in subject.epoch())
        subject.synchronize()
        rates.append(count / (time.perf_counter() - begin))
        if not expected.ceiling:
            check_count(count, expected)
    return rates


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
    cpu, read, begin = usage.cpu_seconds(), usage.read_bytes(), time.perf_counter()
    count, probes = _consume(batches, subject, expected, seconds)
    subject.synchronize()
    window = Window(
        images=count,
        seconds=time.perf_counter() - begin,
        first_batch_seconds=first,
        warmup_images=warmup,
        cpu_seconds=usage.cpu_seconds() - cpu,
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
    read = usage.read_bytes()
    count = first = 0
    cpu, begin = usage.cpu_seconds(), start
    for images, _ in subject.epoch():
        subject.synchronize()
        if not first:
            first, begin, cpu = len(images), time.perf_counter(), usage.cpu_seconds()
            continue
        count += len(images)
        if time.perf_counter() - begin > seconds:
            break
    return Window(
        images=count,
        seconds=max(time.perf_counter() - begin, 1e-9),
        first_batch_seconds=begin - start,
        warmup_images=first,
        cpu_seconds=usage.cpu_seconds() - cpu,
        read_bytes=_since(read),
    )


def _since(before: int | None) -> int | None:
    now = usage.read_bytes()
    return None if before is None or now is None else now - before


def wait_until_idle(patience: float = 5.0, calm: float = 0.06) -> bool:
    """Wait until the process tree stops computing ahead; False if it never does.

    A loader that is left mid-epoch fills its queues: that work would slow the next subject. Two
    calm stretches are asked for: on a busy machine a worker may get no turn in one.
    """
    deadline = time.perf_counter() + patience
    quiet = 0
    while quiet < 2:
        before = usage.cpu_seconds()
        time.sleep(calm)
        # Looking costs a millisecond or two; a child's time comes in ticks of 10 ms.
        quiet = quiet + 1 if usage.cpu_seconds() - before < 0.1 * calm else 0
        if time.perf_counter() > deadline:
            return False
    return True
