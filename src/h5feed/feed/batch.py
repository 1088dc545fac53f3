"""What makes a batch: its memory, its way to the device, its labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from h5feed.augment import Params, Pipeline
from h5feed.errors import UsageError
from h5feed.feed.device import DeviceTransfer, Resident
from h5feed.feed.fields import field_batch, is_place, moved_batch
from h5feed.feed.files import PackedFiles
from h5feed.feed.memory import Ring, SharedMemory, Slot
from h5feed.feed.options import OnError
from h5feed.feed.rows import make_fields
from h5feed.feed.sampling import Drawing
from h5feed.store import FieldSpec

__all__ = [
    "BatchBuilder",
    "transform_targets",
]

Indices = NDArray[np.int64]


class BatchBuilder:
    """Makes parameters, memory and delivered tensors of batches. Thread-safe; knows no epoch.

    Args:
        files: what to feed.
        pipeline: what happens to the images; None where they are delivered as stored.
        transfer: where batches go.
        batch_size: rows of a slot.
        on_device: run the pipeline on the delivered bytes rather than in the loader's threads.
        keep: free slots to keep per field and view.
        on_error: what a damaged item does.
        target_transform: applied to each label or mask.
        target_dtype: of labels and masks; None leaves them as they are stored.
        with_index: deliver the samples' indices as well.
        target: what comes beside the images; None is masks, or else labels.
        keys: names of images and target, which make a batch a dict; None: a tuple.
        resident: the images, where the device gathers them by itself; None where workers do.
        shared: where the memory of batches comes from, if worker processes fill it.

    """

    def __init__(
        self,
        files: PackedFiles,
        pipeline: Pipeline | None,
        transfer: DeviceTransfer,
        *,
        batch_size: int,
        on_device: bool,
        keep: int,
        on_error: OnError,
        target_transform: Callable[[Any], Any] | None,
        target_dtype: torch.dtype | None,
        with_index: bool,
        target: str | tuple[str, ...] | None = None,
        keys: tuple[str, str] | None = None,
        resident: Resident | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        self.files = files
        self.pipeline = pipeline
        self.transfer = transfer
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
        self._named = target
        self._check_named()
        self._keys = keys
        self.resident = resident
        self._batch_size = batch_size
        self._keep = keep
        self.shared = shared
        as_stored = pipeline is None or on_device
        self._dtype = torch.uint8 if pipeline is None or as_stored else pipeline.out_dtype
        self.drawing = None if pipeline is None else Drawing(files, pipeline)
        """What draws the parameters of a batch; None where nothing happens to it."""
        without = {*(["images"] if resident else []), *(["masks"] if self._skips_masks else [])}
        names = [name for name in files.specs if name not in without]
        self.fields = make_fields(files, pipeline, names, on_device=on_device)
        """What the loader's workers fill."""
        self._rings = [self._field_rings(files.specs[name]) for name in names]

    @property
    def rings(self) -> list[Ring]:
        """All memory of batches."""
        return [ring for rings in self._rings for ring in rings]

    def take_slots(self) -> list[list[Slot]]:
        """Return a slot per field and view."""
        self.transfer.reclaim()
        return [[ring.take() for ring in rings] for rings in self._rings]

    def deliver(
        self, indices: Indices, params: Params | None, slots: Sequence[Sequence[Slot]]
    ) -> tuple[Any, Any]:
        """Return the batch as the consumer gets it, and the transfer's ticket for it."""
        if params is not None and self.pipeline is not None and not self.on_device:
            self.pipeline.mix_rows(params, slots[0][0].rows[: len(indices)])
        with self.transfer.stream():
            sent = {
                field.name: [self.transfer.send(slot, len(indices)) for slot in row]
                for field, row in zip(self.fields, slots, strict=True)
            }
            where: Any = None
            if self.resident is not None or self._with_index:
                where = self._small(torch.from_numpy(indices))
            if self.resident is not None:
                sent["images"] = [self.resident.gather(where)]
            images = self._images(sent.pop("images"), params)
            masks = {name: _one_or_all([m[..., 0] for m in rows]) for name, rows in sent.items()}
            batch: Any = (images, self._target(indices, masks, params))
            if self._with_index:
                batch += (where,)
            if self._keys is not None:
                batch = dict(zip((*self._keys, "index"), batch, strict=False))
            ticket = self.transfer.close([slot for row in slots for slot in row])
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
            return self.files.place("images", int(indices[k]))

        transform, dtype = self._target_transform, self._target_dtype
        if isinstance(self._named, tuple):
            moved = self._moved(indices, params)
            return {part: self._value(part, indices, masks, moved) for part in self._named}
        if self._named not in (None, "label", "mask"):
            values = self._value(self._named, indices, masks, self._moved(indices, params))
            return values if transform is None else transform_targets(values, transform, name)
        if not masks:
            labels = torch.from_numpy(self.files.rows("labels", indices))
            labels = transform_targets(labels, transform, name, dtype)
            if params is not None and self.pipeline is not None:
                labels = self.pipeline.mix_labels(params, labels)
            return self._small(labels)
        if len(masks) > 1:
            return {key: transform_targets(m, None, name, dtype) for key, m in masks.items()}
        return transform_targets(next(iter(masks.values())), transform, name, dtype)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self._named,) if isinstance(self._named, str) else self._named or ()

    @property
    def _skips_masks(self) -> bool:
        return self._named is not None and "mask" not in self._names

    def _check_named(self) -> None:
        """Refuse what would be done to one target, where several or others come."""
        if self._named in (None, "label", "mask"):
            return
        places = [n for n in self._names if is_place(self.files, n)]
        if places and self.pipeline is not None:
            for plan in self.pipeline.plans:
                plan.check_moves(" and ".join(places))
        kind = self.files.field_types.get(str(self._named))
        if self._target_transform is not None and (kind is None or not kind.is_fixed):
            raise UsageError(
                f"target_transform with target={self._named!r}: H5Loader gives it one tensor's "
                "rows, and this is none; leave target_transform out, and change what the loader "
                "gives"
            )
        if self.pipeline is not None and self.pipeline.uses_batch:
            raise UsageError(
                f"target={self._named!r} with augment={self.pipeline.ops!r}: labels are mixed "
                'alone; give target="label"'
            )

    def _moved(self, indices: Indices, params: Params | None) -> dict[str, Any]:
        """Return the targets that go where the images' ops take them."""
        places = [name for name in self._names if is_place(self.files, name)]
        if params is None or self.pipeline is None or not places:
            return {}
        return moved_batch(self.files, places, indices, self.pipeline, params)

    def _value(
        self, name: str, indices: Indices, masks: dict[str, Any], moved: dict[str, Any]
    ) -> Any:
        """Return one of several targets of a batch, on the device."""
        if name in moved:
            return self._each(moved[name])
        if name == "mask":
            return transform_targets(masks["masks"], None, str, self._target_dtype)
        if name == "label":
            labels = torch.from_numpy(self.files.rows("labels", indices))
            return self._small(labels.to(self._target_dtype or labels.dtype))
        return self._each(field_batch(self.files, name, indices))

    def _each(self, values: Any) -> Any:
        """Return a tensor, or every one of a list or tuple, on the device."""
        if isinstance(values, list | tuple):
            return type(values)(map(self._each, values))
        return self._small(values)

    def _small(self, tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and tensor.device != self.transfer.device:
            if self.transfer.pinned:  # from pageable memory a copy waits for the device
                tensor = tensor.pin_memory()
            return tensor.to(self.transfer.device, non_blocking=True)
        return tensor

    def _field_rings(self, spec: FieldSpec) -> list[Ring]:
        """Return the memory of a field's batches, for each view."""
        return [
            Ring(
                (self._batch_size, *shape),
                dtype,
                keep=self._keep,
                pinned=self.transfer.pinned,
                shared=self.shared,
            )
            for shape, dtype in self._rows(spec)
        ]

    def _rows(self, spec: FieldSpec) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return shape and type of a row of a field's slots, for each view."""
        if self.pipeline is None or (self.on_device and spec.channels != 1):
            return [(spec.item_shape(spec.height, spec.width), np.dtype(np.uint8))]
        shapes, dtype = self.pipeline.out_shapes, self.pipeline.row_dtype
        if spec.channels == 1:
            return [((height, width, 1), np.dtype(np.uint8)) for height, width, _ in shapes]
        return [(shape, dtype) for shape in shapes]


def _one_or_all(views: list[Tensor]) -> Any:
    return views[0] if len(views) == 1 else tuple(views)


def transform_targets(
    targets: Any,
    transform: Callable[[Any], Any] | None,
    name: Callable[[int], str],
    dtype: torch.dtype | None = None,
) -> Any:
    """Return a batch's targets, a tensor or one for each view, each target changed by itself.

    They have `dtype`, where one is given, when `transform` gets them. What `transform` raises goes
    on, with a note (from Python 3.11 on) of the item: `name(k)`.
    """
    if isinstance(targets, tuple):
        return tuple(transform_targets(view, transform, name, dtype) for view in targets)
    targets = targets if dtype is None else targets.to(dtype)
    if transform is None:
        return targets
    made = []
    plain = targets.dim() == 1 and dtype is None  # as H5Dataset hands them out
    for k, target in enumerate(targets.tolist() if plain else targets):
        try:
            made.append(transform(target))
        except Exception as ex:
            if hasattr(ex, "add_note"):
                ex.add_note(f"target_transform was at the target of {name(k)}")
            raise
    return default_collate(made)
