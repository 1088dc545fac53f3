"""The learning-rate range test: rates from tiny to huge, and what the loss says to each."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from h5feed.errors import UsageError
from h5feed.plotting import COLORS, OTHERS, OURS, PALE, saved_figure
from h5feed.train.config import at_least, below_one
from h5feed.train.distributed import World
from h5feed.train.loaders import Loader
from h5feed.train.trainer import TrainStep
from h5feed.train.trial import endless, kept

__all__ = ["LrCurve", "LrRange", "draw_lr_curve", "find_lr", "first_valley", "smooth"]

_FIRST = 5
_CEILING = 1.25
"""Times the highest of the first losses: what a loss counts for at most."""
_CLEAR = 4.0
"""Standard errors of a smoothed loss by which a fall or a rise has to stand out of the noise."""
_RISE = 0.1
"""Share of the fall so far that a clear rise takes back at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrRange:
    """Which rates are tried.

    >>> test = LrRange(lowest=1e-4, highest=1.0, steps=10)
    >>> [f"{rate:.0e}" for rate in test.rates[:3]]
    ['1e-04', '3e-04', '8e-04']
    """

    lowest: float = 1e-6
    """First rate."""
    highest: float = 10.0
    """Last rate, unless the loss explodes before."""
    steps: int = 100
    """Optimizer steps, one for each rate, evenly spaced on a logarithmic scale."""
    smoothing: float = 0.09
    """Share of all steps over which each loss is averaged with its neighbours."""
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
    def window(self) -> int:
        """Losses in each mean, an odd number."""
        return 2 * round(self.smoothing * self.steps / 2) + 1

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
    """Means of neighbouring losses, none counted above 1.25 times the first ones."""
    suggestion: float | None
    """Highest rate to train with: `lowest`, or half of it where the loss exploded later; None
    where the loss never clearly fell."""
    lowest: float
    """Rate of the lowest smoothed loss before the first clear rise."""
    rise: float | None
    """Rate at which the loss first clearly rose; None where it never did."""
    exploded: bool
    """Whether the test ended because the loss did."""


class _Rising:
    """Takes a schedule's place: the next rate after every step."""

    def __init__(self, optimizer: Optimizer, rates: Sequence[float]) -> None:
        self._optimizer, self._rates = optimizer, iter(rates)
        own = [group["lr"] for group in optimizer.param_groups]
        self._shares = [lr / max(own) for lr in own]  # smaller ones come of --layer-decay
        self.step()

    def step(self) -> None:
        self._rate = next(self._rates, math.nan)
        for group, share in zip(self._optimizer.param_groups, self._shares, strict=True):
            group["lr"] = self._rate * share

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

    >>> from h5feed.train.config import ModelConfig, TrainConfig
    >>> from h5feed.train.trial import open_trial
    >>> model = ModelConfig(model="resnet9-small")
    >>> config = TrainConfig(train=Path("photos.h5"), batch_size=6, model=model)
    >>> with open_trial(config) as trial:
    ...     loader = trial.data.train_loader(trial.data.size)
    ...     curve = find_lr(trial.step, loader, trial.world, LrRange(steps=10))
    >>> len(curve.rates) == len(curve.losses)
    True
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
                smoothed = statistics.fmean(losses[-options.window :])
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
    ceiling = _CEILING * max(losses[:_FIRST])
    counted = [min(loss, ceiling) for loss in losses]
    smoothed = smooth(counted, options.window)
    lowest, rise = first_valley(counted, smoothed, options.window)
    exploded = len(losses) < options.steps
    suggestion = None if lowest is None else rates[lowest] / (2 if exploded else 1)
    return LrCurve(
        rates=tuple(rates),
        losses=tuple(losses),
        smoothed=tuple(smoothed),
        suggestion=suggestion,
        lowest=rates[smoothed.index(min(smoothed)) if lowest is None else lowest],
        rise=None if rise is None else rates[rise],
        exploded=exploded,
    )


def first_valley(
    losses: Sequence[float], smoothed: Sequence[float], window: int
) -> tuple[int | None, int | None]:
    """Return the steps of the lowest smoothed loss before the first clear rise, and of that rise.

    A rise is clear when it stands out of the noise, by how far `losses` scatter around the mean of
    `window` of them, and takes back a tenth of the fall before it. Behind it, networks with batch
    norm wander at a high loss whatever the rate, and may look as if they learned again. None for
    the lowest where no fall stands out of the noise, None for the rise where there is none.

    >>> losses = [2.0, 2.0, 1.0, 0.5, 1.8, 2.0]
    >>> first_valley(losses, losses, window=1)  # the steps of the lowest loss, and of the rise
    (3, 4)
    """
    lowest, squares, start = 0, 0.0, smoothed[0]
    fell = False
    for step, (loss, mean) in enumerate(zip(losses, smoothed, strict=True)):
        squares += (loss - mean) ** 2
        # Of a mean of `window` losses; one of them is used up by the mean itself.
        error = math.sqrt(squares / (step + 1) / max(1, window - 1))
        if mean < smoothed[lowest]:
            lowest = step
        fall = start - smoothed[lowest]
        fell = fell or fall > max(_CLEAR * error, 0.0)
        if fell and mean - smoothed[lowest] > max(_CLEAR * error, _RISE * fall):
            return lowest, step
    return (lowest if fell else None), None


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """Return the mean of each loss and its neighbours, `window` in all, fewer at the ends.

    >>> smooth([3.0, 6.0, 0.0, 3.0], window=3)
    [4.5, 3.0, 3.0, 1.5]
    """
    half = window // 2
    return [statistics.fmean(losses[max(0, k - half) : k + half + 1]) for k in range(len(losses))]


def draw_lr_curve(curve: LrCurve, path: Path, what: str = "") -> None:
    """Draw the loss over the rate (logarithmic), smoothed and raw, and mark what is suggested.

    `what` was trained goes into the caption. Losses above what the smoothed curve counts are
    drawn as marks at the upper edge.
    """
    top = max(curve.smoothed)
    low = min(*curve.losses, *curve.smoothed)
    edge = top + 0.12 * (top - low or 1.0)
    shown = [min(loss, edge) for loss in curve.losses]
    caption = f"{what}  {len(curve.rates)} steps, one at each rate; smoothed: means of neighbours."
    title = "Learning-rate range test"
    if curve.suggestion is not None:
        title += f": try --lr {curve.suggestion:.2g}"
    with saved_figure(path, extra="train", title=title, caption=caption.strip()) as (_, (axes,)):
        axes.plot(curve.rates, shown, ".", color=OTHERS, ms=4, label="each step")
        axes.plot(curve.rates, curve.smoothed, color=OURS, label="smoothed")
        above = [rate for rate, loss in zip(curve.rates, curve.losses, strict=True) if loss > edge]
        if above:
            axes.plot(above, [edge] * len(above), "^", color=PALE, ms=5, label="higher than shown")
        if curve.rise is not None:
            label = "after the first clear rise: not looked at"
            axes.axvspan(curve.rise, curve.rates[-1], color=OTHERS, alpha=0.2, lw=0, label=label)
        if curve.suggestion is not None:
            label = f"suggested: {curve.suggestion:.2g}"
            axes.axvline(curve.suggestion, color=COLORS[1], ls="--", lw=1.4, label=label)
        axes.set_xscale("log")
        axes.set_xlim(curve.rates[0], curve.rates[-1])
        axes.set_ylim(low - 0.06 * (edge - low), edge + 0.06 * (edge - low))
        axes.set_xlabel("learning rate")
        axes.set_ylabel("training loss")
        axes.legend(loc="best")
