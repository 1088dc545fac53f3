"""One pass over an epoch: keeps batches in the making, and hands them over in order."""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from h5feed.augment import Params
from h5feed.errors import DamagedItemError, UsageError
from h5feed.feed.batch import BatchBuilder, Field
from h5feed.feed.memory import Slot
from h5feed.feed.readahead import ReadAhead
from h5feed.feed.workers import Job, WorkerPool

__all__ = [
    "BatchTask",
    "Counts",
    "Cursor",
    "Epoch",
    "EpochIterator",
    "copy_rows",
    "none_whole",
    "substitutes",
]


Rows = NDArray[np.int64]

_MANY = 2  # times the slots that a loop needs which lets go of its batches
_CHUNKS = 2  # per thread and batch: enough to share the work evenly, few enough to cost nothing


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


class EpochIterator(Iterator[Any]):
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
        self._tasks: deque[BatchTask] = deque()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        epoch.iterator = weakref.ref(self)
        for _ in range(prefetch):
            self._request()

    def __next__(self) -> Any:
        _check_process(self._pid)
        with self._lock:
            return self._next()

    def _next(self) -> Any:
        if not self._tasks:
            if not self._epoch.cancelled:
                self._complete()
            raise StopIteration
        task = self._tasks[0]
        began = perf_counter()
        with task.ready:  # interruptible: Ctrl-C arrives here, and the batch can be asked for again
            pass
        self._counts.wait_s += perf_counter() - began
        if self._epoch.cancelled:  # closed by another thread
            raise StopIteration
        self._tasks.popleft()
        self._request()
        if task.error is not None:
            self.close()
            raise task.take_error()
        return self._hand_over(task)

    def close(self) -> None:
        """End the pass: what is in the making is let go."""
        self._epoch.ended = True
        self._tasks.clear()

    def _request(self) -> None:
        if self._requested < len(self._steps):
            task = BatchTask(self._epoch, self._requested)
            self._requested += 1
            self._tasks.append(task)
            self._epoch.pool.submit(task.plan)

    def _hand_over(self, task: BatchTask) -> Any:
        counts, steps = self._counts, self._steps
        counts.add(len(task.indices), skipped=task.skipped, repeated=steps.repeats(task.step))
        self._cursor.advance(steps.consumed(task.step + 1))
        counts.announced_bytes += task.announced
        batch, task.batch = task.batch, None
        self._warn_of_held_batches()
        self._epoch.builder.transfer.receive(task.ticket, _tensors(batch))
        return batch

    def _warn_of_held_batches(self) -> None:
        rings, counts = self._epoch.builder.rings, self._counts
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


@dataclass(slots=True, kw_only=True)
class Epoch:
    """What the batches of one pass share."""

    builder: BatchBuilder
    ahead: ReadAhead
    pool: WorkerPool
    ended: bool = False
    iterator: Callable[[], object] = lambda: None
    """A weak reference to the pass: nobody waits for batches of one that is no more."""

    @property
    def cancelled(self) -> bool:
        """Whether nobody will take another batch."""
        return self.ended or self.iterator() is None


class BatchTask:
    """One batch, from its step number to the tensors that are delivered.

    `plan` and the chunks it hands out run in loader threads; the consumer waits for `ready`, then
    looks at `error` or takes `batch`.
    """

    def __init__(self, epoch: Epoch, step: int) -> None:
        self.step = step
        self.error: BaseException | None = None
        self.batch: Any = None
        self.ticket: Any = None
        self.skipped = 0
        """Rows in which a substitute stands."""
        self.announced = 0
        """Bytes announced to the kernel when it was planned."""
        self.ready = threading.Lock()
        """Held until the batch, or its error, is there."""
        self.ready.acquire()
        self._epoch = epoch
        self._lock = threading.Lock()
        self._chunks = 0
        self._failed_at = sys.maxsize
        """The first row of the earliest chunk that failed: `error` is its error."""
        self._damage: dict[int, tuple[Field, DamagedItemError]] = {}
        self._params: Params | None = None
        self._slots: Sequence[Sequence[Slot]] = ()

    def take_error(self) -> BaseException:
        """Return the error and forget it: it knows this batch, which would else know it."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def plan(self) -> None:
        """Decide which samples and what happens to them, and hand out the chunks (a job)."""
        chunks: list[Job] = []
        if not self._epoch.cancelled:
            try:
                chunks = self._chunk_jobs()
            except BaseException as ex:
                self.error = ex
        self._chunks = len(chunks)
        if not chunks:
            self.ready.release()
        for chunk in chunks:
            self._epoch.pool.submit(chunk)

    def _chunk_jobs(self) -> list[Job]:
        self.indices, self._params, self.announced = self._epoch.ahead.samples(self.step)
        self._slots = self._epoch.builder.take_slots()
        count = len(self.indices)
        parts = _CHUNKS * self._epoch.pool.threads if self._slots else 1
        least = max((field.least for field in self._epoch.builder.fields), default=1)
        size = max(-(-count // parts), least)
        return [partial(self._chunk, a, min(a + size, count)) for a in range(0, count, size)]

    def _chunk(self, begin: int, end: int) -> None:
        """Fill rows begin to end; the last one to finish delivers (a job)."""
        if not self._epoch.cancelled and begin < self._failed_at:
            try:
                for field, slots in zip(self._epoch.builder.fields, self._slots, strict=True):
                    self._fill(field, slots, begin, end)
            except BaseException as ex:
                with self._lock:  # of several errors the first row's is told, in every run
                    if begin < self._failed_at:
                        self.error, self._failed_at = ex, begin
        with self._lock:
            self._chunks -= 1
            last = self._chunks == 0
        if last:
            self._finish()

    def _fill(self, field: Field, slots: Sequence[Slot], begin: int, end: int) -> None:
        try:
            field.fill(self.indices[begin:end], self._params, begin, slots)
        except (DamagedItemError, cv2.error) as ex:
            if getattr(ex, "code", 0) == cv2.Error.StsNoMem:
                raise  # no fault of an item
            self._fill_each(field, slots, begin, end)

    def _fill_each(self, field: Field, slots: Sequence[Slot], begin: int, end: int) -> None:
        """Fill rows begin to end one by one, and note those that cannot be, or raise for one."""
        for k in range(begin, end):
            try:
                field.fill(self.indices[k : k + 1], self._params, k, slots)
                continue
            except DamagedItemError as ex:
                error = ex
            except cv2.error as ex:
                error = field.damaged(int(self.indices[k]), ex)
                error.__cause__ = ex
            if self._epoch.builder.on_error == "raise":
                raise error
            self._damage[k] = field, error

    def _finish(self) -> None:
        if self.error is None and not self._epoch.cancelled:
            try:
                self._substitute()
                self.batch, self.ticket = self._epoch.builder.deliver(
                    self.indices, self._params, self._slots
                )
            except BaseException as ex:
                self.error = ex
        else:
            for slot in (slot for slots in self._slots for slot in slots):
                slot.go_home()
        self._slots, self._params = (), None
        self.ready.release()

    def _substitute(self) -> None:
        """Put the next whole sample of the batch, going round, where one was damaged."""
        if not self._damage:
            return
        bad = np.array(sorted(self._damage))
        instead = substitutes(len(self.indices), bad)
        if instead is None:
            field, ex = self._damage[0]
            raise field.damaged(
                int(self.indices[0]), ex.__cause__, none_whole(len(self.indices))
            ) from ex.__cause__
        for slot in (slot for slots in self._slots for slot in slots):
            slot.rows[bad] = slot.rows[instead]
        self.indices = self.indices.copy()
        self.indices[bad] = self.indices[instead]
        copy_rows(self._params, bad, instead)
        self.skipped = len(bad)


def substitutes(count: int, bad: Rows) -> Rows | None:
    """Return for each row of `bad` (sorted) the next whole one of `count`, going round.

    None where no row is whole.
    """
    whole = np.setdiff1d(np.arange(count), bad)
    return whole[np.searchsorted(whole, bad) % len(whole)] if len(whole) else None


def none_whole(count: int) -> str:
    """Return what to say instead of GO_ON where a batch of `count` has no whole item."""
    return (
        f'; on_error="skip" found no whole item in this batch of {count} to stand in: give a '
        "larger batch_size, or indices without the damaged items"
    )


def copy_rows(params: Params | None, bad: Rows, instead: Rows) -> None:
    """Give rows `bad` the parameters of rows `instead`, in place."""
    views: tuple[tuple[NDArray[Any], ...], ...] = () if params is None else params.views
    for view in views:
        for rows in view:
            rows[bad] = rows[instead]
