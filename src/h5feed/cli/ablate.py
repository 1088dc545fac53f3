"""train-h5 ablate: what each trick is worth, here."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from h5feed.bench.ablate import AblateOptions, ablate
from h5feed.bench.process import SubjectError
from h5feed.bench.report import as_dict, as_markdown, as_text, save_plot
from h5feed.cli._common import check_plot, refuse_two_forms
from h5feed.cli._training import RunOptions, run_training_command
from h5feed.errors import H5FeedError
from h5feed.optional import require
from h5feed.progress import StatusLine
from h5feed.text import printable_json, say

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class _AblateCommand(RunOptions):
    """Train with every known speed-up off, then with one more each, then with one less each.

    Options of train-h5 that are themselves tricks (loader, precision, compile, ...) are overruled.
    """

    ablate: AblateOptions = field(default_factory=AblateOptions)
    plot: Path | None = None
    """Draw the result here (PNG, SVG or PDF)."""
    markdown: bool = False
    """Print a Markdown table."""
    json: bool = False
    """Print everything as JSON."""


def main(args: Sequence[str] | None = None) -> int:
    """Run train-h5 ablate; return its exit status."""
    return run_training_command(_AblateCommand, _ablate, prog="train-h5 ablate", args=args)


def _ablate(command: _AblateCommand) -> None:
    refuse_two_forms(json=command.json, markdown=command.markdown)
    if command.plot is not None:
        check_plot("--plot", command.plot, reads=(command.run.train, command.run.val))
        require("matplotlib", "bench")
    with StatusLine() as tell:
        try:
            ablation = ablate(command.run, command.ablate, tell)
        except SubjectError as ex:
            raise H5FeedError(str(ex), details=ex.trace.strip()) from None
    if command.plot is not None:
        save_plot(ablation, command.plot)
    if command.json:
        say(printable_json(as_dict(ablation), indent=1))
    else:
        say((as_markdown if command.markdown else as_text)(ablation))


if __name__ == "__main__":
    sys.exit(main())
