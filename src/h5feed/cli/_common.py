"""How every command runs: options from a dataclass, one sentence for an error, an exit status."""

import errno
import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar

import tyro

from h5feed import __version__
from h5feed.errors import H5FeedError, UsageError
from h5feed.text import printable, say

__all__ = ["check_plot", "check_target", "refuse_two_forms", "run_command"]

_Options = TypeVar("_Options")

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
UNREAD = 141  # what a shell says of a program that SIGPIPE ended

_WHAT_IS_WRONG = {
    errno.ENOENT: "does not exist",
    errno.ENOTDIR: "does not exist: a part of this path is a file",
    errno.EISDIR: "is a folder: give a file",
    errno.EACCES: "may not be opened: permission denied",
    errno.ENOMEM: "needs more memory than there is",
}


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

    A field's docstring is its help; --version prints the version. Returns the exit status: what
    `work` returns (None counts as 0), 1 for an H5FeedError, OSError or missing library, 2 for a
    UsageError; errors are one sentence on stderr. Where the reader of stdout leaves early (as head
    does), it is 141, without a message.
    tyro itself exits with 0 after --help and 2 where it cannot read `args`.
    `default` makes the options that `args` changes; `flag_pairs` offers --x and --no-x for each.
    """
    config: tuple[Any, ...] = (tyro.conf.OmitArgPrefixes,)
    if not flag_pairs:
        config += (tyro.conf.FlagCreatePairsOff,)
    _open_closed_streams()
    given = sys.argv[1:] if args is None else list(args)
    if given == ["--version"]:
        say(f"{prog} {__version__}")
        return DONE
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal that lacks a sign must not turn work well done into a failure.
            stream.reconfigure(errors="backslashreplace")
    try:
        read = partial(tyro.cli, options, prog=prog, args=args, config=config)
        chosen = read() if default is None else read(default=default())
        with _interrupts_kept():
            status = work(chosen) or DONE
        sys.stdout.flush()
        return status
    except UsageError as ex:
        return _say(prog, ex, USAGE)
    except BrokenPipeError:
        _drop_stdout()
        return UNREAD
    except OSError as ex:
        return _say(prog, _in_words(ex), FAILED)
    except MemoryError as ex:
        why = f" ({ex})" if str(ex) else ""
        return _say(prog, f"there is not enough memory{why}", FAILED)
    except (H5FeedError, ImportError) as ex:
        return _say(prog, ex, FAILED)
    except KeyboardInterrupt as ex:
        return _say(prog, str(ex) or "interrupted", INTERRUPTED)


def refuse_two_forms(*, json: bool, markdown: bool) -> None:
    """Raise UsageError where both are asked for: one would be ignored."""
    if json and markdown:
        raise UsageError("json and markdown are two forms of one output: give one of them")


def check_plot(option: str, path: Path, *, reads: Iterable[Path | None]) -> None:
    """Refuse what matplotlib could not write to, as `check_target` does."""
    check_target(option, path, endings=(".png", ".svg", ".pdf"), reads=reads)


def check_target(
    option: str, path: Path, *, endings: Sequence[str], reads: Iterable[Path | None]
) -> None:
    """Raise UsageError where a file cannot or must not be written to `path`.

    It has to end in one of `endings`, to lie in a folder that can be written to, and to be none
    of the files that the command `reads`.
    """
    said = f"{option} {path}"
    if path.is_dir():
        raise UsageError(f"{said} is a folder: give a file in it")
    if path.suffix.lower() not in endings:
        raise UsageError(f"{said} does not end in {' or '.join(endings)}: give a name that does")
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{said}: the folder {folder} does not exist: make it first")
    if not all(os.access(place, os.W_OK) for place in (folder, path) if place.exists()):
        raise UsageError(f"{said} may not be written: permission denied")
    if path.exists() and any(file and file.exists() and path.samefile(file) for file in reads):
        raise UsageError(f"{said} is a file that is read here: give another name")


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Raise Ctrl-C again where Python can only drop it: in finalizers, weakref callbacks, forks."""
    usual = sys.unraisablehook

    def again() -> None:
        time.sleep(0.01)  # not while the same callback still runs
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def hook(dropped: Any) -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            start_new_thread(again, ())  # threading's locks may be held by what was interrupted
        else:
            usual(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


def _open_closed_streams() -> None:
    """Lead streams that the command was started without (`>&-`) to nowhere.

    Left closed, their numbers go to the next files that are opened, and what a library prints
    there would land in those.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process


def _drop_stdout() -> None:
    """Send the rest to nowhere: Python flushes stdout once more when it ends, and complains."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _in_words(error: OSError) -> str:
    """Return the error as a sentence about its file."""
    if error.filename is None:
        return error.strerror or str(error)
    what = _WHAT_IS_WRONG.get(
        error.errno or 0, f"cannot be used: {error.strerror} (errno {error.errno})"
    )
    return f"{os.fsdecode(error.filename)} {what}"


def _say(prog: str, error: object, status: int) -> int:
    """Say `error` in one line, whatever names are in it, and its details below."""
    sentence, details = error, ""
    if isinstance(error, H5FeedError):
        sentence, details = error.sentence, error.details
    say(printable(f"{prog}: {sentence}"), sys.stderr)
    if details:
        say(details, sys.stderr)
    return status
