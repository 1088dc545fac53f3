"""torch.compile for scoring, by a backend of choice: TensorRT, for one, which cannot train."""

import importlib.util

import torch
from torch import nn

from h5feed.errors import UsageError

__all__ = ["check_backend", "for_scoring"]

_FREEZING = ("tensorrt", "torch_tensorrt")
"""Backends that build the weights into what they compile: it is stale once they have moved."""


def check_backend(backend: str, device: torch.device) -> None:
    """Raise UsageError where --compile-backend `backend` cannot be had; "off" always can."""
    if backend == "off":
        return
    if backend in _FREEZING:
        _check_tensorrt(backend, device)
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise UsageError(f"--compile-backend {backend!r} is not known to torch: it has {known}")


def _check_tensorrt(backend: str, device: torch.device) -> None:
    if importlib.util.find_spec("torch_tensorrt") is None:
        raise UsageError(
            f"--compile-backend {backend} needs torch_tensorrt, which is not installed: pip "
            "install torch-tensorrt, or take --compile-backend inductor"
        )
    if device.type != "cuda":
        raise UsageError(f"--compile-backend {backend} runs on GPUs, and this is on {device}")
    importlib.import_module("torch_tensorrt")  # which makes the backend known


def for_scoring(net: nn.Module, backend: str) -> nn.Module:
    """Return `net` as it is to be called in scoring: compiled, unless `backend` is "off".

    To be called for each scoring. What was compiled before is used again, except by backends
    that build the weights in: with them all is compiled anew, the training step too.
    """
    if backend == "off":
        return net
    if backend in _FREEZING:
        torch.compiler.reset()
    compiled: nn.Module = torch.compile(net, backend=backend)  # type: ignore[assignment]
    return compiled
