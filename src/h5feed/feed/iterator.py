"""One pass over an epoch: keeps batches in the making, and hands them over in order."""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from h5feed.augment import Params
from h5feed.errors import UsageError
from h5feed.feed.batch import BatchBuilder
from h5feed.feed.memory import Slot
from h5feed.feed.readahead import ReadAhead
from h5feed.feed.rows import Damage, fill_rows
from h5feed.feed.workers import Job

__all__ = [
    "BatchTask",
    "Counts",
    "Cursor",
    "Engine",
    "Epoch",
    "EpochIterator",
    "copy_rows",
    "none_whole",
    "substitutes",
]


Rows = NDArray[np.int64]

_MANY = 2  # times the slots that a loop needs which lets go of its batches


@dataclass(slots=True)
class Cursor:
    """Where a loader stands."""

    epoch: int
    consumed: int = 0
    """Positions of the epoch delivered to all ranks together."""
    listed: int = 0
    """CRC-32 of the list that a sampler gave for this pass, or for the one to resume."""
    begun: bool = False
    """Whether a batch has been delivered from here, so that a new pass is the next epoch."""
    named: bool = False
    """Whether `set_epoch` asked for this epoch, also where nothing is left of it."""

    def advance(self, consumed: int) -> None:
        """Move past a batch that has been delivered."""
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
    """The iterator over one pass. Letting it go ends it; its workers belong to the engine.

    Several threads may share it: each batch goes to one of them. A forked child may not.

    It has no __del__: Python drops what is raised there, and a Ctrl-C would be lost.
    """

    def __init__(self, epoch: Epoch, cursor: Cursor, counts: Counts) -> None:
        self._epoch = epoch
        self._steps = epoch.ahead.steps
        self._cursor = cursor
        self._counts = counts
        self._requested = 0
        self._tasks: deque[BatchTask] = deque()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        epoch.iterator = weakref.ref(self)
        for _ in range(epoch.prefetch):
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
        if task.error is not None:
            self.close()
            raise task.take_error()
        self._request()
        return self._hand_over(task)

    def close(self) -> None:
        """End the pass; batches in the making are dropped."""
        self._epoch.ended = True
        self._tasks.clear()

    def _request(self) -> None:
        if self._requested < len(self._steps):
            task = BatchTask(self._epoch, self._requested)
            self._requested += 1
            self._tasks.append(task)
            self._epoch.engine.submit(task.plan)

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


class Engine(Protocol):
    """What the loader's workers are, and how they get their work."""

    def chunk(self, count: int, prefetch: int) -> int:
        """Return how many of a batch's `count` rows a worker best gets at once.

        prefetch: batches in the making at once.
        """
        ...

    def submit(self, job: Job) -> None:
        """Have a job run in a thread; jobs must not raise."""
        ...

    def fill(self, task: BatchTask, chunks: Sequence[range]) -> None:
        """Have these rows of a batch filled side by side, and the batch finished after the last."""
        ...

    def close(self) -> None:
        """End the workers and wait for them; later work starts new ones."""
        ...


@dataclass(slots=True, kw_only=True)
class Epoch:
    """What the batches of one pass share."""

    builder: BatchBuilder
    ahead: ReadAhead
    engine: Engine
    prefetch: int = 1
    """Batches in the making at once."""
    ended: bool = False
    failed: bool = False
    """Whether a batch tells that no further one can be made; those planned later need not."""
    iterator: Callable[[], object] = lambda: None
    """A weak reference to the pass: once it is gone, so is the need for its batches."""

    @property
    def cancelled(self) -> bool:
        """Whether nobody will take another batch."""
        return self.ended or self.iterator() is None


class BatchTask:
    """One batch, from its step number to the tensors that are delivered.

    `plan` is a job of the loader's engine, which has rows filled and then `finish` run; the
    consumer waits for `ready`, then looks at `error` or takes `batch`.
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
        self.params: Params | None = None
        self.slots: Sequence[Sequence[Slot]] = ()
        """Of each field and view."""
        self._epoch = epoch
        self._lock = threading.Lock()
        self._chunks = 0
        self._failed_at = sys.maxsize
        """The first row of the earliest chunk that failed: `error` is its error."""
        self._damage: dict[int, Damage] = {}

    @property
    def stop(self) -> int:
        """Rows from here on need not be filled: of several errors, the first row's is raised."""
        return 0 if self._epoch.cancelled else self._failed_at

    def take_error(self) -> BaseException:
        """Return the error and forget it: it knows this batch, which would else know it."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def plan(self) -> None:
        """Decide which samples and what happens to them, and have the rows filled (a job)."""
        if self._epoch.cancelled or self._epoch.failed:
            self.ready.release()
            return
        try:
            chunks = self._cut()
            self._chunks = len(chunks)
            self._epoch.engine.fill(self, chunks)
        except BaseException as ex:
            self.error = ex
            self.finish()

    def _cut(self) -> list[range]:
        self.indices, self.params, self.announced = self._epoch.ahead.samples(self.step)
        self.slots = self._epoch.builder.take_slots()
        count = len(self.indices)
        size = self._epoch.engine.chunk(count, self._epoch.prefetch) if self.slots else count
        size = max([size, *(field.least for field in self._epoch.builder.fields)])
        return [range(a, min(a + size, count)) for a in range(0, count, size)]

    def fill(self, rows: range) -> None:
        """Fill these rows; the job that fills the last ones delivers the batch."""
        damage: dict[int, Damage] = {}
        try:
            if rows.start < self.stop:
                builder = self._epoch.builder
                memory = [[slot.rows for slot in views] for views in self.slots]
                damage = fill_rows(
                    builder.fields, memory, self.indices, self.params, rows, builder.on_error
                )
        except BaseException as ex:
            last = self.filled(rows.start, error=ex)
        else:
            last = self.filled(rows.start, damage)
        if last:
            self.finish()

    def filled(
        self,
        row: int,
        damage: Mapping[int, Damage] | None = None,
        error: BaseException | None = None,
    ) -> bool:
        """Note how the filling of the chunk from `row` on ended; return whether it was the last."""
        with self._lock:
            if error is not None and row < self._failed_at:
                self.error, self._failed_at = error, row
            self._damage |= damage or {}
            self._chunks -= 1
            return self._chunks == 0

    def fail(self, error: BaseException) -> None:
        """End the batch, and with it the pass: its workers are no more."""
        self.error, self._epoch.failed = error, True
        self.finish()

    def finish(self) -> None:
        """Deliver the batch or its error, once all rows are done with."""
        if self.error is None and not self._epoch.cancelled:
            try:
                self._substitute()
                self.batch, self.ticket = self._epoch.builder.deliver(
                    self.indices, self.params, self.slots
                )
            except BaseException as ex:
                self.error = ex
        else:
            for slot in (slot for slots in self.slots for slot in slots):
                slot.go_home()
        self.slots, self.params = (), None
        self.ready.release()

    def _substitute(self) -> None:
        """Put the next whole sample of the batch, going round, where one was damaged."""
        if not self._damage:
            return
        bad = np.array(sorted(self._damage))
        instead = substitutes(len(self.indices), bad)
        if instead is None:
            number, reason = self._damage[0]
            field = self._epoch.builder.fields[number]
            then = none_whole(len(self.indices))
            raise field.damaged(int(self.indices[0]), reason, then) from reason
        for slot in (slot for slots in self.slots for slot in slots):
            slot.rows[bad] = slot.rows[instead]
        self.indices = self.indices.copy()
        self.indices[bad] = self.indices[instead]
        copy_rows(self.params, bad, instead)
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
