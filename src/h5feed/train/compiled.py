"""torch.compile for scoring: as in training, or by a backend of choice.

TensorRT, for one, cannot train.
"""

import importlib.util
from typing import Any

import torch
from torch import nn

from h5feed.errors import UsageError
from h5feed.train.config import CompileMode

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


def for_scoring(net: nn.Module, backend: str, mode: CompileMode = "off") -> nn.Module:
    """Return `net` as it is to be called in scoring: compiled by `backend`, else in `mode`.

    Both "off" leave it as it is. To be called for each scoring. What was compiled before is used
    again, except by backends that build the weights in: with them all is compiled anew, the
    training step too.
    """
    if backend == "off" and mode == "off":
        return net
    if backend in _FREEZING:
        torch.compiler.reset()
    how: dict[str, Any] = {"mode": mode} if backend == "off" else {"backend": backend}
    compiled: nn.Module = torch.compile(net, **how)  # type: ignore[assignment]
    return compiled
