"""What DALI's external_source calls for each batch: a function of epoch and iteration, no state."""

from __future__ import annotations

import json
import os
import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5feed.augment import Params, Pipeline
from h5feed.errors import UsageError
from h5feed.feed.files import PackedFiles
from h5feed.feed.iterator import copy_rows, substitutes
from h5feed.feed.order import Order
from h5feed.feed.sampling import BatchPlan, Drawing, SampleOrder, Steps
from h5feed.interop.dali.graph import Graph

__all__ = ["EpochStart", "Epochs", "Feed", "OnDamage", "StartList"]

Indices = NDArray[np.int64]

OnDamage = Literal["raise", "skip", "mark"]
"""What a damaged item does: raise at once; let another stand in; or come as a black image whose
index i is given as ~i, so that the iterator can tell."""

_LOOKED_UP = 4  # items of a batch, to tell whether it is in memory: a system call each


class EpochStart(NamedTuple):
    """Where a pass begins."""

    seed: int
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class Epochs:
    """Which batches come."""

    order: SampleOrder
    steps: Steps
    """Of a whole epoch."""
    first: EpochStart
    """Where the first pass begins; whole epochs follow, unless a StartList says otherwise."""

    def start(self, number: int) -> EpochStart:
        """Return where pass `number` begins without a list."""
        seed, epoch, position = self.first
        return EpochStart(seed, epoch + number, 0 if number else position)


class StartList:
    """Where each pass of a pipeline begins, written before DALI asks for its first batch.

    DALI tells a feed the numbers of pass and batch, and no more; nor can it leave a pass before
    the feed ends it. So this is a file in memory, which worker processes read through /proc: gone
    with this process, however that ends.
    """

    _ENTRY = 256  # bytes
    _ENDED = b"!"

    def __init__(self) -> None:
        self._fd = os.memfd_create("h5feed-passes")
        self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        weakref.finalize(self, os.close, self._fd)

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)

    def write(self, number: int, start: EpochStart) -> None:
        """Say where pass `number` begins."""
        entry = json.dumps(start).encode()
        if len(entry) > self._ENTRY - 1:
            raise UsageError(f"seed={start.seed} has more digits than DaliLoader can hand on")
        os.pwrite(self._fd, entry.rjust(self._ENTRY), number * self._ENTRY)

    def end(self, number: int) -> None:
        """End pass `number` where it is."""
        os.pwrite(self._fd, self._ENDED, number * self._ENTRY)

    def read(self, number: int) -> EpochStart | None:
        """Return where pass `number` begins; None where it has been ended."""
        entry = os.pread(self._fd, self._ENTRY, number * self._ENTRY)
        return None if entry.startswith(self._ENDED) else EpochStart(*json.loads(entry))


class Feed:
    """The `source` of a pipeline: all that it needs for one batch, a list with one entry a port.

    Pickles in a few kB, for DALI's worker processes. Raises StopIteration past the last batch.

    Args:
        files: the data.
        pipeline: draws parameters.
        graph: the pipeline that it feeds.
        epochs: which samples.
        starts: says where passes begin; None leaves that to `epochs`.
        on_damage: what a damaged item does.
        announce: batches that are announced to the kernel ahead of the one asked for.
        keep: batches whose arrays are kept alive: DALI uses them in place until it has run.

    """

    def __init__(
        self,
        files: PackedFiles,
        pipeline: Pipeline,
        graph: Graph,
        epochs: Epochs,
        *,
        starts: StartList | None,
        on_damage: OnDamage,
        announce: int,
        keep: int,
    ) -> None:
        self._files = files
        self._pipeline = pipeline
        self._graph = graph
        self._epochs = epochs
        self._starts = starts
        self._on_damage: OnDamage = on_damage
        self._announce_ahead = announce
        self._keep = keep
        self._forget()

    def _forget(self) -> None:
        self._plans: dict[int, BatchPlan] = {}
        self._kept: deque[list[Any]] = deque(maxlen=self._keep)
        self._drawing: Drawing | None = None

    def __getstate__(self) -> dict[str, Any]:
        gone = {"_plans": None, "_kept": None, "_drawing": None}
        return self.__dict__ | gone

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def begin(self, number: int, start: EpochStart, order: Order) -> None:
        """Use `order`, computed already, for a pass: a sampler gives another when asked again."""
        if self._drawing is None:
            self._drawing = Drawing(self._files, self._pipeline)
        steps = replace(self._epochs.steps, start=start.position)
        plan = BatchPlan(order, steps, self._drawing, seed=start.seed, epoch=start.epoch)
        self._plans = {number: plan}

    def __call__(self, info: Any) -> list[Any]:
        """Return the batch of `info`, nvidia.dali.types.BatchInfo."""
        plan = self._plan(info.epoch_idx)
        if plan is None or info.iteration >= len(plan.steps):
            raise StopIteration
        self._announce(plan, info.iteration)
        samples = plan.samples(info.iteration, info.iteration + 1)[0]
        assert samples.params is not None
        arrays = self._arrays(samples.indices, samples.params)
        self._kept.append(arrays)
        return arrays

    def _plan(self, number: int) -> BatchPlan | None:
        """Return that of a pass; None where the pass has been ended."""
        epochs, starts = self._epochs, self._starts
        start = epochs.start(number) if starts is None else starts.read(number)
        if start is None:
            return None
        if number not in self._plans:
            self.begin(number, start, epochs.order.order(start.seed, start.epoch))
        return self._plans[number]

    def _announce(self, plan: BatchPlan, step: int) -> None:
        ahead = self._announce_ahead
        if not ahead:
            return
        for k in range(step + ahead if step else 0, min(step + ahead + 1, len(plan.steps))):
            indices = plan.order(plan.steps.positions(k))
            if not self._files.in_memory(indices[:: max(1, len(indices) // _LOOKED_UP)]):
                self._files.announce(indices)

    def _arrays(self, indices: Indices, params: Params) -> list[Any]:
        marks = indices
        bad = self._damaged(indices)
        if len(bad):
            indices, marks = self._without(indices, params, bad)
        blank = set(np.flatnonzero(marks < 0).tolist())
        made = self._graph.feed(indices, params, blank)
        made += self._masks(indices, params)
        labels = self._files.rows("labels", indices)
        made.append(labels if labels.ndim == 2 else labels[:, None])
        return [*made, marks] if self._graph.with_index else made

    def _damaged(self, indices: Indices) -> Indices:
        damage = self._graph.images.damage
        return np.array([k for k, index in enumerate(indices.tolist()) if damage(index)], np.int64)

    def _without(self, indices: Indices, params: Params, bad: Indices) -> tuple[Indices, Indices]:
        """Return indices to feed and those to report, and change `params`, for damaged rows."""
        if self._on_damage == "raise":
            raise self._graph.images.damaged_item(int(indices[bad[0]]))
        instead = substitutes(len(indices), bad) if self._on_damage == "skip" else None
        marks = indices.copy()
        if instead is None:
            marks[bad] = ~marks[bad]
            return indices, marks
        marks[bad] = marks[instead]
        copy_rows(params, bad, instead)
        return marks, marks

    def _masks(self, indices: Indices, params: Params) -> list[Any]:
        """Return (B, H, W) per view of each mask field.

        Cropped here: nearest is cheap, and DALI's rule for it is not cv2's.
        """
        height, width, _ = self._pipeline.out_shape
        made = []
        for name in self._graph.mask_names:
            masks = [self._files.item(name, index) for index in indices.tolist()]
            for view in range(self._pipeline.views):
                out = np.empty((len(masks), height, width, 1), np.uint8)
                self._pipeline.run_mask(params, 0, masks, out, view=view)
                made.append(out[..., 0])
        return made
