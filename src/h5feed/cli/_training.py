"""What train-h5 and its tools share: the options of a run, and where others of them come from.

--config reads them back, --recipe fills them; options given beside either override it.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from h5feed.cli._common import run_command
from h5feed.train import TrainConfig, read_config
from h5feed.train.recipes import with_recipe

__all__ = ["RunOptions", "run_training_command", "trained_in_words"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A run, from the command line or from the config.json of another one."""

    run: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config: Path | None = None
    """Take the options from a run's config.json; options given beside it override it."""


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
    path, recipe = _value(given, "--config"), _value(given, "--recipe")

    def default() -> _Options:
        # tyro asks for what is MISSING, as it does where there is no default at all.
        missing = TrainConfig(train=tyro.MISSING) if path is None else None
        run = missing or read_config(Path(str(path)))
        run = run if recipe is None else with_recipe(run, recipe)
        return options(run=run, config=None if path is None else Path(path))

    return run_command(
        options,
        work,
        prog=prog,
        args=given,
        default=None if path is None and recipe is None else default,
        flag_pairs=True,
    )


def _value(args: Sequence[str], option: str) -> str | None:
    """Find the last value of an option before the others are read: they change what it holds."""
    found = None
    for number, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name == option:
            rest = [value] if equals else list(args[number + 1 : number + 2])
            found = rest[0] if rest else None
    return found


def trained_in_words(config: TrainConfig) -> str:
    """Say what a plot of a finder is about."""
    return f"{config.model.model} on {config.train.name}, {config.optim.optimizer}"
