"""JPEG and NV12 to RGB and back: the conversions that packing and feeding share."""

import io
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, JpegImagePlugin

from h5feed.cores import is_out_of_memory
from h5feed.jpeg_header import JpegHeader, check_scans, read_header

__all__ = [
    "MAX_JPEG_SIDE",
    "MAX_PIXELS",
    "decode_jpeg",
    "decode_strictly",
    "encode_jpeg",
    "nv12_to_rgb",
    "orient",
    "pixels_in_bands",
    "rgb_to_nv12",
]

UInt8 = npt.NDArray[np.uint8]

MAX_JPEG_SIDE = 65_500
"""Pixels: libjpeg's JPEG_MAX_DIMENSION."""

MAX_PIXELS = 178_956_970
"""Default cap of an image, 0.5 GiB of RGB: the size at which Pillow, too, refuses to open one."""

_BAND_PIXELS = 1 << 20

_CHROMA = np.array([[-37.797, -74.203, 112, 128 * 255], [112, -93.786, -18.214, 128 * 255]]) / 255
"""Cb and Cr of 8-bit RGB and 1, limited range (ITU-R BT.601-7, section 2.5.1)."""


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
    whose pixels end early is refused by both, and one of more than MAX_SCANS scans before it
    is decoded. Raises ValueError with the reason, MemoryError where it is not the file's fault.
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
    """Decode a JPEG file as it lies, of which nothing is forgiven: one that `encode_jpeg` made.

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
    """Turn (H, W) or (H, W, C) pixels upright by an EXIF orientation; a view of the input."""
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
    part a crop needs (`decode_jpeg_region`). It costs 2 % of the bytes at 256² and quality 90
    (measured on 500 photos), and at most 5 % of the time to decode the whole. Raises
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
        _restart_interval(pixels.shape[1]),
    ]
    return cv2.imencode(".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), options)[1].tobytes()


def _restart_interval(width: int) -> int:
    """Return MCUs per restart interval: a divisor of a row's, so that rows begin with one."""
    across = -(-width // 16)
    return next((mcus for mcus in (2, 3) if across % mcus == 0), 1)


def rgb_to_nv12(pixels: UInt8) -> UInt8:
    """Convert RGB uint8 (H, W, 3), H and W even, to NV12 (H·3/2, W), BT.601 limited range.

    Chroma is the mean of each 2 × 2 pixels: 40.9 dB (median of 200 photos at 256²) after the
    way back, where cvtColor, which takes one pixel of the four, gives 38.2 dB.
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
