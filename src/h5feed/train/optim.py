"""Optimizers: which weights decay, and how many kernels one step takes."""

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from h5feed.train.config import OptimConfig
from h5feed.train.large_batch import LAMB, LARS, NovoGrad

__all__ = ["clip_gradients", "make_optimizer", "parameter_groups"]


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


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Two groups: matrices and filters, which decay, and norms and biases, which do not.

    Norms' weights and all biases are the parameters of at most one dimension (He et al. 2019,
    arXiv:1812.01187, section 3.1).
    """
    wanted = [weight for weight in model.parameters() if weight.requires_grad]
    decayed = [weight for weight in wanted if config.decay_norms or weight.ndim > 1]
    spared = [weight for weight in wanted if not config.decay_norms and weight.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def clip_gradients(model: nn.Module, config: OptimConfig) -> None:
    """Clip in place, by norm, then by value; neither waits for the device."""
    if config.clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    if config.clip_value:
        torch.nn.utils.clip_grad_value_(model.parameters(), config.clip_value)
