"""Prove a packed file, or a set of them: every structure, and the checksum of every item."""

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

from h5feed.errors import H5FormatError
from h5feed.jpeg import restart_segments
from h5feed.store.index import SetIndex, is_set, open_index
from h5feed.store.layout import IMAGES
from h5feed.store.read import FileReader, read_index
from h5feed.system import available_cores
from h5feed.text import counted, printable, printable_json

__all__ = ["CheckReport", "DamagedItem", "SetReport", "check_file", "check_set"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReport:
    """What `check_set` found."""

    path: str
    error: str | None
    """Why the index was refused, or None."""
    shards: tuple[CheckReport, ...]
    """Of each shard; its error may be that the index says something else of it."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing at all was found."""
        return self.error is None and all(shard.is_sound for shard in self.shards)

    def to_json(self) -> str:
        """Return it as one JSON object."""
        sound = [{"sound": shard.is_sound} for shard in self.shards]
        shards = [asdict(shard) | also for shard, also in zip(self.shards, sound, strict=True)]
        return printable_json(
            {"path": self.path, "error": self.error, "shards": shards, "sound": self.is_sound}
        )

    def __str__(self) -> str:
        if self.error is not None:
            return f"refused: {self.error}"
        items = sum(shard.items for shard in self.shards)
        size = sum(shard.payload_bytes for shard in self.shards) / 1e6
        wrong = [shard for shard in self.shards if not shard.is_sound]
        said = f"{counted(items, 'item')} in {counted(len(self.shards), 'shard')}, {size:,.1f} MB"
        if not wrong:
            return f"{printable(self.path)}: sound ({said})"
        shards = f"{len(wrong):,} of {counted(len(self.shards), 'shard')} not sound"
        read = f"{counted(items, 'item')} read, {size:,.1f} MB"
        return "\n".join([f"{printable(self.path)}: {shards} ({read})", *map(str, wrong)])


def check_set(
    folder: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> SetReport:
    """Read all of a set: every shard as `check_file` does, and what its index says of each.

    As many shards are read at a time as the process has cores; `progress(done, total)` is called
    as items are done. Raises OSError where the index cannot be read, and H5FormatError where there
    is none.

    >>> report = check_set("set")
    >>> report.is_sound, [shard.items for shard in report.shards]
    (True, [4, 4, 4])
    """
    path = os.path.abspath(folder)
    try:
        index = open_index(path)
    except H5FormatError as ex:
        if not is_set(path):
            raise
        return SetReport(path=path, error=str(ex), shards=())
    found = []
    with ThreadPoolExecutor(available_cores()) as pool:
        for report in pool.map(partial(_check_shard, index), range(len(index.paths))):
            found.append(report)
            if progress is not None:
                progress(int(index.starts[len(found)]), len(index))
    return SetReport(path=path, error=None, shards=tuple(found))


def _check_shard(index: SetIndex, number: int) -> CheckReport:
    """Check a shard, and what the index says of it."""
    path = index.paths[number]
    try:
        index.open_shard(number)  # says which shard is missing, or another
        report = check_file(path, threads=1)
        index.check_rows(number)
        if report.error is None:
            index.compare(number, read_index(path))
        return report
    except H5FormatError as ex:
        said = str(ex)
    except OSError as ex:
        said = f"{path} cannot be read: {ex.strerror} (errno {ex.errno})"
    return CheckReport(path=path, items=0, payload_bytes=0, error=said, damaged=())


def check_file(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
) -> CheckReport:
    """Read all of a packed file and compare every checksum.

    threads: that read; None is as many as the process has cores. `progress(done, total)` is called
    as items are done. Raises OSError where the file cannot be read; damage is reported, not raised.

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
            damaged=tuple(_damaged(file, progress, threads or available_cores())),
        )


def _damaged(
    file: FileReader, progress: Callable[[int, int], None] | None, threads: int
) -> Iterator[DamagedItem]:
    count = len(file.index)
    starts = range(0, count, _BLOCK)
    check = partial(_check_block, file)
    with ThreadPoolExecutor(threads) as pool:
        checked = pool.map(check, starts) if min(len(starts), threads) > 1 else map(check, starts)
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
