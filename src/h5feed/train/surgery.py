"""Biases in front of batch norms: found in any model, named, and dropped.

The norm subtracts its input's mean, and the bias with it (Ioffe & Szegedy 2015, arXiv:1502.03167,
section 3.2); PyTorch's Performance Tuning Guide advises to leave such biases out.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["drop_biases", "useless_biases"]

_WITH_BIAS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_SHIFT = 3.0
"""Added to a bias to see whether an output notices: large against rounding."""
_TOLERANCE = 1e-3


def useless_biases(model: nn.Module, example: Tensor) -> dict[str, str]:
    """Layers whose bias a batch norm right behind subtracts again: {layer: its norm}, by name.

    A pass over `example` (B, C, H, W) in training mode finds the layers whose output tensor goes
    straight into a batch norm. Where it is used elsewhere too (a sum in some `forward`) the bias
    matters: so each is shifted, and only those that change no output are named. Parameters,
    buffers, modes and the random state are left as they were.
    """
    pairs = _adjacent(model, example)
    if not pairs or not _noticed(model, example, list(pairs)):
        return pairs
    return {layer: norm for layer, norm in pairs.items() if not _noticed(model, example, [layer])}


def drop_biases(model: nn.Module, example: Tensor) -> list[str]:
    """Remove the biases that `useless_biases` finds, in place; returns the layers' names.

    The norms' running means move along, so that a trained model gives the same in eval mode.
    """
    pairs = useless_biases(model, example)
    for layer_name, norm_name in pairs.items():
        layer, norm = model.get_submodule(layer_name), model.get_submodule(norm_name)
        if isinstance(norm.running_mean, Tensor):
            norm.running_mean -= layer.get_parameter("bias").detach()
        layer.register_parameter("bias", None)
    return list(pairs)


def _adjacent(model: nn.Module, example: Tensor) -> dict[str, str]:
    names = {module: name for name, module in model.named_modules()}
    made: dict[int, tuple[nn.Module, Tensor]] = {}  # holds the tensor: no id comes twice
    pairs: dict[str, str] = {}

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, _WITH_BIAS) and module.bias is not None:
            made[id(output)] = (module, output)
        elif isinstance(module, _BatchNorm) and inputs and id(inputs[0]) in made:
            pairs[names[made[id(inputs[0])][0]]] = names[module]

    hooks = [module.register_forward_hook(record) for module in names]
    try:
        _outputs(model, example)
    finally:
        for hook in hooks:
            hook.remove()
    return pairs


def _noticed(model: nn.Module, example: Tensor, layers: list[str]) -> bool:
    """Whether any output changes when the biases of `layers` are shifted."""
    before = _outputs(model, example)
    biases = [model.get_submodule(name).get_parameter("bias") for name in layers]
    kept = [bias.detach().clone() for bias in biases]
    with torch.no_grad():
        for bias in biases:
            bias.add_(_SHIFT)
        try:
            after = _outputs(model, example)
        finally:
            for bias, value in zip(biases, kept, strict=True):
                bias.copy_(value)
    if not before:  # nothing that could notice: then every bias counts
        return True
    return any(_differ(one, other) for one, other in zip(before, after, strict=True))


def _differ(before: Tensor, after: Tensor) -> bool:
    scale = before.abs().max().clamp(min=1e-6)
    return not bool((after - before).abs().max() <= _TOLERANCE * scale)


def _outputs(model: nn.Module, example: Tensor) -> list[Tensor]:
    with _left_alone(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same dropout in every pass
        return list(_tensors(model(example)))


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield what has values in the outputs of a model, which may be dicts or tuples of them."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point() and outputs.numel():
            yield outputs
    elif isinstance(outputs, Mapping):
        for output in outputs.values():
            yield from _tensors(output)
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str):
        for output in outputs:
            yield from _tensors(output)


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Run in training mode; put buffers and each module's mode back."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
