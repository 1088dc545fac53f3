"""From a model's name to a module that takes pictures as the file has them."""

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
from h5feed.train.networks import ResNet9, ResNet18, UNet

__all__ = ["OWN_MODELS", "Network", "build_model", "load_function"]

OWN_MODELS: dict[str, Callable[[int], nn.Module]] = {
    "resnet9": ResNet9,
    "resnet9-small": partial(ResNet9, width=16),
    "resnet18": ResNet18,
    "unet": UNet,
}


class Network(nn.Module):
    """A model behind the normalization of its input: uint8 pictures in, outputs out.

    Doing it here puts it on the device, lets the compiler fuse it, keeps the copy to the device
    four times smaller than floats, and saves mean and std with the weights.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: nn.Module, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor
    ) -> None:
        """`mean` and `std` are of the pixels, per channel, on the scale 0 to 255."""
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.as_tensor(mean).float().view(1, -1, 1, 1))
        self.register_buffer("std", torch.as_tensor(std).float().view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Outputs for (B, 3, H, W) uint8 or float pictures on the scale 0 to 255."""
        outputs: Any = self.model((images - self.mean) / self.std)
        if isinstance(outputs, dict) and "out" in outputs:
            outputs = outputs["out"]  # torchvision's segmentation models
        if not isinstance(outputs, Tensor):
            raise UsageError(
                f"--model returns {type(outputs).__name__}, not a tensor: wrap it in a function "
                "that picks the outputs, and name that as --model module:function"
            )
        return outputs


def build_model(name: str, num_outputs: int) -> nn.Module:
    """Return a new, randomly initialized model.

    `name` is one of `OWN_MODELS`, torchvision:NAME, timm:NAME, or module:function. Raises
    UsageError when there is no such model, ImportError when its library is not installed.
    """
    library, colon, rest = name.partition(":")
    if not colon:
        if name not in OWN_MODELS:
            raise UsageError(
                f"--model {name!r} is not known: it is {', '.join(OWN_MODELS)}, torchvision:NAME, "
                "timm:NAME, or module:function"
            )
        return OWN_MODELS[name](num_outputs)
    if library == "torchvision":
        return _torchvision_model(rest, num_outputs)
    if library == "timm":
        return _timm_model(rest, num_outputs)
    model = load_function(name, "--model")(num_outputs)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _torchvision_model(name: str, num_outputs: int) -> nn.Module:
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
    return builder(weights=None, num_classes=num_outputs, **no_fetch)  # type: ignore[no-any-return]


def _timm_model(name: str, num_outputs: int) -> nn.Module:
    timm = require("timm", "train")
    if not timm.is_model(name.partition(".")[0]):
        raise UsageError(f"--model timm:{name}: timm has no such model")
    return timm.create_model(name, pretrained=False, num_classes=num_outputs)  # type: ignore[no-any-return]


def load_function(name: str, flag: str) -> Callable[..., Any]:
    """Import `module:function`, looking in the working directory too; UsageError names `flag`."""
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
