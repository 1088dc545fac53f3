"""What a JPEG file says about itself before its pixels, read by a marker scan of a few µs.

Sources: ITU-T T.81 annex B (markers), Exif 2.32 section 4.6 (the orientation tag).
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["MAX_SCANS", "JpegHeader", "check_scans", "read_header"]

MAX_SCANS = 100
"""Most scans of a file that is decoded; encoders' own scripts make 10 or so.

Every scan of a progressive file goes over all of the image, and may have next to no bytes: a small
file of thousands keeps a decoder busy for minutes. libjpeg-turbo's authors describe it ("Two Issues
with the JPEG Standard", 2015) and leave the limit to applications; their own tests take 500.
"""

_SOI, _EOI, _SOS, _DRI, _APP1 = 0xD8, 0xD9, 0xDA, 0xDD, 0xE1
_SEQUENTIAL = (0xC0, 0xC1, 0xC9)
_NEXT_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")  # not those without a segment
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ORIENTATION_TAG = 0x0112
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


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
    """Scan the markers up to the first scan; ValueError where they make no JPEG header."""
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
    """Raise ValueError for a file of more than MAX_SCANS scans, without decoding any."""
    if header.frame in _SEQUENTIAL and header.scan_components == header.components:
        return  # one scan, and decoders refuse another
    at, scans = header.scan_start, 1
    while found := _NEXT_MARKER.search(data, at):
        marker, at = data[found.start() + 1], found.end()
        if marker in (_SOI, _EOI):
            return
        if marker == _SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise ValueError(f"it has more than {MAX_SCANS} scans, which no encoder writes")
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
