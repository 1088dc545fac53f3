"""Learning rates that move with every optimizer step."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from h5feed.train.config import ScheduleConfig

__all__ = ["go_to_step", "make_schedule", "warmup_steps"]


def make_schedule(
    optimizer: Optimizer, config: ScheduleConfig, lr: float, total_steps: int
) -> LRScheduler:
    """Return the schedule, to be stepped once after each of `total_steps` optimizer steps.

    `lr` is its highest rate; groups with a smaller share of it (--layer-decay) keep that share.
    onecycle and cyclic are torch's own (OneCycleLR, CyclicLR) and move the momentum against the
    rate, as their papers do, around the optimizer's own; the others multiply `lr`.
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
    """Steps over which the rate climbs."""
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
