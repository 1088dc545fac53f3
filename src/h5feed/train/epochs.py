"""The training loader of each epoch: its order, and the size of its images."""

from collections.abc import Callable
from typing import Any

from h5feed.train.data import Loader

__all__ = ["EpochLoaders", "image_size"]

_GROWING = 0.75
"""Share of the epochs over which progressive resizing grows; the rest see full images."""


def image_size(start: int, full: int, epochs: int, epoch: int) -> int:
    """Side in pixels of an epoch's images under progressive resizing.

    Grows linearly from `start` to `full` over the first three quarters of `epochs`, in steps of
    32 px (16 below 128 px, 8 below 64): networks halve their images often. Small images
    first cost less and overfit less (Howard 2018, fast.ai's DAWNBench entry; Tan & Le 2021,
    arXiv:2104.00298). `start` 0 turns it off.
    """
    if not start or epoch == epochs - 1:
        return full
    grain = 32 if full >= 128 else 16 if full >= 64 else 8
    grown = start + (full - start) * epoch / max(1, round(_GROWING * epochs) - 1)
    return min(full, max(grain, round(grown / grain) * grain))


class EpochLoaders:
    """Hands out the loader for an epoch, a new one only where the images' size changes."""

    def __init__(self, make: Callable[[int], Loader], size: Callable[[int], int]) -> None:
        self._make, self._size_of = make, size
        self._size = size(0)
        self._loader = make(self._size)
        self._epoch = -1

    def __len__(self) -> int:
        return len(self._loader)

    def at(self, epoch: int) -> Loader:
        """Return the loader, at the beginning of `epoch` or where a loaded state left it."""
        if (size := self._size_of(epoch)) != self._size:
            self._loader, self._size = self._make(size), size
        elif epoch == self._epoch:
            return self._loader
        self._loader.set_epoch(epoch)
        self._epoch = epoch
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and where its loader stands."""
        return {"epoch": self._epoch, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there again."""
        self.at(state["epoch"]).load_state_dict(state["loader"])
