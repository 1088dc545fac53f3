"""Normal noise as a pure function of (seed, pixel, channel), the same in numpy and in torch."""

import math
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["normal_block", "normal_grid"]

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0x7FEB352D, 0x846CA68B)
"""Of a 32-bit mixer of low bias (C. Wellons, "Prospecting for Hash Functions", lowbias32)."""


def _mix(x: Any) -> Any:
    """Scramble 32-bit numbers held in 64-bit integers, numpy's or torch's."""
    x = ((x ^ (x >> 16)) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> 15)) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> 16)


def _bits(seed: Any, position: Any) -> tuple[Any, Any]:
    """Return two independent 32-bit hashes of a seed below 2**24 and a pixel's position."""
    key = _mix(seed + 0x9E3779B9)
    first = _mix(key ^ position)
    return first, _mix((first + key) & _MASK)


def normal_block(
    seed: int, shape: tuple[int, ...], top: int, left: int, height: int, width: int
) -> NDArray[np.float32]:
    """Return float32 (height, width, C), a box of an image of `shape` (H, W, C)."""
    y = np.arange(top, top + height, dtype=np.int64)[:, None, None]
    x = np.arange(left, left + width, dtype=np.int64)[None, :, None]
    c = np.arange(shape[2], dtype=np.int64)[None, None, :]
    first, second = _bits(np.array([seed]), (y * shape[1] + x) * shape[2] + c)
    # Box and Muller, Ann. Math. Stat. 29 (1958)
    radius = np.sqrt(-2 * np.log((first.astype(np.float32) + 0.5) * np.float32(2**-32)))
    angle = second.astype(np.float32) * np.float32(2 * math.pi * 2**-32)
    return np.asarray(radius * np.cos(angle), np.float32)


def normal_grid(seed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return float32 images of `shape` (B, C, H, W) for seeds (B, 1, 1, 1)."""
    _, channels, height, width = shape
    device = seed.device
    y = torch.arange(height, device=device).view(1, 1, -1, 1)
    x = torch.arange(width, device=device).view(1, 1, 1, -1)
    c = torch.arange(channels, device=device).view(1, -1, 1, 1)
    first, second = _bits(seed.to(torch.int64), (y * width + x) * channels + c)
    radius = torch.sqrt(-2 * torch.log((first.float() + 0.5) * 2**-32))
    return radius * torch.cos(second.float() * (2 * math.pi * 2**-32))
