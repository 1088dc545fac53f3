"""The page cache: what part of some files it holds, and how to make it let go without root."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

__all__ = ["evict", "files_below", "resident_share"]


def files_below(paths: Iterable[str | Path]) -> list[Path]:
    """Return the regular files among `paths` and, for folders, all files below them."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = path.rglob("*") if path.is_dir() else [path]
        found += sorted(file for file in inside if file.is_file())
    return found


def evict(files: Iterable[Path]) -> bool:
    """Ask the kernel to drop the files' pages; return False where it cannot be asked.

    Pages that some process has mapped stay: close every loader of a file first.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page not yet written cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def _resident_pages(file: Path, size: int) -> tuple[int, int]:
    """Pages of `file` in the cache, and all its pages, by mincore(2)."""
    with file.open("rb") as stream:
        # Private and writable only because ctypes takes an address from a writable buffer.
        mapping = mmap.mmap(stream.fileno(), size, flags=mmap.MAP_PRIVATE)
    flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    start = ctypes.c_char.from_buffer(mapping)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(
        ctypes.c_void_p(ctypes.addressof(start)),
        ctypes.c_size_t(size),
        ctypes.c_void_p(flags.ctypes.data),
    )
    del start  # the mapping cannot be closed while something points into it
    mapping.close()
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
    return int((flags & 1).sum()), len(flags)


def resident_share(files: Iterable[Path]) -> float | None:
    """Return what share of the files' pages the page cache holds, or None where it can't tell."""
    try:
        counted = [_resident_pages(file, size) for file in files if (size := file.stat().st_size)]
    except (OSError, AttributeError, ValueError):
        return None
    pages = sum(total for _, total in counted)
    return sum(held for held, _ in counted) / pages if pages else None
