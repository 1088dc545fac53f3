"""Crop, resize and flip on the CPU: straight from the image given into the row of a batch."""

import math
from collections.abc import Sequence
from typing import Any, Final

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

__all__ = [
    "FLIP_CODES",
    "Image",
    "Scratch",
    "crop_image",
    "crop_mask",
    "place",
    "readable",
    "resized",
]

Image = NDArray[Any]
"""(H, W, C) or (H, W), rows contiguous."""

FLIP_CODES: Final = (2, 1, 0, -1)
"""cv2's flip code of a crop's `flip` column; the first is never used."""


class Scratch:
    """Memory for one image at a time, reused from call to call."""

    def __init__(self) -> None:
        self._flat: Image = np.empty(0, np.uint8)
        self._last: Image = self._flat
        self._shape: tuple[int, ...] = (0,)

    def __call__(self, *shape: int) -> Image:
        """Return uint8 memory of this shape and any content; the call before's is gone."""
        if shape != self._shape:
            size = math.prod(shape)
            if self._flat.size < size:
                self._flat = np.empty(size, np.uint8)
            self._last, self._shape = self._flat[:size].reshape(shape), shape
        return self._last


class _Shown:
    def __init__(self, array: Image) -> None:
        self._array = array  # lives as long as what is shown of it
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def readable(array: Image) -> torch.Tensor:
    """Return a tensor of the same memory, for reading only.

    Torch has no read-only tensors, and warns of memory that may not be written to.
    """
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Shown(array)))


def _antialiased(src: Image, height: int, width: int) -> Image:
    """Return `src` (h, w) or (h, w, C) uint8 as torchvision's antialiased bilinear makes it.

    torch's uint8 channels_last kernel runs on the calling thread alone, whatever
    torch.set_num_threads says, and releases the GIL: right for loader threads. It must be given
    contiguous pixels: its own copy of a crop goes through OpenMP, whose teams, one per calling
    thread, then fight for the cores (seen: 5,000 us an image instead of 120).
    """
    pixels = np.ascontiguousarray(src).reshape(*src.shape[:2], -1)
    # Batch axis first, then the permute: the other way round torch does not see that the memory
    # is channels_last, and makes planes at twice the cost.
    batch = readable(pixels)[None].permute(0, 3, 1, 2)
    made = torch.nn.functional.interpolate(
        batch, (height, width), mode="bilinear", antialias=True, align_corners=False
    )
    return np.asarray(made[0].permute(1, 2, 0)).reshape(height, width, *src.shape[2:])


def crop_mask(row: Sequence[int], src: Image, out: Image, fill: int) -> None:
    """Write one mask into `out` (oh, ow) from its box (h, w): nearest, with `fill` around it."""
    rh, rw, py, px, _, _, flip = row[4:11]
    if src.shape != (rh, rw):
        src = cv2.resize(src, (rw, rh), interpolation=cv2.INTER_NEAREST)
    place(src, out, py, px, (fill,))
    if flip:
        cv2.flip(out, FLIP_CODES[flip], out)


def crop_image(row: Sequence[int], src: Image, out: Image, fill: tuple[float, ...]) -> None:
    """Write one image into `out` (oh, ow, C) from its box (h, w, C), by one row of parameters.

    See frame.COLUMNS.
    """
    _, _, h, w, rh, rw, py, px, oh, ow, flip, antialias = row
    if py or px or rh != oh or rw != ow:
        place(resized(src, rh, rw, antialias), out, py, px, fill)
    elif h == rh and w == rw:
        if flip:
            cv2.flip(src, FLIP_CODES[flip], out)
        else:
            out[...] = src
        return
    elif antialias:
        out[...] = _antialiased(src, oh, ow)
    else:
        cv2.resize(src, (ow, oh), out, 0, 0, cv2.INTER_LINEAR)
    if flip:
        cv2.flip(out, FLIP_CODES[flip], out)


def resized(src: Image, height: int, width: int, antialias: int) -> Image:
    """Return `src` (h, w) or (h, w, C) resized; itself where it has that size."""
    if src.shape[:2] == (height, width):
        return src
    if antialias:
        return _antialiased(src, height, width)
    made = cv2.resize(src, (width, height), interpolation=cv2.INTER_LINEAR)
    return made.reshape(height, width, *src.shape[2:])  # cv2 drops an axis of one channel


def place(src: Image, out: Image, top: int, left: int, fill: tuple[float, ...]) -> None:
    """Lay `src` with its top left corner at (top, left) of `out`, and fill around it."""
    height, width = out.shape[:2]
    y0, x0 = max(top, 0), max(left, 0)
    y1, x1 = max(min(top + src.shape[0], height), y0), max(min(left + src.shape[1], width), x0)
    if y0 or x0 or y1 < height or x1 < width:
        out[...] = fill
    out[y0:y1, x0:x1] = src[y0 - top : y1 - top, x0 - left : x1 - left]
