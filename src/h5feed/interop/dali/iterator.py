"""One pass over an epoch, and the pipelines that passes go through, one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from h5feed.augment import Pipeline
from h5feed.errors import UsageError
from h5feed.feed.batch import transform_targets
from h5feed.feed.files import GO_ON, PackedFiles
from h5feed.feed.iterator import Counts, Cursor, none_whole
from h5feed.feed.order import Order
from h5feed.feed.sampling import Steps
from h5feed.interop.dali.feed import Epochs, EpochStart, Feed, OnDamage, StartList
from h5feed.interop.dali.graph import ImageInput, image_input, make_graph, make_pipeline
from h5feed.interop.dali.parts import dali, fn

__all__ = ["DaliEpochIterator", "OutputConverter", "PipelineFactory", "RunningPipeline"]

_ABANDONED: list[Any] = []
"""Pipelines of the process that this one was forked from: to destroy one here would wait for ever
for its threads, which a fork leaves behind."""


class DaliEpochIterator(Iterator[Any]):
    """The iterator over one pass. Letting it go ends it; its pipeline goes on to the next.

    Several threads may share it: each batch goes to one of them.
    """

    def __init__(
        self,
        factory: PipelineFactory,
        converter: OutputConverter,
        epochs: Epochs,
        order: Order,
        cursor: Cursor,
        counts: Counts,
        on_damage: OnDamage,
    ) -> None:
        self._factory = factory
        self._converter = converter
        self._epochs = epochs
        self._steps = replace(epochs.steps, start=epochs.first.position)
        self._order = order
        self._cursor = cursor
        self._counts = counts
        self._on_damage: OnDamage = on_damage
        self._step = 0
        self._over = False
        self._lock = threading.Lock()
        self._running: RunningPipeline | None = factory.begin(epochs, on_damage, order)

    def __next__(self) -> Any:
        self._factory.check_process()
        with self._lock:
            return self._next()

    def _next(self) -> Any:
        if self._over or self._step == len(self._steps):
            self._complete()
            raise StopIteration
        try:
            began = perf_counter()
            outputs = self._outputs()
            self._counts.wait_s += perf_counter() - began
            return self._hand_over(outputs)
        except Exception:
            self._over, self._running = True, None
            raise
        except BaseException:  # Ctrl-C may have lost a batch of this pipeline: another one makes it
            self._running = None
            raise

    def _outputs(self) -> list[torch.Tensor]:
        """Return the next outputs, of a new pipeline where DALI has refused an item."""
        while True:
            try:
                if self._running is None:
                    self._running = self._factory.begin(self._left(), self._on_damage, self._order)
                return self._running.receive()
            except RuntimeError:
                self._running = None
                if not self._factory.note_unreadable(self._order, self._steps, self._step):
                    raise

    def _left(self) -> Epochs:
        """Return what is left of the pass."""
        position = self._steps.consumed(self._step)
        return replace(self._epochs, first=self._epochs.first._replace(position=position))

    def _hand_over(self, outputs: list[torch.Tensor]) -> Any:
        steps, indices = self._steps, outputs[-1].numpy()
        self._factory.check(indices, self._on_damage)
        batch = self._converter.batch(outputs)
        expected = self._order(steps.positions(self._step))
        self._counts.add(
            len(indices),
            skipped=int((indices != expected).sum()),
            repeated=steps.repeats(self._step),
        )
        self._step += 1
        self._cursor.advance(steps.consumed(self._step))
        return batch

    def _complete(self) -> None:
        if self._over:
            return
        self._over = True
        self._cursor.complete()
        if self._running is not None:
            self._running.complete()
            self._return_pipeline()

    def __del__(self) -> None:
        if getattr(self, "_running", None) is not None:
            self._return_pipeline()

    def _return_pipeline(self) -> None:
        self._factory.keep(self._running)
        self._running = None


class OutputConverter:
    """Makes what H5Loader would deliver of a pipeline's outputs. Arguments are DaliLoader's."""

    def __init__(
        self,
        files: PackedFiles,
        pipeline: Pipeline,
        *,
        device: torch.device,
        target_transform: Callable[[Any], Any] | None,
        target_dtype: torch.dtype | None,
        with_index: bool,
    ) -> None:
        self._files = files
        self._views = pipeline.views
        self._dtype = pipeline.out_dtype
        self._masks = [spec.name for spec in files.specs.values() if spec.channels == 1]
        self._device = device
        self._target_transform = target_transform
        self._target_dtype = target_dtype
        self._with_index = with_index

    def batch(self, outputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """Return (images, targets), and indices if wanted."""
        views, indices = self._views, outputs[-1]
        images = [output.permute(0, 3, 1, 2).to(self._dtype) for output in outputs[:views]]
        masks = [_one_or_all(outputs[k : k + views]) for k in range(views, len(outputs) - 2, views)]
        target = self._target(masks, outputs[-2], indices)
        batch = (_one_or_all(images), target)
        return (*batch, indices.to(self._device)) if self._with_index else batch

    def _target(self, masks: list[Any], labels: torch.Tensor, indices: torch.Tensor) -> Any:
        def name(k: int) -> str:
            return self._files.place("images", int(indices[k]))

        transform, dtype = self._target_transform, self._target_dtype
        if len(masks) > 1:
            made = [transform_targets(mask, None, name, dtype) for mask in masks]
            return dict(zip(self._masks, made, strict=True))
        if masks:
            return transform_targets(masks[0], transform, name, dtype)
        if transform is None:
            labels = labels[:, 0] if labels.dtype == torch.int64 else labels
            return transform_targets(labels, None, name, dtype)
        labels = torch.from_numpy(self._files.rows("labels", indices.numpy()))
        made = transform_targets(labels, transform, name, dtype)
        return made.to(self._device) if isinstance(made, torch.Tensor) else made


def _one_or_all(views: list[torch.Tensor]) -> Any:
    return views[0] if len(views) == 1 else tuple(views)


class RunningPipeline:
    """A built pipeline, its feed, and the list that both go by. It serves one pass at a time."""

    def __init__(self, feed: Feed, starts: StartList, pipeline: Any, device: torch.device) -> None:
        self._feed = feed
        self._starts = starts
        self._pipeline = pipeline
        self._device = device
        self._number = -1
        """Of the present pass, as DALI counts them."""
        self._under_way = False
        self._pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            _ABANDONED.append(self._pipeline)

    def begin(self, start: EpochStart, order: Order) -> None:
        """Begin a pass, in this order: the first batches are in the making."""
        if self._under_way:
            self._leave()
        self._number += 1
        self._starts.write(self._number, start)
        self._feed.begin(self._number, start, order)
        self._pipeline.reset()
        self._under_way = True
        self._pipeline.schedule_run()

    def receive(self) -> list[torch.Tensor]:
        """Return the outputs of the next batch, in DALI's own memory, and order another one.

        That memory is free again when nobody holds the tensors. Raises RuntimeError where DALI
        could not make it; the pipeline is of no use then.
        """
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
        shared = self._pipeline.share_outputs(cuda_stream=stream)
        tensors = [from_dlpack(batch.as_tensor()) for batch in shared]
        self._pipeline.release_outputs()
        self._pipeline.schedule_run()
        return tensors

    def complete(self) -> None:
        """Note that the pass has given all its batches."""
        self._under_way = False

    def _leave(self) -> None:
        """Take what is in the making out of the pipeline: only an empty one can be reset."""
        self._starts.end(self._number)
        while True:
            try:
                self._pipeline.share_outputs()
            except StopIteration:
                return
            self._pipeline.release_outputs()
            self._pipeline.schedule_run()


class PipelineFactory:
    """Makes the pipelines of a loader, and keeps the one that waits for the next pass.

    Arguments are DaliLoader's. Raises UsageError that names an op that DaliLoader does not support.
    """

    def __init__(
        self,
        files: PackedFiles,
        pipeline: Pipeline,
        *,
        device: torch.device,
        batch_size: int,
        threads: int,
        prefetch: int,
        workers: int,
        lookahead: int,
    ) -> None:
        self._files = files
        self._pipeline = pipeline
        self.device = device
        self._batch_size = batch_size
        self._threads = threads
        self._prefetch = prefetch
        self._workers = workers
        self._lookahead = lookahead
        self._unreadable: frozenset[int] = frozenset()
        self._idle: RunningPipeline | None = None
        self._pid = os.getpid()
        make_graph(files, pipeline, self._input(), with_index=True)  # refuses ops at once

    def check_process(self) -> None:
        """Refuse to go on in a process that was forked from the one that made the loader."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"DaliLoader was made in process {self._pid} and is used in {os.getpid()}, forked "
                "from it: neither DALI's threads nor CUDA survive a fork; make the loader in the "
                "process that uses it, or start that process by spawn"
            )

    def make(
        self, epochs: Epochs, on_damage: OnDamage, *, starts: StartList | None, with_index: bool
    ) -> tuple[Feed, Any]:
        """Return a new pipeline, not built yet, and what feeds it."""
        batch = range(min(self._batch_size, len(self._files)))
        batch_bytes = int(self._files.item_bytes(batch).sum())
        graph = make_graph(self._files, self._pipeline, self._input(), with_index=with_index)
        feed = Feed(
            self._files,
            self._pipeline,
            graph,
            epochs,
            starts=starts,
            on_damage=on_damage,
            announce=-(-self._lookahead // max(1, batch_bytes)),
            keep=self._prefetch + 2,
        )
        made = make_pipeline(
            graph,
            feed,
            self._batch_size,
            threads=self._threads,
            device_id=self.device.index,
            prefetch=self._prefetch,
            workers=self._workers,
        )
        return feed, made

    def begin(self, epochs: Epochs, on_damage: OnDamage, order: Order) -> RunningPipeline:
        """Return a pipeline that has begun the first pass of `epochs`: the one kept, or another."""
        running, self._idle = self._idle, None
        if running is None:
            starts = StartList()
            feed, made = self.make(epochs, on_damage, starts=starts, with_index=True)
            running = RunningPipeline(feed, starts, made, self.device)
        running.begin(epochs.first, order)
        return running

    def keep(self, running: RunningPipeline | None) -> None:
        """Keep a pipeline for the next pass; None: drop the one kept."""
        self._idle = running

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
            raise self._input().damaged_item(~int(marked[0]), then)

    def _input(self) -> ImageInput:
        on_gpu = self.device.type == "cuda"
        return image_input(self._files, self._pipeline, on_gpu=on_gpu, unreadable=self._unreadable)

    def _decodes(self, index: int) -> bool:
        if not self._files.specs["images"].is_encoded:
            return True
        pipeline = dali.Pipeline(batch_size=1, num_threads=1, device_id=self.device.index)
        with pipeline:
            item = fn.external_source(lambda: [self._files.item("images", index)])
            device = "cpu" if self.device.type == "cpu" else "mixed"
            pipeline.set_outputs(fn.decoders.image(item, device=device))
        try:
            pipeline.run()
        except RuntimeError:
            return False
        return True
