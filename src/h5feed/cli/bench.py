"""bench-h5: what packing gained, on this machine, against what else could be used."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from h5feed.bench.compare import CompareOptions, compare
from h5feed.bench.process import SubjectError
from h5feed.bench.report import (
    Comparison,
    as_dict,
    as_markdown,
    as_text,
    save_plot,
    save_sweep_plot,
    sweep_as_markdown,
    sweep_as_text,
)
from h5feed.bench.training import TrainOptions, train
from h5feed.cli._common import check_plot, refuse_two_forms, run_command
from h5feed.errors import H5FeedError
from h5feed.optional import require
from h5feed.progress import StatusLine
from h5feed.text import printable_json, say

__all__ = ["main"]

_File = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class _BenchCommand:
    """Measure loaders side by side on one packed file.

    bench-h5 train FILE measures training with each of them.
    """

    file: _File
    """The packed file."""
    compare: CompareOptions = field(default_factory=CompareOptions)
    plot: Path | None = None
    """Draw the result here (PNG, SVG or PDF); of --sweep, images/s over workers."""
    markdown: bool = False
    """Print a Markdown table."""
    json: bool = False
    """Print everything as JSON."""


@dataclass(frozen=True, kw_only=True)
class _BenchTrainCommand(_BenchCommand):
    """Train a model with each loader, and with data that costs nothing."""

    train: TrainOptions = field(default_factory=TrainOptions)


def main(args: Sequence[str] | None = None) -> int:
    """Run bench-h5; return its exit status."""
    args = sys.argv[1:] if args is None else args
    if args and args[0] == "train":
        return run_command(_BenchTrainCommand, _bench, prog="bench-h5 train", args=args[1:])
    return run_command(_BenchCommand, _bench, prog="bench-h5", args=args)


def _bench(command: _BenchCommand) -> None:
    refuse_two_forms(json=command.json, markdown=command.markdown)
    if command.plot is not None:
        check_plot("--plot", command.plot, reads=(command.file,))
        require("matplotlib", "bench")
    with StatusLine() as tell:
        try:
            reports = _measured(command, tell)
        except SubjectError as ex:
            raise H5FeedError(str(ex), details=ex.trace.strip()) from None
    say(_printed(reports, command))
    if command.plot is not None:
        if len(reports) == 1:
            save_plot(reports[0], command.plot)
        else:
            save_sweep_plot(reports, command.plot)


def _measured(command: _BenchCommand, tell: Callable[[str], None]) -> Sequence[Comparison]:
    if isinstance(command, _BenchTrainCommand):
        return [train(command.file, command.compare, command.train, tell)]
    return compare(command.file, command.compare, tell)


def _printed(reports: Sequence[Comparison], command: _BenchCommand) -> str:
    if command.json:
        values = [as_dict(report) for report in reports]
        return printable_json(values[0] if len(values) == 1 else values, indent=1)
    if len(reports) == 1:
        return (as_markdown if command.markdown else as_text)(reports[0])
    return (sweep_as_markdown if command.markdown else sweep_as_text)(reports)


if __name__ == "__main__":
    sys.exit(main())
