"""From a model's name to a module that takes images as the file has them.

Three small networks are here, so that training runs with torch alone. None of their convolutions
before a batch norm has a bias: the norm would subtract it again.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from h5feed.errors import UsageError
from h5feed.optional import require

__all__ = [
    "OWN_MODELS",
    "Network",
    "ResNet9",
    "ResNet18",
    "UNet",
    "build_model",
    "build_timm",
    "load_function",
]


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

    >>> ResNet9(10, width=16)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
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
    """ResNet-18 (He et al. 2016); (B, 3, H, W) of 64 px or more to (B, num_outputs).

    >>> ResNet18(10)(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 10])
    """

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

    >>> UNet(3)(torch.zeros(2, 3, 32, 48)).shape
    torch.Size([2, 3, 32, 48])
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


OWN_MODELS: dict[str, Callable[[int], nn.Module]] = {
    "resnet9": ResNet9,
    "resnet9-small": partial(ResNet9, width=16),
    "resnet18": ResNet18,
    "unet": UNet,
}


class Network(nn.Module):
    """A model behind the normalization of its input: uint8 images in, outputs out.

    Doing it here puts it on the device, lets the compiler fuse it, keeps the copy to the device
    four times smaller than floats, and saves mean and std with the weights.

    >>> net = Network(build_model("resnet9-small", 10), mean=(124, 116, 104), std=(58, 57, 57))
    >>> net(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([2, 10])
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: nn.Module, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor
    ) -> None:
        """`mean` and `std` are of the pixels, per channel, on the scale 0 to 255."""
        super().__init__()
        self.model = model
        self.frozen_norms: frozenset[str] = frozenset()
        """Batch norms inside `model`, by name, that stay in eval mode: see `freeze`."""
        self.register_buffer("mean", torch.as_tensor(mean).float().view(1, -1, 1, 1))
        self.register_buffer("std", torch.as_tensor(std).float().view(1, -1, 1, 1))

    def keep_in_eval_mode(self, names: frozenset[str]) -> None:
        """Keep these modules inside `model` in eval mode, whatever `train` is called with."""
        self.frozen_norms = names
        for name in names:
            self.model.get_submodule(name).eval()

    def train(self, mode: bool = True) -> "Network":
        """Set training or eval mode; frozen batch norms keep their running statistics in both."""
        super().train(mode)
        self.keep_in_eval_mode(self.frozen_norms)
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Outputs for (B, 3, H, W) uint8 or float images on the scale 0 to 255."""
        outputs: Any = self.model((images - self.mean) / self.std)
        if isinstance(outputs, dict) and "out" in outputs:
            outputs = outputs["out"]  # torchvision's segmentation models
        if not isinstance(outputs, Tensor):
            raise UsageError(
                f"--model returns {type(outputs).__name__}, not a tensor: wrap it in a function "
                "that picks the outputs, and name that as --model module:function"
            )
        return outputs


def build_model(name: str, num_outputs: int, *, drop_path: float | None = None) -> nn.Module:
    """Return a new, randomly initialized model.

    `name` is one of `OWN_MODELS`, torchvision:NAME, timm:NAME, or module:function. `drop_path` is
    the rate of stochastic depth of its last block (None: as the model comes). Raises UsageError
    when there is no such model or it has no such depth, ImportError when its library is not
    installed.

    >>> model = build_model("resnet9", 10)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    library, colon, rest = name.partition(":")
    if not colon:
        if name not in OWN_MODELS:
            raise UsageError(
                f"--model {name!r} is not known: it is {', '.join(OWN_MODELS)}, torchvision:NAME, "
                "timm:NAME, or module:function"
            )
        if drop_path is not None:
            raise _no_stochastic_depth(name, drop_path)
        return OWN_MODELS[name](num_outputs)
    if library == "torchvision":
        return _torchvision_model(rest, num_outputs, drop_path)
    if library == "timm":
        return build_timm(rest, num_outputs, drop_path)
    function = load_function(name, "--model")
    if drop_path is None:
        model = function(num_outputs)
    elif "drop_path" in inspect.signature(function).parameters:
        model = function(num_outputs, drop_path=drop_path)
    else:
        raise _no_stochastic_depth(name, drop_path)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _no_stochastic_depth(name: str, rate: float) -> UsageError:
    return UsageError(
        f"--drop-path {rate}: --model {name} has no stochastic depth. Leave it out, or take a "
        "model that has it: torchvision's ConvNeXt, EfficientNet, Swin; most of timm's; a "
        "module:function with an argument drop_path"
    )


def _torchvision_model(name: str, num_outputs: int, drop_path: float | None) -> nn.Module:
    models = require("torchvision.models", "train")
    try:
        builder = models.get_model_builder(name)
    except ValueError as ex:
        raise UsageError(f"--model torchvision:{name}: torchvision has no such model") from ex
    # Segmentation models would fetch a pretrained backbone unless told not to.
    no_fetch = (
        {"weights_backbone": None}
        if "weights_backbone" in inspect.signature(builder).parameters
        else {}
    )
    model: nn.Module = builder(weights=None, num_classes=num_outputs, **no_fetch)
    if drop_path is not None:
        _scale_stochastic_depth(model, name, drop_path)
    return model


def _scale_stochastic_depth(model: nn.Module, name: str, rate: float) -> None:
    """Give the last block `rate`, the others their share: torchvision's rates grow with depth.

    Not by an argument of the builder: half of torchvision's builders take none.
    """
    from torchvision.ops import StochasticDepth

    depths = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    highest = max((depth.p for depth in depths), default=0.0)
    if not highest:
        raise _no_stochastic_depth(f"torchvision:{name}", rate)
    for depth in depths:
        depth.p *= rate / highest


def build_timm(
    name: str, num_outputs: int, drop_path: float | None, *, pretrained: bool = False
) -> nn.Module:
    """Return timm's model `name`, with its own weights where it is to be `pretrained`."""
    timm = require("timm", "train")
    if not timm.is_model(name.partition(".")[0]):
        raise UsageError(f"--model timm:{name}: timm has no such model")
    depth = {} if drop_path is None else {"drop_path_rate": drop_path}
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=pretrained, num_classes=num_outputs, **depth
        )
    except TypeError as ex:
        if "drop_path_rate" not in str(ex) or drop_path is None:
            raise
        raise _no_stochastic_depth(f"timm:{name}", drop_path) from ex
    return model


def load_function(name: str, flag: str) -> Callable[..., Any]:
    """Import `module:function`, looking in the working directory too; UsageError names `flag`.

    >>> load_function("math:sqrt", "--model")(9)
    3.0
    """
    module, _, function = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as ex:
        if ex.name != module.partition(".")[0] and ex.name != module:
            raise
        raise UsageError(f"{flag} {name}: there is no module {module!r} to import") from ex
    except AttributeError as ex:
        raise UsageError(f"{flag} {name}: {module} has no {function!r}") from ex
    return found  # type: ignore[no-any-return]
