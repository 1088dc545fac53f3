"""Optimizers and learning rates: which weights decay, how many kernels a step takes, and when.

LARS, LAMB and NovoGrad, for large batches, are written here because torch has none of them, and
the kept library that has all three, timm, brings torchvision and huggingface_hub along; its
NovoGrad, besides, waits for the device once per weight and step. Ours take a few kernels per step
for all weights together and never wait.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from h5feed.train.config import OptimConfig, ScheduleConfig
from h5feed.train.finetune import parameter_layers

__all__ = [
    "LAMB",
    "LARS",
    "NovoGrad",
    "clip_gradients",
    "go_to_step",
    "gradient_norm",
    "make_optimizer",
    "make_schedule",
    "parameter_groups",
    "warmup_steps",
]


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Return the optimizer over the weights that want gradients; SGD's momentum is Nesterov's.

    >>> optimizer = make_optimizer(nn.Linear(3, 2), OptimConfig(optimizer="adamw", lr=1e-3))
    >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
    [(1, 0.05), (1, 0.0)]
    """
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
    nesterov = config.nesterov and config.momentum > 0
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

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> [len(group["params"]) for group in parameter_groups(model, OptimConfig())]
    [1, 3]
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
    """Return the Euclidean norm of all gradients together, a scalar; waits for nothing.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> layer(torch.full((1, 1), 3.0)).backward()
    >>> gradient_norm(layer).item()
    3.0
    """
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm: Any = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(grads))))
    # Under FSDP each process has a part of every gradient.
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def clip_gradients(model: nn.Module, config: OptimConfig) -> None:
    """Clip in place, by norm, then by value; neither waits for the device.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> layer(torch.full((1, 1), 3.0)).backward()
    >>> clip_gradients(layer, OptimConfig(clip_norm=1.0))
    >>> round(layer.weight.grad.item(), 3)
    1.0
    """
    if config.clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    if config.clip_value:
        torch.nn.utils.clip_grad_value_(model.parameters(), config.clip_value)


def make_schedule(
    optimizer: Optimizer, config: ScheduleConfig, lr: float, total_steps: int
) -> LRScheduler:
    """Return the schedule, to be stepped once after each of `total_steps` optimizer steps.

    `lr` is its highest rate; groups with a smaller share of it (--layer-decay) keep that share.
    onecycle and cyclic are torch's own (OneCycleLR, CyclicLR) and move the momentum against the
    rate, as their papers do, around the optimizer's own; the others multiply `lr`.

    >>> optimizer = SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    >>> schedule = make_schedule(optimizer, ScheduleConfig(schedule="linear", warmup=0.5), 0.1, 4)
    >>> rates = []
    >>> for _ in range(4):
    ...     rates += schedule.get_last_lr()
    ...     optimizer.step()
    ...     schedule.step()
    >>> [round(rate, 3) for rate in rates]
    [0.033, 0.067, 0.1, 0.05]
    """
    rates = [lr * (group["lr"] / optimizer.defaults["lr"]) for group in optimizer.param_groups]
    if config.schedule == "onecycle":
        total = max(total_steps, 4)
        climb = min(max(config.climb, 2 / total), 1 - 2 / total)  # torch divides by either's steps
        return OneCycleLR(
            optimizer, max_lr=rates, total_steps=total, pct_start=climb, **_momenta(optimizer)
        )
    if config.schedule == "cyclic":
        half = max(1, total_steps // (2 * config.cycles))
        return CyclicLR(
            optimizer,
            base_lr=[rate / 25 for rate in rates],  # OneCycleLR's div_factor
            max_lr=rates,
            step_size_up=half,
            mode="triangular2",
            **_momenta(optimizer),
        )
    return LambdaLR(optimizer, partial(_factor, config, total_steps))


def go_to_step(schedule: LRScheduler, step: int) -> None:
    """Give a new schedule the rate (and momentum) that it has at `step`, optimizer steps from 0.

    All schedules here are functions of the step, so none is saved: a run that is resumed with
    more epochs goes on at the rate that a run of that many epochs would have there.
    """
    if step:
        schedule.last_epoch = step - 1
        schedule._step_count = step
        schedule.optimizer._opt_called = True  # type: ignore[attr-defined]
        schedule.step()


def _momenta(optimizer: Optimizer) -> dict[str, Any]:
    """Let momentum move around the optimizer's own; none stays none.

    What it lacks to 1 is halved at the lowest rate and half as much again at the highest: 0.9
    goes from 0.95 to 0.85, as Smith & Topin 2018 have it.
    """
    defaults = optimizer.defaults
    momentum = defaults["betas"][0] if "betas" in defaults else defaults["momentum"]
    return {
        "cycle_momentum": momentum > 0,
        "max_momentum": (1 + momentum) / 2,
        "base_momentum": max(0.0, 1 - 1.5 * (1 - momentum)),
    }


def warmup_steps(config: ScheduleConfig, total_steps: int) -> int:
    """Steps over which the rate climbs.

    >>> warmup_steps(ScheduleConfig(warmup=0.1), total_steps=1000)
    100
    """
    return round(config.climb * total_steps)


def _factor(config: ScheduleConfig, total_steps: int, step: int) -> float:
    """What the highest rate is multiplied by at `step` (from 0)."""
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return _SHAPES[config.schedule](config, done, step / max(1, total_steps))


def _cosine(config: ScheduleConfig, done: float, share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def _linear(config: ScheduleConfig, done: float, share: float) -> float:
    return 1 - done


def _step(config: ScheduleConfig, done: float, share: float) -> float:
    return config.step_factor ** int(share / config.step_every + 1e-9)


def _constant(config: ScheduleConfig, done: float, share: float) -> float:
    return 1.0


_SHAPES: dict[str, Callable[[ScheduleConfig, float, float], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "step": _step,
}


Groups: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]]


class _Foreach(Optimizer):
    """An optimizer whose step moves all weights of a group together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every weight that has a gradient once; waits for nothing."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._move(group, weights, [weight.grad for weight in weights])
        return loss

    def _move(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        raise NotImplementedError

    def _buffers(self, weights: list[Tensor], name: str) -> list[Tensor]:
        """Return what each weight carries from step to step, zeros like the weight at first."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight)
        return [self.state[weight][name] for weight in weights]

    def _count(self, weights: list[Tensor]) -> int:
        """Return the number of this step, from 1."""
        for weight in weights:
            self.state[weight]["step"] = self.state[weight].get("step", 0) + 1
        return int(self.state[weights[0]]["step"])


class LARS(_Foreach):
    """SGD with momentum, the rate of each layer scaled by its weights' and gradients' norms.

    You, Gitman and Ginsburg 2017 (arXiv:1708.03888), algorithm 1. Norms' weights and biases take
    plain steps, as every implementation since has it.

    >>> optimizer = LARS(nn.Linear(3, 2).parameters(), lr=2.0, weight_decay=1e-4)
    """

    def __init__(
        self,
        params: Groups,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    def _move(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        decay = group["weight_decay"]
        weight_norms, grad_norms = _norms(weights), _norms(grads)
        ratios = group["trust"] * weight_norms / (grad_norms + decay * weight_norms)
        steps = torch._foreach_add(grads, weights, alpha=decay)
        torch._foreach_mul_(steps, _by_layer(weights, ratios, weight_norms * grad_norms > 0))
        momenta = self._buffers(weights, "momentum_buffer")
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, steps, alpha=group["lr"])
        torch._foreach_sub_(weights, momenta)


class LAMB(_Foreach):
    """Adam with decoupled weight decay, the length of each layer's step tied to its weights' norm.

    You et al. 2020 (arXiv:1904.00962), algorithm 2, with φ the identity. Norms' weights and
    biases take Adam's steps.

    >>> optimizer = LAMB(nn.Linear(3, 2).parameters(), lr=2e-3, weight_decay=0.01)
    """

    def __init__(
        self,
        params: Groups,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-6,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps}
        super().__init__(params, defaults)

    def _move(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        first, second = group["betas"]
        step = self._count(weights)
        means, squares = self._buffers(weights, "exp_avg"), self._buffers(weights, "exp_avg_sq")
        torch._foreach_lerp_(means, grads, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - second)
        roots = torch._foreach_sqrt(torch._foreach_div(squares, 1 - second**step))
        torch._foreach_add_(roots, group["eps"])
        steps = torch._foreach_div(torch._foreach_div(means, 1 - first**step), roots)
        torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
        weight_norms, step_norms = _norms(weights), _norms(steps)
        sound = weight_norms * step_norms > 0
        torch._foreach_mul_(steps, _by_layer(weights, weight_norms / step_norms, sound))
        torch._foreach_add_(weights, steps, alpha=-group["lr"])


class NovoGrad(_Foreach):
    """Momentum of gradients divided by a running norm of their layer: Adam with one number a layer.

    Ginsburg et al. 2019 (arXiv:1905.11286), algorithm 1; weight decay is added to the
    normalized gradient.

    >>> optimizer = NovoGrad(nn.Linear(3, 2).parameters(), lr=0.01, weight_decay=1e-3)
    """

    def __init__(
        self,
        params: Groups,
        lr: float,
        *,
        betas: tuple[float, float] = (0.95, 0.98),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps}
        super().__init__(params, defaults)

    def _move(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        first, second = group["betas"]
        kept = second if self._count(weights) > 1 else 0.0  # v₁ is the first norm itself
        squares = self._squared_norms(weights)
        torch._foreach_mul_(squares, kept)
        norms = torch._foreach_norm(grads)
        torch._foreach_addcmul_(squares, norms, norms, value=1 - kept)
        roots = torch._foreach_add(torch._foreach_sqrt(squares), group["eps"])
        steps = torch._foreach_div(grads, list(roots))
        torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
        momenta = self._buffers(weights, "exp_avg")
        torch._foreach_mul_(momenta, first)
        torch._foreach_add_(momenta, steps)
        torch._foreach_add_(weights, momenta, alpha=-group["lr"])

    def _squared_norms(self, weights: list[Tensor]) -> list[Tensor]:
        for weight in weights:
            if "exp_avg_sq" not in self.state[weight]:
                self.state[weight]["exp_avg_sq"] = weight.new_zeros(())
        return [self.state[weight]["exp_avg_sq"] for weight in weights]


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of each, (len(tensors),)."""
    return torch.stack(list(torch._foreach_norm(list(tensors))))


def _by_layer(weights: list[Tensor], ratios: Tensor, sound: Tensor) -> list[Tensor]:
    """`ratios` of matrices and filters where they are `sound`; 1 for the others."""
    kept = torch.where(sound, ratios, 1.0).unbind()
    one = ratios.new_ones(())
    return [ratio if weight.ndim > 1 else one for weight, ratio in zip(weights, kept, strict=True)]
