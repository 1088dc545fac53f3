"""What DALI's external_source calls for each batch: a function of epoch and iteration, no state."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from h5feed.augment import Params, Pipeline
from h5feed.feed.files import PackedFiles
from h5feed.feed.iterator import copy_rows, substitutes
from h5feed.feed.order import Order
from h5feed.feed.sampling import BatchPlan, Drawing, SampleOrder, Steps
from h5feed.interop.dali.agenda import Agenda, Pass
from h5feed.interop.dali.carried import Step
from h5feed.interop.dali.parts import Port
from h5feed.interop.dali.sources import Source, damaged_item

__all__ = ["Course", "Feed", "OnDamage"]

Indices = NDArray[np.int64]

OnDamage = Literal["raise", "skip", "mark"]
"""What a damaged item does: raise at once; let another stand in; or come as a black image whose
index i is given as ~i, so that whoever takes the batch can tell."""

_LOOKED_UP = 4  # items of a batch, to tell whether it is in memory: a system call each


@dataclass(frozen=True, slots=True)
class Course:
    """Which batches come."""

    arrangement: SampleOrder
    steps: Steps
    """Of a whole epoch."""
    first: Pass
    """What the first pass is; whole epochs follow, unless an agenda says otherwise."""

    def to_come(self, number: int) -> Pass:
        """Return what pass `number` is without an agenda."""
        seed, epoch, start = self.first
        return Pass(seed, epoch + number, 0 if number else start)


class Feed:
    """The `source` of a pipeline: all that it needs for one batch, a list with one entry a port.

    Pickles in a few kB, for DALI's worker processes. Raises StopIteration past the last batch.

    Args:
        pixels: the data.
        pipeline: draws parameters.
        source: takes the images.
        steps: take the parameters of the stages.
        course: which samples.
        agenda: says which passes; None leaves that to the course.
        on_damage: what a damaged item does.
        announce: batches that are announced to the kernel ahead of the one asked for.
        keep: batches whose arrays are kept alive: DALI uses them in place until it has run.
        with_index: give the samples' indices as well.

    """

    def __init__(
        self,
        pixels: PackedFiles,
        pipeline: Pipeline,
        source: Source,
        steps: tuple[Step, ...],
        course: Course,
        *,
        agenda: Agenda | None,
        on_damage: OnDamage,
        announce: int,
        keep: int,
        with_index: bool,
    ) -> None:
        self.pixels = pixels
        self.pipeline = pipeline
        self.source = source
        self.steps = steps
        self._course = course
        self._agenda = agenda
        self.mask_names = [spec.name for spec in pixels.specs.values() if spec.channels == 1]
        self._on_damage: OnDamage = on_damage
        self._announce_ahead = announce
        self._keep = keep
        self._with_index = with_index
        self._forget()

    def _forget(self) -> None:
        self._schedules: dict[int, BatchPlan] = {}
        self._kept: deque[list[Any]] = deque(maxlen=self._keep)
        self._drawing: Drawing | None = None

    def __getstate__(self) -> dict[str, Any]:
        gone = {"_schedules": None, "_kept": None, "_drawing": None}
        return self.__dict__ | gone

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def ports(self) -> list[Port]:
        """The pipeline's inputs, in order: source, steps of each view, masks, labels, indices."""
        views = self.pipeline.views
        steps = [port for step in self.steps for port in step.part.ports]
        masks = [Port("UINT8", 2, "HW")] * (len(self.mask_names) * views)
        label = Port("INT64" if self.pixels.labels.ndim == 1 else "FLOAT", 1)
        index = [Port("INT64", 0)] if self._with_index else []
        return [*self.source.ports, *steps * views, *masks, label, *index]

    def begin(self, number: int, which: Pass, order: Order) -> None:
        """Use `order`, computed already, for a pass: a sampler gives another when asked again."""
        if self._drawing is None:
            self._drawing = Drawing(self.pixels, self.pipeline)
        steps = replace(self._course.steps, start=which.start)
        schedule = BatchPlan(order, steps, self._drawing, seed=which.seed, epoch=which.epoch)
        self._schedules = {number: schedule}

    def __call__(self, info: Any) -> list[Any]:
        """Return the batch of `info`, nvidia.dali.types.BatchInfo."""
        schedule = self._schedule(info.epoch_idx)
        if schedule is None or info.iteration >= len(schedule.steps):
            raise StopIteration
        self._announce(schedule, info.iteration)
        samples = schedule.samples(info.iteration, info.iteration + 1)[0]
        assert samples.params is not None
        arrays = self._arrays(samples.indices, samples.params)
        self._kept.append(arrays)
        return arrays

    def _schedule(self, number: int) -> BatchPlan | None:
        """Return that of a pass; None where the pass has been left."""
        course, agenda = self._course, self._agenda
        which = course.to_come(number) if agenda is None else agenda.read(number)
        if which is None:
            return None
        if number not in self._schedules:
            self.begin(number, which, course.arrangement.order(which.seed, which.epoch))
        return self._schedules[number]

    def _announce(self, schedule: BatchPlan, step: int) -> None:
        ahead = self._announce_ahead
        if not ahead:
            return
        for k in range(step + ahead if step else 0, min(step + ahead + 1, len(schedule.steps))):
            indices = schedule.order(schedule.steps.positions(k))
            if not self.pixels.in_memory(indices[:: max(1, len(indices) // _LOOKED_UP)]):
                self.pixels.announce(indices)

    def _arrays(self, indices: Indices, params: Params) -> list[Any]:
        bad = self._damaged(indices)
        marks = indices
        if len(bad):
            indices, marks = self._without(indices, params, bad)
        blank = set(np.flatnonzero(marks < 0).tolist())
        made = self.source.feed(indices, params, blank)
        for view in params.views:
            for step in self.steps:
                made += step.part.feed(view[step.stage])
        labels = self.pixels.labels[indices]
        made += self._masks(indices, params)
        made.append(labels if labels.ndim == 2 else labels[:, None])
        return [*made, marks] if self._with_index else made

    def _damaged(self, indices: Indices) -> Indices:
        rows = [k for k, index in enumerate(indices.tolist()) if self.source.damage(index)]
        return np.array(rows, np.int64)

    def _without(self, indices: Indices, params: Params, bad: Indices) -> tuple[Indices, Indices]:
        """Return indices to feed and those to report, and change `params`, for damaged rows."""
        if self._on_damage == "raise":
            raise damaged_item(self.pixels, self.source, int(indices[bad[0]]))
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
        height, width, _ = self.pipeline.out_shape
        made = []
        for name in self.mask_names:
            masks = [self.pixels.item(name, index) for index in indices.tolist()]
            for view in range(self.pipeline.views):
                out = np.empty((len(masks), height, width, 1), np.uint8)
                self.pipeline.run_mask(params, 0, masks, out, view=view)
                made.append(out[..., 0])
        return made
