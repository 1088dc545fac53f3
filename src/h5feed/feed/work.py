"""A batch in the making: planned, filled in chunks by several threads, finished by the last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cv2
import numpy as np

from h5feed.augment import Params
from h5feed.errors import DamagedItemError
from h5feed.feed.ahead import Ahead
from h5feed.feed.fields import Field
from h5feed.feed.pool import Job, Pool
from h5feed.feed.recipe import Recipe
from h5feed.feed.slots import Slot
from h5feed.feed.substitute import copy_rows, none_whole, substitutes

__all__ = ["Epoch", "Work"]

_CHUNKS = 2  # per thread and batch: enough to share the work evenly, few enough to cost nothing


@dataclass(slots=True, kw_only=True)
class Epoch:
    """What the batches of one pass share."""

    recipe: Recipe
    ahead: Ahead
    pool: Pool
    ended: bool = False
    run: Callable[[], object] = lambda: None
    """A weak reference to the pass: nobody waits for batches of one that is no more."""

    @property
    def cancelled(self) -> bool:
        """Whether nobody will take another batch."""
        return self.ended or self.run() is None


class Work:
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
        self._slots = self._epoch.recipe.take_slots()
        count = len(self.indices)
        parts = _CHUNKS * self._epoch.pool.threads if self._slots else 1
        least = max((field.least for field in self._epoch.recipe.fields), default=1)
        size = max(-(-count // parts), least)
        return [partial(self._chunk, a, min(a + size, count)) for a in range(0, count, size)]

    def _chunk(self, begin: int, end: int) -> None:
        """Fill rows begin to end; the last one to finish delivers (a job)."""
        if not self._epoch.cancelled and self.error is None:
            try:
                for field, slots in zip(self._epoch.recipe.fields, self._slots, strict=True):
                    self._fill(field, slots, begin, end)
            except BaseException as ex:
                self.error = ex
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
            if self._epoch.recipe.on_error == "raise":
                raise error
            self._damage[k] = field, error

    def _finish(self) -> None:
        if self.error is None and not self._epoch.cancelled:
            try:
                self._substitute()
                self.batch, self.ticket = self._epoch.recipe.deliver(
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
