"""Prove a packed file: every structure, and the checksum of every item."""

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from h5feed.cores import available_cores
from h5feed.errors import H5FormatError
from h5feed.store.mapping import Mapping
from h5feed.store.read import FileIndex, read_index

__all__ = ["CheckReport", "DamagedItem", "check_file"]

_BLOCK = 256  # items a thread checks at a time; crc32 releases the interpreter lock


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedItem:
    """An item whose stored bytes do not have the checksum they were written with."""

    index: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `check_file` found."""

    path: str
    items: int
    """Items checked; 0 when the file could not be opened."""
    payload_bytes: int
    error: str | None
    """Why the gate refused the file, or None."""
    damaged: tuple[DamagedItem, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing at all was found."""
        return self.error is None and not self.damaged


def check_file(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Read all of a packed file and compare every checksum.

    `threads` defaults to the CPUs of this process; `progress(done, total)` is called as items
    are done. Raises OSError where the file cannot be read; damage is reported, not raised.
    """
    try:
        index = read_index(path)
    except H5FormatError as ex:
        return CheckReport(
            path=os.fspath(path), items=0, payload_bytes=0, error=str(ex), damaged=()
        )
    bad = tuple(DamagedItem(index=i, key=index.key(i)) for i in _damaged(index, threads, progress))
    return CheckReport(
        path=index.path,
        items=len(index),
        payload_bytes=sum(extent.nbytes for extent in index.extents.values()),
        error=None,
        damaged=bad,
    )


def _damaged(
    index: FileIndex, threads: int | None, progress: Callable[[int, int], None] | None
) -> Iterator[int]:
    mapping = Mapping(index)
    starts = range(0, len(index), _BLOCK)
    with ThreadPoolExecutor(threads or available_cores()) as pool:
        for start, found in zip(
            starts, pool.map(lambda at: _check_block(index, mapping, at), starts), strict=True
        ):
            yield from found
            if progress is not None:
                progress(min(start + _BLOCK, len(index)), len(index))


def _check_block(index: FileIndex, mapping: Mapping, start: int) -> list[int]:
    items = range(start, min(start + _BLOCK, len(index)))
    for extent in index.extents.values():
        first, _ = extent.item_range(items[0])
        last, length = extent.item_range(items[-1])
        mapping.announce(first, last + length - first)
    return [i for i in items if _checksum(index, mapping, i) != index.crc32[i]]


def _checksum(index: FileIndex, mapping: Mapping, item: int) -> int:
    value = 0
    for extent in index.extents.values():
        start, length = extent.item_range(item)
        value = zlib.crc32(mapping.data[start : start + length].data, value)
    return value
