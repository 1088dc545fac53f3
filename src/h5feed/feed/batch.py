"""What makes a batch: its memory, its pixels out of the file, its way to the device, its labels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from h5feed.augment import Params, Pipeline
from h5feed.errors import DamagedItemError, UsageError
from h5feed.feed.device import DeviceTransfer, Resident
from h5feed.feed.fields import field_batch, is_place
from h5feed.feed.files import GO_ON, PackedFiles, cannot_be
from h5feed.feed.image import JpegItems
from h5feed.feed.memory import Ring, Slot
from h5feed.feed.options import OnError
from h5feed.feed.sampling import Drawing
from h5feed.store import FieldSpec

__all__ = [
    "BatchBuilder",
    "Field",
    "transform_targets",
]

Indices = NDArray[np.int64]
U8 = NDArray[np.uint8]

_KEEP = 32 << 20  # bytes of scratch memory per thread; a larger image gets its own
_TOGETHER = 1 << 20  # bytes of images that stay in the cache between two views of them
_SMALL = 16 << 10  # bytes of an image that many are copied of by one call
_WORTH = 3 << 18  # bytes of those for a job: 256 of CIFAR's


class BatchBuilder:
    """Makes parameters, memory and delivered tensors of batches. Thread-safe; knows no epoch.

    Args:
        pixels: what to feed.
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
        resident: the images, where the device gathers them by itself; None where threads do.

    """

    def __init__(
        self,
        pixels: PackedFiles,
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
        resident: Resident | None = None,
    ) -> None:
        self.pixels = pixels
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
        self.resident = resident
        self._batch_size = batch_size
        self._keep = keep
        as_stored = pipeline is None or on_device
        self._dtype = torch.uint8 if pipeline is None or as_stored else pipeline.out_dtype
        self.drawing = None if pipeline is None else Drawing(pixels, pipeline)
        """What draws the parameters of a batch; None where nothing happens to it."""
        without = {*(["images"] if resident else []), *(["masks"] if self._skips_masks else [])}
        specs = [spec for spec in pixels.specs.values() if spec.name not in without]
        self.fields: tuple[Field, ...] = tuple(self._field(spec) for spec in specs)
        """What the loader's threads fill."""

    @property
    def rings(self) -> list[Ring]:
        """All memory of batches."""
        return [ring for field in self.fields for ring in field.rings]

    def take_slots(self) -> list[list[Slot]]:
        """Return a slot per field and view."""
        self.transfer.reclaim()
        return [[ring.take() for ring in field.rings] for field in self.fields]

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
            batch: tuple[Any, ...] = (images, self._target(indices, masks, params))
            if self._with_index:
                batch += (where,)
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
            return self.pixels.place("images", int(indices[k]))

        transform, dtype = self._target_transform, self._target_dtype
        if isinstance(self._named, tuple):
            return {part: self._value(part, indices, masks) for part in self._named}
        if self._named not in (None, "label", "mask"):
            values = self._value(self._named, indices, masks)
            return values if transform is None else transform_targets(values, transform, name)
        if not masks:
            labels = torch.from_numpy(np.take(self.pixels.labels, indices, axis=0))
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
        places = [n for n in self._names if is_place(self.pixels, n)]
        if places and self.pipeline is not None:
            raise UsageError(
                f"target={places[0]!r} with augment={self.pipeline.ops!r}: H5Loader's ops do not "
                "move boxes and keypoints with their images yet; leave augment out, or transform "
                "samples of H5Dataset"
            )
        kind = self.pixels.field_types.get(str(self._named))
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

    def _value(self, name: str, indices: Indices, masks: dict[str, Any]) -> Any:
        """Return one of several targets of a batch, as it is stored, on the device."""
        if name == "mask":
            return transform_targets(masks["masks"], None, str, self._target_dtype)
        if name == "label":
            labels = torch.from_numpy(np.take(self.pixels.labels, indices, axis=0))
            return self._small(labels.to(self._target_dtype or labels.dtype))
        values = field_batch(self.pixels, name, indices)
        return [self._small(v) for v in values] if isinstance(values, list) else self._small(values)

    def _small(self, tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and tensor.device != self.transfer.device:
            if self.transfer.pinned:  # from pageable memory a copy waits for the device
                tensor = tensor.pin_memory()
            return tensor.to(self.transfer.device, non_blocking=True)
        return tensor

    def _field(self, spec: FieldSpec) -> Field:
        """Choose the shortest way of a field's items into their rows."""
        masks = spec.channels == 1  # their geometry is done here, wherever the images' is
        stored = self.pipeline is None or (self.on_device and not masks)
        shape, dtype = self._row(spec, stored)
        views = 1 if self.pipeline is None or stored else self.pipeline.views
        rings = [
            Ring((self._batch_size, *shape), dtype, keep=self._keep, pinned=self.transfer.pinned)
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


class Field:
    """Base: what fills one field's rows. Subclasses say how."""

    least = 1
    """Rows worth a job of their own. Small images are copied many by one call, whose Python
    holds the GIL as long for a few: on two threads CIFAR's come a third faster by 256 than by 128.
    """

    def __init__(self, pixels: PackedFiles, name: str, rings: Sequence[Ring]) -> None:
        self.pixels = pixels
        self.name = name
        self.rings = rings
        """One per view."""

    def fill(self, indices: Indices, params: Params | None, k0: int, slots: Sequence[Slot]) -> None:
        """Write rows k0, k0+1, … of `slots` (one per view) from items `indices`, int64 (n,).

        Raises DamagedItemError for the first item that cannot be decoded or read.
        """
        raise NotImplementedError

    def damaged(self, index: int, reason: object, then: str = GO_ON) -> DamagedItemError:
        """Make the error that names file, field, index and key of an item."""
        if isinstance(reason, cv2.error):
            place = self.pixels.place(self.name, index)
            why = " ".join(str(reason).split())
            return DamagedItemError(f"{place} cannot be augmented: {why}{then}")
        return self.pixels.damaged(self.name, index, cannot_be(reason), then)


class WholeItems(Field):
    """Items of one size copied as they are stored: for a device, or where nothing is changed."""

    def __init__(self, pixels: PackedFiles, name: str, rings: Sequence[Ring]) -> None:
        super().__init__(pixels, name, rings)
        one = len(pixels.paths) == 1 and pixels.mapped
        self._all = pixels.whole(name) if one else None
        self.least = _least(pixels.specs[name].item_bytes)

    def fill(self, indices: Indices, params: Params | None, k0: int, slots: Sequence[Slot]) -> None:
        """Copy the items' bytes."""
        for slot in slots:
            rows = slot.rows[k0 : k0 + len(indices)]
            if self._all is not None:
                # mode="raise" would go through a copy of its own; the indices are checked.
                np.take(self._all, indices, axis=0, out=rows, mode="clip")
            else:
                for row, index in zip(rows, indices.tolist(), strict=True):
                    np.copyto(row, self.pixels.item(self.name, index))


class Decoded(Field):
    """JPEG items decoded straight into their rows: for a device, or where nothing is changed."""

    def __init__(self, pixels: PackedFiles, name: str, rings: Sequence[Ring]) -> None:
        super().__init__(pixels, name, rings)
        self._items = JpegItems(pixels, name)

    def fill(self, indices: Indices, params: Params | None, k0: int, slots: Sequence[Slot]) -> None:
        """Decode whole items."""
        first, *others = slots
        for k, index in enumerate(indices.tolist(), k0):
            try:
                self._items.decode(index, first.rows[k])
            except ValueError as ex:
                raise self.damaged(index, ex) from ex
            for slot in others:
                np.copyto(slot.rows[k], first.rows[k])


class Augmented(Field):
    """Views of raw or NV12 items, through the pipeline's kernel into the rows."""

    def __init__(
        self, pixels: PackedFiles, name: str, rings: Sequence[Ring], pipeline: Pipeline
    ) -> None:
        super().__init__(pixels, name, rings)
        spec = pixels.specs[name]
        self._pipeline = pipeline
        self._is_mask = spec.channels == 1
        # One array of one size: the pipeline can take small images many at a time.
        one = len(pixels.paths) == 1 and pixels.mapped
        fixed = one and spec.is_fixed and spec.channels == 3
        self._all = pixels.whole(name) if fixed else None
        self._together = max(1, _TOGETHER // spec.item_bytes) if spec.is_fixed else 1
        if fixed and pipeline.only_crops:
            self.least = _least(spec.item_bytes)

    def fill(self, indices: Indices, params: Params | None, k0: int, slots: Sequence[Slot]) -> None:
        """Run the kernel on views of the file."""
        assert params is not None
        step = len(indices) if len(slots) == 1 else self._together
        for a in range(0, len(indices), step):
            part = indices[a : a + step]
            for view, slot in enumerate(slots):
                rows = slot.rows[k0 + a : k0 + a + len(part)]
                self._run(part, params, k0 + a, rows, view)

    def _run(self, indices: Indices, params: Params, k0: int, rows: U8, view: int) -> None:
        if self._all is not None:
            self._pipeline.run_fixed(params, k0, self._all, indices, rows, view=view)
            return
        items = (self.pixels.item(self.name, index) for index in indices.tolist())
        if self._is_mask:
            self._pipeline.run_mask(params, k0, list(items), rows, view=view)
            return
        # One after the other: what is read can then have the memory of the one before.
        make = self._pipeline.kernel(params, k0, len(indices), view=view)
        for i, item in enumerate(items):
            make(i, item, rows[i])


def _least(item_bytes: int) -> int:
    return _WORTH // item_bytes if item_bytes <= _SMALL else 1


class DecodedAndAugmented(Field):
    """JPEG items, of which the part that the crops need is decoded and augmented.

    The part of a 256x256 image that RandomResizedCrop reads takes a third less than the whole.
    libjpeg's scaled decoding would save up to a fifth where crops are small, and be 30 to 37 dB
    from the right pixels (tools/bench_decode.py): left out.
    """

    def __init__(
        self, pixels: PackedFiles, name: str, rings: Sequence[Ring], pipeline: Pipeline
    ) -> None:
        super().__init__(pixels, name, rings)
        self._pipeline = pipeline
        self._items = JpegItems(pixels, name)
        self._shapes = pixels.stored_shapes
        self._threads = threading.local()

    def fill(self, indices: Indices, params: Params | None, k0: int, slots: Sequence[Slot]) -> None:
        """Decode and augment one item after another."""
        assert params is not None
        count = len(indices)
        boxes = self._pipeline.source_rows(params[k0 : k0 + count]).tolist()
        kernels = [
            self._pipeline.kernel(params, k0, count, view=view) for view in range(len(slots))
        ]
        for i, index in enumerate(indices.tolist()):
            try:
                image, top, left = self._decode(index, boxes[i])
            except ValueError as ex:
                raise self.damaged(index, ex) from ex
            for make, slot in zip(kernels, slots, strict=True):
                make(i, image, slot.rows[k0 + i], top, left)

    def _decode(self, index: int, box: list[int]) -> tuple[U8, int, int]:
        """Return pixels of an item that hold `box`, and where in the image they begin."""
        height, width = self._shapes[index].tolist()
        top, left, tall, wide = box
        return self._items.decode_region(
            index, (top, left, tall, wide), self._scratch(height * width * 3)
        )

    def _scratch(self, size: int) -> U8:
        """Return uint8 (size,): fresh memory costs up to half as much again as the decoding."""
        memory: U8 | None = getattr(self._threads, "memory", None)
        if memory is None or len(memory) < size:
            memory = np.empty(size, np.uint8)
            if size <= _KEEP:
                self._threads.memory = memory
        return memory[:size]


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
