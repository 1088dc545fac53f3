"""Three small networks, so that training runs with torch alone.

No convolution before a batch norm has a bias: the norm would subtract it again.
"""

import torch
from torch import Tensor, nn

__all__ = ["ResNet9", "ResNet18", "UNet"]


def _conv(inside: int, outside: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """Convolution and batch norm, without the ReLU."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outside),
    )


def _conv_relu(inside: int, outside: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(*_conv(inside, outside, kernel, stride), nn.ReLU(inplace=True))


class _Residual(nn.Module):
    """Two convolutions beside a shortcut (He et al. 2016, arXiv:1512.03385)."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_relu(inside, outside, stride=stride), *_conv(outside, outside)
        )
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else _conv(inside, outside, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


class ResNet9(nn.Module):
    """The nine-layer residual network of the fast CIFAR-10 recipes (Page 2018, DAWNBench).

    Takes (B, 3, H, W) of 32 px or so, returns (B, num_outputs).
    """

    def __init__(self, num_outputs: int, width: int = 64) -> None:
        super().__init__()
        wide = (width, 2 * width, 4 * width, 8 * width)
        self.body = nn.Sequential(
            _conv_relu(3, wide[0]),
            nn.Sequential(_conv_relu(wide[0], wide[1]), nn.MaxPool2d(2)),
            _Residual(wide[1], wide[1]),
            nn.Sequential(_conv_relu(wide[1], wide[2]), nn.MaxPool2d(2)),
            nn.Sequential(_conv_relu(wide[2], wide[3]), nn.MaxPool2d(2)),
            _Residual(wide[3], wide[3]),
        )
        self.head = nn.Linear(wide[3], num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, num_outputs) for normalized images."""
        features: Tensor = self.body(images).amax((2, 3))
        outputs: Tensor = self.head(features) / 8  # Page's: maxima begin large
        return outputs


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016); (B, 3, H, W) of 64 px or more to (B, num_outputs)."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        blocks = [
            block
            for inside, outside, stride in stages
            for block in (_Residual(inside, outside, stride), _Residual(outside, outside))
        ]
        self.stem = nn.Sequential(*_conv_relu(3, 64, 7, 2), nn.MaxPool2d(3, 2, padding=1))
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(512, num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, num_outputs) for normalized images."""
        return self.head(self.body(self.stem(images)).mean((2, 3)))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """A small U-Net (Ronneberger et al. 2015, arXiv:1505.04597), four times halved.

    Takes (B, 3, H, W), H and W multiples of 16; returns (B, num_outputs, H, W).
    """

    def __init__(self, num_outputs: int, width: int = 16) -> None:
        super().__init__()
        wide = [width * 2**depth for depth in range(5)]
        self.down = nn.ModuleList(
            nn.Sequential(_conv_relu(inside, outside), _conv_relu(outside, outside))
            for inside, outside in zip([3, *wide], wide, strict=False)
        )
        self.up = nn.ModuleList(
            nn.Sequential(_conv_relu(deep + flat, flat), _conv_relu(flat, flat))
            for deep, flat in zip(wide[:0:-1], wide[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(width, num_outputs, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, num_outputs, H, W) for normalized images."""
        kept: list[Tensor] = []
        values = self.down[0](images)
        for block in self.down[1:]:
            kept.append(values)
            values = block(nn.functional.max_pool2d(values, 2))
        for block in self.up:
            values = nn.functional.interpolate(values, scale_factor=2.0)
            values = block(torch.cat((values, kept.pop()), 1))
        return self.head(values)  # type: ignore[no-any-return]
