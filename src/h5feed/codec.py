"""JPEG and NV12 to RGB and back: the conversions that packing and feeding share."""

import io
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import JpegImagePlugin

from h5feed.jpeg_header import read_orientation

__all__ = ["MAX_JPEG_SIDE", "decode_jpeg", "encode_jpeg", "nv12_to_rgb", "orient", "rgb_to_nv12"]

UInt8 = npt.NDArray[np.uint8]

MAX_JPEG_SIDE = 65_500
"""Pixels: libjpeg's JPEG_MAX_DIMENSION."""

_CHROMA = np.array([[-37.797, -74.203, 112, 128 * 255], [112, -93.786, -18.214, 128 * 255]]) / 255
"""Cb and Cr of 8-bit RGB and 1, limited range (ITU-R BT.601-7, section 2.5.1)."""


def decode_jpeg(data: Any, out: UInt8 | None = None, *, apply_orientation: bool = True) -> UInt8:
    """Decode a JPEG file (any bytes-like object) to RGB: uint8 (H, W, 3), C-contiguous.

    With `out`, a writable uint8 (H, W, 3) array of the picture's size after rotation, the
    pixels land there and `out` is returned. `apply_orientation=False` leaves the EXIF
    orientation aside and saves its scan.

    A file that libjpeg-turbo warns about is left to Pillow, which forgives stray bytes; one
    whose pixels end early is refused by both. Raises ValueError with the decoder's reason.
    """
    turn = read_orientation(bytes(data)) if apply_orientation else 1
    if turn == 1 and out is not None and out.flags.c_contiguous:
        pixels = _decode(data, out)
    else:
        pixels = orient(_decode(data, None), turn)
    if out is None:
        return np.ascontiguousarray(pixels)
    if pixels.shape != out.shape:
        raise ValueError(f"the picture is {pixels.shape}, the place for it is {out.shape}")
    if pixels is not out:
        np.copyto(out, pixels)
    return out


def _decode(data: Any, out: UInt8 | None) -> UInt8:
    try:
        pixels: UInt8 = simplejpeg.decode_jpeg(data, "RGB", buffer=out, strict=True)
    except ValueError as ex:
        if "premature end" in str(ex).lower():
            raise ValueError("truncated") from ex
        return _decode_forgiving(bytes(data))
    if out is not None and pixels.shape == out.shape:
        return out
    return pixels


def _decode_forgiving(data: bytes) -> UInt8:
    try:
        # Not Image.open: its decompression-bomb check is a process-wide setting.
        picture = JpegImagePlugin.JpegImageFile(io.BytesIO(data))
        return np.asarray(picture.convert("RGB"))
    except Exception as ex:  # Pillow raises nearly every class on damaged files
        raise ValueError("truncated" if "truncated" in str(ex) else "damaged") from ex


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
