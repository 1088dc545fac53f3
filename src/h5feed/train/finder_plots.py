"""What the finders found, as pictures."""

from pathlib import Path
from typing import Any

from h5feed._optional import require
from h5feed.train.find_batch import BatchSizes
from h5feed.train.find_lr import LrCurve

__all__ = ["draw_batch_sizes", "draw_lr_curve"]

_LINE, _FAINT, _MARK = "tab:blue", "#b5bdc4", "tab:red"


def draw_lr_curve(curve: LrCurve, path: Path) -> None:
    """Draw the loss over the rate (logarithmic), smoothed and raw, the suggestion marked."""
    figure, axes = _figure()
    axes.plot(curve.rates, curve.losses, color=_FAINT, lw=1, label="each step")
    axes.plot(curve.rates, curve.smoothed, color=_LINE, label="smoothed")
    if curve.suggestion is not None:
        place = curve.rates.index(curve.suggestion)
        axes.axvline(curve.suggestion, color=_MARK, ls=":", lw=1)
        axes.plot(
            [curve.suggestion],
            [curve.smoothed[place]],
            "o",
            color=_MARK,
            label=f"falls fastest: {curve.suggestion:.1e}",
        )
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss")
    low, high = min(curve.smoothed), curve.smoothed[0]
    # The explosion at the end would flatten the part that matters.
    height = (high - low) or 1.0
    axes.set_ylim(low - 0.15 * height, high + 0.5 * height)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_batch_sizes(sizes: BatchSizes, path: Path) -> None:
    """Draw images per second and memory over the batch size, the fastest marked."""
    trials = [trial for trial in sizes.trials if trial.fits]
    places = [trial.batch_size for trial in trials]
    figure, axes = _figure()
    axes.plot(places, [t.images_per_second for t in trials], "o-", color=_LINE, label="speed")
    best = sizes.fastest
    axes.axvline(best.batch_size, color=_MARK, ls=":", lw=1, label=f"fastest: {best.batch_size}")
    for trial in sizes.trials:
        if not trial.fits:
            axes.axvline(trial.batch_size, color=_FAINT, lw=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size (grey lines: does not fit)")
    axes.set_ylabel("images per second")
    memory = axes.twinx()
    peaks = [(t.memory_bytes or 0) / 1e9 for t in trials]
    memory.plot(places, peaks, ".--", color="tab:green", label="memory")
    memory.set_ylim(bottom=0)
    memory.set_ylabel("peak memory, GB", color="tab:green")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _figure() -> tuple[Any, Any]:
    require("matplotlib", "train")
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.spines[["top"]].set_visible(False)
    return figure, axes
