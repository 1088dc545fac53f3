"""Which samples make each batch of a pass, and what happens to them: a function of the step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5feed.augment import Params, Pipeline
from h5feed.feed.order import Order
from h5feed.feed.random import Draws
from h5feed.feed.source import Pixels
from h5feed.feed.steps import Steps

__all__ = ["Drawing", "Samples", "Schedule"]

Indices = NDArray[np.int64]


class Samples(NamedTuple):
    """The samples of a batch."""

    indices: Indices
    """(B,) which items."""
    params: Params | None
    """What happens to them; None where nothing does."""
    announced: int = 0
    """Bytes announced on the occasion, of the batches that follow."""


class Drawing:
    """Draws the parameters of any samples of a data set, from what is known of their sizes."""

    def __init__(self, pixels: Pixels, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._stored = pixels.stored_shapes
        cropped = pixels.specs["images"].fit == "crop"  # what was cut off is gone
        self._source = self._stored if cropped else pixels.source_shapes
        self._boxes = pixels.boxes

    def __call__(self, draws: Draws, indices: Indices) -> Params:
        """Return the parameters of samples `indices`, one row of `draws` each."""
        stored, source = (_rows(a, indices) for a in (self._stored, self._source))
        boxes = None if self._boxes is None else _rows(self._boxes, indices)
        return self.pipeline.draw(draws, stored, source, boxes)


def _rows(array: NDArray[Any], indices: Indices) -> NDArray[Any]:
    """Return rows `indices` of an array (N, k), whatever N is for the same cost."""
    if array.strides[0] == 0:  # one row for all, and np.take would lay out all N of them first
        return np.broadcast_to(array[:1], (len(indices), array.shape[1]))
    # indexing by rows takes eight times as long, 16 µs for 256 samples of ten million
    taken: NDArray[Any] = np.take(array, indices, axis=0)
    return taken


class Schedule:
    """The batches of one pass.

    Args:
        order: which item stands at which position.
        steps: which positions make a batch.
        drawing: makes parameters; None where images are delivered as they are.
        seed: of the random numbers.
        epoch: of the random numbers.

    """

    def __init__(
        self, order: Order, steps: Steps, drawing: Drawing | None, *, seed: int, epoch: int
    ) -> None:
        self.order = order
        self.steps = steps
        self._drawing = drawing
        self._key = seed, epoch
        self.alone = drawing is not None and drawing.pipeline.uses_batch
        """Parameters must be drawn for each batch alone, because its images are mixed."""

    def samples(self, first: int, last: int) -> list[Samples]:
        """Return what steps `first` to `last` - 1 are made of; where `alone`, one step at a time.

        Several together cost little more than one.
        """
        parts = [self.steps.positions(step) for step in range(first, last)]
        positions = np.concatenate(parts)
        indices = self.order(positions)
        params = None
        if self._drawing is not None:
            keys = self.order.draw_keys(positions, indices)
            params = self._drawing(Draws(*self._key, keys, batch=self.steps.first(first)), indices)
        made, begin = [], 0
        for part in parts:
            rows = slice(begin, begin + len(part))
            mine = params if params is None or self.alone else params[rows]
            made.append(Samples(indices[rows], mine))
            begin += len(part)
        return made
