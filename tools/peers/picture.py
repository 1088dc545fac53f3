"""All results of run.py in one picture: a panel per variant, a bar per rival."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS, OTHERS, INK, PALE = "#1f6f8b", "#b5bdc4", "#2b2f33", "#6b7278"
HEADS = {"raw": "Raw pixels, 256 px", "jpeg": "JPEG, 256 px", "original": "Original files"}


def _rates(result: dict[str, Any]) -> dict[str, float]:
    return {
        o["name"]: o["images_per_second"] or 0.0 for o in result["outcomes"] if not o["ceiling"]
    }


def _panel(axes: Any, most: dict[str, Any], fewest: dict[str, Any] | None) -> None:
    """Bars for the most workers, sorted; a tick in each for the fewest."""
    outcomes = sorted(
        (o for o in most["outcomes"] if not o["ceiling"]),
        key=lambda o: o["images_per_second"] or 0.0,
        reverse=True,
    )
    rates = [o["images_per_second"] or 0.0 for o in outcomes]
    spans = [o["rates"] or [0.0] for o in outcomes]
    whiskers = (
        [rate - min(span) for rate, span in zip(rates, spans, strict=True)],
        [max(span) - rate for rate, span in zip(rates, spans, strict=True)],
    )
    colors = [OURS if o["name"] == "h5feed" else OTHERS for o in outcomes]
    style = {"ecolor": INK, "elinewidth": 1, "capsize": 2.5}
    axes.barh(range(len(rates)), rates, color=colors, height=0.68, xerr=whiskers, error_kw=style)
    ceilings = [o for o in most["outcomes"] if o["ceiling"] and o["images_per_second"]]
    for o in ceilings:
        axes.axvline(o["images_per_second"], color=INK, linestyle="--", linewidth=1)
    single = {} if fewest is None else _rates(fewest)
    if fewest is not None:
        marks = [single.get(o["name"], 0.0) for o in outcomes]
        axes.plot(marks, range(len(marks)), "|", color="white", markersize=13, markeredgewidth=3.5)
        axes.plot(marks, range(len(marks)), "|", color=INK, markersize=13, markeredgewidth=1.2)
    for place, (o, span) in enumerate(zip(outcomes, spans, strict=True)):
        said = f"{o['images_per_second']:,.0f}" if o["images_per_second"] else "failed"
        axes.annotate(
            said + _pixels(most, o["name"]),
            (max(*span, single.get(o["name"], 0.0)), place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85},
        )
    axes.set_yticks(range(len(outcomes)), [o["name"] for o in outcomes])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max([*rates, *(o["images_per_second"] for o in ceilings), 1.0]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    title = HEADS[most["variant"]]
    if ceilings:
        title += f"   (dashed: bare crop loop, {ceilings[0]['images_per_second']:,.0f})"
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _pixels(result: dict[str, Any], name: str) -> str:
    """Say how much less than the others a rival stores, where it does."""
    stored = {n: told["pixels"] for n, told in result["facts"]["conversions"].items()}
    if name not in stored or "h5feed" not in stored:
        return ""
    share = stored[name] / stored["h5feed"]
    return f"  (of {share:.0%} of the pixels)" if share < 0.95 else ""


def _caption(results: Sequence[dict[str, Any]]) -> str:
    facts = results[0]["facts"]
    versions = [f"{name} {version}" for name, version in facts["versions"].items()]
    half = -(-len(versions) // 2)
    last = results[-1]
    return "\n".join(
        [
            f"{last['machine']}. {last['pictures']:,} pictures, RandomResizedCrop(224) + flip to "
            f"uint8 batches of {last['batch_size']}, warm page cache. Median of "
            f"{facts['schedule']['repeats']} turns; whiskers: slowest, fastest.",
            ", ".join(versions[:half]),
            ", ".join(versions[half:]),
        ]
    )


def save_peers_plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture of all variants in `results` (run.py's JSON)."""
    from matplotlib.figure import Figure

    variants = list(dict.fromkeys(result["variant"] for result in results))
    groups = [
        sorted((r for r in results if r["variant"] == v), key=lambda r: r["workers"])
        for v in variants
    ]
    bars = [len(_rates(group[-1])) for group in groups]
    figure = Figure(figsize=(8.6, 1.3 + 0.31 * sum(bars) + 0.6 * len(bars)), dpi=150)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=bars)[:, 0]
    for axes, group in zip(panels, groups, strict=True):
        _panel(axes, group[-1], group[0] if len(group) > 1 else None)
    workers = [r["workers"] for r in groups[0]]
    head = f"Images per second, {workers[-1]} workers"
    if len(workers) > 1:
        head += f" (tick: {workers[0]} worker{'s' * (workers[0] > 1)})"
    figure.suptitle(head, x=0.01, ha="left", fontsize=12, color=INK)
    figure.supxlabel(_caption(results), fontsize=7, color=PALE, x=0.01, ha="left")
    figure.savefig(path)
