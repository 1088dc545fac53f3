"""Gradient checkpointing for any model: less memory for one more forward pass."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_blocks", "find_blocks", "plain_blocks"]


def checkpoint_blocks(model: nn.Module) -> list[str]:
    """Make `model` keep only its blocks' inputs for the backward pass, in place.

    A long Sequential of bare layers is cut into √n segments (Chen et al. 2016,
    arXiv:1604.06174). Returns the blocks' names. Results, weights' names and batch norm statistics
    stay what they were.
    """
    blocks = find_blocks(model)
    for block in blocks.values():
        block.forward = partial(_forward, block, block.forward)
    return list(blocks)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a model is made of, by name.

    They are the elements of its outermost Sequentials and ModuleLists that have parts of their
    own, and Sequentials of bare layers. A model with none of them is one block per child.
    """
    return dict(_blocks(model, "")) or dict(model.named_children())


def plain_blocks(model: nn.Module) -> None:
    """Undo `checkpoint_blocks`, in place."""
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
