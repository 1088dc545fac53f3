"""train-h5 find-lr: which learning rate to begin with."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from h5feed.cli._common import check_plot
from h5feed.cli._training import RunOptions, run_training_command, trained_in_words
from h5feed.optional import require
from h5feed.progress import Progress
from h5feed.text import say
from h5feed.train.find_lr import LrCurve, LrRange, draw_lr_curve, find_lr
from h5feed.train.trial import open_trial

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class _FindLrCommand(RunOptions):
    """Train for a moment at rising learning rates, and suggest one. Nothing is kept of it."""

    test: LrRange = field(default_factory=LrRange)
    plot: Path | None = None
    """Draw the loss over the rate (PNG, SVG or PDF)."""
    json: bool = False
    """Print the curve as JSON."""


def main(args: Sequence[str] | None = None) -> int:
    """Run train-h5 find-lr; return its exit status."""
    return run_training_command(_FindLrCommand, _find, prog="train-h5 find-lr", args=args)


def _find(command: _FindLrCommand) -> None:
    if command.plot is not None:
        check_plot("--plot", command.plot, reads=(command.run.train, command.run.val))
        require("matplotlib", "train")
    steps = command.test.steps
    with open_trial(command.run) as trial, Progress(steps, "find-lr", unit="step") as progress:

        def tell(rate: float, loss: float) -> None:
            progress.advance(1)
            progress.note(f"rate {rate:.1e}, loss {loss:.3f}")

        loader = trial.data.train_loader(trial.data.size)
        curve = find_lr(trial.step, loader, trial.world, command.test, tell)
    if command.plot is not None:
        run = command.run
        what = f"{trained_in_words(run)}, batches of {run.batch_size}, seed {run.seed}."
        draw_lr_curve(curve, command.plot, what)
    say(json.dumps(asdict(curve)) if command.json else _in_words(curve))


def _in_words(curve: LrCurve) -> str:
    tried = f"{len(curve.rates)} rates from {curve.rates[0]:.1e} to {curve.rates[-1]:.1e}"
    if curve.suggestion is None:
        return (
            f"no suggestion: the loss never clearly fell over {tried}; try more --steps, or "
            "another --lowest and --highest"
        )
    half = "half of where" if curve.exploded else "where"
    rise = "" if curve.rise is None else f" before it first rose, at {curve.rise:.1e}"
    ended = ", where the loss exploded" if curve.exploded else ""
    return (
        f"try --lr {curve.suggestion:.1e}, as the schedule's highest: {half} the loss was lowest"
        f"{rise} ({tried}{ended})"
    )


if __name__ == "__main__":
    sys.exit(main())
