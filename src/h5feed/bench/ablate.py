"""What each trick is worth: the trainer with one switch more, row by row, and with one switch less.

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
from typing import Any

import torch

from h5feed.bench import machine
from h5feed.bench.ablation import AblateOptions, Ablation, Row
from h5feed.bench.measure import Expectation
from h5feed.bench.outcomes import Outcome, suspicions
from h5feed.bench.rounds import Entry, Schedule, run
from h5feed.bench.tricks import CHECKPOINTING, Trick, packed, plain, synthetic, usable
from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.train.config import TrainConfig, write_config
from h5feed.train.data import default_size

__all__ = ["ablate"]

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A row to be measured."""

    name: str
    group: str
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
        machine=machine.describe(machine.machine(config.train)) + _gpu(config),
        facts=_facts(config, options),
        left_out=tuple(left_out),
    )


def _plan(config: TrainConfig, tricks: Sequence[Trick], options: AblateOptions) -> list[_Planned]:
    """Cumulative rows, then all without each, then all with gradient checkpointing."""
    # Without the step from folder to packed file, everything is measured on the packed file.
    packs = any(trick.apply is packed for trick in tricks)
    base = plain(config, options.images if packs else None)

    def planned(name: str, group: str, on: Sequence[Trick], trick: Trick | None) -> _Planned:
        made = base
        for one in on:
            made = one.apply(made)
        if group == "without" and trick is not None and trick.undo is not None:
            made = trick.undo(made)
        free = synthetic(made)  # of the packed file, whose kind it takes
        if made.data.loader == "imagefolder":
            assert options.images is not None
            made = replace(made, train=options.images)
        return _Planned(
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
    rows: Sequence[_Planned], images: int, options: AblateOptions, scratch: Path, tell: Tell
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
    subject = "h5feed.bench.ablate_subject:TrainerSteps"
    return Entry(
        name=name,
        command=(sys.executable, "-m", "h5feed.bench.host", subject),
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
    rows: Sequence[_Planned], found: dict[TrainConfig, Outcome], images: int
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
    versions = machine.versions()
    if torch.cuda.is_available() and config.device != "cpu":
        versions["GPU"] = torch.cuda.get_device_name()
        versions["CUDA"] = str(torch.version.cuda)
    return {
        "machine": machine.machine(config.train),
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
