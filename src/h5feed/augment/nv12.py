"""NV12 images (store=yuv420) to RGB: the part that a crop reads, or a whole batch on a device.

Converting first and resizing the RGB pixels is faster than resizing luma and chroma apart and
converting the result (RandomResizedCrop 224 of 256x256: 65 against 86 us; raw RGB 55), and lets
boxes be any, the same as for store=raw.
"""

from typing import Final

import cv2
import torch

from h5feed.augment.crop_cpu import Image, Scratch

__all__ = ["nv12_batch", "nv12_box"]

_STRIDE: Final = 64
"""Columns are converted in multiples of this: cv2's vector loop (AVX-512) leaves the rest of each
row to scalar code, 80 us for 190 columns where 192 take 10."""


def nv12_box(image: Image, y: int, x: int, h: int, w: int, scratch: Scratch) -> Image:
    """Return RGB (h, w, 3) of a box of an NV12 image (H*3//2, W), a view of `scratch`."""
    lines, width = image.shape
    height = lines * 2 // 3
    top, bottom, left = y & -2, (y + h + 1) & -2, x & -2
    right = left + ((x + w - left + _STRIDE - 1) & -_STRIDE)
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


def nv12_batch(batch: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float RGB (B, 3, h, w), whole numbers 0..255, from uint8 NV12 (B, h*3//2, w)."""
    height, width = batch.shape[1] * 2 // 3, batch.shape[2]
    # ITU-R BT.601-7, limited range, as cv2's COLOR_YUV2RGB_NV12 has it
    luma = (batch[:, :height].float() - 16).clamp(min=0) * 1.164383
    chroma = batch[:, height:].reshape(-1, height // 2, width // 2, 2).float() - 128
    chroma = chroma.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    u, v = chroma.unbind(3)
    rgb = [luma + 1.596027 * v, luma - 0.812968 * v - 0.391762 * u, luma + 2.017232 * u]
    return torch.stack(rgb, dim=1).round().clamp(0, 255).to(dtype)
