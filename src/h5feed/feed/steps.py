"""How the positions of an epoch are cut into the batches of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Steps", "Tail"]

Tail = Literal["pad", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The batches of one rank from position `start` of an epoch on; every rank has as many.

    A step takes the next `batch_size · world_size` positions, and each rank its own run of them. So
    what is left of an epoch is one number, which means the same at any batch and world size.
    """

    samples: int
    """Positions of the epoch."""
    batch_size: int
    """Samples of one rank in a step."""
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    """Leave out what does not fill a batch on every rank."""
    tail: Tail = "pad"
    """What evens out a short last step: ranks repeat samples, or some are left out."""
    start: int = 0
    """Positions already consumed by all ranks together."""

    @property
    def stride(self) -> int:
        """Positions that a full step takes."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        full, rest = divmod(max(self.samples - self.start, 0), self.stride)
        return full + (self._last_share(rest) > 0)

    def share(self, step: int) -> int:
        """Return how many samples each rank has in a step."""
        rest = self.samples - self.start - step * self.stride
        return self.batch_size if rest >= self.stride else self._last_share(rest)

    def first(self, step: int) -> int:
        """Return the position of this rank's first sample of a step."""
        return self.start + step * self.stride + self.rank * self.share(step)

    def positions(self, step: int) -> NDArray[np.int64]:
        """Return int64 (share,): this rank's positions, those past the end begun again from 0."""
        first = self.first(step)
        positions = np.arange(first, first + self.share(step))
        if positions[-1] >= self.samples:
            positions %= self.samples
        return positions

    def repeats(self, step: int) -> int:
        """Return how many of this rank's samples of a step are there only to fill it."""
        share = self.share(step)
        return min(max(self.first(step) + share - self.samples, 0), share)

    def consumed(self, steps: int) -> int:
        """Return the positions consumed by all ranks once `steps` steps are done."""
        return min(self.start + steps * self.stride, self.samples)

    def _last_share(self, rest: int) -> int:
        if self.drop_last:
            return 0
        if self.tail == "pad":
            return -(-rest // self.world_size)
        return rest // self.world_size
