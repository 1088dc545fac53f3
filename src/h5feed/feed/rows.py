"""What fills the rows of a batch: the pixels of each field, out of the file, changed or not.

Nothing here needs torch, which a worker process does without.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from h5feed.augment import Params, Pipeline
from h5feed.errors import DamagedItemError
from h5feed.feed.files import GO_ON, PackedFiles, cannot_be
from h5feed.feed.image import JpegItems

if TYPE_CHECKING:
    from h5feed.feed.options import OnError

__all__ = [
    "Augmented",
    "Damage",
    "Decoded",
    "DecodedAndAugmented",
    "Field",
    "WholeItems",
    "fill_rows",
    "make_fields",
]

Indices = NDArray[np.int64]
Rows = NDArray[Any]
"""(batch, ...): the memory of one view of a field of a batch."""
U8 = NDArray[np.uint8]

_KEEP = 32 << 20  # bytes of scratch memory per thread; a larger image gets its own
_TOGETHER = 1 << 20  # bytes of images that stay in the cache between two views of them
_SMALL = 16 << 10  # bytes of an image that many are copied of by one call
_WORTH = 3 << 18  # bytes of those for a job: 256 of CIFAR's


def make_fields(
    files: PackedFiles, pipeline: Pipeline | None, names: Sequence[str], *, on_device: bool
) -> tuple[Field, ...]:
    """Return what fills the pixel fields `names` of a batch, by the shortest way of items there.

    pipeline: None where items are delivered as they are stored. on_device: the images' changes
    are made after they were delivered.
    """
    made: list[Field] = []
    for spec in map(files.specs.__getitem__, names):
        # the geometry of masks is done here, wherever the images' is
        if pipeline is None or (on_device and spec.channels != 1):
            made.append((Decoded if spec.is_encoded else WholeItems)(files, spec.name))
        else:
            augmented = DecodedAndAugmented if spec.is_encoded else Augmented
            made.append(augmented(files, spec.name, pipeline))
    return tuple(made)


class Damage(NamedTuple):
    """A row that could not be filled."""

    field: int
    """Number of the field."""
    reason: BaseException | None
    """Why, as `Field.damaged` takes it."""


def fill_rows(
    fields: Sequence[Field],
    memory: Sequence[Sequence[Rows]],
    indices: Indices,
    params: Params | None,
    rows: range,
    on_error: OnError,
) -> dict[int, Damage]:
    """Fill `rows` of a batch whose samples are `indices`, int64 (B,), with parameters `params`.

    memory: of each view of each field. Returns the rows that are damaged, where `on_error` is
    "skip"; else raises the first one's DamagedItemError.
    """
    damage: dict[int, Damage] = {}
    for number, (field, views) in enumerate(zip(fields, memory, strict=True)):
        try:
            field.fill(indices[rows.start : rows.stop], params, rows.start, views)
        except (DamagedItemError, cv2.error) as ex:
            if getattr(ex, "code", 0) == cv2.Error.StsNoMem:
                raise  # no fault of an item
            for k, error in _fill_each(field, views, indices, params, rows, on_error).items():
                damage[k] = Damage(number, error.__cause__)
    return damage


def _fill_each(
    field: Field,
    views: Sequence[Rows],
    indices: Indices,
    params: Params | None,
    rows: range,
    on_error: OnError,
) -> dict[int, DamagedItemError]:
    """Fill `rows` one by one, and return those that cannot be, or raise for one."""
    damage: dict[int, DamagedItemError] = {}
    for k in rows:
        try:
            field.fill(indices[k : k + 1], params, k, views)
            continue
        except DamagedItemError as ex:
            error = ex
        except cv2.error as ex:
            error = field.damaged(int(indices[k]), ex)
            error.__cause__ = ex
        if on_error == "raise":
            raise error
        damage[k] = error
    return damage


class Field:
    """Base: what fills one field's rows. Subclasses say how."""

    least = 1
    """Rows worth a job of their own. Small images are copied many by one call, whose Python
    holds the GIL as long for a few: on two threads CIFAR's come a third faster by 256 than by 128.
    """

    def __init__(self, files: PackedFiles, name: str) -> None:
        self.files = files
        self.name = name

    def fill(self, indices: Indices, params: Params | None, k0: int, views: Sequence[Rows]) -> None:
        """Write rows k0, k0+1, … of each view's memory from items `indices`, int64 (n,).

        Raises DamagedItemError for the first item that cannot be decoded or read.
        """
        raise NotImplementedError

    def damaged(self, index: int, reason: object, then: str = GO_ON) -> DamagedItemError:
        """Make the error that names file, field, index and key of an item."""
        if isinstance(reason, cv2.error):
            place = self.files.place(self.name, index)
            why = " ".join(str(reason).split())
            return DamagedItemError(f"{place} cannot be augmented: {why}{then}")
        return self.files.damaged(self.name, index, cannot_be(reason), then)


class WholeItems(Field):
    """Items of one size copied as they are stored: for a device, or where nothing is changed."""

    def __init__(self, files: PackedFiles, name: str) -> None:
        super().__init__(files, name)
        one = files.is_single and files.mapped
        self._all = files.whole(name) if one else None
        self.least = _least(files.specs[name].item_bytes)
        self._together = files.mapped and self.least > 1

    def fill(self, indices: Indices, params: Params | None, k0: int, views: Sequence[Rows]) -> None:
        """Copy the items' bytes."""
        for view in views:
            rows = view[k0 : k0 + len(indices)]
            if self._all is not None:
                # mode="raise" would go through a copy of its own; the indices are checked.
                np.take(self._all, indices, axis=0, out=rows, mode="clip")
            elif self._together:
                self.files.copy_whole(self.name, indices, rows)
            else:
                for row, item in zip(rows, self.files.items(self.name, indices), strict=True):
                    np.copyto(row, item)


class Decoded(Field):
    """JPEG items decoded straight into their rows: for a device, or where nothing is changed."""

    def __init__(self, files: PackedFiles, name: str) -> None:
        super().__init__(files, name)
        self._items = JpegItems(files, name)

    def fill(self, indices: Indices, params: Params | None, k0: int, views: Sequence[Rows]) -> None:
        """Decode whole items."""
        first, *others = views
        for k, index in enumerate(indices.tolist(), k0):
            try:
                self._items.decode(index, first[k])
            except ValueError as ex:
                raise self.damaged(index, ex) from ex
            for other in others:
                np.copyto(other[k], first[k])


class Augmented(Field):
    """Views of raw or NV12 items, through the pipeline's kernel into the rows."""

    def __init__(self, files: PackedFiles, name: str, pipeline: Pipeline) -> None:
        super().__init__(files, name)
        spec = files.specs[name]
        self._pipeline = pipeline
        self._is_mask = spec.channels == 1
        # One array of one size: the pipeline can take small images many at a time.
        fixed = files.mapped and spec.is_fixed and spec.channels == 3
        self._all = files.whole(name) if fixed and files.is_single else None
        self._shape = spec.item_shape(spec.height, spec.width)
        self._together = max(1, _TOGETHER // spec.item_bytes) if spec.is_fixed else 1
        if fixed and pipeline.only_crops:
            self.least = _least(spec.item_bytes)
        # small ones of several files are copied first, to be one array as well
        self._gathers = fixed and self._all is None and self.least > 1

    def fill(self, indices: Indices, params: Params | None, k0: int, views: Sequence[Rows]) -> None:
        """Run the kernel on views of the file."""
        assert params is not None
        step = len(indices) if len(views) == 1 else self._together
        for a in range(0, len(indices), step):
            part = indices[a : a + step]
            for view, memory in enumerate(views):
                rows = memory[k0 + a : k0 + a + len(part)]
                self._run(part, params, k0 + a, rows, view)

    def _run(self, indices: Indices, params: Params, k0: int, rows: U8, view: int) -> None:
        if self._all is not None:
            self._pipeline.run_fixed(params, k0, self._all, indices, rows, view=view)
            return
        if self._gathers:
            field = np.empty((len(indices), *self._shape), np.uint8)
            self.files.copy_whole(self.name, indices, field)
            self._pipeline.run_fixed(params, k0, field, np.arange(len(field)), rows, view=view)
            return
        items = self.files.items(self.name, indices)
        if self._is_mask:
            self._pipeline.run_mask(params, k0, list(items), rows, view=view)
            return
        # One after the other: what is read can then have the memory of the one before.
        self._pipeline.run_cpu(params, k0, items, rows, view=view)


def _least(item_bytes: int) -> int:
    return _WORTH // item_bytes if item_bytes <= _SMALL else 1


class DecodedAndAugmented(Field):
    """JPEG items, of which the part that the crops need is decoded and augmented.

    The part of a 256x256 image that RandomResizedCrop reads takes two fifths less than the whole.
    simplejpeg's fastdct would save 1 to 3 % of that, and be 45 dB from the right pixels: left out.
    libjpeg's scaled decoding would save up to a fifth where crops are small, and be 30 to 37 dB
    from the right pixels (tools/bench_decode.py): left out.
    """

    def __init__(self, files: PackedFiles, name: str, pipeline: Pipeline) -> None:
        super().__init__(files, name)
        self._pipeline = pipeline
        self._items = JpegItems(files, name)
        self._threads = threading.local()

    def fill(self, indices: Indices, params: Params | None, k0: int, views: Sequence[Rows]) -> None:
        """Decode and augment one item after another."""
        assert params is not None
        count = len(indices)
        boxes = self._pipeline.source_rows(params[k0 : k0 + count])
        kernels = [
            self._pipeline.kernel(params, k0, count, view=view) for view in range(len(views))
        ]
        parts = self._items.decode_regions(indices, boxes, self._scratch)
        for i, (image, top, left) in enumerate(parts):
            for make, memory in zip(kernels, views, strict=True):
                make(i, image, memory[k0 + i], top, left)

    def _scratch(self, size: int) -> U8:
        """Return uint8 (size,): fresh memory costs up to half as much again as the decoding."""
        memory: U8 | None = getattr(self._threads, "memory", None)
        if memory is None or len(memory) < size:
            memory = np.empty(size, np.uint8)
            if size <= _KEEP:
                self._threads.memory = memory
        return memory[:size]
