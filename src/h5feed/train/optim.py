"""Optimizers: which weights decay, and how many kernels one step takes."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from h5feed.train.config import OptimConfig
from h5feed.train.large_batch import LAMB, LARS, NovoGrad
from h5feed.train.models import parameter_layers

__all__ = ["clip_gradients", "gradient_norm", "make_optimizer", "parameter_groups"]


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Return the optimizer over the weights that want gradients; SGD's momentum is Nesterov's."""
    groups = parameter_groups(model, config)
    if config.optimizer == "lars":
        return LARS(groups, config.lr, momentum=config.momentum)
    if config.optimizer == "lamb":
        return LAMB(groups, config.lr, betas=(config.momentum, 0.999))
    if config.optimizer == "novograd":
        return NovoGrad(groups, config.lr, betas=(config.momentum, 0.98))
    how: dict[str, Any] = {
        "fused": config.implementation == "fused",
        "foreach": config.implementation == "foreach",
    }
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr, betas=(config.momentum, 0.999), **how)
    nesterov = config.momentum > 0
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, **how)


_NEVER_DECAYED = re.compile(
    r"bias$|bias_table$|(cls|class|dist|reg|mask)_token$|pos(ition)?_?embed(ding)?s?$|(layer|logit)_?scale$"
)
"""Ends of the names of weights that have several dimensions and are no matrices: decay would only
pull tokens, positions and scales to 0 (Dosovitskiy et al. 2021; Liu et al. 2021)."""


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Group weights: matrices and filters, which decay, and all others, which do not.

    Norms' weights and all biases are the parameters of at most one dimension (He et al. 2019,
    arXiv:1812.01187, section 3.1). Tokens, position embeddings and bias tables are known by
    their names, and by `no_weight_decay()`, by which timm's models name them. With --layer-decay
    each layer has two groups of its own, whose "lr" is its own.
    """
    spared_names = _names_spared_by_models(model)
    scales = _rate_scales(model, config.layer_decay)
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        is_matrix = weight.ndim > 1 and not _NEVER_DECAYED.search(name)
        decays = config.decay_norms or (is_matrix and name not in spared_names)
        groups.setdefault((scales.get(name, 1.0), decays), []).append(weight)
    return [
        {
            "params": groups[scale, decays],
            "weight_decay": config.decay if decays else 0.0,
            "lr": config.lr * scale,
        }
        for scale, decays in sorted(groups, reverse=True)
    ]


def _rate_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """What each parameter's rate is multiplied by: layer_decay to the power of its depth.

    1 for the head, and with n layers layer_decay ** (n - 1) for the stem (Bao et al. 2021,
    arXiv:2106.08254, as timm counts).
    """
    if layer_decay == 1:
        return {}
    layers = parameter_layers(model)
    return {
        name: layer_decay ** (len(layers) - 1 - depth)
        for depth, layer in enumerate(layers)
        for name in layer
    }


def _names_spared_by_models(model: nn.Module) -> set[str]:
    """Names of what the `no_weight_decay()` of `model` or of its parts lists."""
    spared: set[str] = set()
    for prefix, module in model.named_modules():
        listed = getattr(module, "no_weight_decay", None)
        if callable(listed):
            spared |= {f"{prefix}.{name}" if prefix else name for name in listed()}
    return spared


def gradient_norm(model: nn.Module) -> Tensor:
    """Return the Euclidean norm of all gradients together, a scalar; waits for nothing."""
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm: Any = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(grads))))
    # Under FSDP each process has a part of every gradient.
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def clip_gradients(model: nn.Module, config: OptimConfig) -> None:
    """Clip in place, by norm, then by value; neither waits for the device."""
    if config.clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    if config.clip_value:
        torch.nn.utils.clip_grad_value_(model.parameters(), config.clip_value)
