"""One pixel field of a batch: its slots, and how loader threads fill them from the file."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from h5feed.augment import Params, Pipeline
from h5feed.errors import DamagedItemError
from h5feed.feed.image import JpegItems
from h5feed.feed.slots import Ring, Slot
from h5feed.feed.source import Pixels, cannot_be
from h5feed.feed.substitute import GO_ON

__all__ = ["Field"]

U8 = NDArray[np.uint8]
Indices = NDArray[np.int64]

_KEEP = 32 << 20  # bytes of scratch memory per thread; a larger image gets its own
_TOGETHER = 1 << 20  # bytes of images that stay in the cache between two views of them
_SMALL = 16 << 10  # bytes of an image that many are copied of by one call
_WORTH = 3 << 18  # bytes of those for a job: 256 of CIFAR's


class Field:
    """Base: what fills one field's rows. Subclasses say how."""

    least = 1
    """Rows worth a job of their own. Small images are copied many by one call, whose Python
    holds the GIL as long for a few: on two threads CIFAR's come a third faster by 256 than by 128.
    """

    def __init__(self, pixels: Pixels, name: str, rings: Sequence[Ring]) -> None:
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

    def __init__(self, pixels: Pixels, name: str, rings: Sequence[Ring]) -> None:
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

    def __init__(self, pixels: Pixels, name: str, rings: Sequence[Ring]) -> None:
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
        self, pixels: Pixels, name: str, rings: Sequence[Ring], pipeline: Pipeline
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
        self, pixels: Pixels, name: str, rings: Sequence[Ring], pipeline: Pipeline
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
