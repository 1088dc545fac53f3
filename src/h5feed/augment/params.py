"""The parameters of a batch: plain arrays, a row per image, to be sliced, packed and sent."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from h5feed.augment.ops import Floats
from h5feed.augment.stages import Rows

__all__ = ["Params"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """The parameters of a batch, or of a part of one (`params[a:b]`)."""

    views: tuple[tuple[Rows, ...], ...]
    """views[v][s]: rows (B, columns) of stage s for view v."""
    mix: Floats | None
    """How the batch is mixed, float64 (6,), see mixing; None where it is not."""
    ragged: bool
    """Whether images differ in size between two stages, which only the CPU can follow."""

    def __len__(self) -> int:
        return len(self.views[0][0])

    def __getitem__(self, part: slice) -> "Params":
        return replace(self, views=tuple(tuple(rows[part] for rows in view) for view in self.views))

    def packed(self, view: int = 0) -> torch.Tensor:
        """Return a view's rows side by side, then the mix in every row: float32 (B, columns).

        All that a device needs, in one small transfer.
        """
        columns = list(self.views[view])
        if self.mix is not None:
            columns.append(np.broadcast_to(self.mix, (len(self), len(self.mix))))
        return torch.from_numpy(np.concatenate(columns, axis=1, dtype=np.float32))
