"""The one augmentation of the comparison, RandomResizedCrop and flip, where a subject has none.

The distribution is torchvision's RandomResizedCrop: area 8 to 100 %, aspect 3/4 to 4/3 drawn in
its logarithm, up to ten tries, then the largest centered crop.
https://github.com/pytorch/vision/blob/main/torchvision/transforms/v2/_geometry.py
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

__all__ = ["Box", "PillowCrop", "TensorCrop", "draw_box"]

Box = tuple[int, int, int, int]
"""top, left, height, width in pixels."""


def draw_box(height: int, width: int) -> Box:
    """Draw a crop of an image of this size, from the generator that DataLoader workers seed."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        aspect = math.exp(random.uniform(-1.0, 1.0) * math.log(4 / 3))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


@dataclass(slots=True)
class TensorCrop:
    """RandomResizedCrop + flip of a (C, H, W) tensor, uint8 or float.

    torch's own kernel, bilinear and antialiased: what torchvision's v2 transforms call.
    """

    size: int

    def __call__(self, image: Tensor) -> Tensor:
        """Return a (C, size, size) tensor of the same dtype."""
        top, left, height, width = draw_box(image.shape[-2], image.shape[-1])
        part = image[..., top : top + height, left : left + width].unsqueeze(0)
        # Bilinear of uint8 is fastest in channels_last memory, as torchvision arranges it.
        part = part.contiguous(memory_format=torch.channels_last)
        size = [self.size, self.size]
        out = functional.interpolate(part, size, mode="bilinear", antialias=True).squeeze(0)
        return out.flip(-1) if random.random() < 0.5 else out


@dataclass(slots=True)
class PillowCrop:
    """RandomResizedCrop + flip of a PIL image, Pillow's bilinear, to a (3, H, W) uint8 tensor."""

    size: int

    def __call__(self, image: Image.Image) -> Tensor:
        """Return a (3, size, size) tensor."""
        top, left, height, width = draw_box(image.height, image.width)
        box = (left, top, left + width, top + height)
        size = (self.size, self.size)
        out = image.resize(size, Image.Resampling.BILINEAR, box=box)
        if random.random() < 0.5:
            out = out.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        flat = torch.frombuffer(bytearray(out.tobytes()), dtype=torch.uint8)
        return flat.view(self.size, self.size, 3).permute(2, 0, 1).contiguous()
