"""What a stored item is to Python code: pixels of an image, as array, tensor or PIL image."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image

from h5feed.augment.frame import Shapes
from h5feed.errors import DamagedItemError, UsageError
from h5feed.feed.files import BYTES_CHANGED, GO_ON, PackedFiles, cannot_be
from h5feed.jpeg import (
    JpegHeader,
    JpegRegions,
    SegmentsError,
    decode_jpeg,
    decode_strictly,
    nv12_to_rgb,
    read_header,
    restart_segments,
    splice_regions,
)
from h5feed.optional import require

if TYPE_CHECKING:
    import torch

__all__ = [
    "Aspect",
    "JpegItems",
    "Output",
    "first_squeezed",
    "image_place",
    "image_reader",
    "mask_reader",
    "source_size",
]

Output = Literal["tensor", "pil", "numpy", "tv_tensor"]
Aspect = Literal["stored", "source"]
U8 = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]
_Header = tuple[JpegHeader, bytes]
"""Parsed, and as it lies at the beginning of a file."""

_ENCODED = (0xC0, 3, 3, 1)  # frame, components, those of the first scan, EXIF orientation
_MOST_TIMES = 16  # the stored pixels, in the source's proportions
_MOST_HEADERS = 4096  # 2.5 MB; with fit="keep" each size has its own
_SPLICED = 1 << 20  # bytes of JPEG files of which parts are made at once: they stay in the cache
_AT_ONCE = 1 << 16  # items: the first is found at once, and ten million cost no memory


def image_reader(
    files: PackedFiles, field: str, *, output: Output, aspect: Aspect
) -> Callable[[int], Any]:
    """Return the function that makes item `index` of a field into what `output` says.

    "tensor": uint8 (C, H, W) in channels_last memory, (H, W) for masks; "numpy": uint8
    (H, W, C) or (H, W), read-only; "pil": an RGB or L image; "tv_tensor": the tensor as
    torchvision's Image, or Mask. Views of the file wherever the
    field is raw and nothing is resized (an RGB image of PIL is always a copy).
    """
    read = _stored_reader(files, field, writable=output in ("tensor", "tv_tensor"))
    if aspect == "source":
        read = _true_proportions(files, field, read)
    if files.specs[field].channels == 1:
        read = _without_channel(read)
    if output == "tv_tensor":
        kind = _tv_tensors().Image if field == "images" else _tv_tensors().Mask
        return lambda index: _as_tensor(read(index)).as_subclass(kind)
    finishers: dict[Output, Callable[[U8], Any]] = {
        "tensor": _as_tensor,
        "numpy": _as_readonly,
        "pil": Image.fromarray,
    }
    finish = finishers[output]
    return lambda index: finish(read(index))


def mask_reader(
    files: PackedFiles, *, output: Output, aspect: Aspect, dtype: torch.dtype | None
) -> Callable[[int], Any]:
    """Return the function that makes mask `index` into what `output` says, as `dtype`.

    By default it is as stored, uint8; but int64 with "tv_tensor", which is what losses take.
    Raises UsageError where `output` has no such dtype.
    """
    import torch

    if output == "tv_tensor":
        plain = mask_reader(files, output="tensor", aspect=aspect, dtype=dtype or torch.int64)
        mask = _tv_tensors().Mask
        return lambda index: plain(index).as_subclass(mask)
    read = image_reader(files, "masks", output=output, aspect=aspect)
    if dtype is None:
        return read
    if output == "tensor":
        return lambda index: read(index).to(dtype)
    kind: Any = None
    with suppress(TypeError):  # numpy has no bfloat16
        kind = torch.empty(0, dtype=dtype).numpy().dtype
    if output == "pil" or kind is None:
        raise UsageError(
            f'target_dtype={dtype} is nothing that masks can be with output="{output}": leave it '
            'out, or take output="tensor"'
        )
    return lambda index: read(index).astype(kind)


def _tv_tensors() -> Any:
    return require("torchvision.tv_tensors", "train")


def source_size(stored: tuple[int, int], source: tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) in `source` proportions that just covers `stored`.

    For a square it is what torchvision's Resize(S) makes of the source: the short side S, the
    long one int(S · long / short). Thinner than 1 to 16 it is made smaller, to 16 times the
    stored pixels: of 1x10,000 pixels Resize(256) would make 256x2,560,000.
    """
    (height, width), (true_height, true_width) = stored, source
    if true_height * width >= true_width * height:
        size = max(height, int(width * true_height / true_width)), width
    else:
        size = height, max(width, int(height * true_width / true_height))
    most = _MOST_TIMES * height * width
    if size[0] * size[1] <= most:
        return size
    scale = math.sqrt(most / (size[0] * size[1]))
    short, long = max(1, int(min(size) * scale)), int(max(size) * scale)
    long = min(long, most // short)
    return (long, short) if size[0] > size[1] else (short, long)


def image_place(
    files: PackedFiles, index: int, aspect: Aspect
) -> tuple[tuple[int, int], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return (height, width) of an image, and scale and shift of (x, y) from where it is stored."""
    height, width = files.row("shapes", index).tolist()
    spec, size, shift = files.specs["images"], (height, width), (0, 0)
    if aspect == "source" and files.has_letterbox:
        top, left, height, width = files.row("letterbox", index).tolist()
        size, shift = (height, width), (-left, -top)
    elif aspect == "source" and spec.fit == "stretch" and spec.encoding != "original":
        size = source_size(size, tuple(files.row("source_shapes", index).tolist()))
    scale = np.array([size[1] / width, size[0] / height], np.float32)
    return size, scale, np.array(shift, np.float32)


def first_squeezed(files: PackedFiles) -> int | None:
    """Return the first item that fit="stretch" stored in other than its own proportions.

    By more than a pixel, which is what h5feed.augment takes for squeezed. None where none is.
    """
    spec = files.specs["images"]
    if spec.fit != "stretch" or spec.encoding == "original":
        return None
    for begin in range(0, len(files), _AT_ONCE):
        some = np.arange(begin, min(begin + _AT_ONCE, len(files)))
        source = files.rows("source_shapes", some).astype(np.int64)
        stored = np.broadcast_to(np.array([spec.height, spec.width], np.int64), source.shape)
        shapes = Shapes.stored(stored, source, None)
        squeezed = (shapes.true != shapes.actual).any(axis=1)
        if squeezed.any():
            return begin + int(squeezed.argmax())
    return None


def _stored_reader(files: PackedFiles, field: str, *, writable: bool) -> Callable[[int], U8]:
    """Item → (H, W, C) as stored."""
    encoding = files.specs[field].encoding
    if encoding == "raw":
        return partial(files.writable if writable else files.item, field)
    if encoding == "yuv420":
        return lambda index: nv12_to_rgb(files.item(field, index))
    items = JpegItems(files, field)

    def read(index: int) -> U8:
        try:
            return items.decode(index)
        except ValueError as ex:
            raise files.damaged(field, index, f"cannot be decoded: {ex}") from ex

    return read


class JpegItems:
    """A field's JPEG files, each held against what the packed file says before it is decoded.

    What pack-h5 encoded begins with a header that other items have to the byte, but for the size
    where sizes differ. The first item of each header is held against its checksum; from then on
    it takes one look-up (0.5 µs, where parsing takes 13) to know a header without a wrong bit.
    Headers of the "original" files are parsed. Where a restart segment lies is worked out from
    the lengths that the file has of all, many images at once.
    """

    def __init__(self, files: PackedFiles, field: str) -> None:
        self._files = files
        self._field = field
        self._encoded = files.specs[field].encoding == "jpeg"
        self._known: dict[bytes, _Header] = {}
        self._length = 0  # of the header met last

    def decode(self, index: int, out: U8 | None = None) -> U8:
        """Decode an item, into `out` (C-contiguous) where one is given; ValueError says why not."""
        data = self._files.item(self._field, index)
        if self._encoded:
            self._checked(index, data)
            return decode_strictly(data, _of_size(out, self._files.row("shapes", index).tolist()))
        content = data.tobytes()
        header = read_header(content)
        self._check_size(index, header.rotated_shape)
        return decode_jpeg(content, out, header=header)

    def decode_regions(
        self, indices: Indices, boxes: Indices, scratch: Callable[[int], U8]
    ) -> Iterator[tuple[U8, int, int]]:
        """Decode at least `boxes` (n, 4) of items (n): top, left, height, width.

        Yields (pixels, top, left) of one after the other: RGB uint8 (h, w, 3) in memory that
        `scratch(bytes)` gives, whose pixel (0, 0) is the image's (top, left). Of the "original"
        files that is the whole image. Raises DamagedItemError.
        """
        if not self._encoded:
            for index in indices.tolist():
                height, width = self._files.row("shapes", index).tolist()
                out = scratch(height * width * 3).reshape(height, width, 3)
                try:
                    yield self.decode(index, out), 0, 0
                except ValueError as ex:
                    raise self._damaged(index, ex) from ex
            return
        total = int(self._files.lengths(self._field, indices).sum())
        step = max(1, len(indices) * _SPLICED // max(total, _SPLICED))
        for a in range(0, len(indices), step):
            some = indices[a : a + step]
            regions = self._regions(some, boxes[a : a + step])
            for index, data, (top, left, height, width) in zip(
                some.tolist(), regions.files, regions.places, strict=True
            ):
                out = scratch(height * width * 3).reshape(height, width, 3)
                try:
                    decode_strictly(data, out)
                except ValueError as ex:
                    raise self._damaged(index, ex) from ex
                yield out, top, left

    def _regions(self, indices: Indices, boxes: Indices) -> JpegRegions:
        """Return the parts of items that boxes need; DamagedItemError for a wrong one."""
        data, starts = self._files.payloads(self._field, indices)
        sizes = self._files.lengths(self._field, indices)
        view, headers = data.data, []
        for index, start in zip(indices.tolist(), starts.tolist(), strict=True):
            found = self._known.get(bytes(view[start : start + self._length]))
            try:
                header = found or self._checked(index, self._files.item(self._field, index))
                self._check_size(index, (header[0].height, header[0].width))
            except ValueError as ex:
                raise self._damaged(index, ex) from ex
            headers.append(header)
        segments = self._files.segments(self._field, indices)
        try:
            return splice_regions(data, starts, sizes, headers, segments, boxes)
        except SegmentsError as ex:
            raise self._damaged(int(indices[ex.number]), ex) from ex

    def _damaged(self, index: int, reason: ValueError) -> DamagedItemError:
        return self._files.damaged(self._field, index, cannot_be(reason), GO_ON)

    def _checked(self, index: int, data: U8) -> _Header:
        """Return the header of an item that pack-h5 encoded."""
        header = self._known.get(data[: self._length].tobytes())
        if header is None:
            header = self._learn(index, data.tobytes())
        self._check_size(index, (header[0].height, header[0].width))
        return header

    def _learn(self, index: int, content: bytes) -> _Header:
        header = read_header(content)
        start = content[: header.scan_start]
        if start not in self._known:
            kind = (header.frame, header.components, header.scan_components, header.orientation)
            if kind != _ENCODED:
                raise ValueError("it is not a baseline JPEG of three components")
            self._check_size(index, (header.height, header.width))
            if not self._files.is_intact(index):
                raise ValueError(BYTES_CHANGED)
            restart_segments(content)  # raises ValueError where it has others than we make
            if len(self._known) >= _MOST_HEADERS:
                self._known.clear()
            self._known[start] = header, start
        self._length = len(start)
        return header, start  # another thread may have cleared what is known

    def _check_size(self, index: int, found: tuple[int, int]) -> None:
        height, width = self._files.row("shapes", index).tolist()
        if found != (height, width):
            what = f"{found[0]}x{found[1]}, and the packed file says {height}x{width}"
            raise ValueError(f"its header says {what}")


def _of_size(out: U8 | None, size: list[int]) -> U8 | None:
    """Return `out`, after a look at whether an image of `size` (height, width) fits it."""
    if out is not None and out.shape != (*size, 3):
        raise ValueError(f"the image is {size[0]}x{size[1]}, the place for it {out.shape}")
    return out


def _true_proportions(
    files: PackedFiles, field: str, read: Callable[[int], U8]
) -> Callable[[int], U8]:
    """Undo what fitting did to the proportions: stretched is resized, padded is cut out."""
    spec = files.specs[field]
    if spec.fit == "pad" and files.has_letterbox:

        def cut(index: int) -> U8:
            top, left, height, width = files.row("letterbox", index).tolist()
            return read(index)[top : top + height, left : left + width]

        return cut
    if spec.fit != "stretch" or spec.encoding == "original":
        return read
    # Only ever enlarges, so plain bilinear is what an antialiased one would give.
    filter_ = cv2.INTER_NEAREST_EXACT if spec.interpolation == "nearest" else cv2.INTER_LINEAR

    def resize(index: int) -> U8:
        stored = read(index)
        size = source_size(stored.shape[:2], tuple(files.row("source_shapes", index).tolist()))
        if size == stored.shape[:2]:
            return stored
        resized = np.empty((*size, stored.shape[2]), np.uint8)
        cv2.resize(stored, size[::-1], dst=resized, interpolation=filter_)
        return resized

    return resize


def _without_channel(read: Callable[[int], U8]) -> Callable[[int], U8]:
    def plane(index: int) -> U8:
        pixels: U8 = read(index)[..., 0]
        return pixels

    return plane


def _as_tensor(image: U8) -> torch.Tensor:
    import torch

    if image.ndim == 3:
        image = image.transpose(2, 0, 1)
    return torch.from_numpy(image)


def _as_readonly(image: U8) -> U8:
    view: U8 = image.view()
    view.flags.writeable = False
    return view
