"""Prove a packed file: every structure, and the checksum of every item."""

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

from h5feed.errors import H5FormatError
from h5feed.jpeg import restart_segments
from h5feed.store.layout import IMAGES
from h5feed.store.read import FileReader
from h5feed.system import available_cores
from h5feed.text import counted, printable, printable_json

__all__ = ["CheckReport", "DamagedItem", "check_file"]

_BLOCK = 256  # items a thread checks at a time; crc32 releases the interpreter lock
_LONGEST = 300  # characters of a key that are printed
_PIECE = 8 << 20  # bytes read at once: an item may be larger than memory


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedItem:
    """An item whose stored bytes cannot be read, or are not those it was written with."""

    index: int
    key: str
    error: str | None
    """What is wrong, such as "cannot be read: …"; None where its checksum is."""

    def __str__(self) -> str:
        said = "" if self.error is None else f": {self.error}"
        return f"item {self.index}: {printable(self.key, _LONGEST)}{said}"


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

    def to_json(self) -> str:
        """Return it as one JSON object."""
        return printable_json(asdict(self) | {"sound": self.is_sound})

    def __str__(self) -> str:
        if self.error is not None:
            return f"refused: {self.error}"
        size = f"{counted(self.items, 'item')}, {self.payload_bytes / 1e6:,.1f} MB"
        if self.is_sound:
            return f"{printable(self.path)}: sound ({size})"
        said = f"{printable(self.path)}: {len(self.damaged)} damaged of {size}"
        return "\n".join([said, *map(str, self.damaged)])


def check_file(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Read all of a packed file and compare every checksum.

    As many threads read as the process has cores; `progress(done, total)` is called as items
    are done. Raises OSError where the file cannot be read; damage is reported, not raised.

    >>> report = check_file("photos.h5")
    >>> report.is_sound, report.items, report.damaged
    (True, 12, ())
    """
    try:
        file = FileReader(path)
    except H5FormatError as ex:
        return CheckReport(
            path=os.fspath(path), items=0, payload_bytes=0, error=str(ex), damaged=()
        )
    with file:
        index = file.index
        return CheckReport(
            path=index.path,
            items=len(index),
            payload_bytes=sum(extent.nbytes for extent in index.parts),
            error=None,
            damaged=tuple(_damaged(file, progress)),
        )


def _damaged(
    file: FileReader, progress: Callable[[int, int], None] | None
) -> Iterator[DamagedItem]:
    count = len(file.index)
    starts = range(0, count, _BLOCK)
    check = partial(_check_block, file)
    with ThreadPoolExecutor(available_cores()) as pool:
        checked = pool.map(check, starts) if len(starts) > 1 else map(check, starts)
        for start, found in zip(starts, checked, strict=True):
            yield from found
            if progress is not None:
                progress(min(start + _BLOCK, count), count)


def _check_block(file: FileReader, start: int) -> list[DamagedItem]:
    items = range(start, min(start + _BLOCK, len(file.index)))
    for extent in file.index.parts:
        first, _ = extent.item_range(items[0])
        last, length = extent.item_range(items[-1])
        file.announce(first, last + length - first)
    return [damaged for item in items if (damaged := _check_item(file, item)) is not None]


def _check_item(file: FileReader, item: int) -> DamagedItem | None:
    """Read one item and compare its checksum: by `pread`, which a failing disk does not kill."""
    try:
        said = None
        if _checksum(file, item) == file.index.crc32[item]:
            if _has_its_segments(file, item):
                return None
            said = "the lengths of its restart segments are not those of its bytes"
    except OSError as ex:
        said = f"cannot be read: {ex.strerror} (errno {ex.errno})"
    return DamagedItem(index=item, key=file.index.key(item), error=said)


def _checksum(file: FileReader, item: int) -> int:
    value = 0
    for extent in file.index.parts:
        start, length = extent.item_range(item)
        for at in range(start, start + length, _PIECE):
            value = zlib.crc32(file.read(at, min(_PIECE, start + length - at)), value)
    return value


def _has_its_segments(file: FileReader, item: int) -> bool:
    """Whether the segments of a jpeg item are where the file says; True for other items."""
    images = file.index.extents[IMAGES]
    if images.segments is None:
        return True
    try:
        found = restart_segments(file.read(*images.item_range(item)))
    except ValueError:
        return False
    return found.tobytes() == file.read(*images.segments.item_range(item))
