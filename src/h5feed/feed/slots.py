"""Batch memory that is used again, and never while somebody still holds it.

A fresh 38 MB batch costs as much in page faults as the crops that fill it (6,400 images/s against
13,300 into memory used before), so batches are written into slots that come back.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Ring", "Slot"]


class Slot:
    """The memory of one batch of one field: `rows` (batch, ...) is written, then lent."""

    __slots__ = ("__weakref__", "_home", "_keep", "rows")

    def __init__(self, rows: NDArray[Any], home: deque[Slot], keep: int) -> None:
        self.rows = rows
        self._home = home
        self._keep = keep

    def lend(self, count: int) -> torch.Tensor:
        """Return the first `count` rows as a tensor; the slot goes home when nobody holds them.

        What is watched is the temporary array that the tensor's storage keeps alive: it lives as
        long as any alias, also one by detach(), numpy() or a slice, while a weak reference to the
        tensor itself would fire as soon as only such aliases are left.
        """
        array = self.rows[:count]
        weakref.finalize(array, self.go_home).atexit = False
        return torch.from_numpy(array)

    def go_home(self) -> None:
        """Make the slot free; or let its memory go, where enough others are free."""
        # Called in any thread, perhaps in the middle of a garbage collection: no lock, and
        # deque.append is atomic.
        if len(self._home) < self._keep:
            self._home.append(self)


class Ring:
    """Slots of one shape: as many as are in use at once, allocated when first needed.

    A slot's first use pays its page faults, in the thread that writes it.

    Args:
        shape: of a batch, batch first.
        dtype: of its elements.
        keep: how many free slots stay; what the caller held beyond that is freed on its return.
        pinned: page-locked memory, for copies to a CUDA device.

    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], *, keep: int, pinned: bool = False
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self.keep = keep
        self._pinned = pinned
        self._free: deque[Slot] = deque()
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()

    def __len__(self) -> int:
        """Return how many slots there are, free or not."""
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots together."""
        return len(self) * int(np.prod(self._shape)) * self._dtype.itemsize

    def take(self) -> Slot:
        """Return a slot that nobody holds, a new one if need be."""
        try:
            return self._free.pop()
        except IndexError:
            slot = Slot(self._allocate(), self._free, self.keep)
            self._slots.add(slot)
            return slot

    def _allocate(self) -> NDArray[Any]:
        if not self._pinned:
            return np.empty(self._shape, self._dtype)
        size = int(np.prod(self._shape)) * self._dtype.itemsize
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        pinned: NDArray[Any] = memory.view(self._dtype).reshape(self._shape)
        return pinned
