"""train-h5: train on a packed file, every known speed-up a switch."""

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from h5feed.cli._training import RunOptions, run_training_command
from h5feed.text import say
from h5feed.train import Summary, train
from h5feed.train.checkpoint import Terminated, save_signal_ignored
from h5feed.train.distributed import is_main_process
from h5feed.train.log import LAST

__all__ = ["main"]

_TOOLS = {
    "ablate": "ablate",
    "export": "export",
    "find-batch": "find_batch",
    "find-lr": "find_lr",
}
"""First words that name another command, and the module of each."""


@dataclass(frozen=True, kw_only=True)
class _TrainCommand(RunOptions):
    """Train on a packed file, every known speed-up a switch.

    SIGUSR1 saves at once; Ctrl-C and SIGTERM save and end, and --resume continues from there (with
    several processes at the next --log-every).

    Several GPUs: --gpus N, or torchrun --nproc-per-node N -m h5feed.cli.train TRAIN ...

    Before the first run: train-h5 find-lr and train-h5 find-batch. What each speed-up is worth:
    train-h5 ablate. For other programs: train-h5 export. Each has a --help of its own.
    """

    json: bool = False
    """Print the result as one JSON object."""


def main(args: Sequence[str] | None = None) -> int:
    """Run train-h5; return its exit status."""
    given = sys.argv[1:] if args is None else list(args)
    if given and given[0] in _TOOLS:
        tool = importlib.import_module(f"h5feed.cli.{_TOOLS[given[0]]}")
        return tool.main(given[1:])  # type: ignore[no-any-return]
    with save_signal_ignored():
        return run_training_command(_TrainCommand, _train, prog="train-h5", args=given)


def _train(command: _TrainCommand) -> int | None:
    out = command.run.out
    resume = f"go on with train-h5 --config {out / 'config.json'} --resume"
    old = None if command.run.resume else _version(out / LAST)
    try:
        summary = train(command.run)
    except KeyboardInterrupt as ex:
        if _version(out / LAST) in (None, old):  # before the first step nothing is replaced
            raise
        raise KeyboardInterrupt(f"interrupted; {resume}") from ex
    except Terminated as ex:
        if is_main_process():
            say(f"train-h5: terminated and saved; {resume}", sys.stderr)
        return int(ex.code or 0)
    if is_main_process():
        say(json.dumps(asdict(summary), default=str) if command.json else _in_words(summary))
    return None


def _version(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from the one that takes its place; None where there is none."""
    if not path.exists():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _in_words(summary: Summary) -> str:
    words = [f"{summary.out}: {summary.steps:,} steps, {summary.seconds:.1f} s"]
    if summary.train:
        words.append(f"train loss {summary.train['loss']:.4f}")
    if summary.val:
        score = f"val {summary.metric} {summary.val[summary.metric]:.4f}"
        best = "" if summary.best is None else f" (best {summary.best:.4f})"  # NaN is none
        words.append(f"val loss {summary.val['loss']:.4f}, {score}{best}")
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
