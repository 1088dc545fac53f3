"""The report as a picture: a bar per loader, its spread, ceilings as lines, speed-ups beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from h5feed._optional import require

from .outcomes import Outcome
from .report import SMOKE_BATCHES, Report

__all__ = ["draw_bars", "save_plot"]

OURS = "#1f6f8b"
OTHERS = "#b5bdc4"
INK = "#2b2f33"
_CEILING_STYLES = ("--", ":", "-.")
_LOG_FROM = 100.0  # bars of a hundredth cannot be told apart on a linear axis


def _is_ours(outcome: Outcome) -> bool:
    return any(name in outcome.name for name in ("H5Loader", "H5Dataset", "DaliLoader", "h5feed"))


def _label(outcome: Outcome, report: Report, with_speed_up: bool) -> str:
    if outcome.rate is None:
        return "failed"
    text = f"{outcome.rate:,.0f}"
    base = report.baseline
    if with_speed_up and base is not None and base.rate and outcome is not base:
        text += f"  ({outcome.rate / base.rate:.1f}×)"
    return text


def _errors(outcomes: list[Outcome]) -> tuple[list[float], list[float]]:
    """Distances from the median down to the slowest and up to the fastest window."""
    low = [o.rate - min(o.rates) if o.rate else 0.0 for o in outcomes]
    high = [max(o.rates) - o.rate if o.rate else 0.0 for o in outcomes]
    return low, high


def draw_bars(axes: Any, report: Report, *, legend: bool = True) -> None:
    """Draw a report's loaders as horizontal bars into `axes`, first one on top."""
    bars = [o for o in report.outcomes if not o.ceiling and (o.rate is not None or o.error)]
    rates = [o.rate or 0.0 for o in bars]
    colors = [OURS if _is_ours(o) else OTHERS for o in bars]
    places = list(range(len(bars)))
    axes.barh(
        places,
        rates,
        color=colors,
        height=0.66,
        xerr=_errors(bars),
        error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2.5},
    )
    axes.set_yticks(places, [o.name for o in bars])
    axes.invert_yaxis()
    ceilings = [o for o in report.outcomes if o.ceiling and o.rate]
    positive = [rate for rate in rates if rate]
    far = [o for o in ceilings if o.rate and positive and o.rate > 1.6 * max(*positive, 1)]
    for o, style in zip(ceilings, _CEILING_STYLES * len(ceilings), strict=False):
        if o not in far:
            axes.axvline(o.rate, color=INK, linestyle=style, linewidth=1, label=_ceiling_label(o))
        else:
            # Drawn, it would squeeze the bars: said instead.
            axes.plot([], [], " ", label=f"{_ceiling_label(o)} (off the scale)")
    _scale(axes, positive, [max(o.rates) for o in (*bars, *ceilings) if o.rates and o not in far])
    for place, o in zip(places, bars, strict=True):
        end = max(o.rates) if o.rates else 0.0
        axes.annotate(
            _label(o, report, not report.is_smoke),
            (max(end, axes.get_xlim()[0]), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )
    if ceilings and legend:
        # Below the axis (its label ends 5 font sizes down): inside, it would lie on some bar.
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(0, 0),
            borderaxespad=5,
            ncols=2,
            frameon=False,
            fontsize=8,
        )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _ceiling_label(outcome: Outcome) -> str:
    return f"ceiling, {outcome.name}: {outcome.rate:,.0f}"


def _scale(axes: Any, rates: list[float], ends: list[float]) -> None:
    """Linear from zero; logarithmic only where the slowest bar would vanish."""
    top = max([*ends, 1.0])
    if rates and top / min(rates) > _LOG_FROM:
        axes.set_xscale("log")
        axes.set_xlim(min(rates) / 2, top * 6)
        axes.set_xlabel("images per second (logarithmic)")
    else:
        axes.set_xlim(0, top * 1.3)
        axes.set_xlabel("images per second")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _caption(report: Report) -> str:
    versions = report.facts.get("versions", {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [f"{report.machine}. Median of repeats; whiskers: slowest and fastest."]
    if report.is_smoke:
        lines.insert(
            0,
            f"SMOKE RUN: {report.pictures} pictures, fewer than {SMOKE_BATCHES} batches of "
            f"{report.batch_size}; speeds mean nothing.",
        )
    return "\n".join([*lines, named])


def save_plot(report: Report, path: Path) -> None:
    """Write the report as a PNG, SVG or PDF (by the name's ending)."""
    require("matplotlib", "bench")
    from matplotlib.figure import Figure

    count = sum(not o.ceiling for o in report.outcomes)
    figure = Figure(figsize=(8.6, 1.7 + 0.42 * count), dpi=150, layout="constrained")
    axes = figure.subplots()
    draw_bars(axes, report)
    figure.suptitle(report.title, fontsize=10.5, color=INK, x=0.01, ha="left")
    figure.supxlabel(_caption(report), fontsize=7.5, color="#6b7278", x=0.01, ha="left")
    figure.savefig(path)
