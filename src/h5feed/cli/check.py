"""check-h5: is every bit of a packed file, or of a set, what was written."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tyro

from h5feed.cli._common import DONE, FAILED, run_command
from h5feed.progress import Progress
from h5feed.store import CheckReport, SetReport, check_file, check_set
from h5feed.text import say

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class _CheckOptions:
    """Check every structure and checksum of a file or set; exit status 1 when it is damaged."""

    file: tyro.conf.Positional[Path]
    """The file to check, or the folder of a set."""
    json: bool = False
    """Print the result as one JSON object."""


def main(args: Sequence[str] | None = None) -> int:
    """Run check-h5; return its exit status."""
    return run_command(_CheckOptions, _check, prog="check-h5", args=args)


def _check(command: _CheckOptions) -> int:
    bar: Progress | None = None
    with ExitStack() as stack:

        def show(done: int, total: int) -> None:
            nonlocal bar
            bar = bar or stack.enter_context(Progress(total, "checking"))
            bar.advance(done - bar.done)

        check = check_set if command.file.is_dir() else check_file
        report: CheckReport | SetReport = check(command.file, progress=show)
    say(report.to_json() if command.json else str(report))
    return DONE if report.is_sound else FAILED


if __name__ == "__main__":
    sys.exit(main())
