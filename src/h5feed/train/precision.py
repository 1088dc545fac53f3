"""Number formats, the switches of torch's backends, and torch.compile for scoring.

Mixed precision is Micikevicius et al. 2018 (arXiv:1710.03740) by torch.amp; TF32 and cuDNN's
autotuner are described in PyTorch's notes on CUDA and its Performance Tuning Guide.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

from h5feed.errors import H5FeedError, UsageError
from h5feed.train.config import CompileMode, SpeedConfig

__all__ = [
    "backends",
    "check_backend",
    "choose_precision",
    "for_scoring",
    "make_autocast",
    "make_scaler",
]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(config: SpeedConfig, device: torch.device) -> str:
    """Return torch, fp32, tf32, bf16 or fp16; UsageError where `device` does not have it.

    >>> choose_precision(SpeedConfig(), torch.device("cpu"))
    'fp32'
    """
    wanted = config.precision
    on_cuda = device.type == "cuda"
    ampere = on_cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    if wanted == "auto":
        return "bf16" if ampere else "fp32"
    if wanted == "tf32" and not ampere:
        raise UsageError(
            f"--precision tf32 needs a GPU of compute capability 8.0 or more, and {device} is "
            "none: use fp32"
        )
    if wanted == "bf16" and on_cuda and not ampere:
        raise UsageError(
            f"--precision bf16 needs a GPU of compute capability 8.0 or more, and {device} is "
            "none: use fp16"
        )
    return wanted


def make_autocast(precision: str, device: torch.device) -> autocast:
    """Return the context of forward passes: bf16 or fp16 where it is safe, else nothing.

    >>> with make_autocast("bf16", torch.device("cpu")):
    ...     nn.Linear(3, 2)(torch.zeros(1, 3)).dtype
    torch.bfloat16
    """
    dtype = _AUTOCAST.get(precision)
    return autocast(device.type, dtype=dtype, enabled=dtype is not None)


def make_scaler(precision: str, device: torch.device) -> GradScaler:
    """Return fp16's gradient scaler: small gradients would be 0 in fp16; bf16 has fp32's range.

    >>> make_scaler("bf16", torch.device("cpu")).is_enabled()
    False
    """
    return GradScaler(device.type, enabled=precision == "fp16")


@contextmanager
def backends(precision: str, config: SpeedConfig) -> Iterator[None]:
    """Set cuDNN's autotuner, TF32 and determinism for as long as the block lasts.

    fp32 means true fp32, in convolutions too, where torch's own default is TF32; torch leaves
    both as they are. With --deterministic an operation without a deterministic algorithm raises
    H5FeedError.

    >>> with backends("bf16", SpeedConfig()):
    ...     torch.get_float32_matmul_precision()
    'high'
    """
    cudnn = torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.allow_tf32, torch.get_float32_matmul_precision())
    cudnn.benchmark = config.cudnn_benchmark and not config.deterministic
    if precision != "torch":
        cudnn.allow_tf32 = precision != "fp32"
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    try:
        with _deterministic() if config.deterministic else nullcontext():
            yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = before[:2]
        torch.set_float32_matmul_precision(before[2])


@contextmanager
def _deterministic() -> Iterator[None]:
    # Read when cuBLAS is first used (PyTorch's notes on reproducibility).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
    )
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic = True
    try:
        yield
    except RuntimeError as ex:
        if "use_deterministic_algorithms" not in str(ex):
            raise
        said = str(ex).partition(". ")[0].partition(", but you set")[0]
        raise H5FeedError(
            f"--deterministic: {said}: leave it out, or take a model without that operation"
        ) from ex
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic = before[2]


_FREEZING = ("tensorrt", "torch_tensorrt")
"""Backends that build the weights into what they compile: it is stale once they have moved."""


def check_backend(backend: str, device: torch.device) -> None:
    """Raise UsageError where --scoring-backend `backend` cannot be had; "off" always can."""
    if backend == "off":
        return
    if backend in _FREEZING:
        _check_tensorrt(backend, device)
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise UsageError(f"--scoring-backend {backend!r} is not known to torch: it has {known}")


def _check_tensorrt(backend: str, device: torch.device) -> None:
    if importlib.util.find_spec("torch_tensorrt") is None:
        raise UsageError(
            f"--scoring-backend {backend} needs torch_tensorrt, which is not installed: pip "
            "install torch-tensorrt, or take --scoring-backend inductor"
        )
    if device.type != "cuda":
        raise UsageError(f"--scoring-backend {backend} runs on GPUs, and this is on {device}")
    importlib.import_module("torch_tensorrt")  # which makes the backend known


def for_scoring(net: nn.Module, backend: str, mode: CompileMode = "off") -> nn.Module:
    """Return `net` as it is to be called in scoring: compiled by `backend`, else in `mode`.

    Both "off" leave it as it is. To be called for each scoring. What was compiled before is used
    again, except by backends that build the weights in: with them all is compiled anew, the
    training step too.

    >>> net = nn.Linear(3, 2)
    >>> for_scoring(net, backend="off") is net
    True
    """
    if backend == "off" and mode == "off":
        return net
    if backend in _FREEZING:
        torch.compiler.reset()
    how: dict[str, Any] = {"mode": mode} if backend == "off" else {"backend": backend}
    compiled: nn.Module = torch.compile(net, **how)  # type: ignore[assignment]
    return compiled
