"""Reports as plots: a bar per loader, warm and cold apart, ceilings as outlines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from h5feed.plotting import Bar, draw_bars, saved_figure

from .outcomes import Outcome
from .report import SMOKE_BATCHES, Report, is_ours

__all__ = ["bars", "cold_bars", "draw_groups", "save_plot"]

UNIT = "images per second"
_ROW, _REST = 0.33, 1.75  # inches: of a bar, and of title, axis and caption


def _kind(outcome: Outcome) -> str:
    if outcome.ceiling:
        return "ceiling"
    return "ours" if is_ours(outcome) else "other"


def _speed_up(outcome: Outcome, baseline: Outcome | None) -> str:
    if outcome.ceiling or not outcome.rate or baseline is None or not baseline.rate:
        return ""
    return f"{outcome.rate / baseline.rate:.1f}×"


def bars(report: Report) -> list[Bar]:
    """Return a bar for each outcome, in the report's order: images per second, and how much more.

    What was not warm (the disk) is left to `cold_bars`.
    """
    baseline = None if report.is_smoke else report.baseline
    return [
        Bar(
            name=o.name,
            value=o.rate,
            low=min(o.rates, default=None),
            high=max(o.rates, default=None),
            says=(f"{o.rate:,.0f}", _speed_up(o, baseline)) if o.rate else ("failed", ""),
            kind=_kind(o),  # type: ignore[arg-type]
        )
        for o in report.outcomes
        if not _is_cold(o) and (o.rate or o.error)
    ]


def cold_bars(report: Report) -> list[Bar]:
    """Return a bar for each cold run, and for the disk that bounds them."""
    found = [(o, o.rate if _is_cold(o) else o.cold and o.cold.rate) for o in report.outcomes]
    return [
        Bar(name=o.name, value=rate, says=(f"{rate:,.0f}",), kind=_kind(o))  # type: ignore[arg-type]
        for o, rate in found
        if rate
    ]


def _is_cold(outcome: Outcome) -> bool:
    return outcome.ceiling and outcome.name.startswith("disk")


def _caption(report: Report) -> str:
    said = f"{report.machine}. Bars: median of the windows; whiskers: slowest and fastest."
    if any(o.ceiling for o in report.outcomes):
        said += " Dashed outlines: ceilings, the work without a loader."
    if not report.is_smoke:
        return said
    return (
        f"SMOKE RUN: {report.images} images, fewer than {SMOKE_BATCHES} batches of "
        f"{report.batch_size}; speeds mean nothing.\n{said}"
    )


def save_plot(report: Report, path: Path) -> None:
    """Write the report as a PNG, SVG or PDF (by the name's ending)."""
    groups = {"": bars(report)}
    if cold := cold_bars(report):
        groups = {"Warm: files in the page cache": groups[""], "Cold: first epoch": cold}
    draw_groups(groups, path, title=report.title, caption=_caption(report))


def draw_groups(
    groups: dict[str, list[Bar]],
    path: Path,
    *,
    title: str,
    caption: str,
    heads: Sequence[str] = (),
    apart: bool = False,
) -> None:
    """Write groups of bars as one plot, as high as they need; `apart`: each on its own scale."""
    panels = [{name: bars} for name, bars in groups.items()] if apart else [groups]
    rows = [
        sum(len(bars) + 1.2 * bool(name) for name, bars in panel.items()) + 1.5 * apart
        for panel in panels
    ]
    height = _REST + _ROW * sum(rows)
    with saved_figure(
        path,
        extra="bench",
        title=title,
        caption=caption,
        height=height,
        rows=len(panels),
        height_ratios=rows,
    ) as (_, drawn):
        for number, (axes, panel) in enumerate(zip(drawn, panels, strict=True)):
            draw_bars(axes, panel, heads=() if number else heads, unit=UNIT)
