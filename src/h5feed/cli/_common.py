"""How every command runs: options from a dataclass, one sentence for an error, an exit status."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from io import TextIOWrapper
from typing import Any, TypeVar

import tyro

from h5feed.errors import H5FeedError, UsageError

__all__ = ["run_command"]

_Options = TypeVar("_Options")

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def run_command(
    options: type[_Options],
    work: Callable[[_Options], int | None],
    *,
    prog: str,
    args: Sequence[str] | None = None,
    default: Callable[[], _Options] | None = None,
    flag_pairs: bool = False,
) -> int:
    """Read the command line into `options`, a dataclass, and do `work` with it.

    A field's docstring is its help. Returns the exit status: what `work` returns (None counts
    as 0), 1 for an H5FeedError, OSError or missing library, 2 for a UsageError; errors are one
    sentence on stderr. tyro itself exits with 0 after --help and 2 where it cannot read `args`.
    `default` makes the options that `args` changes; `flag_pairs` offers --x and --no-x for each.
    """
    config: tuple[Any, ...] = (tyro.conf.OmitArgPrefixes,)
    if not flag_pairs:
        config += (tyro.conf.FlagCreatePairsOff,)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal that lacks a sign must not turn work well done into a failure.
            stream.reconfigure(errors="backslashreplace")
    try:
        read = partial(tyro.cli, options, prog=prog, args=args, config=config)
        given = read() if default is None else read(default=default())
        return work(given) or DONE
    except UsageError as ex:
        return _say(prog, ex, USAGE)
    except (H5FeedError, OSError, ImportError) as ex:
        return _say(prog, ex, FAILED)
    except KeyboardInterrupt as ex:
        return _say(prog, str(ex) or "interrupted", INTERRUPTED)


def _say(prog: str, error: object, status: int) -> int:
    print(f"{prog}: {error}", file=sys.stderr)
    return status
