"""What every batch of a loader is made with: fields and their slots, pipeline, device, labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h5feed.augment import Params, Pipeline
from h5feed.errors import UsageError
from h5feed.feed.collate import transform_targets
from h5feed.feed.device import Lane
from h5feed.feed.fields import Augmented, Decoded, DecodedAndAugmented, Field, WholeItems
from h5feed.feed.resident import Resident
from h5feed.feed.schedule import Drawing
from h5feed.feed.slots import Ring, Slot
from h5feed.feed.source import Pixels
from h5feed.store import FieldSpec

__all__ = ["OnError", "Recipe"]

OnError = Literal["raise", "skip"]
Indices = NDArray[np.int64]


class Recipe:
    """Makes parameters, memory and delivered tensors of batches. Thread-safe; knows no epoch.

    Args:
        pixels: what to feed.
        pipeline: what happens to the images; None where they are delivered as stored.
        lane: where batches go.
        batch_size: rows of a slot.
        on_device: run the pipeline on the delivered bytes rather than in the loader's threads.
        keep: free slots to keep per field and view.
        on_error: what a damaged item does.
        target_transform: applied to each label or mask.
        target_dtype: of labels and masks; None leaves them as they are stored.
        with_index: deliver the samples' indices as well.
        resident: the images, where the device gathers them by itself; None where threads do.

    """

    def __init__(
        self,
        pixels: Pixels,
        pipeline: Pipeline | None,
        lane: Lane,
        *,
        batch_size: int,
        on_device: bool,
        keep: int,
        on_error: OnError,
        target_transform: Callable[[Any], Any] | None,
        target_dtype: torch.dtype | None,
        with_index: bool,
        resident: Resident | None = None,
    ) -> None:
        self.pixels = pixels
        self.pipeline = pipeline
        self.lane = lane
        self.on_device = on_device
        self.on_error: OnError = on_error
        self._target_transform = target_transform
        self._target_dtype = target_dtype
        if target_dtype is not None and pipeline is not None and pipeline.uses_batch:
            raise UsageError(
                f"target_dtype={target_dtype} with augment={pipeline.ops!r}: mixed targets are "
                "float32; leave target_dtype out"
            )
        self._with_index = with_index
        self.resident = resident
        self._batch_size = batch_size
        self._keep = keep
        as_stored = pipeline is None or on_device
        self._dtype = torch.uint8 if pipeline is None or as_stored else pipeline.out_dtype
        self.drawing = None if pipeline is None else Drawing(pixels, pipeline)
        """What draws the parameters of a batch; None where nothing happens to it."""
        specs = [s for s in pixels.specs.values() if resident is None or s.name != "images"]
        self.fields: tuple[Field, ...] = tuple(self._field(spec) for spec in specs)
        """What the loader's threads fill."""

    @property
    def rings(self) -> list[Ring]:
        """All memory of batches."""
        return [ring for field in self.fields for ring in field.rings]

    def take_slots(self) -> list[list[Slot]]:
        """Return a slot per field and view."""
        self.lane.reclaim()
        return [[ring.take() for ring in field.rings] for field in self.fields]

    def deliver(
        self, indices: Indices, params: Params | None, slots: Sequence[Sequence[Slot]]
    ) -> tuple[Any, Any]:
        """Return the batch as the consumer gets it, and the lane's ticket for it."""
        if params is not None and self.pipeline is not None and not self.on_device:
            self.pipeline.mix_rows(params, slots[0][0].rows[: len(indices)])
        with self.lane.stream():
            sent = {
                field.name: [self.lane.send(slot, len(indices)) for slot in row]
                for field, row in zip(self.fields, slots, strict=True)
            }
            where: Any = None
            if self.resident is not None or self._with_index:
                where = self._small(torch.from_numpy(indices))
            if self.resident is not None:
                sent["images"] = [self.resident.gather(where)]
            images = self._images(sent.pop("images"), params)
            masks = {name: _one_or_all([m[..., 0] for m in rows]) for name, rows in sent.items()}
            batch: tuple[Any, ...] = (images, self._target(indices, masks, params))
            if self._with_index:
                batch += (where,)
            ticket = self.lane.close([slot for row in slots for slot in row])
        return batch, ticket

    def _images(self, rows: Sequence[Tensor], params: Params | None) -> Any:
        """Return the images' tensor, or a tuple of one per view."""
        if self.on_device and self.pipeline is not None and params is not None:
            numbers = range(self.pipeline.views)
            views = [self.pipeline.run_device(params, rows[0], view=view) for view in numbers]
        else:
            views = [view.permute(0, 3, 1, 2).view(self._dtype) for view in rows]
        return _one_or_all(views)

    def _target(self, indices: Indices, masks: dict[str, Any], params: Params | None) -> Any:
        def name(k: int) -> str:
            return self.pixels.place("images", int(indices[k]))

        transform, dtype = self._target_transform, self._target_dtype
        if not masks:
            labels = torch.from_numpy(np.take(self.pixels.labels, indices, axis=0))
            labels = transform_targets(labels, transform, name, dtype)
            if params is not None and self.pipeline is not None:
                labels = self.pipeline.mix_labels(params, labels)
            return self._small(labels)
        if len(masks) > 1:
            return {key: transform_targets(m, None, name, dtype) for key, m in masks.items()}
        return transform_targets(next(iter(masks.values())), transform, name, dtype)

    def _small(self, tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and tensor.device != self.lane.device:
            if self.lane.pinned:  # from pageable memory a copy waits for the device
                tensor = tensor.pin_memory()
            return tensor.to(self.lane.device, non_blocking=True)
        return tensor

    def _field(self, spec: FieldSpec) -> Field:
        """Choose the shortest way of a field's items into their rows."""
        masks = spec.channels == 1  # their geometry is done here, wherever the images' is
        stored = self.pipeline is None or (self.on_device and not masks)
        shape, dtype = self._row(spec, stored)
        views = 1 if self.pipeline is None or stored else self.pipeline.views
        rings = [
            Ring((self._batch_size, *shape), dtype, keep=self._keep, pinned=self.lane.pinned)
            for _ in range(views)
        ]
        if self.pipeline is None or stored:
            return (Decoded if spec.is_encoded else WholeItems)(self.pixels, spec.name, rings)
        augmented = DecodedAndAugmented if spec.is_encoded else Augmented
        return augmented(self.pixels, spec.name, rings, self.pipeline)

    def _row(self, spec: FieldSpec, stored: bool) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and type of a row of a field's slots."""
        if stored:
            return spec.item_shape(spec.height, spec.width), np.dtype(np.uint8)
        assert self.pipeline is not None
        height, width, channels = self.pipeline.out_shape
        if spec.channels == 1:
            return (height, width, 1), np.dtype(np.uint8)
        return (height, width, channels), self.pipeline.row_dtype


def _one_or_all(views: list[Tensor]) -> Any:
    return views[0] if len(views) == 1 else tuple(views)
