"""check-h5: is every bit of a packed file what was written."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from h5feed.cli._common import DONE, FAILED, run_command
from h5feed.progress import Progress
from h5feed.store import CheckReport, DamagedItem, check_file
from h5feed.text import counted, printable, printable_json, say

__all__ = ["main"]

_LONGEST = 300  # characters of a name


@dataclass(frozen=True, kw_only=True)
class _CheckOptions:
    """Check every structure and checksum of a packed file; exit status 1 when it is damaged."""

    file: tyro.conf.Positional[Path]
    """The file to check."""
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

        report = check_file(command.file, progress=show)
    say(_as_json(report) if command.json else _as_text(report))
    return DONE if report.is_sound else FAILED


def _as_json(report: CheckReport) -> str:
    return printable_json(asdict(report) | {"sound": report.is_sound})


def _as_text(report: CheckReport) -> str:
    if report.error is not None:
        return f"refused: {report.error}"
    size = f"{counted(report.items, 'item')}, {report.payload_bytes / 1e6:,.1f} MB"
    if report.is_sound:
        return f"{printable(report.path)}: sound ({size})"
    lines = [_item_text(item) for item in report.damaged]
    return "\n".join([f"{printable(report.path)}: {len(lines)} damaged of {size}", *lines])


def _item_text(item: DamagedItem) -> str:
    said = "" if item.error is None else f": cannot be read: {item.error}"
    return f"item {item.index}: {printable(item.key, _LONGEST)}{said}"


if __name__ == "__main__":
    sys.exit(main())
