"""One pass over an epoch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from h5feed.feed.iterator import Counts, Cursor
from h5feed.feed.order import Order
from h5feed.interop.dali.delivery import Delivery
from h5feed.interop.dali.feed import Course, OnDamage
from h5feed.interop.dali.line import Line
from h5feed.interop.dali.maker import Maker

__all__ = ["Run"]


class Run(Iterator[Any]):
    """The iterator over one pass. Letting it go ends it; its line goes on to the next.

    Several threads may share it: each batch goes to one of them.
    """

    def __init__(
        self,
        maker: Maker,
        delivery: Delivery,
        course: Course,
        order: Order,
        cursor: Cursor,
        counts: Counts,
        on_damage: OnDamage,
    ) -> None:
        self._maker = maker
        self._delivery = delivery
        self._course = course
        self._steps = replace(course.steps, start=course.first.start)
        self._order = order
        self._cursor = cursor
        self._counts = counts
        self._on_damage: OnDamage = on_damage
        self._step = 0
        self._over = False
        self._lock = threading.Lock()
        self._line: Line | None = maker.begin(course, on_damage, order)

    def __next__(self) -> Any:
        self._maker.check_process()
        with self._lock:
            return self._next()

    def _next(self) -> Any:
        if self._over or self._step == len(self._steps):
            self._complete()
            raise StopIteration
        try:
            began = perf_counter()
            outputs = self._outputs()
            self._counts.wait_s += perf_counter() - began
            return self._hand_over(outputs)
        except Exception:
            self._over, self._line = True, None
            raise
        except BaseException:  # Ctrl-C may have lost a batch of this line: another begins with it
            self._line = None
            raise

    def _outputs(self) -> list[torch.Tensor]:
        """Return the next outputs of the line, or of a new one that knows what DALI refuses."""
        while True:
            try:
                if self._line is None:
                    self._line = self._maker.begin(self._left(), self._on_damage, self._order)
                return self._line.receive()
            except RuntimeError:
                self._line = None
                if not self._maker.note_unreadable(self._order, self._steps, self._step):
                    raise

    def _left(self) -> Course:
        """Return what is left of the pass."""
        start = self._steps.consumed(self._step)
        return replace(self._course, first=self._course.first._replace(start=start))

    def _hand_over(self, outputs: list[torch.Tensor]) -> Any:
        steps, indices = self._steps, outputs[-1].numpy()
        self._maker.check(indices, self._on_damage)
        batch = self._delivery.batch(outputs)
        expected = self._order(steps.positions(self._step))
        self._counts.add(
            len(indices),
            skipped=int((indices != expected).sum()),
            repeated=steps.repeats(self._step),
        )
        self._step += 1
        self._cursor.advance(steps.consumed(self._step))
        return batch

    def _complete(self) -> None:
        if self._over:
            return
        self._over = True
        self._cursor.complete()
        if self._line is not None:
            self._line.complete()
            self._return_line()

    def __del__(self) -> None:
        if getattr(self, "_line", None) is not None:
            self._return_line()

    def _return_line(self) -> None:
        self._maker.keep(self._line)
        self._line = None
