"""Mixup and CutMix on a batch that is on the device already, whatever loader brought it."""

import numpy as np
import torch
from torch import Tensor

from h5feed.train.config import RecipeConfig

__all__ = ["mix_batch"]


def mix_batch(
    images: Tensor, targets: Tensor, config: RecipeConfig, num_classes: int, seed: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Mix each image with its neighbour in the batch; targets become shares of classes.

    `images` are (B, C, H, W), `targets` (B,) class numbers; returns float (or, cut, as they
    came) images and float32 (B, num_classes). Mixup is Zhang et al. 2018 (arXiv:1710.09412),
    CutMix Yun et al. 2019 (arXiv:1905.04899); with both on, each batch takes one at random. The
    draw is a function of `seed` (a run's seed, step, part and rank), so that a resumed run
    mixes alike. A batch is shuffled already, so that a neighbour is a random partner.
    """
    draws = np.random.default_rng(seed)
    cut = config.cutmix > 0 and (config.mixup == 0 or draws.random() < 0.5)
    alpha = config.cutmix if cut else config.mixup
    share = draws.beta(alpha, alpha)
    partners = images.roll(1, 0)
    if cut:
        images, share = _paste(images, partners, share, draws)
    else:
        images = torch.lerp(partners.float(), images.float(), share)
    one_hot = torch.zeros(len(targets), num_classes, device=targets.device)
    one_hot.scatter_(1, targets[:, None], 1.0)
    return images, torch.lerp(one_hot.roll(1, 0), one_hot, share)


def _paste(
    images: Tensor, partners: Tensor, share: float, draws: np.random.Generator
) -> tuple[Tensor, float]:
    """Put a box of the partner, 1 − share of the area, over each image; the box is clipped."""
    height, width = images.shape[2:]
    half_h, half_w = (side * (1 - share) ** 0.5 / 2 for side in (height, width))
    y, x = draws.integers(height), draws.integers(width)
    top, bottom = round(max(y - half_h, 0)), round(min(y + half_h, height))
    left, right = round(max(x - half_w, 0)), round(min(x + half_w, width))
    images = images.clone()
    images[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
    return images, 1 - (bottom - top) * (right - left) / (height * width)
