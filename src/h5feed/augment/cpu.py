"""Kernels of the CPU: crop, resize and flip straight from the stored image into a batch's row."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from h5feed.augment.frame import Interpolation, Ints, PaddingMode

if TYPE_CHECKING:
    import torch

__all__ = [
    "SMALL",
    "Image",
    "Scratch",
    "are_windows",
    "copy_windows",
    "crop_image",
    "crop_images",
    "crop_mask",
    "nv12_box",
    "nv12_boxes",
    "raw_boxes",
    "readable",
]

Image = NDArray[Any]
"""(H, W, C) or (H, W), rows contiguous."""

_FLIP_CODES: Final = (2, 1, 0, -1)
"""cv2's flip code of a crop's `flip` column; the first is never used."""

_FILTERS: Final = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_BORDERS: Final = {
    "edge": cv2.BORDER_REPLICATE,
    "reflect": cv2.BORDER_REFLECT_101,
    "symmetric": cv2.BORDER_REFLECT,
}

SMALL: Final = 16 << 10
"""Bytes of an image up to which `copy_windows` is faster than a loop over images."""

_STRIDE: Final = 64
"""Columns are converted in multiples of this: cv2's vector loop (AVX-512) leaves the rest of each
row to scalar code, 80 us for 190 columns where 192 take 10."""

_FOLLOWED: Final = 192
"""Columns of luma that are converted at least: of less than three cache lines of a row the
processor reads none ahead, and 128 columns that lie in memory take 20 us where 192 take 12."""

_KEEP: Final = 32 << 20
"""Bytes of memory for one image that a thread keeps; larger images get new memory each time."""

_MIRRORED: Final = 4
"""Neighbors at most that one cv2.flip mirrors: more would have left the core's own cache."""


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


class _Local(threading.local):
    """Memory of each thread."""

    def __init__(self) -> None:
        self.rgb = Scratch()
        self.blocks: tuple[Any, Image, Image] | None = None


_LOCAL = _Local()


class _Shown:
    def __init__(self, array: Image) -> None:
        self._array = array  # lives as long as what is shown of it
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def readable(array: Image) -> torch.Tensor:
    """Return a tensor of the same memory, for reading only.

    Torch has no read-only tensors, and warns of memory that may not be written to.
    """
    import torch

    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Shown(array)))


def _antialiased(src: Image, height: int, width: int, mode: Interpolation) -> Image:
    """Return `src` (h, w) or (h, w, C) uint8 as torchvision's antialiased resize makes it.

    torch's uint8 channels_last kernel runs on the calling thread alone, whatever
    torch.set_num_threads says, and releases the GIL: right for loader threads. It must be given
    contiguous pixels: its own copy of a crop goes through OpenMP, whose teams, one per calling
    thread, then fight for the cores (seen: 5,000 us an image instead of 120).
    """
    import torch

    pixels = np.ascontiguousarray(src).reshape(*src.shape[:2], -1)
    # Batch axis first, then the permute: the other way round torch does not see that the memory
    # is channels_last, and makes planes at twice the cost.
    batch = readable(pixels)[None].permute(0, 3, 1, 2)
    made = torch.nn.functional.interpolate(
        batch, (height, width), mode=mode, antialias=True, align_corners=False
    )
    return np.asarray(made[0].permute(1, 2, 0)).reshape(height, width, *src.shape[2:])


def crop_mask(
    row: Sequence[int], src: Image, out: Image, fill: int, padding: PaddingMode = "constant"
) -> None:
    """Write one mask into `out` (oh, ow) from its box (h, w): nearest, with `fill` around it."""
    rh, rw, py, px, _, _, flip = row[4:11]
    if src.shape != (rh, rw):
        src = cv2.resize(src, (rw, rh), interpolation=cv2.INTER_NEAREST)
    _place(src, out, py, px, (fill,), padding)
    if flip:
        cv2.flip(out, _FLIP_CODES[flip], out)


def crop_image(
    row: Sequence[int],
    src: Image,
    out: Image,
    fill: tuple[float, ...],
    interpolation: Interpolation = "bilinear",
    padding: PaddingMode = "constant",
) -> None:
    """Write one image into `out` (oh, ow, C) from its box (h, w, C), by one row of parameters.

    See frame.COLUMNS.
    """
    _, _, h, w, rh, rw, py, px, oh, ow, flip, antialias = row
    if py or px or rh != oh or rw != ow:
        _place(_resized(src, rh, rw, antialias, interpolation), out, py, px, fill, padding)
    elif h == rh and w == rw:
        if flip:
            cv2.flip(src, _FLIP_CODES[flip], out)
        else:
            out[...] = src
        return
    elif antialias:
        out[...] = _antialiased(src, oh, ow, interpolation)
    else:
        cv2.resize(src, (ow, oh), out, 0, 0, _FILTERS[interpolation])
    if flip:
        cv2.flip(out, _FLIP_CODES[flip], out)


def crop_images(
    rows: Sequence[list[int]],
    boxes: Iterable[Image],
    out: Image,
    fill: tuple[float, ...],
    interpolation: Interpolation = "bilinear",
    padding: PaddingMode = "constant",
) -> None:
    """Write images into `out` (n, oh, ow, C), C-contiguous, as `crop_image` does each of them.

    rows: n of frame.COLUMNS; boxes: what each of them reads, in their order. The usual image takes
    the GIL for little more than cv2's own calls, and hands it on as rarely as can be: to be
    resized, and to be mirrored together with its neighbors.
    """
    (count, oh, ow, channels), resize, filter_ = out.shape, cv2.resize, _FILTERS[interpolation]
    size, tall = (ow, oh), out.reshape(count * oh, ow, channels)
    upright = [oh, ow, 0, 0, oh, ow, 0, 0]
    mirrored = [oh, ow, 0, 0, oh, ow, 1, 0]

    def mirror(begin: int, end: int) -> None:
        neighbors = tall[begin * oh : end * oh]
        cv2.flip(neighbors, 1, neighbors)

    waiting = 0  # images before this one that are still to be mirrored
    for i, (row, box, image) in enumerate(zip(rows, boxes, out, strict=True)):
        kind = row[4:]
        if waiting and (kind != mirrored or waiting == _MIRRORED):
            mirror(i - waiting, i)
            waiting = 0
        if kind == mirrored:
            resize(box, size, image, 0, 0, filter_)
            waiting += 1
        elif kind == upright:
            resize(box, size, image, 0, 0, filter_)
        else:
            crop_image(row, box, image, fill, interpolation, padding)
    if waiting:
        mirror(count - waiting, count)


def raw_boxes(rows: Sequence[list[int]], images: Iterable[Image]) -> Iterator[Image]:
    """Give of each image (H, W, C) what its row of frame.COLUMNS reads: a view of (h, w, C)."""
    for image, row in zip(images, rows, strict=True):
        y, x, h, w = row[:4]
        yield image[y : y + h, x : x + w]


def nv12_boxes(rows: Sequence[list[int]], images: Iterable[Image]) -> Iterator[Image]:
    """Give of each NV12 image what its row reads, as `nv12_box`; the next one takes its memory."""
    for image, row in zip(images, rows, strict=True):
        y, x, h, w = row[:4]
        yield nv12_box(image, y, x, h, w, _LOCAL.rgb if image.size * 2 <= _KEEP else Scratch())


def _resized(
    src: Image, height: int, width: int, antialias: int, interpolation: Interpolation
) -> Image:
    """Return `src` (h, w) or (h, w, C) resized; itself where it has that size."""
    if src.shape[:2] == (height, width):
        return src
    if antialias:
        return _antialiased(src, height, width, interpolation)
    made = cv2.resize(src, (width, height), interpolation=_FILTERS[interpolation])
    return made.reshape(height, width, *src.shape[2:])  # cv2 drops an axis of one channel


def _place(
    src: Image, out: Image, top: int, left: int, fill: tuple[float, ...], padding: PaddingMode
) -> None:
    """Lay `src` with its top left corner at (top, left) of `out`, and fill around it."""
    height, width = out.shape[:2]
    if padding != "constant":
        above, below = max(top, 0), max(height - top - src.shape[0], 0)
        before, behind = max(left, 0), max(width - left - src.shape[1], 0)
        if above or below or before or behind:
            src = cv2.copyMakeBorder(src, above, below, before, behind, _BORDERS[padding])
            src = src.reshape(*src.shape[:2], *out.shape[2:])  # cv2 drops an axis of one channel
            top, left = top - above, left - before
    y0, x0 = max(top, 0), max(left, 0)
    y1, x1 = max(min(top + src.shape[0], height), y0), max(min(left + src.shape[1], width), x0)
    if y0 or x0 or y1 < height or x1 < width:
        out[...] = fill
    out[y0:y1, x0:x1] = src[y0 - top : y1 - top, x0 - left : x1 - left]


def are_windows(rows: NDArray[np.int32], height: int, width: int) -> bool:
    """Whether rows (n, 12) of crop parameters only cut windows out of images of one size.

    A window may reach outside its image, but must show all of the image that lies in it.
    """
    y, x, h, w, rh, rw, py, px, oh, ow = rows[:, :10].T
    top, left = y - py, x - px
    fits = (rh == h) & (rw == w)
    fits &= (y == np.maximum(top, 0)) & (y + h == np.minimum(top + oh, height))
    fits &= (x == np.maximum(left, 0)) & (x + w == np.minimum(left + ow, width))
    return bool(fits.all())


def copy_windows(
    rows: NDArray[np.int32],
    field: Image,
    indices: Ints,
    out: Image,
    fill: tuple[float, ...],
    padding: PaddingMode = "constant",
) -> None:
    """Write windows of images `indices` (n) of a field (N, H, W, C) into `out` (n, oh, ow, C).

    The rows (n, 12) are such that `are_windows`. At 32x32 an image is 3 kB of copying, and a
    Python call for each costs more than that. So a chunk is gathered, mirrored by one cv2 call,
    laid into a padded block, and all rows of all windows are fetched by one numpy index over
    overlapping rows: 0.5 us an image, a loop 1.3. Thread-safe.
    """
    (_, height, width, channels), (count, oh, ow, _) = field.shape, out.shape
    top, left = rows[:, 0] - rows[:, 6], rows[:, 1] - rows[:, 7]
    mirrored, upside_down = rows[:, 10] % 2 == 1, rows[:, 10] >= 2
    left = np.where(mirrored, width - ow - left, left)
    pads = [-top.min(), (top + oh).max() - height, -left.min(), (left + ow).max() - width]
    # in fours, so that one block of memory serves most chunks
    around = tuple(int(max(pad + 3, 0)) // 4 * 4 for pad in pads)
    above, _, before, _ = around
    gathered, block = _blocks(count, field.shape[1:], around, fill)

    order = np.argsort(mirrored, kind="stable")  # those to mirror lie together, at the end
    np.take(field.reshape(len(field), -1), indices[order], axis=0, out=gathered, mode="clip")
    images = gathered.reshape(count, height, width, channels)
    first = count - int(mirrored.sum())
    if first < count:
        tall = images[first:].reshape(-1, width, channels)
        cv2.flip(tall, 1, tall)
    block[:, above : above + height, before : before + width] = images
    if padding != "constant":
        _pad(block, 1, above, height, padding)
        _pad(block, 2, before, width, padding)

    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    whole, line, pixel = block.strides[:3]
    starts = place * whole + (top + above) * line + (left + before) * pixel
    down = np.arange(oh) * line
    lines = np.where(upside_down[:, None], down[::-1], down) if upside_down.any() else down
    kind = np.dtype((np.void, ow * channels))
    every = as_strided(block.reshape(-1)[: kind.itemsize].view(kind), (block.size,), (1,))
    out.reshape(count, oh, -1).view(kind)[..., 0] = every[starts[:, None] + lines]


def _pad(block: Image, axis: int, begin: int, length: int, padding: PaddingMode) -> None:
    """Write what lies along an axis before `begin` and behind `begin + length`."""
    lines = np.arange(block.shape[axis]) - begin
    outside = np.flatnonzero((lines < 0) | (lines >= length))
    for line in outside.tolist():
        source = begin + _mirrored(line - begin, length, padding)
        where: list[Any] = [slice(None)] * block.ndim
        of = list(where)
        where[axis], of[axis] = line, source
        block[tuple(where)] = block[tuple(of)]


def _mirrored(line: int, length: int, padding: PaddingMode) -> int:
    """Return which line of `length` shows at `line`, which may lie outside."""
    if padding == "edge":
        return min(max(line, 0), length - 1)
    if padding == "reflect":
        line %= max(2 * length - 2, 1)
        return min(line, 2 * length - 2 - line)
    line %= 2 * length
    return min(line, 2 * length - 1 - line)


def _blocks(
    count: int, shape: tuple[int, ...], around: tuple[int, ...], fill: tuple[float, ...]
) -> tuple[Image, Image]:
    """Return this thread's memory for images gathered, and for them with `fill` around them."""
    key = (shape, around, fill)
    held = _LOCAL.blocks
    if held is None or held[0] != key or len(held[1]) < count:
        height, width, channels = shape
        above, below, before, behind = around
        gathered = np.empty((count, height * width * channels), np.uint8)
        block = np.empty(
            (count, height + above + below, width + before + behind, channels), np.uint8
        )
        block[...] = fill  # its borders keep it, the images change
        held = _LOCAL.blocks = (key, gathered, block)
    return held[1][:count], held[2][:count]


def nv12_box(image: Image, y: int, x: int, h: int, w: int, scratch: Scratch) -> Image:
    """Return RGB (h, w, 3) of a box of an NV12 image (H*3//2, W), a view of `scratch`.

    Converting first and resizing the RGB pixels is faster than resizing luma and chroma apart
    and converting the result (RandomResizedCrop 224 of 256x256: 65 against 86 us; raw RGB 55),
    and lets boxes be any, the same as for store=raw.
    """
    lines, width = image.shape
    height = lines * 2 // 3
    top, bottom, left = y & -2, (y + h + 1) & -2, x & -2
    right = left + max((x + w - left + _STRIDE - 1) & -_STRIDE, _FOLLOWED)
    if right > width:
        left, right = max(width - right + left, 0), width
    luma = image[top:bottom, left:right]
    chroma = image[height + top // 2 : height + bottom // 2, left:right]
    # one shape for all images of one size: the scratch memory then has its array at hand
    rgb = scratch(height, width, 3)[: bottom - top, : right - left]
    cv2.cvtColorTwoPlane(
        luma, chroma.reshape((bottom - top) // 2, -1, 2), cv2.COLOR_YUV2RGB_NV12, rgb
    )
    return rgb[y - top : y - top + h, x - left : x - left + w]
