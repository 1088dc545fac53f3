"""All results of run.py in one plot: a group per variant, a bar per loader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import VARIANTS, setting, settings_of, together

from h5feed.bench.report import Chart, draw_chart
from h5feed.plotting import Bar

__all__ = ["save_peers_plot"]


def _bars(results: Sequence[dict[str, Any]], variant: str) -> list[Bar]:
    """A bar per loader for the most workers, fastest first; the fewest as a stroke."""
    counts = [workers for kind, workers in settings_of(results) if kind == variant]
    most, fewest = (variant, counts[-1]), (variant, counts[0])
    names = dict.fromkeys(o["name"] for r in results if setting(r) == most for o in r["outcomes"])
    bars = []
    for name in names:
        found, single = (together(results, wanted, name) for wanted in (most, fewest))
        assert found is not None
        says = ("failed", "") if found.rate is None else (f"{found.rate:,.0f}", "")
        if found.rate is not None and found.spread is not None:
            says = (says[0], f"±{found.spread:.0%}")
        bars.append(
            Bar(
                name=name + _pixels(results, most, name),
                value=found.rate,
                low=found.low,
                high=found.high,
                says=says,
                kind="ceiling" if found.ceiling else "ours" if name == "h5feed" else "other",
                mark=single.rate if single and most != fewest else None,
            )
        )
    return sorted(bars, key=lambda bar: (bar.kind == "ceiling", -(bar.value or 0.0)))


def _pixels(results: Sequence[dict[str, Any]], wanted: tuple[str, int], name: str) -> str:
    """Say how much less than the others a rival stores, where it does."""
    stored = {
        who: told["pixels"]
        for result in results
        if setting(result) == wanted
        for who, told in result["facts"]["conversions"].items()
    }
    if name not in stored or "h5feed" not in stored:
        return ""
    share = stored[name] / stored["h5feed"]
    return f" ({share:.0%} of the pixels)" if share < 0.95 else ""


def _caption(results: Sequence[dict[str, Any]]) -> str:
    last = results[-1]
    runs = len({result["run"] for result in results})
    fewest = min(result["workers"] for result in results)
    return (
        f"{last['machine']}. {last['images']:,} images, RandomResizedCrop(224) and flip to uint8 "
        f"batches of {last['batch_size']}, files in the page cache; {runs} "
        f"run{'s' * (runs > 1)}. Bars: {last['workers']} workers, median of the windows; whiskers "
        f"and ±: slowest and fastest window; stroke: {fewest} worker{'s' * (fewest > 1)}. "
        "Dashed outlines: ceilings, the work without a loader."
    )


def save_peers_plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw all variants in `results` (run.py's JSON)."""
    variants = dict.fromkeys(variant for variant, _ in settings_of(results))
    groups = {
        VARIANTS[variant][0].upper() + VARIANTS[variant][1:]: _bars(results, variant)
        for variant in variants
    }
    title = "Loaders side by side: images per second"
    chart = Chart(groups, title, _caption(results), heads=("img/s", "±"), apart=True)
    draw_chart(chart, path)
