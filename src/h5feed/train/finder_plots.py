"""What the finders found, as plots."""

import math
from pathlib import Path
from typing import Any

from h5feed.plotting import COLORS, OTHERS, OURS, PALE, saved_figure
from h5feed.train.find_batch import BatchSizes
from h5feed.train.find_lr import LrCurve

__all__ = ["draw_batch_sizes", "draw_lr_curve"]

_MARK, _MEMORY = COLORS[1], COLORS[2]


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
            axes.axvline(curve.suggestion, color=_MARK, ls="--", lw=1.4, label=label)
        axes.set_xscale("log")
        axes.set_xlim(curve.rates[0], curve.rates[-1])
        axes.set_ylim(low - 0.06 * (edge - low), edge + 0.06 * (edge - low))
        axes.set_xlabel("learning rate")
        axes.set_ylabel("training loss")
        axes.legend(loc="best")


def draw_batch_sizes(sizes: BatchSizes, path: Path, what: str = "") -> None:
    """Draw images per second and peak memory over the batch size, the fastest marked.

    `what` was trained goes into the caption.
    """
    trials = [trial for trial in sizes.trials if trial.fits]
    places = [trial.batch_size for trial in trials]
    too_large = [trial.batch_size for trial in sizes.trials if not trial.fits]
    best = sizes.fastest
    title = f"Batch sizes: {best.batch_size:,} is the smallest of the fastest"
    form: dict[str, Any] = {"height": 5.6, "rows": 2, "sharex": True}
    with saved_figure(path, extra="train", title=title, caption=what, **form) as (figure, panels):
        speed, memory = panels
        figure.get_layout_engine().set(w_pad=0.1)  # inches: labels would touch the edge
        speed.plot(places, [t.images_per_second for t in trials], "o-", color=OURS)
        speed.plot(best.batch_size, best.images_per_second, "o", color=_MARK, ms=9)
        speed.set_ylabel("images per second")
        peaks = [(t.memory_bytes or 0) / 1e9 for t in trials]
        memory.plot(places, peaks, "o-", color=_MEMORY)
        memory.set_ylabel("peak memory, GB")
        memory.set_xlabel("batch size")
        for panel in panels:
            panel.axvline(best.batch_size, color=_MARK, ls="--", lw=1.4)
            for number, size in enumerate(too_large):
                label = "does not fit" if number == 0 else None
                panel.axvline(size, color=PALE, ls=":", lw=1.4, label=label)
            panel.margins(y=0.08)
            panel.set_ylim(bottom=0)
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
        if too_large:
            memory.legend(loc="upper left")
        memory.set_xscale("log", base=2)
        doubled = [size for size in places if math.log2(size / places[0]).is_integer()]
        memory.set_xticks(doubled, [f"{size:,}" for size in doubled])
