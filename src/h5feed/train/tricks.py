"""Tricks: gradient checkpointing, dropped biases, averaged weights, mixing, small images first.

Biases in front of batch norms are subtracted again with the norm's mean (Ioffe & Szegedy 2015,
arXiv:1502.03167, section 3.2); PyTorch's Performance Tuning Guide advises to leave them out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from h5feed.augment.mixing import CutMix, MixOp, MixUp, MixUpOrCutMix, mix_images, mix_labels
from h5feed.train.config import RecipeConfig
from h5feed.train.loaders import Loader

__all__ = [
    "Ema",
    "EpochLoaders",
    "checkpoint_blocks",
    "drop_biases",
    "find_blocks",
    "image_size",
    "mix_batch",
    "modes_kept",
    "plain_blocks",
    "useless_biases",
]


def checkpoint_blocks(model: nn.Module) -> list[str]:
    """Make `model` keep only its blocks' inputs for the backward pass, in place.

    A long Sequential of bare layers is cut into √n segments (Chen et al. 2016,
    arXiv:1604.06174). Returns the blocks' names. Results, weights' names and batch norm statistics
    stay what they were.

    >>> from h5feed.train.models import build_model
    >>> checkpoint_blocks(build_model("resnet9-small", 10))[:3]
    ['body.0', 'body.1', 'body.2']
    """
    blocks = find_blocks(model)
    for block in blocks.values():
        block.forward = partial(_forward, block, block.forward)
    return list(blocks)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a model is made of, by name.

    They are the elements of its outermost Sequentials and ModuleLists that have parts of their
    own, and Sequentials of bare layers. A model with none of them is one block per child.

    >>> from h5feed.train.models import build_model
    >>> list(find_blocks(build_model("resnet18", 10)))[:2]
    ['stem', 'body.0']
    """
    return dict(_blocks(model, "")) or dict(model.named_children())


def plain_blocks(model: nn.Module) -> None:
    """Undo `checkpoint_blocks`, in place.

    >>> from h5feed.train.models import build_model
    >>> model = build_model("resnet9-small", 10)
    >>> _ = checkpoint_blocks(model)
    >>> plain_blocks(model)
    """
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is _forward:
            del module.forward


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.Sequential) and _is_flat(child):
            yield path, child
        elif isinstance(child, nn.Sequential | nn.ModuleList):
            for part, block in child.named_children():
                if list(block.children()):
                    yield f"{path}.{part}", block
        else:
            yield from _blocks(child, f"{path}.")


def _is_flat(module: nn.Module) -> bool:
    return not any(list(child.children()) for child in module.children())


def _forward(block: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return plain(*args, **kwargs)
    saved = partial(checkpoint, use_reentrant=False)
    if not torch.compiler.is_compiling():  # which refuses contexts, and updates statistics once
        saved = partial(saved, context_fn=partial(_contexts, block))
    if not (isinstance(block, nn.Sequential) and _is_flat(block)):
        return saved(plain, *args, **kwargs)
    (values,) = args
    for segment in _segments(list(block)):
        values = saved(partial(_run, segment), values)
    return values


def _segments(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Cut √n times, never in front of a layer that would overwrite the input kept for it."""
    size = max(3, round(len(layers) ** 0.5))
    segments: list[list[nn.Module]] = [[]]
    for layer in layers:
        if len(segments[-1]) >= size and not getattr(layer, "inplace", False):
            segments.append([])
        segments[-1].append(layer)
    return segments


def _run(layers: list[nn.Module], values: Any) -> Any:
    for layer in layers:
        values = layer(values)
    return values


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_kept(block)


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Keep the second forward pass from moving batch norms' running statistics once more."""
    kept = [
        (norm, name, buffer)
        for norm in block.modules()
        if isinstance(norm, _BatchNorm)
        for name, buffer in norm.named_buffers(recurse=False)
    ]
    for norm, name, buffer in kept:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in kept:
            setattr(norm, name, buffer)


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

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))
    >>> useless_biases(model, torch.randn(2, 3, 16, 16))
    {'0': '1'}
    """
    pairs = _adjacent(model, example)
    if not pairs or not _noticed(model, example, list(pairs)):
        return pairs
    return {layer: norm for layer, norm in pairs.items() if not _noticed(model, example, [layer])}


def drop_biases(model: nn.Module, example: Tensor) -> list[str]:
    """Remove the biases that `useless_biases` finds, in place; returns the layers' names.

    The norms' running means move along, so that a trained model gives the same in eval mode.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))
    >>> drop_biases(model, torch.randn(2, 3, 16, 16))
    ['0']
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
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with modes_kept(model):
        model.train()
        try:
            yield
        finally:
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Put each module's training or eval mode back after the block.

    >>> net = nn.Linear(3, 2)
    >>> with modes_kept(net):
    ...     _ = net.eval()
    >>> net.training
    True
    """
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class Ema:
    """Exponential moving average of a model's parameters and float buffers.

    Early steps use the smaller decay (1 + step) / (10 + step), so that the average does not
    stay at the random start (as in TensorFlow's ExponentialMovingAverage). torch's own
    AveragedModel is not used: it reads a counter from the device at every step, and it needs a
    second model, compiled a second time.

    >>> model = nn.Linear(3, 2)
    >>> ema = Ema(model, decay=0.999)
    >>> for step in range(10):
    ...     # the optimizer moves the weights here
    ...     ema.update(step)
    >>> with ema.swapped_in():
    ...     pass  # score the averaged weights here
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        live = {name: value.detach() for name, value in named.items() if value.is_floating_point()}
        self._names = list(live)
        self._live = list(live.values())
        self._average = [value.clone() for value in self._live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights in, after optimizer step number `step` (from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, self._live, 1 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the model the averaged weights for as long as the block lasts."""
        trained = [value.clone() for value in self._live]
        torch._foreach_copy_(self._live, self._average)
        try:
            yield
        finally:
            torch._foreach_copy_(self._live, trained)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages, by the names that they have in the model's own state."""
        return dict(zip(self._names, self._average, strict=True))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved average; KeyError where it is of another model."""
        torch._foreach_copy_(self._average, [state[name] for name in self._names])


def mix_batch(
    images: Tensor, targets: Tensor, config: RecipeConfig, num_classes: int, seed: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Mix each image with the one before it in the batch; targets become shares of classes.

    What MixUp and CutMix of h5feed.augment do, on a batch that is on the device already, whatever
    loader brought it. `images` are (B, C, H, W), `targets` (B,) class numbers; returns float (or,
    cut, as they came) images and float32 (B, num_classes). With both on, each batch takes one at
    random. The draw is a function of `seed` (a run's seed, step, part and rank), so that a resumed
    run mixes alike. A batch is shuffled already, so that a neighbour is a random partner.

    >>> from h5feed.train.config import RecipeConfig
    >>> images, labels = torch.zeros(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    >>> images, targets = mix_batch(images, labels, RecipeConfig(mixup=0.2), 10, seed=(0, 1))
    >>> targets.shape
    torch.Size([4, 10])
    """
    op: MixOp = CutMix(alpha=config.cutmix) if config.cutmix else MixUp(alpha=config.mixup)
    if config.mixup and config.cutmix:
        op = MixUpOrCutMix(alpha=config.mixup, cutmix_alpha=config.cutmix)
    uniforms = np.random.default_rng(seed).random(3)
    drawn = op.draw(uniforms, (images.shape[2], images.shape[3]))
    cut = drawn[1] == 0  # nothing of an image's own in the box
    mix = torch.from_numpy(drawn).float().to(images.device, non_blocking=True)
    images = mix_images(images if cut else images.float(), mix)
    return images, mix_labels(targets, float(drawn[0]), num_classes, wait=False)


_GROWING = 0.75
"""Share of the epochs over which progressive resizing grows; the rest see full images."""


def image_size(start: int, full: int, epochs: int, epoch: int) -> int:
    """Side in pixels of an epoch's images under progressive resizing.

    Grows linearly from `start` to `full` over the first three quarters of `epochs`, in steps of
    32 px (16 below 128 px, 8 below 64): networks halve their images often. Small images
    first cost less and overfit less (Howard 2018, fast.ai's DAWNBench entry; Tan & Le 2021,
    arXiv:2104.00298). `start` 0 turns it off.

    >>> [image_size(128, 224, epochs=8, epoch=epoch) for epoch in range(8)]
    [128, 160, 160, 192, 192, 224, 224, 224]
    """
    if not start or epoch == epochs - 1:
        return full
    grain = 32 if full >= 128 else 16 if full >= 64 else 8
    grown = start + (full - start) * epoch / max(1, round(_GROWING * epochs) - 1)
    return min(full, max(grain, round(grown / grain) * grain))


class EpochLoaders:
    """Hands out the loader for an epoch, a new one only where the images' size changes."""

    def __init__(self, make: Callable[[int], Loader], size: Callable[[int], int]) -> None:
        self._make, self._size_of = make, size
        self._size = size(0)
        self._loader = make(self._size)
        self._epoch = -1

    def __len__(self) -> int:
        return len(self._loader)

    def at(self, epoch: int) -> Loader:
        """Return the loader, at the beginning of `epoch` or where a loaded state left it."""
        if (size := self._size_of(epoch)) != self._size:
            self._loader, self._size = self._make(size), size
        elif epoch == self._epoch:
            return self._loader
        self._loader.set_epoch(epoch)
        self._epoch = epoch
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and where its loader stands."""
        return {"epoch": self._epoch, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there again."""
        self.at(state["epoch"]).load_state_dict(state["loader"])
