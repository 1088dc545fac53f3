"""A network that learns CIFAR-10 fast, after airbench94 (Jordan 2024, arXiv:2404.00498, section 3).

Its first layer whitens 2 × 2 patches and is not trained (Page 2018); six convolutions begin as the
identity where they can (Zagoruyko & Komodakis 2017); norms learn a shift and no scale; GELU.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, max_pool2d

__all__ = ["SpeedNet", "small"]

_BIAS = 8.0
"""Shifts are stored an eighth of their size: SGD then moves them 64 times as fast, as airbench."""
_EPS = 5e-4


class SpeedNet(nn.Module):
    """Takes normalized (B, 3, 32, 32) or so, returns (B, num_outputs).

    It needs `whiten` before the first step, and has 118 million multiplications an image at the
    usual width, a fifth of ResNet-9's.
    """

    def __init__(self, num_outputs: int, widths: tuple[int, int, int] = (64, 256, 256)) -> None:
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2)
        self.whitening.weight.requires_grad_(False)
        nn.init.zeros_(self.whitening.bias)
        inside = (24, *widths)
        self.blocks = nn.Sequential(*map(_Block, inside, widths))
        self.head = nn.Linear(widths[-1], num_outputs, bias=False)
        nn.init.normal_(self.head.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, num_outputs) for normalized images."""
        features: Tensor = self.blocks(gelu(self.whitening(images))).amax((2, 3))
        outputs: Tensor = self.head(features) / 9
        return outputs

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the first layer by normalized images (B, 3, H, W), B some thousands.

        Its filters are the patches' principal components, scaled to variance 1, and their
        negatives, which GELU would lose.
        """
        patches = images.double().unfold(2, 2, 2).unfold(3, 2, 2)
        rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
        values, vectors = torch.linalg.eigh(rows.T.cov())
        filters = (vectors / (values + _EPS).sqrt()).T.reshape(12, 3, 2, 2)
        self.whitening.weight.copy_(torch.cat((filters, -filters)))


small = partial(SpeedNet, widths=(16, 64, 64))
"""A tenth of its work."""


class _Block(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first, self.second = _conv(inside, outside), _conv(outside, outside)
        self.norms = nn.ModuleList([_Norm(outside), _Norm(outside)])

    def forward(self, values: Tensor) -> Tensor:
        values = gelu(self.norms[0](max_pool2d(self.first(values), 2)))
        return gelu(self.norms[1](self.second(values)))


def _conv(inside: int, outside: int) -> nn.Conv2d:
    conv = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight[:inside])
    return conv


class _Norm(nn.BatchNorm2d):
    """Batch norm with a shift alone, its running statistics quick enough for 10 epochs."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=0.4, affine=False)
        self.shift = nn.Parameter(torch.zeros(channels))

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) + (_BIAS * self.shift).view(1, -1, 1, 1)
