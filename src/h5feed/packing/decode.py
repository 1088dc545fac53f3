"""Image files' bytes to upright RGB pixels, or one short reason why not.

What differs from torchvision's default loader (`Image.open(path).convert("RGB")`):

- EXIF orientation is applied, in every format (torchvision leaves the image lying).
- Alpha is composited on `background`: RGBA, gray with alpha, palettes with transparent
  entries, and a transparent color (torchvision drops alpha and shows what lay under it).
- 16-bit gray is scaled by keeping the high byte, `v >> 8`, which is what Pillow and libpng do
  to 16-bit color (torchvision clips it: anything above 255 becomes white). Pillow scales
  PNM files of any other range to the full one.
- Floating-point, 32-bit and L*a*b* pixels have no fixed range or no RGB and are refused.
- The first frame of GIF, WebP and TIFF stands for the whole, as in torchvision.
- A JPEG file that libjpeg-turbo finds cut short is refused, also where a later end marker
  makes other readers fill the rest with gray. Stray bytes are forgiven, as in Pillow.
"""

import io
import mmap
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from h5feed.errors import H5FeedError
from h5feed.jpeg import MAX_PIXELS, decode_jpeg, orient, pixels_in_bands, read_header
from h5feed.system import is_out_of_memory
from h5feed.text import in_bytes

__all__ = [
    "BYTES_PER_PIXEL",
    "DecodeError",
    "decode_mask",
    "decode_rgb",
    "image_to_rgb",
    "read_file",
    "read_size",
    "whole_images_only",
]

UInt8 = npt.NDArray[np.uint8]
Color = tuple[int, int, int]

BYTES_PER_PIXEL = 12
"""Of memory that decoding may take for each of `max_pixels`, the file's bytes included."""
_SPARE_BYTES = 64 << 20
"""More than a small image takes, whatever its format and metadata."""

EMPTY = "empty file"
NOT_AN_IMAGE = "not an image in a known format"
TRUNCATED = "truncated"
DAMAGED = "damaged"
TOO_LARGE = "too many pixels"
UNSUPPORTED = "unsupported pixels"
ORIENTATION_TAG = 0x0112

_JPEG = b"\xff\xd8"
_SEQUENTIAL = (0xC0, 0xC1)
# Without O_NONBLOCK, opening a named pipe would wait for its writer for good.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_PNG_DEPTH = 24  # where IHDR, always the first chunk, says how many bits a sample has
_OPENERS: tuple[tuple[bytes, Callable[[io.BytesIO], ImageFile.ImageFile]], ...] = (
    (_JPEG, JpegImagePlugin.JpegImageFile),
    (b"\x89PNG\r\n\x1a\n", PngImagePlugin.PngImageFile),
    (b"GIF8", GifImagePlugin.GifImageFile),
    (b"BM", BmpImagePlugin.BmpImageFile),
    (b"RIFF", WebPImagePlugin.WebPImageFile),
    (b"II", TiffImagePlugin.TiffImageFile),
    (b"MM", TiffImagePlugin.TiffImageFile),
    (b"P", PpmImagePlugin.PpmImageFile),
)


class DecodeError(H5FeedError):
    """A file cannot be packed as an image."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        """One of a few fixed texts, to count by."""
        self.detail = detail
        """What is known beyond the reason; may be empty."""

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


def memory_cap(max_pixels: int) -> int:
    """Return the most bytes that a file and its decoding may take."""
    return BYTES_PER_PIXEL * max_pixels + _SPARE_BYTES


def read_file(
    path: bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    most: int | None = None,
    extent: tuple[int, int] | None = None,
) -> bytes:
    """Read a file, its first `most` bytes where that is given.

    `extent` is where the file lies in another one, which `path` names: first byte and length.

    Without Python's buffering, which costs small files 10 µs each. Raises DecodeError where
    it is not a regular file or too large to decode, and OSError.
    """
    handle = os.open(path, _OPEN_FLAGS)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise DecodeError("not a regular file")
        at, size = extent or (0, status.st_size)
        if size > memory_cap(max_pixels):
            raise DecodeError(
                "file too large",
                f"{in_bytes(size)}, more than {BYTES_PER_PIXEL} bytes for each of "
                f"max_pixels={max_pixels}",
            )
        size = size if most is None else min(size, most)
        if at:
            os.lseek(handle, at, os.SEEK_SET)
        data = os.read(handle, size + (most is None and extent is None))
        while len(data) < size:
            more = os.read(handle, size - len(data))
            if not more:
                break
            data += more
        return data
    finally:
        os.close(handle)


def decode_rgb(
    data: bytes, *, background: Color = (255, 255, 255), max_pixels: int = MAX_PIXELS
) -> UInt8:
    """Decode an image file to upright RGB: uint8 (H, W, 3), C-contiguous.

    Raises DecodeError whatever the bytes are, and MemoryError where memory ran out, which is
    not the file's fault. The header's size is held against `max_pixels` before any pixel is
    decoded, and so is the memory that decoding takes (`BYTES_PER_PIXEL`).
    """
    with _refusals(data):
        if data.startswith(_JPEG):
            header = read_header(data)
            _check_size(header.height, header.width, max_pixels)
            _check_bytes(data, header.height, header.width, max_pixels)
            return decode_jpeg(data)
        image = _open(data, max_pixels)
        turn = _orientation(image)
        pixels = image_to_rgb(image, background)
        del image  # its pixels, before those of the turned copy are made
        return np.ascontiguousarray(orient(pixels, turn))


def decode_mask(data: bytes, *, max_pixels: int = MAX_PIXELS) -> UInt8:
    """Decode a mask of class numbers, upright: uint8 (H, W), C-contiguous.

    Gray levels are class numbers, palette entries count by their index, 1-bit pixels are 0
    and 1. Gray stored as color is accepted where the channels are equal, and alpha is left out.
    Raises DecodeError, and MemoryError where memory ran out.
    """
    with _refusals(data):
        image = _open(data, max_pixels)
        turn = _orientation(image)
        if image.format == "PNG" and data[_PNG_DEPTH] > 8 and len(image.getbands()) > 1:
            # Pillow would keep the high byte of each number: 0 for every class.
            raise DecodeError(UNSUPPORTED, "a mask of 16 bits needs one channel")
        kind = image.getbands()
        return np.ascontiguousarray(
            orient(pixels_in_bands(image, lambda part: _to_classes(part, kind)), turn)
        )


def read_size(data: bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return height and width after rotation, from the header alone; raises DecodeError."""
    with _refusals(data):
        return _upright_size(data, max_pixels)


def _upright_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    if data.startswith(_JPEG):
        header = read_header(data)
        _check_size(header.height, header.width, max_pixels)
        return header.rotated_shape
    image = _open(data, max_pixels)
    width, height = image.size
    return (width, height) if _orientation(image) >= 5 else (height, width)


@contextmanager
def _refusals(data: bytes) -> Iterator[None]:
    """Turn whatever a decoder raises on `data` into a DecodeError, or into a MemoryError."""
    try:
        yield
    except DecodeError:
        raise
    except Exception as ex:  # Pillow raises nearly every class on damaged files
        # Some decoders only say that they failed: then ask whether there was memory to succeed.
        if is_out_of_memory(ex) or not _is_free(_decoding_bytes(data)):
            raise MemoryError(str(ex)) from ex
        raise DecodeError(*_reason(ex)) from ex


@contextmanager
def whole_images_only() -> Iterator[None]:
    """Have Pillow refuse truncated files also where the program has told it to fill them up.

    LOAD_TRUNCATED_IMAGES is Pillow's for the whole process; so this is for a run, not a file.
    """
    asked = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = asked


def _is_free(size: int) -> bool:
    """Whether the system would give this process `size` more bytes; nothing is touched."""
    try:
        mmap.mmap(-1, size).close()
    except (OSError, OverflowError):
        return False
    return True


def _reason(ex: Exception) -> tuple[str, str]:
    text = str(ex).lower()
    if isinstance(ex, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return TOO_LARGE, "more than Pillow decodes in this format"
    if isinstance(ex, EOFError) or "truncated" in text:
        return TRUNCATED, ""
    if isinstance(ex, SyntaxError) and text.startswith("not a"):
        return NOT_AN_IMAGE, ""
    return DAMAGED, str(ex) if "scans" in text else ""


def _open(data: bytes, max_pixels: int) -> ImageFile.ImageFile:
    """Read a file's header by the plugin its first bytes name.

    Not Image.open: its decompression-bomb check is a process-wide setting, which packing
    would have to change for everybody.
    """
    if not data:
        raise DecodeError(EMPTY)
    if data.startswith(b"RIFF"):
        if len(data) < 8 + int.from_bytes(data[4:8], "little"):
            raise DecodeError(TRUNCATED)  # libwebp only says that it failed
        height, width = _webp_size(data)
        _check_size(height, width, max_pixels)
        _check_bytes(data, height, width, max_pixels)
    for magic, opener in _OPENERS:
        if data.startswith(magic):
            image = opener(io.BytesIO(data))
            _check_size(image.height, image.width, max_pixels)
            _check_bytes(data, image.height, image.width, max_pixels)
            return image
    raise DecodeError(NOT_AN_IMAGE)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height < 1 or width < 1:
        raise DecodeError(DAMAGED, f"{height}x{width} pixels")
    if height * width > max_pixels:
        raise DecodeError(TOO_LARGE, f"{height}x{width}, more than max_pixels={max_pixels}")


def _check_bytes(data: bytes, height: int, width: int, max_pixels: int) -> None:
    """Hold the memory that decoding takes, the file's own bytes included, against the cap."""
    need = len(data) + _bytes_per_pixel(data) * height * width
    if need > memory_cap(max_pixels):
        raise DecodeError(
            TOO_LARGE,
            f"{height}x{width} take {in_bytes(need)} to decode, more than {BYTES_PER_PIXEL} bytes "
            f"for each of max_pixels={max_pixels}",
        )


def _bytes_per_pixel(data: bytes) -> int:
    """Return what decoding takes at its height, measured on images of 25 megapixels."""
    if data.startswith(b"RIFF"):
        return 17  # libwebp keeps two canvases of RGBA and hands out a copy
    if data.startswith((b"II", b"MM")):
        return 12  # the whole may be one strip of 64-bit pixels
    if data.startswith(_JPEG):
        header = read_header(data)
        if header.frame not in _SEQUENTIAL or header.scan_components < header.components:
            return 4 + 2 * header.components  # coefficients of all scans are kept
    return 8


def _decoding_bytes(data: bytes) -> int:
    """Return what decoding takes, as far as the header says."""
    need = _SPARE_BYTES
    with suppress(Exception):
        shape = _webp_size(data) if data.startswith(b"RIFF") else _upright_size(data, sys.maxsize)
        need += _bytes_per_pixel(data) * shape[0] * shape[1]
    return need


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return height and width of a WebP file (RFC 9649), before libwebp makes canvases for it."""
    kind, word = data[12:16], int.from_bytes(data[21:25], "little")
    if kind == b"VP8X":
        return int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1
    if kind == b"VP8L":
        return (word >> 14 & 0x3FFF) + 1, (word & 0x3FFF) + 1
    if kind == b"VP8 ":
        sides = struct.unpack_from("<HH", data, 26)
        return sides[1] & 0x3FFF, sides[0] & 0x3FFF
    raise DecodeError(NOT_AN_IMAGE)


def _orientation(image: ImageFile.ImageFile) -> int:
    """Return the EXIF orientation still to be applied; 1 where the tag cannot be read."""
    if image.format == "TIFF":
        return 1  # Pillow's TIFF plugin turns the image itself
    try:
        turn: Any = image.getexif().get(ORIENTATION_TAG)
    except Exception:  # an image is not refused for its metadata
        return 1
    return turn if isinstance(turn, int) and 1 <= turn <= 8 else 1


def image_to_rgb(image: Image.Image, background: Color) -> UInt8:
    """Return the pixels of a Pillow image as RGB uint8 (H, W, 3), alpha composited."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format != "TIFF"):
        return pixels_in_bands(image, lambda part: _gray16_to_rgb(part, background))
    if image.mode in ("F", "I", "LAB"):
        raise DecodeError(UNSUPPORTED, f"Pillow mode {image.mode}")
    image.load()
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
        return pixels_in_bands(
            image, lambda part: _composite(np.asarray(part.convert("RGBA")), background)
        )
    return pixels_in_bands(image, lambda part: np.asarray(part.convert("RGB")))


def _gray16_to_rgb(image: Image.Image, background: Color) -> UInt8:
    values = np.asarray(image)
    rgba = np.empty((*values.shape, 4), np.uint8)
    rgba[..., :3] = (values >> 8)[..., None]
    rgba[..., 3] = np.where(values == image.info.get("transparency", -1), 0, 255)
    return _composite(rgba, background)


def _composite(rgba: UInt8, background: Color) -> UInt8:
    """Lay RGBA over a plain color: (c·a + b·(255 − a)) / 255, rounded to the nearest."""
    alpha = rgba[..., 3:].astype(np.uint16)
    below = (255 - alpha) * np.array(background, np.uint16)
    # 255 · 255 + 127 is within 16 bits; adding 127 rounds exactly, for there are no ties.
    return ((rgba[..., :3] * alpha + below + 127) // 255).astype(np.uint8)


def _to_classes(image: Image.Image, bands: tuple[str, ...]) -> UInt8:
    values = np.asarray(image)
    if values.dtype.kind == "f":
        raise DecodeError(UNSUPPORTED, "a mask needs whole numbers")
    if values.ndim == 3:
        if bands[-1] == "A":
            values = values[..., :-1]
        if (values != values[..., :1]).any():
            raise DecodeError(UNSUPPORTED, "a mask needs one channel of class numbers")
        values = values[..., 0]
    if values.min() < 0 or values.max() > 255:
        raise DecodeError(UNSUPPORTED, "a mask's class numbers are 0 to 255")
    return values.astype(np.uint8)
