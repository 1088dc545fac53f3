"""on_error="skip": which whole samples of a batch stand in for damaged ones."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5feed.augment import Params

__all__ = ["GO_ON", "copy_rows", "none_whole", "substitutes"]

Rows = NDArray[np.int64]

GO_ON = ', and on_error="skip" goes on without them'
"""What to do about a damaged item, in the words that end its error."""


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
