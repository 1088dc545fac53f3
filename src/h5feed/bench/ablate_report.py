"""An ablation, said to people: a table, JSON, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from h5feed.plotting import Bar

from .ablation import Ablation, Row
from .plot import draw_groups
from .tables import markdown_table, text_table
from .tricks import Published

__all__ = ["as_dict", "as_markdown", "as_text", "from_dict", "save_plot"]


def _number(value: float | None, form: str = ",.0f", factor: float = 1.0) -> str:
    return "–" if value is None else format(value * factor, form)


def _ratio(row: Row) -> str:
    return "–" if row.ratio is None else f"{row.ratio:.2f}×"


def _input_bound(row: Row) -> str:
    """No share is below nothing: that much of it is noise, or an error that `doubts` names."""
    if row.input_bound is None or row.input_bound >= 0:
        return _number(row.input_bound, ".0%")
    return "in doubt" if row.doubts else "0%"


Cell = Callable[[Row], str]


def _columns(sources: Sequence[str]) -> dict[str, Cell]:
    """Return each column's head, and what it says of a row; published figures by `sources`."""

    def published(row: Row) -> str:
        if row.error:
            return f"failed: {row.error}"
        if row.group == "without" or not row.tricks:
            return ""
        if row.published is None:
            return "none found"
        found = row.published
        return f"{found.figure}; {found.hardware} [{sources.index(found.source) + 1}]"

    return {
        "row": lambda row: row.name,
        "img/s": lambda row: _number(row.rate),
        "spread": lambda row: "–" if row.spread is None else f"±{row.spread:.0%}",
        "worth": _ratio,
        "s/epoch": lambda row: _number(row.epoch_seconds, ",.1f"),
        "peak MB": lambda row: _number(row.memory_bytes, ",.0f", 1e-6),
        "loss": lambda row: _number(row.final_loss, ".3f"),
        "ceiling": lambda row: _number(row.ceiling),
        "input-bound": _input_bound,
        "CPU s/1000": lambda row: _number(row.cpu_seconds_per_1000, ".2f"),
        "published elsewhere": published,
    }


def _sources(ablation: Ablation) -> list[str]:
    return list(dict.fromkeys(row.published.source for row in ablation.rows if row.published))


def _foot(ablation: Ablation) -> list[str]:
    versions = (f"{name} {what}" for name, what in ablation.facts.get("versions", {}).items())
    lines = [
        f"Measured on {', '.join([ablation.machine, *versions])}.",
        *(f"[{number}] {source}." for number, source in enumerate(_sources(ablation), 1)),
        *(f"In doubt: {row.name}: {doubt}" for row in ablation.rows for doubt in row.doubts),
        *(f"Not measured: {what}" for what in ablation.left_out),
    ]
    if not ablation.is_smoke:
        return lines
    few = (
        f"Smoke run: {ablation.images} images are too few for batches of "
        f"{ablation.batch_size}. It shows that everything runs, not how fast."
    )
    return [few, *lines]


_CEILING = (
    "ceiling: img/s with data that costs nothing; input-bound: 1 − ceiling's time / the row's."
)


def as_text(ablation: Ablation) -> str:
    """Return the table for a terminal: a row each, without a trick too."""
    columns = _columns(_sources(ablation))
    rows = [[cell(row) for cell in columns.values()] for row in ablation.rows]
    table = text_table(list(columns), rows, (0, len(columns) - 1))
    worth = "worth: against the row before; of “all but” rows, all together against the row."
    return "\n".join([ablation.title, "", *table, "", f"{worth} {_CEILING}", *_foot(ablation)])


def _trick(row: Row) -> str:
    """Return the name of the trick that a row adds or leaves out."""
    return row.name.removeprefix("+ ").removeprefix("all but ")


_PAGE = (
    "row", "img/s", "spread", "worth", "left out", "s/epoch", "peak MB", "loss", "ceiling",
    "input-bound", "CPU s/1000", "published elsewhere",
)  # fmt: skip


def as_markdown(ablation: Ablation) -> str:
    """Return the table for a page: a row for each trick, and what leaving it out costs.

    What torch does by default has no row that adds it, only the one that leaves it out.
    """
    added = {_trick(row) for row in ablation.rows if row.group == "cumulative"}
    missed = {
        _trick(row): "failed" if row.error else _ratio(row)
        for row in ablation.rows
        if row.group == "without"
    }
    columns = _columns(_sources(ablation))
    columns["left out"] = lambda row: missed.get(_trick(row), "–")
    columns["worth"] = lambda row: "–" if row.group == "without" else _ratio(row)
    rows = [
        [columns[head](row) for head in _PAGE]
        for row in ablation.rows
        if row.group != "without" or _trick(row) not in added
    ]
    table = markdown_table(_PAGE, rows, (0, len(_PAGE) - 1))
    worth = "worth: against the row before; left out: all together against all but this one."
    foot = "  \n".join([f"{worth} {_CEILING}", *_foot(ablation)])
    return "\n".join([f"**{ablation.title}**", "", *table, "", foot])


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
    given |= {name: tuple(given.get(name, ())) for name in ("tricks", "rates", "doubts")}
    return Row(**given, published=None if published is None else Published(**published))


def save_plot(ablation: Ablation, path: Path) -> None:
    """Write a bar per row with its spread and its ceiling as PNG, SVG or PDF."""
    rows = [row for row in ablation.rows if row.rate]
    headings = {
        "cumulative": "One trick more in each row",
        "without": "All tricks but one",
        "beside": "All tricks and one",
    }
    groups = {
        heading: [_bar(row) for row in rows if row.group == group]
        for group, heading in headings.items()
    }
    draw_groups(
        {heading: bars for heading, bars in groups.items() if bars},
        path,
        title=f"What each trick is worth: {ablation.title}",
        caption=f"{ablation.machine}. Bars: median of the windows; whiskers: slowest and fastest; "
        "stroke: the same training on data that costs nothing. worth: against the row before; of "
        "“all but” rows, all together against the row.",
        heads=("img/s", "worth"),
    )


def _bar(row: Row) -> Bar:
    return Bar(
        name=row.name,
        value=row.rate,
        low=min(row.rates),
        high=max(row.rates),
        says=(_number(row.rate), "" if row.ratio is None else _ratio(row)),
        kind="ours" if row.group == "cumulative" else "other",
        mark=row.ceiling,
    )
