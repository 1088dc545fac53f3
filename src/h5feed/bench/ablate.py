"""train-h5 ablate: the trainer with one switch more, row by row, and with one switch less.

Every row is a process of its own, measured by turns like bench-h5's subjects, beside a row that
trains the same way on data that costs nothing: t_synthetic. What the input costs is
1 − t_synthetic / t_real.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from h5feed.bench import system
from h5feed.bench.measure import Expectation
from h5feed.bench.report import Chart, Report, ReportTable, number
from h5feed.bench.rounds import LONGEST_WINDOW, Entry, Outcome, Rates, Schedule, run, suspicions
from h5feed.bench.tricks import CHECKPOINTING, Published, Trick, packed, plain, synthetic, usable
from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.plotting import Bar
from h5feed.train.config import TrainConfig, at_least, write_config
from h5feed.train.data import default_size

__all__ = ["AblateOptions", "Ablation", "Row", "ablate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AblateOptions:
    """What is measured, and for how long."""

    images: Path | None = None
    """The folder that TRAIN was packed from: the plain loop reads it file by file."""
    seconds: float = 2.0
    """Length of a timed window; longer where six batches take longer."""
    repeats: int = 3
    """Windows of each row; they take turns."""
    final_steps: int = 30
    """Steps after which the loss is compared: over the last fifth of them."""
    leave_one_out: bool = True
    """Measure all tricks but one, too, for each of them."""
    only: tuple[str, ...] = ()
    """Only tricks whose name contains one of these."""

    def __post_init__(self) -> None:
        at_least(self, 0.05, "seconds")
        at_least(self, 1, "repeats", "final_steps")
        if self.seconds > LONGEST_WINDOW:
            most = f"it must be at most {LONGEST_WINDOW:g}"
            raise UsageError(f"--seconds {self.seconds} is too large: {most}")


Group = Literal["cumulative", "without", "beside"]
"""Rows with one trick more each; all tricks but one; all tricks and one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Rates):
    """One configuration, measured."""

    name: str
    group: Group
    tricks: tuple[str, ...]
    """Those that are on."""
    ratio: float | None = None
    """What its trick is worth: to the row before; of "without" rows, of all to this one."""
    epoch_seconds: float | None = None
    memory_bytes: int | None = None
    """Peak of the GPU's allocations; on the CPU of the process and its workers."""
    final_loss: float | None = None
    ceiling: float | None = None
    """Images per second with data that costs nothing."""
    input_bound: float | None = None
    """1 − t_synthetic / t_real; below 0 where the difference drowns in the spread, or where
    something is wrong (see `doubts`)."""
    doubts: tuple[str, ...] = ()
    """What must be explained before the row may be believed."""
    cpu_seconds_per_1000: float | None = None
    published: Published | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation(Report):
    """All rows, and where they were measured."""

    SMOKE_BATCHES: ClassVar[int] = 8
    LISTED: ClassVar[str] = "rows"

    rows: tuple[Row, ...]

    def table(self, *, page: bool) -> ReportTable:
        """A row each; on a `page` a row for each trick, and what leaving it out costs.

        What torch does by default has no row that adds it, only the one that leaves it out.
        """
        columns = _columns(self._sources)
        if not page:
            cells = [[cell(row) for cell in columns.values()] for row in self.rows]
            worth = "of “all but” rows, all together against the row."
            return ReportTable(list(columns), cells, (0, len(columns) - 1), self._foot(worth))
        added = {_trick(row) for row in self.rows if row.group == "cumulative"}
        missed = {
            _trick(row): "failed" if row.error else _times(row)
            for row in self.rows
            if row.group == "without"
        }
        columns["left out"] = lambda row: missed.get(_trick(row), "–")
        columns["worth"] = lambda row: "–" if row.group == "without" else _times(row)
        cells = [
            [columns[head](row) for head in _PAGE]
            for row in self.rows
            if row.group != "without" or _trick(row) not in added
        ]
        worth = "left out: all together against all but this one."
        return ReportTable(_PAGE, cells, (0, len(_PAGE) - 1), self._foot(worth))

    @property
    def _sources(self) -> list[str]:
        return list(dict.fromkeys(row.published.source for row in self.rows if row.published))

    def _foot(self, worth: str) -> list[str]:
        versions = (f"{name} {what}" for name, what in self.facts.get("versions", {}).items())
        return [
            f"worth: against the row before; {worth} {_CEILING}",
            *([self.smoke()] if self.is_smoke else []),
            f"Measured on {', '.join([self.machine, *versions])}.",
            *(f"[{number}] {source}." for number, source in enumerate(self._sources, 1)),
            *(f"In doubt: {row.name}: {doubt}" for row in self.rows for doubt in row.doubts),
            *(f"Not measured: {what}" for what in self.left_out),
        ]

    def chart(self) -> Chart:
        """A bar per row with its spread and its ceiling."""
        groups = {
            heading: [_bar(row) for row in self.rows if row.group == group and row.rate]
            for group, heading in _HEADINGS.items()
        }
        return Chart(
            {heading: bars for heading, bars in groups.items() if bars},
            title=f"What each trick is worth: {self.title}",
            caption=f"{self.machine}. Bars: median of the windows; whiskers: slowest and fastest; "
            "stroke: the same training on data that costs nothing. worth: against the row before; "
            "of “all but” rows, all together against the row.",
            heads=("img/s", "worth"),
        )


_HEADINGS = {
    "cumulative": "One trick more in each row",
    "without": "All tricks but one",
    "beside": "All tricks and one",
}
_CEILING = (
    "ceiling: img/s with data that costs nothing; input-bound: 1 − ceiling's time / the row's."
)
_PAGE = (
    "row", "img/s", "spread", "worth", "left out", "s/epoch", "peak MB", "loss", "ceiling",
    "input-bound", "CPU s/1000", "published elsewhere",
)  # fmt: skip


def _columns(sources: Sequence[str]) -> dict[str, Callable[[Row], str]]:
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
        "img/s": lambda row: number(row.rate),
        "spread": lambda row: "–" if row.spread is None else f"±{row.spread:.0%}",
        "worth": _times,
        "s/epoch": lambda row: number(row.epoch_seconds, ",.1f"),
        "peak MB": lambda row: number(row.memory_bytes, ",.0f", 1e-6),
        "loss": lambda row: number(row.final_loss, ".3f"),
        "ceiling": lambda row: number(row.ceiling),
        "input-bound": _input_bound,
        "CPU s/1000": lambda row: number(row.cpu_seconds_per_1000, ".2f"),
        "published elsewhere": published,
    }


def _times(row: Row) -> str:
    return "–" if row.ratio is None else f"{row.ratio:.2f}×"


def _input_bound(row: Row) -> str:
    """No share is below nothing: that much of it is noise, or an error that `doubts` names."""
    if row.input_bound is None or row.input_bound >= 0:
        return number(row.input_bound, ".0%")
    return "in doubt" if row.doubts else "0%"


def _trick(row: Row) -> str:
    """Return the name of the trick that a row adds or leaves out."""
    return row.name.removeprefix("+ ").removeprefix("all but ")


def _bar(row: Row) -> Bar:
    return Bar(
        name=row.name,
        value=row.rate,
        low=min(row.rates),
        high=max(row.rates),
        says=(number(row.rate), "" if row.ratio is None else _times(row)),
        kind="ours" if row.group == "cumulative" else "other",
        mark=row.ceiling,
    )


Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedRow:
    """A row to be measured."""

    name: str
    group: Group
    tricks: tuple[Trick, ...]
    trick: Trick | None
    config: TrainConfig
    synthetic: TrainConfig
    """The same on data that costs nothing."""


def ablate(config: TrainConfig, options: AblateOptions, tell: Tell = lambda _: None) -> Ablation:
    """Measure `config`'s model and recipe with the tricks off, on, and left out one by one.

    Raises:
        UsageError: A wrong option, or a file or model that cannot be trained on.
        SubjectError: The plain loop failed.
    """
    dataset = H5Dataset(config.train)
    size = config.data.size or default_size(dataset)
    config = replace(config, data=replace(config.data, size=size))
    tricks, left_out = usable(config, options.images)
    if options.only:
        tricks = [t for t in tricks if any(part in t.name for part in options.only)]
    if not tricks:
        raise UsageError(f"--only {' '.join(options.only)} leaves no trick to measure")
    rows = _plan(config, tricks, options)
    with tempfile.TemporaryDirectory() as scratch:
        found = _measure(rows, len(dataset), options, Path(scratch), tell)
    measured = tuple(_rows(rows, found, len(dataset)))
    return Ablation(
        title=f"{config.model.model} at {size} px, {len(dataset):,} images, batches of "
        f"{config.batch_size}, {config.optim.optimizer}",
        rows=measured,
        images=len(dataset),
        batch_size=config.batch_size,
        machine=system.describe_machine(system.machine_facts(config.train)) + _gpu(config),
        facts=_facts(config, options),
        left_out=tuple(left_out),
    )


def _plan(
    config: TrainConfig, tricks: Sequence[Trick], options: AblateOptions
) -> list[_PlannedRow]:
    """Cumulative rows, then all without each, then all with gradient checkpointing."""
    # Without the step from folder to packed file, everything is measured on the packed file.
    packs = any(trick.apply is packed for trick in tricks)
    base = plain(config, options.images if packs else None)

    def planned(
        name: str,
        group: Group,
        on: Sequence[Trick],
        trick: Trick | None,
    ) -> _PlannedRow:
        made = base
        for one in on:
            made = one.apply(made)
        if group == "without" and trick is not None and trick.undo is not None:
            made = trick.undo(made)
        free = synthetic(made)  # of the packed file, whose kind it takes
        if made.data.loader == "imagefolder":
            assert options.images is not None
            made = replace(made, train=options.images)
        return _PlannedRow(
            name=name, group=group, tricks=tuple(on), trick=trick, config=made, synthetic=free
        )

    rows = [planned("the plain loop", "cumulative", [], None)]
    added = [trick for trick in tricks if trick.undo is None]
    for count, trick in enumerate(added, 1):
        rows.append(planned(f"+ {trick.name}", "cumulative", added[:count], trick))
    if options.leave_one_out and len(tricks) > 1:
        for trick in tricks:
            rest = [one for one in tricks if one is not trick]
            rows.append(planned(f"all but {trick.name}", "without", rest, trick))
    if not options.only:
        every = [*tricks, CHECKPOINTING]
        rows.append(planned(f"all and {CHECKPOINTING.name}", "beside", every, CHECKPOINTING))
    return rows


def _measure(
    rows: Sequence[_PlannedRow], images: int, options: AblateOptions, scratch: Path, tell: Tell
) -> dict[TrainConfig, Outcome]:
    """Measure every configuration of `rows` once, synthetic ones too."""
    wanted: dict[TrainConfig, Entry] = {}
    for row in rows:
        for name, config in ((row.name, row.config), (f"{row.name}, no data", row.synthetic)):
            if config not in wanted:
                path = scratch / f"{len(wanted)}.json"
                write_config(config, path)
                wanted[config] = _entry(name, path, config, images, options)
    plainest = rows[0].config
    wanted[plainest] = replace(wanted[plainest], required=True)
    schedule = Schedule(
        seconds=options.seconds, repeats=options.repeats, settle=0.0, verify=options.seconds / 2
    )
    return dict(zip(wanted, run(list(wanted.values()), schedule, tell), strict=True))


def _entry(
    name: str, config_file: Path, config: TrainConfig, images: int, options: AblateOptions
) -> Entry:
    free = config.data.loader == "synthetic"
    subject = "h5feed.bench.training:TrainerSteps"
    return Entry(
        name=name,
        command=(sys.executable, "-m", "h5feed.bench.process", subject),
        params={"config": str(config_file), "final_steps": 0 if free else options.final_steps},
        expected=Expectation(
            images=images,
            batch_size=config.batch_size,
            height=config.data.size,
            width=config.data.size,
            ceiling=free,
        ),
        files=(str(config.train),),
        required=False,
        cold=False,
    )


def _rows(
    rows: Sequence[_PlannedRow], found: dict[TrainConfig, Outcome], images: int
) -> Iterable[Row]:
    rates = {row.name: found[row.config].rate for row in rows}
    cumulative = [row.name for row in rows if row.group == "cumulative"]
    everything = rates[cumulative[-1]]
    for row in rows:
        real = found[row.config]
        ceiling = found[row.synthetic]
        below = _below(real, ceiling)
        before = everything
        if row.group == "cumulative" and row.trick is not None:
            before = rates[cumulative[cumulative.index(row.name) - 1]]
        yield Row(
            name=row.name,
            group=row.group,
            tricks=tuple(trick.name for trick in row.tricks),
            rates=real.rates,
            ratio=None if row.trick is None else _ratio(row.group, real.rate, before),
            epoch_seconds=images / real.rate if real.rate else None,
            memory_bytes=real.extra.get("device_bytes") or real.private_bytes,
            final_loss=real.extra.get("final_loss"),
            ceiling=ceiling.rate,
            input_bound=1 - real.rate / ceiling.rate if real.rate and ceiling.rate else None,
            doubts=(*suspicions(real), *below),
            cpu_seconds_per_1000=real.cpu_seconds_per_1000,
            published=None if row.trick is None else row.trick.published,
            error=real.error or ceiling.error,
        )


def _below(real: Outcome, ceiling: Outcome) -> list[str]:
    """Say that a ceiling lies below what it should bound, further than the windows are spread."""
    if not real.rates or not ceiling.rate or min(real.rates) <= max(ceiling.rates):
        return []
    return [
        f"its slowest window ({min(real.rates):,.0f} img/s) is faster than any on data that costs "
        f"nothing ({max(ceiling.rates):,.0f}): one of the two was disturbed"
    ]


def _ratio(group: str, rate: float | None, before: float | None) -> float | None:
    if not rate or not before:
        return None
    return before / rate if group == "without" else rate / before


def _facts(config: TrainConfig, options: AblateOptions) -> dict[str, Any]:
    versions = system.versions()
    if torch.cuda.is_available() and config.device != "cpu":
        versions["GPU"] = torch.cuda.get_device_name()
        versions["CUDA"] = str(torch.version.cuda)
    return {
        "machine": system.machine_facts(config.train),
        "versions": versions,
        "options": {
            "seconds": options.seconds,
            "repeats": options.repeats,
            "final_steps": options.final_steps,
        },
    }


def _gpu(config: TrainConfig) -> str:
    on_gpu = torch.cuda.is_available() and config.device != "cpu"
    return f", {torch.cuda.get_device_name()}" if on_gpu else ""
