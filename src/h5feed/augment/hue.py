"""Turn the hue of images by a share of the color circle, in HSV space."""

import cv2
import numpy as np
import torch

from h5feed.augment.crop_cpu import Image

__all__ = ["shift_hue", "shift_hue_batch"]

_TO_BYTE = 255.999  # torchvision's way back to uint8 (to_dtype_image), rounding down


def shift_hue(image: Image, factor: float) -> None:
    """Change uint8 RGB (H, W, 3) in place.

    In floats: cv2's uint8 HSV holds hue in 256 steps, which moves colors by up to 13 levels.
    """
    hsv = cv2.cvtColor(image * np.float32(1 / 255), cv2.COLOR_RGB2HSV)
    hue = hsv[..., 0]
    hue += np.float32(factor * 360)
    if factor > 0:
        np.subtract(hue, 360, out=hue, where=hue >= 360)
    else:
        np.add(hue, 360, out=hue, where=hue < 0)
    rgb = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    rgb *= np.float32(_TO_BYTE)
    np.copyto(image, rgb, casting="unsafe")


def shift_hue_batch(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return float32 RGB (B, 3, H, W) of whole numbers 0..255, hues turned by (B, 1, 1, 1).

    The formulas are those of en.wikipedia.org/wiki/HSL_and_HSV ("HSV to RGB alternative").
    """
    red, green, blue = (images / 255).unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    per = torch.where(chroma > 0, 1 / chroma, 0.0)
    hue = torch.where(
        value == red,
        (green - blue) * per,
        torch.where(value == green, 2 + (blue - red) * per, 4 + (red - green) * per),
    )
    hue = hue + 6 * factor[:, 0]
    made = []
    for corner in (5, 3, 1):
        k = torch.remainder(hue + corner, 6)
        made.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return (torch.stack(made, dim=1) * _TO_BYTE).clamp(0, 255).floor()
