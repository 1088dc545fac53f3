"""The learning-rate range test: rates from tiny to huge, and what the loss says to each."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from h5feed.errors import UsageError
from h5feed.train.data import Loader
from h5feed.train.distributed import World
from h5feed.train.limits import at_least, below_one
from h5feed.train.step import TrainStep
from h5feed.train.trial import endless, kept

__all__ = ["LrCurve", "LrRange", "find_lr", "smooth", "suggest"]

_SKIPPED = 5
"""First steps that suggest nothing: a network's very first losses fall at any rate."""
_CEILING = 1.25
"""Times the highest of the first losses: what a loss counts for at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrRange:
    """Which rates are tried."""

    lowest: float = 1e-6
    """First rate."""
    highest: float = 10.0
    """Last rate, unless the loss explodes before."""
    steps: int = 100
    """Optimizer steps, one for each rate, evenly spaced on a logarithmic scale."""
    smoothing: float = 0.9
    """Share of the smoothed loss that is carried from one step to the next."""
    explosion: float = 4.0
    """Stop where the smoothed loss is this many times its lowest (as fast.ai does)."""

    def __post_init__(self) -> None:
        if not 0 < self.lowest < self.highest:
            raise UsageError(
                f"--lowest {self.lowest} and --highest {self.highest}: rates are above 0, and "
                "climb from the lowest to the highest"
            )
        at_least(self, 10, "steps")
        at_least(self, 1, "explosion")
        below_one(self, "smoothing")

    @property
    def rates(self) -> list[float]:
        """The rate of each step."""
        ratio = math.log(self.highest / self.lowest) / (self.steps - 1)
        return [self.lowest * math.exp(ratio * step) for step in range(self.steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LrCurve:
    """What a range test found."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """Training loss of the step made at each rate."""
    smoothed: tuple[float, ...]
    suggestion: float | None
    """Rate at which the smoothed loss falls fastest; None when it never falls."""
    lowest: float
    """Rate with the lowest smoothed loss: too high to train with."""
    exploded: bool
    """Whether the test ended because the loss did."""


class _Rising:
    """Takes a schedule's place: the next rate after every step."""

    def __init__(self, optimizer: Optimizer, rates: Sequence[float]) -> None:
        self._optimizer, self._rates = optimizer, iter(rates)
        self.step()

    def step(self) -> None:
        self._rate = next(self._rates, math.nan)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate

    def get_last_lr(self) -> list[float]:
        return [self._rate]


def find_lr(
    step: TrainStep,
    loader: Loader,
    world: World,
    options: LrRange,
    tell: Callable[[float, float], None] = lambda _rate, _loss: None,
) -> LrCurve:
    """Train at rising rates on `loader`'s batches (Smith 2017, arXiv:1506.01186, section 3.3).

    Afterwards step, loader and generators are exactly as they were. `tell` is called with each
    rate and its loss.
    """
    losses: list[float] = []
    smoothed = lowest = math.inf
    schedule = step.schedule
    with kept(step, world, loader):
        batches = endless(loader)
        step.schedule = cast(LRScheduler, _Rising(step.optimizer, options.rates))
        try:
            for rate in options.rates:
                loss = step(batches)[0].item()
                if not math.isfinite(loss):
                    break
                losses.append(loss)
                tell(rate, loss)
                smoothed = _exponential(losses, options.smoothing)[-1]
                lowest = min(lowest, smoothed)
                if smoothed > options.explosion * lowest:
                    break
        finally:
            step.schedule = schedule
            batches.close()
    return _curve(losses, options)


def _curve(losses: list[float], options: LrRange) -> LrCurve:
    rates = options.rates[: len(losses)]
    if not losses:
        raise UsageError(
            f"the loss is not a number at --lowest {options.lowest} already: look at the data "
            "and the model first (--debug anomaly)"
        )
    # How high an exploding loss gets means nothing, and would drown what came before it.
    ceiling = _CEILING * max(losses[:_SKIPPED])
    smoothed = smooth([min(loss, ceiling) for loss in losses], options.smoothing)
    return LrCurve(
        rates=tuple(rates),
        losses=tuple(losses),
        smoothed=tuple(smoothed),
        suggestion=suggest(rates, smoothed),
        lowest=rates[smoothed.index(min(smoothed))],
        exploded=len(losses) < options.steps,
    )


def suggest(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """Return the rate where `smoothed` falls fastest over log rate, before its lowest point."""
    end = smoothed.index(min(smoothed))
    if end <= _SKIPPED + 1:
        return None
    slopes = torch.gradient(
        torch.tensor(smoothed, dtype=torch.float64), spacing=(torch.tensor(rates).double().log(),)
    )[0]
    steepest = _SKIPPED + int(slopes[_SKIPPED:end].argmin())
    return rates[steepest] if slopes[steepest] < 0 else None


def smooth(losses: Sequence[float], share: float) -> list[float]:
    """Return `losses` smoothed exponentially from both ends, so that the curve does not lag."""
    forward = _exponential(losses, share)
    backward = _exponential(losses[::-1], share)[::-1]
    return [(left + right) / 2 for left, right in zip(forward, backward, strict=True)]


def _exponential(losses: Sequence[float], share: float) -> list[float]:
    """Exponentially weighted means of all losses so far, without a pull towards 0 at the start."""
    sums = weight = 0.0
    means: list[Any] = []
    for loss in losses:
        sums, weight = share * sums + (1 - share) * loss, share * weight + (1 - share)
        means.append(sums / weight)
    return means
