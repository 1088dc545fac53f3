"""Decode only the part of a JPEG that a crop needs.

A restart marker resets the entropy coder, so the bytes between two of them can be decoded
without those before. `decode_jpeg_region` builds a smaller JPEG file of the header, with its
height and width patched, and of the segments that the crop touches, and decodes that. One
more pixel on each side is kept for the chroma upsampling, which looks at its neighbors, so
that every pixel of the crop is exactly what decoding the whole image gives.

Source: ITU-T T.81, sections B.2.1 (order of segments), E.1.4 and F.2.1.3 (restart intervals).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from h5feed.codec import decode_jpeg, decode_strictly
from h5feed.jpeg_header import JpegHeader, read_header

__all__ = ["Box", "decode_jpeg_region"]

UInt8 = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]

_SEQUENTIAL = (0xC0, 0xC1)
_EOI = 0xD9


def decode_jpeg_region(
    data: Any, box: Box, scratch: UInt8 | None = None, *, ours: JpegHeader | None = None
) -> tuple[UInt8, int, int]:
    """Decode at least the pixels of `box` (top, left, height, width) of a JPEG file.

    Returns (pixels, top, left): RGB uint8 (h, w, 3), C-contiguous, whose pixel (0, 0) is the
    image's (top, left). Without usable restart markers that is the whole image. The EXIF
    orientation is not applied, and `box` is one of the image as stored.

    `scratch`, uint8 (n,), is where the pixels land if they fit: fresh memory costs up to half
    as much again as the decoding (page faults). `ours` is the header of a file that `encode_jpeg`
    made, of which nothing is forgiven. Raises ValueError with the reason; damage outside the
    region goes unnoticed.
    """
    data = bytes(data)
    header = read_header(data) if ours is None else ours
    region = _Region.around(header, box)
    if _can_splice(header) and not region.is_whole:
        spliced = _splice(data, header, region)
        if spliced is not None:
            out = _room(scratch, region.height, region.width)
            try:
                return _decode(spliced, out, ours), region.top, region.left
            except ValueError:
                pass  # the whole file decides, and says what is wrong
    return _decode(data, _room(scratch, header.height, header.width), ours), 0, 0


def _decode(data: Any, out: UInt8 | None, ours: JpegHeader | None) -> UInt8:
    if ours is not None:
        return decode_strictly(data, out)
    return decode_jpeg(data, out, apply_orientation=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """The segments that a box touches: rows r0 to r1 and columns c0 to c1 of their grid."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    grid: tuple[int, int]
    top: int
    left: int
    height: int
    width: int

    @classmethod
    def around(cls, header: JpegHeader, box: Box) -> "_Region":
        tall, wide = header.mcu_height, header.mcu_width * max(header.restart_interval, 1)
        r0, r1, bottom = _span(box[0], box[2], header.height, tall)
        c0, c1, right = _span(box[1], box[3], header.width, wide)
        return cls(
            rows=(r0, r1),
            columns=(c0, c1),
            grid=(-(-header.height // tall), -(-header.width // wide)),
            top=r0 * tall,
            left=c0 * wide,
            height=bottom - r0 * tall,
            width=right - c0 * wide,
        )

    @property
    def is_whole(self) -> bool:
        return (self.rows, self.columns) == ((0, self.grid[0]), (0, self.grid[1]))


def _span(start: int, length: int, size: int, step: int) -> tuple[int, int, int]:
    """Return first and last+1 segment, and the last pixel+1, with one pixel to each side."""
    first = max(start - 1, 0) // step
    last = min(start + length, size - 1) // step + 1
    return first, last, min(last * step, size)


def _can_splice(header: JpegHeader) -> bool:
    """Whether the one scan is a grid of segments, each within a row of MCUs."""
    across = -(-header.width // header.mcu_width)
    return (
        header.restart_interval > 0
        and header.frame in _SEQUENTIAL
        and header.scan_components == header.components
        and across % header.restart_interval == 0
    )


def _splice(data: bytes, header: JpegHeader, region: _Region) -> bytearray | None:
    """Return the smaller file; None where the segments are not what the header promises."""
    down, across = region.grid
    ends = _segment_ends(data, header.scan_start)
    if len(ends) != down * across:
        return None
    starts = np.concatenate(([header.scan_start], ends[:-1])).reshape(down, across)
    ends = ends.reshape(down, across)
    (r0, r1), (c0, c1) = region.rows, region.columns
    firsts, lasts = starts[r0:r1, c0].tolist(), ends[r0:r1, c1 - 1].tolist()
    head = _patched_header(data, header, region)
    pieces = [data[first:last] for first, last in zip(firsts, lasts, strict=True)]
    spliced = bytearray(head + b"".join(pieces))
    # Every segment came with the marker that closed it; they now count from RST0 again.
    lengths = ends[r0:r1, c0:c1] - starts[r0:r1, c0:c1]
    marks = lengths.cumsum() + (len(head) - 1)
    view = np.frombuffer(spliced, np.uint8)
    view[marks] = 0xD0 | (np.arange(len(marks)) & 7)
    view[-1] = _EOI
    return spliced


def _patched_header(data: bytes, header: JpegHeader, region: _Region) -> bytes:
    at = header.height_at
    size = region.height.to_bytes(2, "big") + region.width.to_bytes(2, "big")
    return data[:at] + size + data[at + 4 : header.scan_start]


def _segment_ends(data: bytes, start: int) -> npt.NDArray[np.intp]:
    """Return where each entropy-coded segment ends, its closing marker (RST or EOI) included."""
    scan = np.frombuffer(data, np.uint8, offset=start)
    marks = (scan[:-1] == 0xFF).nonzero()[0] + 1
    codes = scan[marks]
    ends: npt.NDArray[np.intp] = marks[(codes & 0xF8 == 0xD0) | (codes == _EOI)] + (start + 1)
    return ends


def _room(scratch: UInt8 | None, height: int, width: int) -> UInt8 | None:
    """Return a (height, width, 3) view of the start of `scratch`, or None if it is too small."""
    size = height * width * 3
    if scratch is None or len(scratch) < size:
        return None
    return scratch[:size].reshape(height, width, 3)
