"""Optimizers for large batches, and how the learning rate follows the batch size.

LARS, LAMB and NovoGrad are written here because torch has none of them, and the kept library
that has all three, timm, brings torchvision and huggingface_hub along; its NovoGrad, besides,
waits for the device once per weight and step. Ours take a few kernels per step for all weights
together and never wait.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LAMB", "LARS", "NovoGrad", "Scaling", "scale_lr"]

Scaling = Literal["off", "linear", "sqrt"]
Groups: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]]


def scale_lr(lr: float, rule: Scaling, batch_size: int, reference: int) -> float:
    """Return the rate for `batch_size` that does what `lr` does for batches of `reference`.

    linear: Goyal et al. 2017 (arXiv:1706.02677), for SGD. sqrt: Krizhevsky 2014
    (arXiv:1404.5997), and You et al. 2020 for LAMB. Both need a warm-up.
    """
    ratio = batch_size / reference
    return lr * {"off": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


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
