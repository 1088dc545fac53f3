"""Which images are to be packed, in which order, with which labels: columns, not objects.

Memory is what counts here: 1.28 million items stay under 100 bytes each.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """N images below a folder, as columns."""

    classes: tuple[str, ...]
    labels: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    """int64 (N,), −1 where there is none; or float32 (N, K) targets."""
    key_bytes: npt.NDArray[np.uint8]
    """The paths below the folder, '/' between folders, back to back (file-system bytes)."""
    key_offsets: npt.NDArray[np.int64]
    """(N+1,) where each key begins in `key_bytes`."""
    targets: tuple[str, ...] = ()
    """The names of float32 labels' K columns."""
    notes: tuple[str, ...] = ()
    """What a user should be told, such as images that belong to no class."""

    def __len__(self) -> int:
        return len(self.key_offsets) - 1

    def key(self, index: int) -> bytes:
        """Return an item's path below the folder, in file-system bytes."""
        return self.key_bytes[self.key_offsets[index] : self.key_offsets[index + 1]].tobytes()
