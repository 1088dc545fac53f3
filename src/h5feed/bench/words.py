"""A report in words: its table, and what a reader must know to read it.

Nothing but the standard library: tools/peers prints with it, too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from .outcomes import Outcome, suspicions
from .report import SMOKE_BATCHES, Report, is_ours, utilization
from .tables import markdown_table, text_table

__all__ = ["as_markdown", "as_text", "headline", "sweep_as_markdown", "sweep_as_text"]

_WIDTH = 100  # columns of a terminal; wider lines are broken


def _number(value: float | None, form: str = ",.0f", factor: float = 1.0) -> str:
    return "–" if value is None else format(value * factor, form)


def _spread(o: Outcome) -> str:
    return "–" if o.spread is None else f"{o.spread:.0%}"


def _disk(o: Outcome, images: int) -> float | None:
    return o.disk_bytes / images / 1000 if o.disk_bytes and not o.ceiling else None


def _remark(o: Outcome) -> str:
    said = [o.note] if o.note else []
    # A few pages that something else holds are no reason for a remark.
    if o.cold is not None and (o.cold.resident_before or 0.0) > 0.02:
        said.append(f"{o.cold.resident_before:.0%} of its files were cached when it began cold")
    if not o.idle:
        said.append("goes on computing between its turns")
    said += suspicions(o)
    if o.error is not None:
        said.append("failed: " + textwrap.shorten(o.error, 90, placeholder=" …"))
    return "; ".join(said)


def _input_bound(o: Outcome, report: Report) -> float | None:
    used = utilization(o, report)
    return None if used is None else 1 - used


def _break_even(o: Outcome, report: Report) -> str:
    epochs = report.facts.get("break_even_epochs", {}).get(o.name)
    return "–" if epochs is None else f"{epochs:,.1f}"


Cell = Callable[[Outcome, Report], str]
_WHO: dict[str, Cell] = {
    "loader": lambda o, _: f"[{o.name}]" if o.ceiling else o.name,
    "img/s": lambda o, _: _number(o.rate),
    "±": lambda o, _: _spread(o),
    "×": lambda o, r: "–" if r.is_smoke else _speed_up(o, r.baseline),
}
_COST: dict[str, Cell] = {
    "CPU s/1000": lambda o, _: _number(o.cpu_seconds_per_1000, ".2f"),
    "memory MB": lambda o, _: "–" if o.ceiling else _number(o.private_bytes, ",.0f", 1e-6),
}
_COLUMNS: dict[str, dict[str, Cell]] = {
    "loading": _WHO
    | {
        "cold img/s": lambda o, _: _number(o.cold and o.cold.rate),
        "cold kB/img": lambda o, _: _number(o.cold and o.cold.read_bytes_per_image, ",.0f", 1e-3),
        "1st batch s": lambda o, _: "–" if o.ceiling else _number(o.startup_seconds, ".2f"),
    }
    | _COST
    | {"disk kB/img": lambda o, r: _number(_disk(o, r.images), ",.1f")},
    "training": _WHO
    | {
        "AU": lambda o, r: _number(utilization(o, r), ".0%"),
        "input bound": lambda o, r: _number(_input_bound(o, r), ".0%"),
        "break-even epochs": _break_even,
    }
    | _COST,
}


def _speed_up(o: Outcome, baseline: Outcome | None) -> str:
    if baseline is None or o.rate is None or not baseline.rate:
        return "–"
    return f"{o.rate / baseline.rate:.1f}"


def _cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Heads and rows; a column that nobody has anything in is left out."""
    columns = _COLUMNS[report.kind]
    rows = [[cell(o, report) for cell in columns.values()] for o in report.outcomes]
    kept = [k for k in range(len(columns)) if any(row[k] != "–" for row in rows)]
    heads = list(columns)
    return [heads[k] for k in kept], [[row[k] for k in kept] for row in rows]


def headline(report: Report) -> str:
    """One sentence for who reads only one: the fastest against the first, or why there is none."""
    loaders = report.loaders
    if report.is_smoke:
        return (
            f"Smoke run: {report.images} images are fewer than {SMOKE_BATCHES} batches of "
            f"{report.batch_size}. It shows that everything runs, not how fast."
        )
    if len(loaders) < 2 or not loaders[0].rate:
        return "Nothing to compare."
    best = max(loaders, key=lambda o: o.rate or 0)
    text = (
        f"{best.name}: {best.rate:,.0f} img/s, {_speed_up(best, loaders[0])} × {loaders[0].name} "
        f"({loaders[0].rate:,.0f} img/s)"
    )
    others = [o for o in loaders if not is_ours(o)]
    rival = max(others, key=lambda o: o.rate or 0, default=None)
    if rival is not None and rival.rate and rival not in (loaders[0], best):
        text += f", {_speed_up(best, rival)} × {rival.name} ({rival.rate:,.0f} img/s)"
    ceiling = report.ceiling
    if ceiling is not None and ceiling.rate and best.rate:
        text += f"; {best.rate / ceiling.rate:.0%} of [{ceiling.name}]"
    return text + "."


def _legend(report: Report) -> str:
    """What the signs of this table mean, and of no other."""
    said = "±: half the range of the repeats."
    if report.kind == "training":
        said += " AU: accelerator utilization as MLPerf Storage defines it; input bound: 1 − AU."
    if any(o.cold for o in report.outcomes):
        said += " cold: the first epoch after the cache was emptied; disk: bytes stored."
    if any(o.ceiling for o in report.outcomes):
        nobody = "the model alone" if report.kind == "training" else "the work without a loader"
        said += f" In […]: {nobody}."
    return said


def _foot(report: Report) -> list[str]:
    lines = [headline(report), _legend(report), f"Measured on {report.machine}."]
    if "pack_seconds" in report.facts:
        lines.append(f"Packing all of it takes about {report.facts['pack_seconds']:,.0f} s here.")
    return lines + [f"Not measured: {who}" for who in report.left_out]


def as_text(report: Report) -> str:
    """Return the report for a terminal of 100 columns: aligned, numbers to the right."""
    heads, rows = _cells(report)
    notes = [f"{o.name}: {said}" for o in report.outcomes if (said := _remark(o))]
    foot = [textwrap.fill(line, _WIDTH, subsequent_indent="  ") for line in _foot(report) + notes]
    return "\n".join([report.title, "", *text_table(heads, rows, {0}), "", *foot])


def sweep_as_text(reports: Sequence[Report]) -> str:
    """Return several reports and, below them, images/s of all settings in one table."""
    heads, rows = _grid(reports)
    return "\n\n".join([*map(as_text, reports), "\n".join(text_table(heads, rows, {0}))])


def _grid(reports: Sequence[Report]) -> tuple[list[str], list[list[str]]]:
    """A row per loader, a column per setting."""
    settings = [
        f"{r.batch_size:,}×{r.outcomes[0].params['workers']}w" if r.outcomes else ""
        for r in reports
    ]
    names = list(dict.fromkeys(o.name for r in reports for o in r.outcomes))
    rates = [{o.name: _number(o.rate) for o in r.outcomes} for r in reports]
    rows = [[name, *(column.get(name, "–") for column in rates)] for name in names]
    return ["img/s, batch × workers", *settings], rows


def as_markdown(report: Report) -> str:
    """Return the report as a Markdown table with its title and its foot."""
    heads, rows = _cells(report)
    rows = [[*row, _remark(o)] for row, o in zip(rows, report.outcomes, strict=True)]
    lines = markdown_table([*heads, "remark"], rows, {0, len(heads)})
    return "\n".join([f"**{report.title}**", "", *lines, "", *("  \n".join(_foot(report)),)])


def sweep_as_markdown(reports: Sequence[Report]) -> str:
    """Return several reports and, below them, images/s of all settings in one table."""
    heads, rows = _grid(reports)
    return "\n\n".join([*map(as_markdown, reports), "\n".join(markdown_table(heads, rows, {0}))])
