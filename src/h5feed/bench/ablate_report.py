"""An ablation, said to people: a table, JSON, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from h5feed._optional import require

from .ablation import Ablation, Row
from .plot import INK, OTHERS, OURS
from .tables import markdown_table, text_table
from .tricks import Published

__all__ = ["as_dict", "as_markdown", "as_text", "from_dict", "save_plot"]


def _number(value: float | None, form: str = ",.0f", factor: float = 1.0) -> str:
    return "–" if value is None else format(value * factor, form)


def _ratio(row: Row) -> str:
    return "–" if row.ratio is None else f"{row.ratio:.2f}×"


def _published(row: Row) -> str:
    if row.group == "without" or not row.tricks:
        return ""
    if row.published is None:
        return "none found"
    return f"{row.published.figure}; {row.published.hardware}"


Cell = Callable[[Row], str]
_COLUMNS: dict[str, Cell] = {
    "row": lambda row: row.name,
    "img/s": lambda row: _number(row.rate),
    "spread": lambda row: "–" if row.spread is None else f"±{row.spread:.0%}",
    "worth": _ratio,
    "s/epoch": lambda row: _number(row.epoch_seconds, ",.1f"),
    "peak MB": lambda row: _number(row.memory_bytes, ",.0f", 1e-6),
    "loss": lambda row: _number(row.final_loss, ".3f"),
    "ceiling": lambda row: _number(row.ceiling),
    "input-bound": lambda row: _number(row.input_bound, ".0%"),
    "CPU s/1000": lambda row: _number(row.cpu_seconds_per_1000, ".2f"),
    "published elsewhere": lambda row: f"failed: {row.error}" if row.error else _published(row),
}
_LEFT = (0, len(_COLUMNS) - 1)


def _cells(ablation: Ablation) -> list[list[str]]:
    return [[cell(row) for cell in _COLUMNS.values()] for row in ablation.rows]


def _foot(ablation: Ablation) -> list[str]:
    lines = [
        "worth: against the row before; of “all but” rows, all together against the row. ceiling: "
        "img/s with data that costs nothing; input-bound: 1 − ceiling's time / the row's.",
        f"Measured on {ablation.machine}.",
    ]
    if ablation.is_smoke:
        lines.insert(
            0,
            f"Smoke run: {ablation.pictures} pictures are too few for batches of "
            f"{ablation.batch_size}. It shows that everything runs, not how fast.",
        )
    sources = {row.published.source for row in ablation.rows if row.published}
    lines += [f"Published: {source}." for source in sorted(sources)]
    return lines + [f"Not measured: {what}" for what in ablation.left_out]


def as_text(ablation: Ablation) -> str:
    """Return the table for a terminal."""
    table = text_table(list(_COLUMNS), _cells(ablation), _LEFT)
    return "\n".join([ablation.title, "", *table, "", *_foot(ablation)])


def as_markdown(ablation: Ablation) -> str:
    """Return the table for a page."""
    table = markdown_table(list(_COLUMNS), _cells(ablation), _LEFT)
    return "\n".join([f"**{ablation.title}**", "", *table, "", "  \n".join(_foot(ablation))])


def as_dict(ablation: Ablation) -> dict[str, Any]:
    """Return the ablation as JSON values; `from_dict` brings it back."""
    rows = [asdict(row) | {"images_per_second": row.rate} for row in ablation.rows]
    return asdict(ablation) | {"rows": rows, "smoke": ablation.is_smoke}


def from_dict(values: Mapping[str, Any]) -> Ablation:
    """Return the ablation that `as_dict` made `values` of."""
    given = {key: value for key, value in values.items() if key != "smoke"}
    rows = tuple(_row(saved) for saved in given.pop("rows"))
    return Ablation(**{**given, "left_out": tuple(given["left_out"])}, rows=rows)


def _row(saved: Mapping[str, Any]) -> Row:
    given = {key: value for key, value in saved.items() if key != "images_per_second"}
    published = given.pop("published")
    given["tricks"], given["rates"] = tuple(given["tricks"]), tuple(given["rates"])
    return Row(**given, published=None if published is None else Published(**published))


def save_plot(ablation: Ablation, path: Path) -> None:
    """Write a bar per row with its spread and its ceiling as PNG, SVG or PDF."""
    require("matplotlib", "bench")
    from matplotlib.figure import Figure

    rows = [row for row in ablation.rows if row.rate]
    figure = Figure(figsize=(9, 1.8 + 0.34 * len(rows)), dpi=150, layout="constrained")
    axes = figure.subplots()
    places = list(range(len(rows)))
    rates = [row.rate or 0.0 for row in rows]
    low = [rate - min(row.rates) for rate, row in zip(rates, rows, strict=True)]
    high = [max(row.rates) - rate for rate, row in zip(rates, rows, strict=True)]
    axes.barh(
        places,
        rates,
        color=[OURS if row.group == "cumulative" else OTHERS for row in rows],
        height=0.66,
        xerr=(low, high),
        error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2.5},
    )
    _ceilings(axes, rows)
    for place, row in zip(places, rows, strict=True):
        worth = "" if row.ratio is None else f"  ({row.ratio:.2f}×)"
        axes.text(max(row.rates), place, f"  {row.rate:,.0f}{worth}", va="center", fontsize=8)
    axes.set_yticks(places, [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max([*rates, *(row.ceiling or 0 for row in rows)]))
    axes.set_xlabel("images per second (blue: one trick more each; grey: one less, or beside)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(ablation.title, fontsize=11, color=INK, loc="left")
    caption = "Median; whiskers: slowest and fastest; in brackets: what the trick is worth"
    figure.supxlabel(f"{ablation.machine}. {caption}.", fontsize=7.5, x=0.01, ha="left")
    figure.savefig(path)


def _ceilings(axes: Any, rows: list[Row]) -> None:
    """Mark each row's speed on data that costs nothing."""
    marked = [(row.ceiling, place) for place, row in enumerate(rows) if row.ceiling]
    if marked:
        axes.plot(*zip(*marked, strict=True), "|", color=INK, ms=11, label="without input cost")
        axes.legend(loc="lower right", fontsize=8, edgecolor="none")
