"""Image files' bytes to upright RGB pixels, or one short reason why not.

What differs from torchvision's default loader (`Image.open(path).convert("RGB")`):

- EXIF orientation is applied, in every format (torchvision leaves the picture lying).
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from h5feed.codec import MAX_PIXELS, decode_jpeg, orient
from h5feed.errors import H5FeedError
from h5feed.jpeg_header import read_header

__all__ = ["DecodeError", "decode_mask", "decode_rgb", "picture_to_rgb", "read_size"]

UInt8 = npt.NDArray[np.uint8]
Color = tuple[int, int, int]

EMPTY = "empty file"
NOT_A_PICTURE = "not a picture in a known format"
TRUNCATED = "truncated"
DAMAGED = "damaged"
TOO_LARGE = "too many pixels"
UNSUPPORTED = "unsupported pixels"
ORIENTATION_TAG = 0x0112

_JPEG = b"\xff\xd8"
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
    """A file cannot be packed as a picture."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        """One of a few fixed texts, to count by."""
        self.detail = detail
        """What is known beyond the reason; may be empty."""

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


def decode_rgb(
    data: bytes, *, background: Color = (255, 255, 255), max_pixels: int = MAX_PIXELS
) -> UInt8:
    """Decode a picture file to upright RGB: uint8 (H, W, 3), C-contiguous.

    Raises DecodeError, and nothing else, whatever the bytes are. The header's size is held
    against `max_pixels` before any pixel is decoded.
    """
    with _refusals():
        if data.startswith(_JPEG):
            header = read_header(data)
            _check_size(header.height, header.width, max_pixels)
            return decode_jpeg(data)
        picture = _open(data, max_pixels)
        turn = _orientation(picture)
        return np.ascontiguousarray(orient(picture_to_rgb(picture, background), turn))


def decode_mask(data: bytes, *, max_pixels: int = MAX_PIXELS) -> UInt8:
    """Decode a mask of class numbers, upright: uint8 (H, W), C-contiguous.

    Gray levels are class numbers, palette entries count by their index, 1-bit pixels are 0
    and 1. Gray stored as color is accepted where the channels are equal, and alpha is left out.
    Raises DecodeError.
    """
    with _refusals():
        picture = _open(data, max_pixels)
        turn = _orientation(picture)
        if picture.format == "PNG" and data[_PNG_DEPTH] > 8 and len(picture.getbands()) > 1:
            # Pillow would keep the high byte of each number: 0 for every class.
            raise DecodeError(UNSUPPORTED, "a mask of 16 bits needs one channel")
        return np.ascontiguousarray(orient(_to_classes(picture), turn))


def read_size(data: bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return height and width after rotation, from the header alone; raises DecodeError."""
    with _refusals():
        if data.startswith(_JPEG):
            header = read_header(data)
            _check_size(header.height, header.width, max_pixels)
            return header.rotated_shape
        picture = _open(data, max_pixels)
        width, height = picture.size
        return (width, height) if _orientation(picture) >= 5 else (height, width)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn whatever a decoder raises into a DecodeError."""
    try:
        yield
    except DecodeError:
        raise
    except Exception as ex:  # Pillow raises nearly every class on damaged files
        raise DecodeError(*_reason(ex)) from ex


def _reason(ex: Exception) -> tuple[str, str]:
    text = str(ex).lower()
    if isinstance(ex, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return TOO_LARGE, "more than Pillow decodes in this format"
    if isinstance(ex, MemoryError):
        return TOO_LARGE, "more than memory holds"
    if isinstance(ex, EOFError) or "truncated" in text:
        return TRUNCATED, ""
    if isinstance(ex, SyntaxError) and text.startswith("not a"):
        return NOT_A_PICTURE, ""
    return DAMAGED, str(ex) if "scans" in text else ""


def _open(data: bytes, max_pixels: int) -> ImageFile.ImageFile:
    """Read a file's header by the plugin its first bytes name.

    Not Image.open: its decompression-bomb check is a process-wide setting, which packing
    would have to change for everybody.
    """
    if not data:
        raise DecodeError(EMPTY)
    if data.startswith(b"RIFF") and len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise DecodeError(TRUNCATED)  # libwebp only says that it failed
    for magic, opener in _OPENERS:
        if data.startswith(magic):
            picture = opener(io.BytesIO(data))
            _check_size(picture.height, picture.width, max_pixels)
            return picture
    raise DecodeError(NOT_A_PICTURE)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height < 1 or width < 1:
        raise DecodeError(DAMAGED, f"{height}x{width} pixels")
    if height * width > max_pixels:
        raise DecodeError(TOO_LARGE, f"{height}x{width}, more than max_pixels={max_pixels}")


def _orientation(picture: ImageFile.ImageFile) -> int:
    """Return the EXIF orientation still to be applied; 1 where the tag cannot be read."""
    if picture.format == "TIFF":
        return 1  # Pillow's TIFF plugin turns the picture itself
    try:
        turn: Any = picture.getexif().get(ORIENTATION_TAG)
    except Exception:  # a picture is not refused for its metadata
        return 1
    return turn if isinstance(turn, int) and 1 <= turn <= 8 else 1


def picture_to_rgb(picture: Image.Image, background: Color) -> UInt8:
    """Return the pixels of a Pillow picture as RGB uint8 (H, W, 3), alpha composited."""
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format != "TIFF"):
        return _gray16_to_rgb(picture, background)
    if picture.mode in ("F", "I", "LAB"):
        raise DecodeError(UNSUPPORTED, f"Pillow mode {picture.mode}")
    picture.load()
    if picture.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in picture.info:
        return _composite(np.asarray(picture.convert("RGBA")), background)
    return np.asarray(picture.convert("RGB"))


def _gray16_to_rgb(picture: Image.Image, background: Color) -> UInt8:
    values = np.asarray(picture)
    rgba = np.empty((*values.shape, 4), np.uint8)
    rgba[..., :3] = (values >> 8)[..., None]
    rgba[..., 3] = np.where(values == picture.info.get("transparency", -1), 0, 255)
    return _composite(rgba, background)


def _composite(rgba: UInt8, background: Color) -> UInt8:
    """Lay RGBA over a plain color: (c·a + b·(255 − a)) / 255, rounded to the nearest."""
    alpha = rgba[..., 3:].astype(np.uint16)
    below = (255 - alpha) * np.array(background, np.uint16)
    # 255 · 255 + 127 is within 16 bits; adding 127 rounds exactly, for there are no ties.
    return ((rgba[..., :3] * alpha + below + 127) // 255).astype(np.uint8)


def _to_classes(picture: ImageFile.ImageFile) -> UInt8:
    values = np.asarray(picture)
    if values.dtype.kind == "f":
        raise DecodeError(UNSUPPORTED, "a mask needs whole numbers")
    if values.ndim == 3:
        if picture.getbands()[-1] == "A":
            values = values[..., :-1]
        if (values != values[..., :1]).any():
            raise DecodeError(UNSUPPORTED, "a mask needs one channel of class numbers")
        values = values[..., 0]
    if values.min() < 0 or values.max() > 255:
        raise DecodeError(UNSUPPORTED, "a mask's class numbers are 0 to 255")
    return values.astype(np.uint8)
