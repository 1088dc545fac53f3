"""train-h5 find-batch: which batch sizes fit, and which is fastest."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from h5feed.cli._common import check_plot
from h5feed.cli._training import RunOptions, run_training_command, trained_in_words
from h5feed.optional import require
from h5feed.progress import StatusLine
from h5feed.text import say
from h5feed.train import TrainConfig
from h5feed.train.find_batch import BatchRange, BatchSizes, BatchTrial, draw_batch_sizes, find_batch
from h5feed.train.loaders import Batch, random_batch
from h5feed.train.trial import Trial, open_trial

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class _FindBatchCommand(RunOptions):
    """Try batch sizes until memory is full, and time each. Nothing is kept of it."""

    test: BatchRange = field(default_factory=BatchRange)
    plot: Path | None = None
    """Draw speed and memory over the size (PNG, SVG or PDF)."""
    json: bool = False
    """Print all sizes as JSON."""


def main(args: Sequence[str] | None = None) -> int:
    """Run train-h5 find-batch; return its exit status."""
    return run_training_command(_FindBatchCommand, _find, prog="train-h5 find-batch", args=args)


def _find(command: _FindBatchCommand) -> None:
    if command.plot is not None:
        check_plot("--plot", command.plot, reads=(command.run.train, command.run.val))
        require("matplotlib", "train")
    whole = replace(command.run, speed=replace(command.run.speed, accumulate=1))
    with open_trial(whole) as trial, StatusLine() as show:

        def trying(size: int, seconds: float) -> None:
            show(f"batch of {size}: about {seconds:.0f} s" if seconds else f"batch of {size}")

        def tell(tried: BatchTrial) -> None:
            show.say(_trial_in_words(tried))

        test = _bounded(command.test, trial.data.count)
        sizes = find_batch(trial.step, partial(_batch, trial), trial.world, test, tell, trying)
    if command.plot is not None:
        what = f"{trained_in_words(command.run)}; the median of {test.steps} steps of each size."
        draw_batch_sizes(sizes, command.plot, what)
    say(json.dumps(_as_dict(sizes)) if command.json else _in_words(sizes, test, command.run))


def _bounded(test: BatchRange, images: int) -> BatchRange:
    """Return `test` without batches that are larger than the set."""
    if not images:
        return test
    return replace(test, smallest=min(test.smallest, images), largest=min(test.largest, images))


def _batch(trial: Trial, count: int) -> Batch:
    data, seed = trial.data, trial.config.seed
    return random_batch(data.task, data.num_outputs, count, data.size, seed, trial.world.device)


def _trial_in_words(trial: BatchTrial) -> str:
    said = "does not fit"
    if trial.fits:
        memory = f", {trial.memory_bytes / 1e9:.2f} GB" if trial.memory_bytes else ""
        said = f"{trial.images_per_second:,.0f} images/s{memory}"
    return f"batch of {trial.batch_size}: {said}"


def _as_dict(sizes: BatchSizes) -> dict[str, object]:
    return {
        "largest": sizes.largest.batch_size,
        "fastest": sizes.fastest.batch_size,
        "full": sizes.full,
        "in_time": sizes.in_time,
        "trials": [asdict(trial) for trial in sizes.trials],
    }


def _in_words(sizes: BatchSizes, test: BatchRange, config: TrainConfig) -> str:
    largest, best = sizes.largest, sizes.fastest
    limit = "the largest that fits" if sizes.full else "the largest tried, and it fits"
    if not sizes.in_time:
        limit += f" (a further one would take longer than --seconds {test.seconds:g} leave)"
    rule = "linear" if config.optim.optimizer == "sgd" else "sqrt"
    return (
        f"--batch-size {best.batch_size} is fastest ({best.images_per_second:,.0f} images/s); "
        f"{largest.batch_size} is {limit}. --lr {config.optim.lr:g} was meant for batches of "
        f"{config.batch_size}? Then add --lr-scaling {rule} --lr-batch {config.batch_size}"
    )


if __name__ == "__main__":
    sys.exit(main())
