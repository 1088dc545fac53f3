"""bench-h5: one or several settings measured, each into a report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch

from h5feed.bench import ceilings, machine
from h5feed.bench.contestants import contestants, entries
from h5feed.bench.options import CompareOptions, stored_side
from h5feed.bench.outcomes import Outcome
from h5feed.bench.report import Report
from h5feed.bench.rounds import run
from h5feed.feed.files import PackedFiles
from h5feed.system import available_cores

__all__ = ["compare", "crop_in_words", "facts", "report_of", "settings"]

Tell = Callable[[str], None]


def facts(file: Path, options: CompareOptions) -> dict[str, Any]:
    """Return all that is needed to measure again: machine, versions, options."""
    versions = machine.versions()
    if options.where == "cuda":
        versions["GPU"] = torch.cuda.get_device_name()
    named = asdict(options)
    named |= {"batch_size": options.batch, "crop": options.side}
    named["images"] = options.images and options.images.name  # no path of this machine
    return {
        "machine": machine.machine(file),
        "versions": versions,
        "options": named,
        "schedule": asdict(options.schedule),
    }


def _disk_outcome(file: Path, count: int) -> Iterable[Outcome]:
    rate = ceilings.disk_rate(file)
    if rate is not None:
        per_image = file.stat().st_size / count
        note = f"{rate / 1e6:,.0f} MB/s, file evicted, 8 threads"
        yield Outcome(name="disk, cold", ceiling=True, rates=(rate / per_image,), note=note)


def crop_in_words(pixels: PackedFiles, options: CompareOptions) -> str:
    """Return "224²", and that it is enlarged where less is stored."""
    stored = stored_side(pixels)
    enlarged = stored is not None and stored < options.side
    return f"{options.side}²" + (f" (enlarged: stored at {stored})" if enlarged else "")


def _one(file: Path, options: CompareOptions, workers: int, tell: Tell) -> Report:
    """Measure one setting."""
    pixels = PackedFiles([file])
    with tempfile.TemporaryDirectory(prefix="bench-h5-") as small:
        among = contestants(stored_side(pixels))
        taking_part, left_out = entries(among, pixels, options, workers, Path(small))
        outcomes = run(taking_part, options.schedule, tell)
    if options.schedule.cold:
        outcomes += _disk_outcome(file, len(pixels))
    title = (
        f"{len(pixels):,} images ({pixels.specs['images'].encoding}), random crop to "
        f"{crop_in_words(pixels, options)} and flip, batches of {options.batch}, "
        f"{workers} workers, on {options.where}"
    )
    return report_of(title, outcomes, left_out, facts(file, options), len(pixels))


def report_of(
    title: str,
    outcomes: Sequence[Outcome],
    left_out: Sequence[str],
    known: dict[str, Any],
    images: int,
    kind: Literal["loading", "training"] = "loading",
) -> Report:
    """Return the report of what `facts` and the outcomes say."""
    return Report(
        title=title,
        kind=kind,
        outcomes=tuple(outcomes),
        images=images,
        batch_size=known["options"]["batch_size"],
        machine=machine.describe(known["machine"]),
        facts=known,
        left_out=tuple(left_out),
    )


def settings(options: CompareOptions, count: int) -> list[tuple[CompareOptions, int]]:
    """Return (options, workers) of every comparison on a set: one, or with `sweep` many."""
    cores = available_cores()
    if not options.sweep:
        return [(options, options.workers or min(cores, 8))]
    counts = [n for n in (1, 2, 4, 8, 16, 32) if n <= cores]
    sizes = sorted({min(64, count), options.batch})
    return [(replace(options, batch_size=size), n) for size in sizes for n in counts]


def compare(file: Path, options: CompareOptions, tell: Tell = lambda _: None) -> Sequence[Report]:
    """Measure `file` and return a report per setting (one, unless `sweep`).

    Raises:
        UsageError: A wrong option, or a folder that is not the file's source.
        SubjectError: A loader failed, or did not deliver what it should.
    """
    options.check()
    pixels = PackedFiles([file])
    options = options.for_file(pixels)
    return [_one(file, given, workers, tell) for given, workers in settings(options, len(pixels))]
