"""on_error="skip": which whole samples of a batch stand in for damaged ones."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5feed.augment import Params

__all__ = ["copy_rows", "substitutes"]

Rows = NDArray[np.int64]


def substitutes(count: int, bad: Rows) -> Rows | None:
    """Return for each row of `bad` (sorted) the next whole one of `count`, going round.

    None where no row is whole.
    """
    whole = np.setdiff1d(np.arange(count), bad)
    return whole[np.searchsorted(whole, bad) % len(whole)] if len(whole) else None


def copy_rows(params: Params | None, bad: Rows, instead: Rows) -> None:
    """Give rows `bad` the parameters of rows `instead`, in place."""
    views: tuple[tuple[NDArray[Any], ...], ...] = () if params is None else params.views
    for view in views:
        for rows in view:
            rows[bad] = rows[instead]
