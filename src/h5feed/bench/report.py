"""What was measured, said to people: a table for a terminal or a page, JSON for programs.

The same report serves bench-h5 and tools/peers; it needs nothing but the standard library.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .rounds import Cold, Outcome
from .tables import markdown_table, text_table

__all__ = [
    "COLUMNS",
    "Report",
    "as_dict",
    "as_markdown",
    "as_text",
    "from_dict",
    "headline",
    "utilization",
]

SMOKE_BATCHES = 4  # fewer batches in an epoch measure how epochs start, not how pictures flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Outcomes that belong side by side: same pictures, same batch size, same workers."""

    title: str
    """What was done, in one line."""
    kind: Literal["loading", "training"] = "loading"
    """Which columns the table has."""
    outcomes: tuple[Outcome, ...]
    pictures: int
    """In one epoch."""
    batch_size: int
    machine: str
    """In words."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Machine, versions, options: everything needed to do it again."""
    left_out: tuple[str, ...] = ()
    """Who was not measured, and why."""

    @property
    def is_smoke(self) -> bool:
        """Whether the set is too small to mean anything."""
        return self.pictures < SMOKE_BATCHES * self.batch_size

    @property
    def loaders(self) -> list[Outcome]:
        """Those who were measured, without the ceilings."""
        return [o for o in self.outcomes if not o.ceiling and o.rate is not None]

    @property
    def baseline(self) -> Outcome | None:
        """The first one: what the others are compared with."""
        return self.loaders[0] if self.loaders else None

    @property
    def ceiling(self) -> Outcome | None:
        """The first ceiling: what nobody can pass by much."""
        return next((o for o in self.outcomes if o.ceiling and o.rate), None)


def _number(value: float | None, form: str = ",.0f", factor: float = 1.0) -> str:
    return "–" if value is None else format(value * factor, form)


def _spread(o: Outcome) -> str:
    """Half the distance between the slowest and the fastest window, in percent of the median."""
    if o.rate is None or len(o.rates) < 2:
        return "–"
    return f"±{50 * (max(o.rates) - min(o.rates)) / o.rate:.0f} %"


def _cold(o: Outcome) -> str:
    if o.cold is None:
        return "–"
    # A few pages that something else holds are no reason for a remark.
    kept = o.cold.resident_before
    return f"{o.cold.rate:,.0f}" + (f" ({kept:.0%} cached)" if kept and kept > 0.02 else "")


def _disk(o: Outcome, pictures: int) -> float | None:
    return o.disk_bytes / pictures / 1000 if o.disk_bytes and not o.ceiling else None


def _remark(o: Outcome) -> str:
    said = [o.note] if o.note else []
    if not o.idle:
        said.append("goes on computing between its turns")
    if o.error is not None:
        said.append("failed: " + textwrap.shorten(o.error, 90, placeholder=" …"))
    return "; ".join(said)


def utilization(o: Outcome, report: Report) -> float | None:
    """Accelerator utilization as MLPerf Storage defines it: compute time over running time."""
    if o.ceiling or o.rate is None or report.ceiling is None or not report.ceiling.rate:
        return None
    return min(o.rate / report.ceiling.rate, 1.0)


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
    "spread": lambda o, _: _spread(o),
    "×": lambda o, r: "–" if r.is_smoke else _speed_up(o, r.baseline),
}
_COST: dict[str, Cell] = {
    "CPU s/1000": lambda o, _: _number(o.cpu_seconds_per_1000, ".2f"),
    "memory MB": lambda o, _: "–" if o.ceiling else _number(o.private_bytes, ",.0f", 1e-6),
}
_REMARK: dict[str, Cell] = {"remark": lambda o, _: _remark(o)}
COLUMNS: dict[str, dict[str, Cell]] = {
    "loading": _WHO
    | {
        "cold img/s": lambda o, _: _cold(o),
        "1st batch s": lambda o, _: "–" if o.ceiling else _number(o.startup_seconds, ".2f"),
    }
    | _COST
    | {"disk kB/img": lambda o, r: _number(_disk(o, r.pictures), ",.1f")}
    | _REMARK,
    "training": _WHO
    | {
        "AU": lambda o, r: _number(utilization(o, r), ".0%"),
        "input-bound": lambda o, r: _number(_input_bound(o, r), ".0%"),
        "break-even epochs": _break_even,
    }
    | _COST
    | _REMARK,
}


def _speed_up(o: Outcome, baseline: Outcome | None) -> str:
    if baseline is None or o.rate is None or not baseline.rate:
        return "–"
    return f"{o.rate / baseline.rate:.1f}"


def _cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Heads and rows; a column that nobody has anything in is left out."""
    columns = COLUMNS[report.kind]
    rows = [[cell(o, report) for cell in columns.values()] for o in report.outcomes]
    kept = [k for k in range(len(columns)) if any(row[k] not in ("–", "") for row in rows)]
    heads = list(columns)
    return [heads[k] for k in kept], [[row[k] for k in kept] for row in rows]


def headline(report: Report) -> str:
    """One sentence for who reads only one: the fastest against the first, or why there is none."""
    loaders = report.loaders
    if report.is_smoke:
        return (
            f"Smoke run: {report.pictures} pictures are fewer than {SMOKE_BATCHES} batches of "
            f"{report.batch_size}. It shows that everything runs, not how fast."
        )
    if len(loaders) < 2 or not loaders[0].rate:
        return "Nothing to compare."
    best = max(loaders, key=lambda o: o.rate or 0)
    text = (
        f"{best.name}: {best.rate:,.0f} img/s, {_speed_up(best, loaders[0])} × {loaders[0].name} "
        f"({loaders[0].rate:,.0f} img/s)"
    )
    ceiling = report.ceiling
    if ceiling is not None and ceiling.rate and best.rate:
        text += f"; {best.rate / ceiling.rate:.0%} of [{ceiling.name}]"
    return text + "."


_CEILING = {
    "loading": "[…] are ceilings: the bare work with no loader around it.",
    "training": "[…] is the ceiling: the model alone. AU: accelerator utilization as MLPerf "
    "Storage defines it.",
}


def _foot(report: Report) -> list[str]:
    lines = [headline(report), f"Measured on {report.machine}."]
    if any(o.ceiling for o in report.outcomes):
        lines.insert(1, _CEILING[report.kind])
    if "pack_seconds" in report.facts:
        lines.append(f"Packing all of it takes about {report.facts['pack_seconds']:,.0f} s here.")
    return lines + [f"Not measured: {who}" for who in report.left_out]


def _left(heads: Sequence[str]) -> set[int]:
    """Columns of words."""
    return {k for k, head in enumerate(heads) if head in ("loader", "remark")}


def as_text(report: Report) -> str:
    """Return the report for a terminal: aligned columns, numbers to the right."""
    heads, rows = _cells(report)
    table = text_table(heads, rows, _left(heads))
    return "\n".join([report.title, "", *table, "", *_foot(report)])


def as_markdown(report: Report) -> str:
    """Return the report as a Markdown table with its title and its foot."""
    heads, rows = _cells(report)
    lines = markdown_table(heads, rows, _left(heads))
    return "\n".join([f"**{report.title}**", "", *lines, "", *("  \n".join(_foot(report)),)])


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report as JSON values; `from_dict` brings it back."""
    outcomes = [asdict(o) | {"images_per_second": o.rate} for o in report.outcomes]
    return asdict(report) | {"outcomes": outcomes, "smoke": report.is_smoke}


def from_dict(values: Mapping[str, Any]) -> Report:
    """Return the report that `as_dict` made `values` of."""
    outcomes = []
    for saved in values["outcomes"]:
        given = {key: value for key, value in saved.items() if key != "images_per_second"}
        cold = given.pop("cold")
        given["rates"] = tuple(given["rates"])
        outcomes.append(Outcome(**given, cold=None if cold is None else Cold(**cold)))
    names = ("title", "kind", "pictures", "batch_size", "machine", "facts")
    return Report(
        **{name: values[name] for name in names},
        outcomes=tuple(outcomes),
        left_out=tuple(values["left_out"]),
    )
