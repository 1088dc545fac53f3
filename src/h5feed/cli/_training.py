"""What train-h5 and its tools share: the options of a run, and --config, which reads them back."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from h5feed.cli._common import run_command
from h5feed.train import TrainConfig, read_config

__all__ = ["RunOptions", "run_training_command", "trained_in_words"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A run, from the command line or from the config.json of another one."""

    run: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config: Path | None = None
    """Take the options from a run's config.json; what is given beside it counts more."""


_Options = TypeVar("_Options", bound=RunOptions)


def run_training_command(
    options: type[_Options],
    work: Callable[[_Options], int | None],
    *,
    prog: str,
    args: Sequence[str] | None,
) -> int:
    """Do `work` with a command's options, as `run_command` does."""
    given = sys.argv[1:] if args is None else list(args)
    path = _config_path(given)
    return run_command(
        options,
        work,
        prog=prog,
        args=given,
        default=None if path is None else lambda: options(run=read_config(path), config=path),
        flag_pairs=True,
    )


def _config_path(args: Sequence[str]) -> Path | None:
    """Find the last --config before the other options are read: they change what it holds."""
    found = None
    for number, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name == "--config":
            rest = [value] if equals else list(args[number + 1 : number + 2])
            found = Path(rest[0]) if rest else None
    return found


def trained_in_words(config: TrainConfig) -> str:
    """Say what a plot of a finder is about."""
    return f"{config.model.model} on {config.train.name}, {config.optim.optimizer}"
