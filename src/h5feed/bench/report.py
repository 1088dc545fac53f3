"""What was measured, said to people and programs: tables, sentences, JSON, a plot.

`Comparison` has loaders side by side (bench-h5, tools/peers), `h5feed.bench.ablate.Ablation` one
training with more and more tricks. Each says what its table and its plot hold; the rest is here.
"""

from __future__ import annotations

import textwrap
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_type_hints

from h5feed.bench.rounds import Outcome, Rates, suspicions
from h5feed.plotting import Bar, draw_bars, saved_figure

__all__ = [
    "OURS",
    "Chart",
    "Comparison",
    "Report",
    "ReportTable",
    "as_dict",
    "as_markdown",
    "as_text",
    "draw_chart",
    "from_dict",
    "markdown_table",
    "number",
    "save_plot",
    "save_sweep_plot",
    "sweep_as_markdown",
    "sweep_as_text",
    "text_table",
]

OURS = "H5Loader"
"""The contestant whose threads make batches with h5feed's own ops."""
_OURS = (OURS, "H5Dataset", "DaliLoader", "h5feed")
_WIDTH = 100  # columns of a terminal; wider lines are broken
_ROW, _REST = 0.33, 1.75  # inches: of a bar, and of title, axis and caption


class ReportTable(NamedTuple):
    """A table, and what stands below it."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int]
    """Columns of text; all others are numbers, aligned to the right."""
    foot: Sequence[str] = ()


class Chart(NamedTuple):
    """Groups of bars under headings, drawn as one plot."""

    groups: Mapping[str, Sequence[Bar]]
    title: str
    caption: str
    heads: Sequence[str] = ()
    """Of the columns beside the bars."""
    apart: bool = False
    """Each group on a scale of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What every report has: what was done, with how much, and where."""

    SMOKE_BATCHES: ClassVar[int]
    """Fewer batches in an epoch measure how epochs start, not how images flow."""
    LISTED: ClassVar[str]
    """The field that holds what was measured, one after another."""

    title: str
    """What was done, in one line."""
    images: int
    """In one epoch."""
    batch_size: int
    machine: str
    """In words."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Machine, versions, options: everything needed to do it again."""
    left_out: tuple[str, ...] = ()
    """What was not measured, and why."""

    @property
    def is_smoke(self) -> bool:
        """Whether the set is too small for speeds to mean anything."""
        return self.images < self.SMOKE_BATCHES * self.batch_size

    def smoke(self) -> str:
        """Say so in words."""
        return (
            f"Smoke run: {self.images} images are fewer than {self.SMOKE_BATCHES} batches of "
            f"{self.batch_size}. It shows that everything runs, not how fast."
        )

    def table(self, *, page: bool) -> ReportTable:
        """Return the table for a Markdown `page`, or for a terminal."""
        raise NotImplementedError

    def chart(self) -> Chart:
        """Return the plot."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Report):
    """Loaders side by side: same images, same batch size, same workers."""

    SMOKE_BATCHES: ClassVar[int] = 4
    LISTED: ClassVar[str] = "outcomes"

    kind: Literal["loading", "training"] = "loading"
    """Which columns the table has."""
    outcomes: tuple[Outcome, ...]

    @property
    def loaders(self) -> list[Outcome]:
        """Those who were measured, without the ceilings."""
        return [o for o in self.outcomes if not o.ceiling and o.rate is not None]

    @property
    def baseline(self) -> Outcome | None:
        """The first loader: what the others are compared with."""
        return self.loaders[0] if self.loaders else None

    @property
    def ceiling(self) -> Outcome | None:
        """The first ceiling: no loader can be much faster."""
        return next((o for o in self.outcomes if o.ceiling and o.rate), None)

    def speed_up(self, o: Outcome) -> float | None:
        """How many times as fast as the baseline `o` is."""
        base = self.baseline
        return None if base is None or not base.rate or o.rate is None else o.rate / base.rate

    def utilization(self, o: Outcome) -> float | None:
        """Accelerator utilization as MLPerf Storage has it: compute time over running time."""
        if o.ceiling or o.rate is None or self.ceiling is None or not self.ceiling.rate:
            return None
        return min(o.rate / self.ceiling.rate, 1.0)

    def headline(self) -> str:
        """One sentence for who reads only one: the fastest against the first, or why not."""
        loaders = self.loaders
        if self.is_smoke:
            return self.smoke()
        if len(loaders) < 2 or not loaders[0].rate:
            return "Nothing to compare."
        best = max(loaders, key=_rate)
        said = (
            f"{best.name}: {best.rate:,.0f} img/s, {_times(best, loaders[0])} × "
            f"{loaders[0].name} ({loaders[0].rate:,.0f} img/s)"
        )
        others = [o for o in loaders if not _is_ours(o)]
        rival = max(others, key=_rate, default=None)
        if rival is not None and rival.rate and rival not in (loaders[0], best):
            said += f", {_times(best, rival)} × {rival.name} ({rival.rate:,.0f} img/s)"
        if self.ceiling is not None:
            said += f"; {_rate(best) / _rate(self.ceiling):.0%} of [{self.ceiling.name}]"
        return said + "."

    def table(self, *, page: bool) -> ReportTable:
        """A row per outcome; empty columns are left out."""
        columns = _COLUMNS[self.kind]
        rows = [[cell(o, self) for cell in columns.values()] for o in self.outcomes]
        kept = [k for k in range(len(columns)) if any(row[k] != "–" for row in rows)]
        heads = [list(columns)[k] for k in kept]
        rows = [[row[k] for k in kept] for row in rows]
        remarks = [_remark(o) for o in self.outcomes]
        if page:
            rows = [[*row, said] for row, said in zip(rows, remarks, strict=True)]
            return ReportTable([*heads, "remark"], rows, {0, len(heads)}, self._foot())
        told = zip(self.outcomes, remarks, strict=True)
        return ReportTable(
            heads, rows, {0}, self._foot() + [f"{o.name}: {said}" for o, said in told if said]
        )

    def _foot(self) -> list[str]:
        lines = [self.headline(), self._legend(), f"Measured on {self.machine}."]
        if "pack_seconds" in self.facts:
            lines.append(f"Packing all of it takes about {self.facts['pack_seconds']:,.0f} s here.")
        lines += self._good_for()
        return lines + [f"Not measured: {who}" for who in self.left_out]

    def _good_for(self) -> list[str]:
        """Say up to how many cores threads can go on like this: Python runs on one at a time."""
        spent, workers = self.facts.get("python_seconds"), self.facts.get("workers")
        rate = next((o.rate for o in self.outcomes if o.name == OURS and o.rate), None)
        if not spent or not workers or not rate or self.is_smoke:
            return []
        cores = max(workers, int(workers / (rate * spent)))
        return [
            f"Python's lock is held {spent * 1e6:.1f} µs an image: {OURS}'s threads make at most "
            f"{1 / spent:,.0f} img/s, and its rate grows with the cores up to {cores} at most."
        ]

    def _legend(self) -> str:
        """What the signs of this table mean, and of no other."""
        training = self.kind == "training"
        said = "±: half the range of the repeats."
        if training:
            said += (
                " AU: accelerator utilization as MLPerf Storage defines it; input bound: 1 − AU."
            )
        if any(o.cold for o in self.outcomes):
            said += " cold: the first epoch after the cache was emptied; disk: bytes stored."
        if any(o.ceiling for o in self.outcomes):
            nobody = "the model alone" if training else "the work without a loader"
            said += f" In […]: {nobody}."
        return said

    def chart(self) -> Chart:
        """A bar per loader, warm and cold apart, ceilings as outlines."""
        caption = f"{self.machine}. Bars: median of the windows; whiskers: slowest and fastest."
        if any(o.ceiling for o in self.outcomes):
            caption += " Dashed outlines: ceilings, the work without a loader."
        if self.is_smoke:
            caption = f"{self.smoke()}\n{caption}"
        warm, cold = self.bars(), self.cold_bars()
        if not cold:
            return Chart({"": warm}, self.title, caption)
        groups = {"Warm: files in the page cache": warm, "Cold: first epoch": cold}
        return Chart(groups, self.title, caption)

    def bars(self) -> list[Bar]:
        """Return a bar for each outcome, in order: images per second, and how much more.

        What was not warm (the disk) is left to `cold_bars`.
        """
        return [
            Bar(
                name=o.name,
                value=o.rate,
                low=min(o.rates, default=None),
                high=max(o.rates, default=None),
                says=(number(o.rate), self._gain(o)) if o.rate else ("failed", ""),
                kind=_bar_kind(o),
            )
            for o in self.outcomes
            if not _is_disk(o) and (o.rate or o.error)
        ]

    def _gain(self, o: Outcome) -> str:
        gain = self.speed_up(o)
        return "" if o.ceiling or self.is_smoke or gain is None else f"{gain:.1f}×"

    def cold_bars(self) -> list[Bar]:
        """Return a bar for each cold run, and for the disk that bounds them."""
        found = [(o, o.rate if _is_disk(o) else o.cold and o.cold.rate) for o in self.outcomes]
        return [
            Bar(name=o.name, value=rate, says=(number(rate),), kind=_bar_kind(o))
            for o, rate in found
            if rate
        ]


def _rate(o: Outcome) -> float:
    return o.rate or 0.0


def _times(o: Outcome, other: Outcome) -> str:
    return f"{_rate(o) / _rate(other):.1f}"


def _is_ours(o: Outcome) -> bool:
    return any(name in o.name for name in _OURS)


def _is_disk(o: Outcome) -> bool:
    return o.ceiling and o.name.startswith("disk")


def _bar_kind(o: Outcome) -> Literal["ours", "other", "ceiling"]:
    if o.ceiling:
        return "ceiling"
    return "ours" if _is_ours(o) else "other"


def number(value: float | None, form: str = ",.0f", factor: float = 1.0) -> str:
    """Return `value` × `factor` as a cell of a table; a dash for None.

    >>> number(20951.3), number(0.5, ".0%"), number(None)
    ('20,951', '50%', '–')
    """
    return "–" if value is None else format(value * factor, form)


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


def _disk(o: Outcome, images: int) -> float | None:
    return o.disk_bytes / images / 1000 if o.disk_bytes and not o.ceiling else None


def _input_bound(o: Outcome, report: Comparison) -> float | None:
    used = report.utilization(o)
    return None if used is None else 1 - used


def _break_even(o: Outcome, report: Comparison) -> str:
    return number(report.facts.get("break_even_epochs", {}).get(o.name), ",.1f")


Cell = Callable[[Outcome, Comparison], str]
_WHO: dict[str, Cell] = {
    "loader": lambda o, _: f"[{o.name}]" if o.ceiling else o.name,
    "img/s": lambda o, _: number(o.rate),
    "±": lambda o, _: number(o.spread, ".0%"),
    "×": lambda o, r: "–" if r.is_smoke else number(r.speed_up(o), ".1f"),
}
_COST: dict[str, Cell] = {
    "CPU s/1000": lambda o, _: number(o.cpu_seconds_per_1000, ".2f"),
    "memory MB": lambda o, _: "–" if o.ceiling else number(o.private_bytes, ",.0f", 1e-6),
}
_COLUMNS: dict[str, dict[str, Cell]] = {
    "loading": _WHO
    | {
        "cold img/s": lambda o, _: number(o.cold and o.cold.rate),
        "cold kB/img": lambda o, _: number(o.cold and o.cold.read_bytes_per_image, ",.0f", 1e-3),
        "1st batch s": lambda o, _: "–" if o.ceiling else number(o.startup_seconds, ".2f"),
    }
    | _COST
    | {"disk kB/img": lambda o, r: number(_disk(o, r.images), ",.1f")},
    "training": _WHO
    | {
        "AU": lambda o, r: number(r.utilization(o), ".0%"),
        "input bound": lambda o, r: number(_input_bound(o, r), ".0%"),
        "break-even epochs": _break_even,
    }
    | _COST,
}


def as_text(report: Report) -> str:
    """Return the report for a terminal of 100 columns: aligned, numbers to the right."""
    table = report.table(page=False)
    foot = [textwrap.fill(line, _WIDTH, subsequent_indent="  ") for line in table.foot]
    return "\n".join([report.title, "", *text_table(*table[:3]), "", *foot])


def as_markdown(report: Report) -> str:
    """Return the report as a Markdown table with its title and its foot."""
    table = report.table(page=True)
    lines = markdown_table(*table[:3])
    return "\n".join([f"**{report.title}**", "", *lines, "", "  \n".join(table.foot)])


def sweep_as_text(reports: Sequence[Comparison]) -> str:
    """Return several reports and, below them, images/s of all settings in one table."""
    return "\n\n".join([*map(as_text, reports), "\n".join(text_table(*_grid(reports)[:3]))])


def sweep_as_markdown(reports: Sequence[Comparison]) -> str:
    """Return several reports and, below them, images/s of all settings in one table."""
    return "\n\n".join([*map(as_markdown, reports), "\n".join(markdown_table(*_grid(reports)[:3]))])


def _grid(reports: Sequence[Comparison]) -> ReportTable:
    """A row per loader, a column per setting."""
    settings = [f"{r.batch_size:,}×{_workers(r)}w" if r.outcomes else "" for r in reports]
    names = list(dict.fromkeys(o.name for r in reports for o in r.outcomes))
    rates = [{o.name: number(o.rate) for o in r.outcomes} for r in reports]
    rows = [[name, *(column.get(name, "–") for column in rates)] for name in names]
    return ReportTable(["img/s, batch × workers", *settings], rows, {0})


def text_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]
) -> list[str]:
    """Return lines with aligned columns: those in `left` to the left, numbers to the right.

    Heads of numbers stand in two lines where they are wider than their numbers.

    >>> print("\\n".join(text_table(["loader", "img/s"], [["H5Loader", "20,951"]], left={0})))
    loader     img/s
    ────────  ──────
    H5Loader  20,951
    """
    columns = list(zip(*rows, strict=True)) or [()] * len(heads)
    needed = [max((len(cell) for cell in column), default=0) for column in columns]
    broken = [
        ("", head) if k in left or len(head) <= width else _in_two(head)
        for k, (head, width) in enumerate(zip(heads, needed, strict=True))
    ]
    widths = [max(width, *map(len, head)) for width, head in zip(needed, broken, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    above = [line(words) for words in zip(*broken, strict=True)]
    return [*filter(None, above), "  ".join("─" * width for width in widths), *map(line, rows)]


def _in_two(head: str) -> tuple[str, str]:
    """Break a head at the blank that makes the wider of its two lines the shortest."""
    words = head.split()
    breaks = [(" ".join(words[:k]), " ".join(words[k:])) for k in range(len(words))]
    return min(breaks, key=lambda two: max(map(len, two)))


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]
) -> list[str]:
    """Return a Markdown table's lines.

    >>> markdown_table(["loader", "img/s"], [["H5Loader", "20,951"]], left={0})
    ['| loader | img/s |', '| --- | ---: |', '| H5Loader | 20,951 |']
    """
    align = ["---" if k in left else "---:" for k in range(len(heads))]
    return ["| " + " | ".join(cells) + " |" for cells in (heads, align, *rows)]


def save_plot(report: Report, path: Path) -> None:
    """Write the report as a PNG, SVG or PDF (by the name's ending)."""
    draw_chart(report.chart(), path)


def save_sweep_plot(reports: Sequence[Comparison], path: Path) -> None:
    """Write images/s over workers: a panel per batch size, a line per loader, dashed ceilings."""
    sizes = sorted({report.batch_size for report in reports})
    names = list(dict.fromkeys(o.name for report in reports for o in report.outcomes if o.rates))
    title = reports[0].title.partition(", batches of")[0]
    caption = f"{reports[0].machine}. Points: median of the windows; bars: slowest and fastest."
    with saved_figure(
        path, extra="bench", title=title, caption=caption, width=5.0 * len(sizes) + 2.5,
        columns=len(sizes), sharey=True,
    ) as (figure, panels):  # fmt: skip
        for panel, size in zip(panels, sizes, strict=True):
            some = [report for report in reports if report.batch_size == size]
            for number_, name in enumerate(names):
                _draw_line(panel, name, f"C{number_}", some)
            panel.set_title(f"batches of {size:,}")
            panel.set_xlabel("workers")
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks := sorted({_workers(report) for report in some}))
            panel.set_xticklabels([str(tick) for tick in ticks])
            panel.set_ylim(bottom=0)
        panels[0].set_ylabel("images per second")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")


def _draw_line(panel: Any, name: str, color: str, reports: Sequence[Comparison]) -> None:
    found = [(_workers(r), o) for r in reports for o in r.outcomes if o.name == name and o.rates]
    found = [(workers, o) for workers, o in found if not _is_disk(o)]
    if not found:
        return
    places, outcomes = zip(*found, strict=True)
    rates = [_rate(o) for o in outcomes]
    low = [rate - min(o.rates) for rate, o in zip(rates, outcomes, strict=True)]
    high = [max(o.rates) - rate for rate, o in zip(rates, outcomes, strict=True)]
    line = "--" if outcomes[0].ceiling else "-"
    panel.errorbar(places, rates, (low, high), label=name, color=color, linestyle=line, marker="o")


def _workers(report: Comparison) -> int:
    workers: int = report.outcomes[0].params["workers"] if report.outcomes else 0
    return workers


def draw_chart(chart: Chart, path: Path) -> None:
    """Write groups of bars as one plot, as high as they need."""
    panels: list[Mapping[str, Sequence[Bar]]] = [chart.groups]
    if chart.apart:
        panels = [{name: bars} for name, bars in chart.groups.items()]
    rows = [
        sum(len(bars) + 1.2 * bool(name) for name, bars in panel.items()) + 1.5 * chart.apart
        for panel in panels
    ]
    with saved_figure(
        path,
        extra="bench",
        title=chart.title,
        caption=chart.caption,
        height=_REST + _ROW * sum(rows),
        rows=len(panels),
        height_ratios=rows,
    ) as (_, drawn):
        for k, (axes, panel) in enumerate(zip(drawn, panels, strict=True)):
            draw_bars(axes, panel, heads=() if k else chart.heads, unit="images per second")


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report as JSON values; `from_dict` brings it back."""
    listed: Sequence[Rates] = getattr(report, report.LISTED)
    values = [asdict(one) | {"images_per_second": one.rate} for one in listed]
    return asdict(report) | {report.LISTED: values, "smoke": report.is_smoke}


_Made = TypeVar("_Made")


def from_dict(kind: type[_Made], values: Mapping[str, Any]) -> _Made:
    """Return the `kind` of report that `as_dict` made `values` of.

    What a report works out itself (`smoke`, `images_per_second`) is passed over.
    """
    hints = get_type_hints(kind)
    names = [one.name for one in fields(kind) if one.name in values]  # type: ignore[arg-type]
    return kind(**{name: _from_json(values[name], hints[name]) for name in names})


def _from_json(value: Any, hint: Any) -> Any:
    """`value` as JSON gives it, as the annotated type `hint`."""
    inner = get_args(hint)
    if getattr(hint, "__origin__", None) is Union or isinstance(hint, types.UnionType):
        return value if value is None else _from_json(value, inner[0])
    if isinstance(hint, type) and is_dataclass(hint):
        return from_dict(hint, value)
    return tuple(_from_json(one, inner[0]) for one in value) if isinstance(value, list) else value
