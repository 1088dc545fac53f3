"""What a command is to write: refused before any work, and never half a file."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from h5feed.errors import UsageError

__all__ = ["check_plot", "check_target", "write_whole"]


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


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` beside `path` and rename it: that name holds the old file or the new one."""
    target = Path(os.path.realpath(path))  # a link goes on leading to its file
    partial = target.with_name(f".{os.getpid()}{target.suffix}")
    try:
        partial.write_bytes(data)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
