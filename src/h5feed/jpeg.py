"""JPEG files and NV12 pixels: headers, decoding (whole or a region), encoding.

Sources: ITU-T T.81 (annex B: markers), Exif 2.32 section 4.6 (the orientation tag).
"""

import io
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, JpegImagePlugin

from h5feed.system import is_out_of_memory

__all__ = [
    "MAX_JPEG_SIDE",
    "MAX_PIXELS",
    "MAX_SCANS",
    "Box",
    "JpegHeader",
    "JpegRegions",
    "SegmentsError",
    "check_scans",
    "decode_jpeg",
    "decode_strictly",
    "encode_jpeg",
    "nv12_to_rgb",
    "orient",
    "pixels_in_bands",
    "read_header",
    "restart_segments",
    "rgb_to_nv12",
    "segment_grid",
    "splice_regions",
]

UInt8 = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Box = tuple[int, int, int, int]
"""Top, left, height, width in pixels."""

MAX_JPEG_SIDE = 65_500
"""Pixels: libjpeg's JPEG_MAX_DIMENSION."""

MAX_PIXELS = 178_956_970
"""Default cap of an image, 0.5 GiB of RGB: the size at which Pillow, too, refuses to open one."""

MAX_SCANS = 100
"""Most scans of a file that is decoded; encoders' own scripts make 10 or so.

Every scan of a progressive file goes over all of the image, and may have next to no bytes: a small
file of thousands keeps a decoder busy for minutes. libjpeg-turbo's authors describe it ("Two Issues
with the JPEG Standard", 2015) and leave the limit to applications; their own tests take 500.
"""
_MOST_SCANNED = 18 * MAX_PIXELS
"""Pixels that all scans of a larger file may go over: 1 to 4 s (0.4 to 1.2 ns a pixel and scan)."""
_ORDINARY_SCANS = 18
"""Scans of a file of any size: libjpeg's scripts have 18 for CMYK, 14 for RGB, 10 for YCbCr."""

_SOI, _EOI, _SOS, _DRI, _APP1 = 0xD8, 0xD9, 0xDA, 0xDD, 0xE1
_HUFFMAN = (0xC0, 0xC1)
_SEQUENTIAL = (*_HUFFMAN, 0xC9)
_NEXT_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")  # not those without a segment
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ORIENTATION_TAG = 0x0112
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')

_BAND_PIXELS = 1 << 20
_MCU = 16  # pixels of an MCU's side in what encode_jpeg makes: 4:2:0

_CHROMA = np.array([[-37.797, -74.203, 112, 128 * 255], [112, -93.786, -18.214, 128 * 255]]) / 255
"""Cb and Cr of 8-bit RGB and 1, limited range (ITU-R BT.601-7, section 2.5.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JpegHeader:
    """The facts of a JPEG file's header. Sizes are pixels as stored, before any rotation."""

    height: int
    width: int
    components: int
    """1 gray, 3 color, 4 CMYK or YCCK."""
    frame: int
    """SOF marker: 0xC0 and 0xC1 are sequential Huffman, 0xC2 progressive."""
    height_at: int
    """Where in the file the frame's height is written (two bytes, big endian)."""
    mcu_height: int
    mcu_width: int
    """Pixels that one MCU of an interleaved scan covers."""
    restart_interval: int
    """MCUs between restart markers; 0 where there are none."""
    scan_components: int
    scan_start: int
    """Where the first scan's entropy-coded bytes begin."""
    orientation: int
    """EXIF orientation, 1 (upright) to 8; XMP's where EXIF has none, as in Pillow."""

    @property
    def rotated_shape(self) -> tuple[int, int]:
        """Height and width once the orientation is applied."""
        if self.orientation >= 5:
            return self.width, self.height
        return self.height, self.width


def read_header(data: bytes) -> JpegHeader:
    """Scan the markers up to the first scan; ValueError where they make no JPEG header.

    >>> header = read_header(encode_jpeg(np.zeros((40, 60, 3), np.uint8), 90))
    >>> header.height, header.width, header.restart_interval
    (40, 60, 2)
    """
    frame: tuple[int, int, int, int, int, int, int] | None = None
    interval = 0
    exif = xmp = None
    for marker, start, end in _segments(data):
        if marker in _FRAMES:
            if frame is not None:
                raise ValueError("damaged JPEG header: two frames before the first scan")
            frame = (marker, start + 1, *_read_frame(data, start, end))
        elif marker == _DRI and end - start >= 2:
            interval = int.from_bytes(data[start : start + 2], "big")
        elif marker == _APP1 and exif is None and data[start : start + 6] == b"Exif\0\0":
            exif = data[start + 6 : end]
        elif marker == _APP1 and data[start : start + 5] == b"http:":
            xmp = data[start:end]
        elif marker == _SOS:
            if frame is None or start >= end:
                raise ValueError("damaged JPEG header: a scan without a frame")
            kind, height_at, height, width, components, mcu_height, mcu_width = frame
            return JpegHeader(
                height=height,
                width=width,
                components=components,
                frame=kind,
                height_at=height_at,
                mcu_height=mcu_height,
                mcu_width=mcu_width,
                restart_interval=interval,
                scan_components=data[start],
                scan_start=end,
                orientation=_exif_orientation(exif) or _xmp_orientation(xmp) or 1,
            )
    raise ValueError("truncated JPEG header")


def check_scans(data: bytes, header: JpegHeader) -> None:
    """Raise ValueError for a file of too many scans for its size, without decoding any.

    MAX_SCANS of up to 32 megapixels, and fewer of larger ones, down to 18.
    """
    if header.frame in _SEQUENTIAL and header.scan_components == header.components:
        return  # one scan, and decoders refuse another
    pixels = max(1, header.height * header.width)
    most = max(_ORDINARY_SCANS, min(MAX_SCANS, _MOST_SCANNED // pixels))
    at, scans = header.scan_start, 1
    while found := _NEXT_MARKER.search(data, at):
        marker, at = data[found.start() + 1], found.end()
        if marker in (_SOI, _EOI):
            return
        if marker == _SOS:
            scans += 1
            if scans > most:
                size = f"{header.height}x{header.width}"
                raise ValueError(
                    f"it has more than {most} scans, which no encoder writes at {size}"
                )
        at += int.from_bytes(data[at : at + 2], "big")


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of each segment's content, the first scan's header last."""
    if data[:2] != b"\xff\xd8":
        raise ValueError("not a JPEG file")
    at, size = 2, len(data)
    while True:
        while at < size and data[at] != 0xFF:
            at += 1  # libjpeg skips stray bytes between segments
        while at < size and data[at] == 0xFF:
            at += 1
        if at + 3 > size:
            raise ValueError("truncated JPEG header")
        marker = data[at]
        at += 1
        if marker in _STANDALONE or marker == 0:
            continue
        length = data[at] << 8 | data[at + 1]
        if length < 2 or at + length > size:
            raise ValueError("truncated JPEG header")
        yield marker, at + 2, at + length
        if marker == _SOS:
            return
        at += length


def _read_frame(data: bytes, start: int, end: int) -> tuple[int, int, int, int, int]:
    """Return height, width, components, MCU height, MCU width of a frame header."""
    if end - start < 6:
        raise ValueError("damaged JPEG header: short frame")
    height, width, components = struct.unpack_from(">HHB", data, start + 1)
    sampling = data[start + 7 : end : 3]
    if components == 0 or len(sampling) < components:
        raise ValueError("damaged JPEG header: short frame")
    if components == 1:
        return height, width, 1, 8, 8  # a scan of one component has MCUs of one block
    across = max(factors >> 4 for factors in sampling[:components])
    down = max(factors & 15 for factors in sampling[:components])
    return height, width, components, 8 * down, 8 * across


def _exif_orientation(exif: bytes | None) -> int:
    """Return the first directory's orientation; 0 where it has none or is damaged."""
    if exif is None or exif[:2] not in (b"II", b"MM"):
        return 0
    order = "<" if exif[:2] == b"II" else ">"
    try:
        (directory,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, directory)
        for entry in range(directory + 2, directory + 2 + 12 * count, 12):
            tag, kind, values = struct.unpack_from(order + "HHI", exif, entry)
            if tag == _ORIENTATION_TAG:
                if values != 1 or kind not in (3, 4):
                    return 0
                (value,) = struct.unpack_from(order + ("H" if kind == 3 else "I"), exif, entry + 8)
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 0


def _xmp_orientation(xmp: bytes | None) -> int:
    match = _XMP_ORIENTATION.search(xmp) if xmp is not None else None
    value = int(match[1]) if match else 0
    return value if 1 <= value <= 8 else 0


def decode_jpeg(
    data: Any,
    out: UInt8 | None = None,
    *,
    apply_orientation: bool = True,
    header: JpegHeader | None = None,
) -> UInt8:
    """Decode a JPEG file (any bytes-like object) to RGB: uint8 (H, W, 3), C-contiguous.

    With `out`, a writable uint8 (H, W, 3) array of the image's size after rotation, the
    pixels land there and `out` is returned. `apply_orientation=False` leaves the EXIF
    orientation aside. `header` is what `read_header` made of `data`, where that is known.

    A file that libjpeg-turbo warns about is left to Pillow, which forgives stray bytes; one
    whose pixels end early is refused by both, and one of too many scans (`check_scans`)
    before it is decoded. Raises ValueError with the reason, MemoryError where it is not the
    file's fault.

    >>> data = encode_jpeg(np.full((40, 60, 3), 128, np.uint8), 90)
    >>> decode_jpeg(data).shape
    (40, 60, 3)
    """
    content = bytes(data)
    if header is None:
        header = read_header(content)
    check_scans(content, header)
    turn = header.orientation if apply_orientation else 1
    if turn == 1 and out is not None and out.flags.c_contiguous:
        pixels = _decode(content, out)
    else:
        pixels = orient(_decode(content, None), turn)
    if out is None:
        return np.ascontiguousarray(pixels)
    if pixels.shape != out.shape:
        raise ValueError(f"the image is {pixels.shape}, the place for it is {out.shape}")
    if pixels is not out:
        np.copyto(out, pixels)
    return out


def decode_strictly(data: Any, out: UInt8 | None = None) -> UInt8:
    """Decode a JPEG file that `encode_jpeg` made, as it lies, forgiving nothing.

    `out` is C-contiguous; the caller knows that its size is the file's. Raises ValueError for
    whatever libjpeg-turbo warns about.
    """
    try:
        pixels: UInt8 = simplejpeg.decode_jpeg(data, "RGB", buffer=out, strict=True)
    except ValueError as ex:
        if is_out_of_memory(ex):
            raise MemoryError(str(ex)) from ex
        early = "premature end" in str(ex).lower()
        raise ValueError("truncated" if early else f"damaged ({ex})") from ex
    return out if out is not None and pixels.shape == out.shape else pixels


def _decode(data: bytes, out: UInt8 | None) -> UInt8:
    try:
        return decode_strictly(data, out)
    except ValueError as ex:
        if str(ex) == "truncated":
            raise
        return _decode_forgiving(data)


def _decode_forgiving(data: bytes) -> UInt8:
    try:
        # Not Image.open: its decompression-bomb check is a process-wide setting.
        image = JpegImagePlugin.JpegImageFile(io.BytesIO(data))
        return pixels_in_bands(image, lambda part: np.asarray(part.convert("RGB")))
    except Exception as ex:  # Pillow raises nearly every class on damaged files
        if is_out_of_memory(ex):
            raise MemoryError(str(ex)) from ex
        raise ValueError("truncated" if "truncated" in str(ex) else "damaged") from ex


# Decoding only the part that a crop needs. A restart marker resets the entropy coder, so the bytes
# between two of them can be decoded without those before. `splice_regions` builds a smaller JPEG
# file of the header, with its height and width patched, and of the segments that the crop touches.
# One more pixel on each side is kept for the chroma upsampling, which looks at its neighbors, so
# that every pixel of the crop is exactly what decoding the whole gives. Nothing is parsed: where a
# segment lies is known from the lengths of all, and numpy works that out for many images at once.
# Source: ITU-T T.81, sections B.2.1 (order of segments), E.1.4 and F.2.1.3 (restart intervals).


def segment_grid(height: Any, width: Any) -> tuple[Any, Any]:
    """Return how many rows and columns of restart segments `encode_jpeg` makes of these sizes.

    Of ints or of int arrays.

    >>> segment_grid(256, 256), segment_grid(100, 75)
    ((16, 8), (7, 5))
    """
    across = -(-width // _MCU)
    return -(-height // _MCU), across // _restart_interval(across)


def restart_segments(data: bytes) -> npt.NDArray[np.uint16]:
    """Return the lengths (bytes) of the restart segments of what `encode_jpeg` made, in order.

    Each with the marker that ends it, RST or EOI. ValueError where they are not those of
    `segment_grid`.
    """
    header = read_header(data)
    made = header.mcu_height, header.mcu_width, header.restart_interval
    interval = _restart_interval(-(-header.width // _MCU))
    scan = np.frombuffer(data, np.uint8, offset=header.scan_start)
    marks = (scan[:-1] == 0xFF).nonzero()[0] + 1
    codes = scan[marks]
    ends = marks[(codes & 0xF8 == 0xD0) | (codes == _EOI)] + 1
    lengths = np.diff(ends, prepend=0)
    down, across = segment_grid(header.height, header.width)
    is_ours = made == (_MCU, _MCU, interval) and len(lengths) == down * across
    if not is_ours or ends[-1] != len(scan) or lengths.max() > 0xFFFF:
        raise ValueError("it has other restart segments than pack-h5 writes")
    return np.asarray(lengths, "<u2")


@dataclass(frozen=True, slots=True, kw_only=True)
class JpegRegions:
    """Parts of JPEG files, each a file of its own to be decoded by `decode_strictly`."""

    files: list[memoryview]
    places: list[list[int]]
    """Top, left, height, width of each part in its image."""


def splice_regions(
    data: UInt8,
    starts: Ints,
    sizes: Ints,
    headers: Sequence[tuple[JpegHeader, bytes]],
    segments: npt.NDArray[np.uint16],
    boxes: Ints,
) -> JpegRegions:
    """Make files of at least the pixels of `boxes` out of n JPEG files that `encode_jpeg` made.

    `starts` and `sizes` (n) say where in `data`, uint8 (bytes,), each file lies; `headers` what
    each begins with, parsed and in bytes; `segments` are the lengths of `restart_segments`, of all
    files one after the other; `boxes` (n, 4) top, left, height, width. Raises SegmentsError for
    the first file whose segments are not those of its bytes: each must end in its own marker.

    >>> image = encode_jpeg(np.zeros((256, 256, 3), np.uint8), 90)
    >>> header, where = read_header(image), np.array([0])
    >>> made = splice_regions(
    ...     np.frombuffer(image, np.uint8), where, where + len(image),
    ...     [(header, image[: header.scan_start])], restart_segments(image),
    ...     np.array([[100, 100, 20, 20]]),
    ... )
    >>> made.places[0], decode_strictly(made.files[0]).shape
    ([96, 96, 25, 25], (25, 25, 3))
    """
    facts = np.array([(h.scan_start, h.height_at, h.height, h.width) for h, _ in headers], np.int64)
    head, size_at, height, width = facts.T
    down, across = segment_grid(height, width)
    counts = down * across
    firsts = counts.cumsum() - counts  # in `segments`, of each file's
    ends = np.zeros(len(segments) + 1, np.int64)
    segments.cumsum(out=ends[1:])
    base = starts + head - ends[firsts]  # what makes an address in `data` of one in `ends`
    _check_segments(data, ends, base, counts, starts + sizes)

    rows, columns, places = _touched(boxes, height, width, across)
    all_across = columns[1] - columns[0] == across  # whose rows lie back to back
    pieces = np.where(all_across, 1, rows[1] - rows[0])
    wide = np.where(all_across, (rows[1] - rows[0]) * across, columns[1] - columns[0])
    of = np.repeat(np.arange(len(starts)), pieces)
    first = (firsts + rows[0] * across + columns[0])[of] + _counted(pieces) * across[of]
    last = first + wide[of]
    froms, untils = (base[of] + ends[first]).tolist(), (base[of] + ends[last]).tolist()

    view = data.data
    ranges = zip(froms, untils, strict=True)
    parts: list[bytes | memoryview] = []
    for (_, content), count in zip(headers, pieces.tolist(), strict=True):
        parts.append(content)
        parts += [view[a:b] for a, b in islice(ranges, count)]
    joined = bytearray().join(parts)

    # Every segment came with the marker that closed it; they count from RST0 again in each file.
    used = pieces * wide
    lengths = segments[np.repeat(first, wide[of]) + _counted(wide[of])]
    stops = lengths.cumsum(dtype=np.int64) + np.repeat(head.cumsum(), used)
    marks = 0xD0 | (_counted(used) & 7)
    closing = used.cumsum() - 1
    marks[closing] = _EOI
    memory = np.frombuffer(joined, np.uint8)
    memory[stops - 1] = marks
    until = stops[closing]
    begin = np.concatenate(([0], until[:-1]))
    sides = np.stack([places[:, 2] >> 8, places[:, 2], places[:, 3] >> 8, places[:, 3]], axis=1)
    memory[(begin + size_at)[:, None] + np.arange(4)] = sides & 0xFF
    whole = memoryview(joined)
    files = [whole[a:b] for a, b in zip(begin.tolist(), until.tolist(), strict=True)]
    return JpegRegions(files=files, places=places.tolist())


class SegmentsError(ValueError):
    """The segments of a file are not those of its bytes."""

    def __init__(self, number: int) -> None:
        super().__init__("the lengths of its restart segments are not those of its bytes")
        self.number = number
        """Which of the files given."""


def _check_segments(data: UInt8, ends: Ints, base: Ints, counts: Ints, stops: Ints) -> None:
    """Raise SegmentsError for the first file with a segment that ends in the wrong place."""
    closing = counts.cumsum()
    lasts = ends[1:] + (np.repeat(base, counts) - 1)  # the byte that closes each segment
    codes = 0xD0 | (_counted(counts) & 7)
    codes[closing - 1] = _EOI
    wrong = data.take(lasts, mode="clip") != codes  # what lies outside is found wrong below
    wrong |= data.take(lasts - 1, mode="clip") != 0xFF
    wrong[closing - 1] |= lasts[closing - 1] + 1 != stops
    if wrong.any():
        raise SegmentsError(int(np.searchsorted(closing, wrong.argmax(), side="right")))


def _touched(boxes: Ints, height: Ints, width: Ints, across: Ints) -> tuple[Any, Any, Ints]:
    """Return the first and last+1 row and column of segments that boxes need, and their places.

    libjpeg-turbo upsamples chroma of up to 2 samples a row in another way: so there are 5 pixels,
    where the image has as many.
    """
    step = _MCU * (-(-width // _MCU) // across)  # pixels that a segment is wide
    y, x, h, w = boxes.T
    r0 = np.maximum(y - 1, 0) // _MCU
    c0 = np.maximum(np.minimum(x - 1, width - 5), 0) // step
    bottom, right = np.minimum(y + h + 1, height), np.minimum(x + w + 1, width)
    top, left = r0 * _MCU, c0 * step
    right = np.maximum(right, np.minimum(left + 5, width))
    r1, c1 = -(-bottom // _MCU), -(-right // step)
    # all MCUs of a segment are to be part of the smaller image
    right = np.maximum(right, c1 * step - (_MCU - 5))
    places = np.stack([top, left, bottom - top, np.minimum(right, width) - left], axis=1)
    return (r0, r1), (c0, c1), places


def _counted(counts: Ints) -> Ints:
    """Return 0, 1, … for each of `counts`, one after the other.

    >>> _counted(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ends = counts.cumsum()
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


def pixels_in_bands(image: Image.Image, convert: Callable[[Image.Image], UInt8]) -> UInt8:
    """Return uint8 (H, W, …) pixels of a Pillow image, converted some rows at a time.

    The whole at once takes 14 to 28 bytes a pixel, for Pillow and numpy copy at every step;
    so it is Pillow's 4 at most, and the result's own.
    """
    image.load()
    rows = max(1, _BAND_PIXELS // max(1, image.width))
    if rows >= image.height:
        return convert(image)
    first = convert(image.crop((0, 0, image.width, rows)))
    out = np.empty((image.height, *first.shape[1:]), np.uint8)
    out[:rows] = first
    for top in range(rows, image.height, rows):
        below = min(top + rows, image.height)
        out[top:below] = convert(image.crop((0, top, image.width, below)))
    return out


def orient(pixels: UInt8, orientation: int) -> UInt8:
    """Turn (H, W) or (H, W, C) pixels upright by an EXIF orientation; a view of the input.

    >>> orient(np.zeros((40, 60, 3), np.uint8), 6).shape  # 6: lies on its side
    (60, 40, 3)
    """
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def encode_jpeg(pixels: UInt8, quality: int) -> bytes:
    """Encode RGB uint8 (H, W, 3) as a 4:2:0 baseline JPEG, `quality` 1 to 100 as in libjpeg.

    A restart marker follows every two MCUs (32 pixels), so that a reader can decode just the
    part a crop needs (`splice_regions`). It costs 2 % of the bytes at 256² and quality 90
    (measured on 500 photos), and at most 5 % of the time to decode the whole. Markers after every
    MCU would be 4 % of the bytes and save 4 % of the time for RandomResizedCrop's part; after every
    4, 8 and 16 that part takes 2, 19 and 22 % longer. Raises
    ValueError for a side over MAX_JPEG_SIDE.
    """
    if max(pixels.shape[:2]) > MAX_JPEG_SIDE:
        raise ValueError(f"JPEG holds {MAX_JPEG_SIDE} pixels a side, not {pixels.shape[:2]}")
    options = [
        cv2.IMWRITE_JPEG_QUALITY,
        quality,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
        cv2.IMWRITE_JPEG_RST_INTERVAL,
        int(_restart_interval(-(-pixels.shape[1] // _MCU))),
    ]
    return cv2.imencode(".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), options)[1].tobytes()


def _restart_interval(across: Any) -> Any:
    """Return MCUs per restart interval: a divisor of a row's, so that rows begin with one."""
    even, threes = across % 2 == 0, across % 3 == 0
    return 1 + even + 2 * (threes > even)


def rgb_to_nv12(pixels: UInt8) -> UInt8:
    """Convert RGB uint8 (H, W, 3), H and W even, to NV12 (H·3/2, W), BT.601 limited range.

    Chroma is the mean of each 2 × 2 pixels: 40.9 dB (median of 200 photos at 256²) after the
    way back, where cvtColor, which takes one pixel of the four, gives 38.2 dB.

    >>> nv12 = rgb_to_nv12(np.full((4, 4, 3), 255, np.uint8))
    >>> nv12.shape, int(nv12[0, 0]), nv12_to_rgb(nv12).shape
    ((6, 4), 235, (4, 4, 3))
    """
    height, width = pixels.shape[:2]
    nv12 = np.empty((height * 3 // 2, width), np.uint8)
    nv12[:height] = cv2.cvtColor(pixels, cv2.COLOR_RGB2YUV_I420)[:height]
    quarter = cv2.resize(pixels, (width // 2, height // 2), interpolation=cv2.INTER_AREA)
    chroma = nv12[height:].reshape(height // 2, width // 2, 2)
    cv2.transform(quarter, _CHROMA, dst=chroma)
    return nv12


def nv12_to_rgb(nv12: UInt8, out: UInt8 | None = None) -> UInt8:
    """Convert NV12 uint8 (H·3/2, W) to RGB uint8 (H, W, 3), into `out` where one is given."""
    height = nv12.shape[0] * 2 // 3
    chroma = nv12[height:].reshape(height // 2, nv12.shape[1] // 2, 2)
    rgb: Any = cv2.cvtColorTwoPlane(nv12[:height], chroma, cv2.COLOR_YUV2RGB_NV12, dst=out)
    return np.asarray(rgb, np.uint8)
