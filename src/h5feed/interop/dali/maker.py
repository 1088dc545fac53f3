"""Makes the pipelines of a loader, and keeps the one that waits for the next pass."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from h5feed.augment import Op, Pipeline
from h5feed.errors import UsageError
from h5feed.feed.files import GO_ON, PackedFiles
from h5feed.feed.iterator import none_whole
from h5feed.feed.order import Order
from h5feed.feed.sampling import Steps
from h5feed.interop.dali._library import dali, fn
from h5feed.interop.dali.agenda import Agenda
from h5feed.interop.dali.carried import make_steps
from h5feed.interop.dali.feed import Course, Feed, OnDamage
from h5feed.interop.dali.graph import make_pipeline
from h5feed.interop.dali.line import Line
from h5feed.interop.dali.sources import Source, damaged_item, open_source

__all__ = ["Maker", "bound_pipeline"]


def bound_pipeline(
    pixels: PackedFiles, ops: Sequence[Op], antialias: bool | str, views: int
) -> Pipeline:
    """Return the ops as a pipeline that knows its output size; UsageError where there is none."""
    spec = pixels.specs["images"]
    pipeline = Pipeline(ops, antialias=antialias, views=views)  # type: ignore[arg-type]
    one_size = spec.fit != "keep" and spec.encoding != "original"
    pipeline.bind(
        (spec.height, spec.width) if one_size else None,
        encoding="yuv420" if spec.encoding == "yuv420" else "raw",
    )
    return pipeline


class Maker:
    """What all pipelines of one loader share. Arguments are DaliLoader's."""

    def __init__(
        self,
        pixels: PackedFiles,
        pipeline: Pipeline,
        antialias: bool | str,
        *,
        device: torch.device,
        batch_size: int,
        threads: int,
        prefetch: int,
        workers: int,
        lookahead: int,
    ) -> None:
        self.pixels = pixels
        self.pipeline = pipeline
        self.device = device
        self._steps = make_steps(pipeline.ops, antialias)  # type: ignore[arg-type]
        self._batch_size = batch_size
        self._threads = threads
        self._prefetch = prefetch
        self._workers = workers
        self._lookahead = lookahead
        self._unreadable: frozenset[int] = frozenset()
        self._idle: Line | None = None
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Refuse to go on in a process that was forked from the one that made the loader."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"DaliLoader was made in process {self._pid} and is used in {os.getpid()}, forked "
                "from it: neither DALI's threads nor CUDA survive a fork; make the loader in the "
                "process that uses it, or start that process by spawn"
            )

    def make(
        self, course: Course, on_damage: OnDamage, *, agenda: Agenda | None, with_index: bool
    ) -> tuple[Feed, Any]:
        """Return a new pipeline, not built yet, and what feeds it."""
        batch = range(min(self._batch_size, len(self.pixels)))
        batch_bytes = int(self.pixels.item_bytes(batch).sum())
        feed = Feed(
            self.pixels,
            self.pipeline,
            self._source(),
            self._steps,
            course,
            agenda=agenda,
            on_damage=on_damage,
            announce=-(-self._lookahead // max(1, batch_bytes)),
            keep=self._prefetch + 2,
            with_index=with_index,
        )
        made = make_pipeline(
            feed,
            self._batch_size,
            threads=self._threads,
            device_id=self.device.index,
            prefetch=self._prefetch,
            workers=self._workers,
        )
        return feed, made

    def begin(self, course: Course, on_damage: OnDamage, order: Order) -> Line:
        """Return a line that has begun the first pass of `course`: the one kept, or a new one."""
        line, self._idle = self._idle, None
        if line is None:
            agenda = Agenda()
            feed, made = self.make(course, on_damage, agenda=agenda, with_index=True)
            line = Line(feed, agenda, made, self.device)
        line.begin(course.first, order)
        return line

    def keep(self, line: Line | None) -> None:
        """Keep a line for the pass that follows; None: let go of it."""
        self._idle = line

    def note_unreadable(self, order: Order, steps: Steps, step: int) -> bool:
        """Find the items that DALI cannot decode, from `step` as far as batches are made ahead.

        They are damaged from now on. Returns whether there are any: DALI tells of a failure only
        by ending the pipeline, so each item is tried alone.
        """
        ahead = range(step, min(step + self._prefetch + 1, len(steps)))
        indices = np.unique(np.concatenate([order(steps.positions(k)) for k in ahead])).tolist()
        found = {index for index in indices if not self._decodes(index)} - self._unreadable
        self._unreadable |= found
        self._idle = None
        return bool(found)

    def check(self, indices: NDArray[np.int64], on_damage: OnDamage) -> None:
        """Raise DamagedItemError where a row holds no image: its index i is given as ~i."""
        marked = indices[indices < 0]
        if len(marked):
            then = none_whole(len(indices)) if on_damage == "skip" else GO_ON
            raise damaged_item(self.pixels, self._source(), ~int(marked[0]), then)

    def _source(self) -> Source:
        on_gpu = self.device.type == "cuda"
        return open_source(self.pixels, self.pipeline, on_gpu=on_gpu, unreadable=self._unreadable)

    def _decodes(self, index: int) -> bool:
        if not self.pixels.specs["images"].is_encoded:
            return True
        pipeline = dali.Pipeline(batch_size=1, num_threads=1, device_id=self.device.index)
        with pipeline:
            item = fn.external_source(lambda: [self.pixels.item("images", index)])
            device = "cpu" if self.device.type == "cpu" else "mixed"
            pipeline.set_outputs(fn.decoders.image(item, device=device))
        try:
            pipeline.run()
        except RuntimeError:
            return False
        return True
