"""Transforms over views of the file, and what keeps the file's pixels what they were.

A view's memory is a private page of the mapping: a transform that writes into its image would
change what this process reads there in every later epoch. So each process runs a transform on
copies first and looks at whether it writes. One that does gets copies for good; one that did
not gets views, and torch's version counter tells if it writes after all (one that flips a coin
may start late). Then the result, which may be the view itself or any part of it, keeps the
memory's contents, and the file's bytes are put back under it.

Running such a transform a second time on a copy would be simpler, and wrong: random numbers
drawn twice make the first sample under a seed differ from the same one later.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Guard"]

_TRIALS = 8  # a copy of 256² pixels costs 20 µs, a transform that reads them ten times that


class Guard:
    """Calls `transform(view)` such that the pixels under the view stay the file's."""

    def __init__(self, transform: Callable[[Any], Any], restore: Callable[[int], None]) -> None:
        self.transform = transform
        self._restore = restore
        self._trials = _TRIALS
        self._writes = False

    def __call__(self, view: Tensor, index: int) -> Any:
        """Return what `transform` makes of item `index`, of which `view` is a uint8 view."""
        if self._writes or self._trials > 0:
            return self._on_copy(view)
        version = view._version
        try:
            return self.transform(view)
        finally:
            if view._version != version:
                self._writes = True
                # Moves the storage itself, so every tensor the transform made of it follows.
                view.share_memory_()  # type: ignore[no-untyped-call]
                self._restore(index)

    def _on_copy(self, view: Tensor) -> Any:
        copy = view.clone()
        result = self.transform(copy)
        if self._trials > 0:
            self._trials -= 1
            self._writes = self._writes or not torch.equal(copy, view)
        return result
