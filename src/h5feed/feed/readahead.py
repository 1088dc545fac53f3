"""The batches of a pass as they are needed, announced to the kernel before they are read."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from h5feed.feed.files import PackedFiles
from h5feed.feed.sampling import BatchPlan, Samples

__all__ = [
    "ReadAhead",
]

_AT_ONCE = 2048  # samples: numpy's cost per call is then a small part
_LOOKED_UP = 8  # items of those: each is a system call, and costs its thread the GIL
_UNDER_WAY = 4096  # items: reads enough for any disk, also where they are small
_STAY_AWAKE = 16  # times that many samples announced, after one of those was not in memory

Indices = NDArray[np.int64]


class ReadAhead:
    """The batches of one pass: decided several at once, announced to the kernel a little before.

    Announcing costs 4 µs an image even where everything is in memory, so a few items are looked
    up every time that batches are decided on, and announced while some of late were missing.

    Args:
        pixels: where the items lie.
        plan: which items make a batch.
        lookahead: bytes to announce ahead of the batch being planned; 0 announces nothing.
        fields: the fields that are read at all.

    """

    def __init__(
        self,
        files: PackedFiles,
        plan: BatchPlan,
        *,
        lookahead: int,
        fields: Sequence[str] = ("images",),
    ) -> None:
        self.steps = plan.steps
        self._files = files
        self._plan = plan
        self._fields = fields
        self._lock = threading.Lock()
        self._decided: dict[int, Samples] = {}
        self._next_decided = 0
        self._next_announced = 0
        reads = lookahead > 0 and len(fields) > 0 and len(self.steps) > 0
        self._depth = self._steps_in(lookahead) if reads else 0
        self._awake = 0

    def samples(self, step: int) -> Samples:
        """Return the samples of a step, once, after announcing those that follow it."""
        with self._lock:
            until = min(step + self._depth, len(self.steps) - 1)
            while self._next_decided <= until:
                self._decide()
            announced = 0
            while self._depth and self._next_announced <= until:
                announced += self._announce(self._decided[self._next_announced].indices)
                self._next_announced += 1
            return self._decided.pop(step)._replace(announced=announced)

    def _decide(self) -> None:
        """Decide on the next steps, as many as make some thousand samples."""
        first = self._next_decided
        count = 1 if self._plan.alone else max(1, _AT_ONCE // self.steps.batch_size)
        last = min(first + count, len(self.steps))
        made = self._plan.samples(first, last)
        self._decided.update(enumerate(made, first))
        self._next_decided = last
        if self._depth:
            self._awake -= 1
            if not self._in_memory(np.concatenate([samples.indices for samples in made])):
                self._awake = _STAY_AWAKE

    def _in_memory(self, indices: Indices) -> bool:
        some = indices[:: max(1, len(indices) // _LOOKED_UP)]
        return self._files.in_memory(some, self._fields[0])

    def _announce(self, indices: Indices) -> int:
        return self._files.announce(indices, self._fields) if self._awake > 0 else 0

    def _steps_in(self, lookahead: int) -> int:
        """Return how many steps make `lookahead` bytes, going by the first one, or enough items."""
        first = self._plan.order(self.steps.positions(0))
        by_bytes = -(-lookahead // max(1, int(self._files.item_bytes(first).sum())))
        return min(by_bytes, -(-_UNDER_WAY // len(first)))
