"""One pass over an epoch: keeps batches in the making, and hands them over in order."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from h5feed.errors import UsageError
from h5feed.feed.work import Epoch, Work

__all__ = ["Counts", "Cursor", "Run"]


@dataclass(slots=True)
class Cursor:
    """Where a loader stands."""

    epoch: int
    consumed: int = 0
    """Positions of the epoch delivered to all ranks together."""
    listed: int = 0
    """CRC-32 of a sampler's list, of a pass that began or was to be gone on with."""
    begun: bool = False
    """Whether a batch has been delivered from here, so that a new pass is the next epoch."""
    named: bool = False
    """Whether `set_epoch` asked for this epoch, also where nothing is left of it."""

    def advance(self, consumed: int) -> None:
        """Stand behind a batch that has been delivered."""
        self.consumed = consumed
        self.begun = True

    def complete(self) -> None:
        """Stand at the beginning of the next epoch."""
        self.epoch += 1
        self.consumed = self.listed = 0
        self.begun = False
        self.named = False


@dataclass(slots=True)
class Counts:
    """What a loader has delivered since it was made."""

    batches: int = 0
    images: int = 0
    skipped: int = 0
    repeated: int = 0
    wait_s: float = 0.0
    announced_bytes: int = 0
    held_many: bool = False

    def add(self, images: int, *, skipped: int, repeated: int) -> None:
        """Count a batch that is handed over."""
        self.batches += 1
        self.images += images
        self.skipped += skipped
        self.repeated += repeated


_MANY = 2  # times the slots that a loop needs which lets go of its batches


class Run(Iterator[Any]):
    """The iterator over one pass. Letting it go ends it; its threads belong to the pool.

    Several threads may share it: each batch goes to one of them. A forked child may not.

    It has no __del__: Python drops what is raised there, and a Ctrl-C would be lost.
    """

    def __init__(self, epoch: Epoch, cursor: Cursor, counts: Counts, *, prefetch: int) -> None:
        self._epoch = epoch
        self._steps = epoch.ahead.steps
        self._cursor = cursor
        self._counts = counts
        self._requested = 0
        self._works: deque[Work] = deque()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        epoch.run = weakref.ref(self)
        for _ in range(prefetch):
            self._request()

    def __next__(self) -> Any:
        _check_process(self._pid)
        with self._lock:
            return self._next()

    def _next(self) -> Any:
        if not self._works:
            if not self._epoch.cancelled:
                self._complete()
            raise StopIteration
        work = self._works[0]
        began = perf_counter()
        with work.ready:  # interruptible: Ctrl-C arrives here, and the batch can be asked for again
            pass
        self._counts.wait_s += perf_counter() - began
        if self._epoch.cancelled:  # closed by another thread
            raise StopIteration
        self._works.popleft()
        self._request()
        if work.error is not None:
            self.close()
            raise work.take_error()
        return self._hand_over(work)

    def close(self) -> None:
        """End the pass: what is in the making is let go."""
        self._epoch.ended = True
        self._works.clear()

    def _request(self) -> None:
        if self._requested < len(self._steps):
            work = Work(self._epoch, self._requested)
            self._requested += 1
            self._works.append(work)
            self._epoch.pool.submit(work.plan)

    def _hand_over(self, work: Work) -> Any:
        counts, steps = self._counts, self._steps
        counts.add(len(work.indices), skipped=work.skipped, repeated=steps.repeats(work.step))
        self._cursor.advance(steps.consumed(work.step + 1))
        counts.announced_bytes += work.announced
        batch, work.batch = work.batch, None
        self._warn_of_held_batches()
        self._epoch.recipe.lane.receive(work.ticket, _tensors(batch))
        return batch

    def _warn_of_held_batches(self) -> None:
        rings, counts = self._epoch.recipe.rings, self._counts
        if not counts.held_many and any(len(ring) > _MANY * ring.keep for ring in rings):
            counts.held_many = True
            held = sum(ring.nbytes for ring in rings) / 1e6
            warnings.warn(
                f"{len(rings[0])} batches are held at once, {held:.0f} MB that grow with every "
                "further one: a batch's memory is used again once nobody holds it or a view of it. "
                "Copy what you keep (images.clone()), or ignore this if the memory is there",
                stacklevel=5,  # the caller's loop
            )

    def _complete(self) -> None:
        self._epoch.ended = True
        self._cursor.complete()


def _check_process(pid: int) -> None:
    """Refuse to go on in a forked child with the pass of its parent `pid`."""
    if pid != os.getpid():
        raise UsageError(
            f"this pass was begun by process {pid}, whose threads make its batches, and process "
            f"{os.getpid()} was forked from it without them: begin a pass of its own there, with "
            "iter(loader)"
        )


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = batch.values()
    elif not isinstance(batch, (tuple, list)):
        return []
    return [tensor for part in batch for tensor in _tensors(part)]
