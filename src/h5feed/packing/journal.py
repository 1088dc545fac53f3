"""The journal of a run: what is safely on the disk, so that an interrupted run can go on.

The journal has one header (what is packed, how, with which versions) and one entry per block of
images, in order without gaps. An entry is appended only after the pixels it speaks of were
synced, and a torn last entry costs one block. Nothing that lies there is believed on its word:
an entry must make sense, and the pixels must have its checksums, before a run goes on with them.
"""

import errno
import json
import os
import reprlib
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from h5feed.disk import (
    naming,
    open_file,
    sync_file,
    write_at,
)
from h5feed.errors import PackError
from h5feed.packing.encode import BlockResult, Skip, payload_sizes, row_type
from h5feed.packing.output import OutputPaths
from h5feed.progress import Progress
from h5feed.store.layout import FieldSpec
from h5feed.system import available_cores
from h5feed.text import printable

__all__ = [
    "Header",
    "Journal",
    "JournalWriter",
    "intact_blocks",
    "lock",
]

_VERSION = 1
"""Of the journal: a run resumes only from a journal that it could have written itself."""
_FRAME = struct.Struct("<4sIII")  # magic, bytes of JSON, bytes of rows, CRC-32 of both
_MAGIC = b"h5fj"
_MOST_FRAME_BYTES = 64 << 20  # an entry has at most 256 images' facts
_READ_BYTES = 8 << 20
_SECONDS_BETWEEN_SYNCS = 1.0
_SECONDS_FOR_LOCK = 5.0
_CHECKED_TOGETHER = 256  # entries

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What has to be the same for a run to go on."""

    source: str
    """Digest over names, sizes, times and labels of all images."""
    count: int
    content: dict[str, Any]
    """The options that decide the file's bytes."""
    versions: dict[str, str]

    def differences(self, now: "Header") -> list[str]:
        """Say in words where `now` differs from this header."""
        said = []
        if (self.source, self.count) != (now.source, now.count):
            said.append(f"the source has changed ({self.count:,} images then, {now.count:,} now)")
        for then, today in ((self.content, now.content), (self.versions, now.versions)):
            said += [
                f"{printable(name)} was {_short.repr(then.get(name))} and is "
                f"{_short.repr(today.get(name))}"
                for name in sorted({*then, *today})
                if then.get(name) != today.get(name)
            ]
        return said


class Journal:
    """The journal of one OUT, held by this run alone: made by `lock`."""

    def __init__(self, paths: OutputPaths, specs: Sequence[FieldSpec], handle: int) -> None:
        self._paths, self._specs, self._handle = paths, specs, handle
        self._ends = [0]
        """Where the header ends, and each entry that was read."""
        self._end = 0
        self.stop = 0
        """All images before this one are safe."""

    @property
    def payloads(self) -> tuple[Path, ...]:
        """The files whose pixels the journal speaks of."""
        return self._paths.payloads(self._specs)

    def begin(self, header: Header) -> None:
        """Write the header of a new journal, in place of the old one; raises OSError."""
        with naming(self._paths.journal):
            os.ftruncate(self._handle, 0)
        self._end = self.stop = 0
        self._append(json.dumps({"journal": _VERSION, **asdict(header)}).encode(), b"")
        self._sync()

    def read(self, header: Header) -> list[BlockResult] | None:
        """Return the entries of an earlier run, or None where it had not really begun.

        Raises PackError where source, options or versions are not what they were, and where
        the journal cannot be one that this version has written.
        """
        frames = self._frames()
        first_end, text, _ = next(frames, (0, b"", b""))
        if not text:
            self._refuse_lost_header()
            return None
        self._ends = [first_end]
        try:
            then = _parse_header(text)
        except (LookupError, TypeError, ValueError, RecursionError) as ex:
            raise self._refuse("has no header that this version writes") from ex
        if said := then.differences(header):
            raise PackError(
                f"{self._paths.journal} cannot be resumed: {'; '.join(said)}. Give what it was "
                "begun with, or --overwrite to start again"
            )
        blocks: list[BlockResult] = []
        for end, text, rows in frames:
            self._ends.append(end)
            start = blocks[-1].stop if blocks else 0
            try:
                blocks.append(_parse_block(text, rows, start, header.count, self._specs))
            except (LookupError, TypeError, ValueError, RecursionError) as ex:
                raise self._refuse(f"has an entry behind image {start:,} without sense") from ex
        self.cut(blocks)
        return blocks

    def cut(self, blocks: Sequence[BlockResult]) -> None:
        """Continue after these entries, the first of those read; the others are dropped."""
        self._end = self._ends[len(blocks)]
        self.stop = blocks[-1].stop if blocks else 0
        with naming(self._paths.journal):
            os.ftruncate(self._handle, self._end)

    def append(self, blocks: Sequence[BlockResult]) -> None:
        """Add entries and sync them; what they speak of must be on the disk already."""
        for block in blocks:
            facts = {
                "start": block.start,
                "stop": block.stop,
                "skips": block.skips,
                "sizes": block.sizes,
                "source_bytes": block.source_bytes,
                "labels": block.labels,
            }
            self._append(json.dumps(facts).encode(), block.rows.tobytes())
        self._sync()
        self.stop = blocks[-1].stop

    def _append(self, text: bytes, rows: bytes) -> None:
        check = zlib.crc32(rows, zlib.crc32(text))
        frame = _FRAME.pack(_MAGIC, len(text), len(rows), check) + text + rows
        write_at(self._handle, frame, self._end, self._paths.journal)
        self._end += len(frame)

    def _sync(self) -> None:
        sync_file(self._handle, self._paths.journal)

    def _frames(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (end, JSON, rows) of the whole frames up to the first torn one."""
        at, size = 0, os.fstat(self._handle).st_size
        while at + _FRAME.size <= size:
            with naming(self._paths.journal):
                head = os.pread(self._handle, _FRAME.size, at)
            magic, text_bytes, rows_bytes, check = _FRAME.unpack(head)
            length = text_bytes + rows_bytes
            at += _FRAME.size
            if magic != _MAGIC or length > min(size - at, _MOST_FRAME_BYTES):
                return
            with naming(self._paths.journal):
                body = os.pread(self._handle, length, at)
            if len(body) != length or zlib.crc32(body) != check:
                return
            at += length
            yield at, body[:text_bytes], body[text_bytes:]

    def _refuse_lost_header(self) -> None:
        """Raise PackError where there was a header: it is on the disk before the first pixel is."""
        with suppress(FileNotFoundError):
            if self._paths.partial.lstat().st_size:
                raise self._refuse("has no whole header")

    def _refuse(self, what: str) -> PackError:
        return PackError(
            f"{self._paths.journal} {what} (damaged, or of another version of h5feed): --overwrite "
            "starts again"
        )


def _parse_header(text: bytes) -> Header:
    """Return the header; KeyError, TypeError or ValueError where another program wrote it."""
    facts = json.loads(text)
    if facts["journal"] != _VERSION:
        raise ValueError("another version")
    del facts["journal"]
    header = Header(**facts)
    kinds = (type(header.source), type(header.count), type(header.content), type(header.versions))
    if kinds != (str, int, dict, dict):
        raise TypeError(f"{kinds=}")
    return header


def _parse_block(
    text: bytes, rows: bytes, start: int, count: int, specs: Sequence[FieldSpec]
) -> BlockResult:
    """Return the entry that begins with image `start` of `count`.

    Raises KeyError, TypeError or ValueError for what `append` would not have written.
    """
    facts = json.loads(text)
    block = BlockResult(
        start=facts["start"],
        stop=facts["stop"],
        rows=np.frombuffer(rows, row_type(specs)),
        skips=tuple(Skip(*skip) for skip in facts["skips"]),
        sizes=tuple(facts["sizes"]),
        source_bytes=facts["source_bytes"],
        labels=facts["labels"],
    )
    if block.labels is not None and np.array(block.labels).dtype.kind not in "if":
        raise TypeError("a label is not a number")
    if block.labels is not None and len(block.labels) != len(block.rows):
        raise ValueError("other labels than images")
    numbers = [block.start, block.stop, block.source_bytes, *block.sizes]
    numbers += [skip.item for skip in block.skips]
    texts = [text for skip in block.skips for text in (skip.reason, skip.detail)]
    if {int} != {type(n) for n in numbers} or not {str} >= {type(text) for text in texts}:
        raise TypeError("a number or a text is none")
    if block.start != start or not start < block.stop <= count or block.source_bytes < 0:
        raise ValueError("out of place")
    packed, skipped = block.rows["index"].tolist(), [skip.item for skip in block.skips]
    in_order = packed == sorted(packed) and skipped == sorted(skipped)
    if not in_order or sorted(packed + skipped) != list(range(start, block.stop)):
        raise ValueError("other images than it says")
    _check_rows(block, specs)
    return block


def _check_rows(block: BlockResult, specs: Sequence[FieldSpec]) -> None:
    """Raise ValueError for sizes that no image has, or that are not those of the block."""
    rows, images = block.rows, specs[0]
    names = [
        name for name in ("source_shape", "shape", "bytes") if name in (rows.dtype.names or ())
    ]
    if any((rows[name] < 1).any() or (rows[name] > 1 << 48).any() for name in names):
        raise ValueError("a size out of range")
    if "box" in (rows.dtype.names or ()):
        boxes = rows["box"].astype(np.int64)
        ends = boxes[:, :2] + boxes[:, 2:]
        inside = (boxes[:, :2] >= 0) & (boxes[:, 2:] >= 1) & (ends <= (images.height, images.width))
        if not inside.all():
            raise ValueError("a box outside the stored image")
    # Pythons' integers: the product of two forged sides could be more than 64 bits hold.
    sizes = tuple(sum(field.tolist()) for field in payload_sizes(specs, rows))
    if sizes != block.sizes:
        raise ValueError(f"{block.sizes=}, and its images have {sizes}")


@contextmanager
def lock(paths: OutputPaths, specs: Sequence[FieldSpec]) -> Iterator[Journal]:
    """Open and lock the journal, made if need be: one run at a time may work on an OUT.

    Forked workers inherit the lock: a process that gets it knows that no worker of a killed run
    is still writing pixels.
    """
    handle = _locked(paths.journal)
    try:
        yield Journal(paths, specs, handle)
    finally:
        with suppress(OSError):
            if os.fstat(handle).st_size == 0:  # the run was refused before it began
                paths.journal.unlink()
        os.close(handle)


def _locked(path: Path) -> int:
    """Open `path` and lock it; again where the run waited for has removed it in the meantime."""
    while True:
        try:
            handle = open_file(path, create=True)
        except OSError as ex:
            raise PackError(f"cannot write {path}: {ex.strerror}") from ex
        try:
            _wait_for_lock(handle, path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.lstat()):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _wait_for_lock(handle: int, path: Path) -> None:
    import fcntl  # not on Windows, where packing is refused and all else can be imported

    until = time.monotonic() + _SECONDS_FOR_LOCK
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as ex:
            if ex.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # a file system without locks
        if time.monotonic() > until:
            raise PackError(f"{path} is in use by another run: wait for it, or give another OUT")
        time.sleep(0.05)


class JournalWriter:
    """Syncs pixels and appends entries from a thread of its own, so that no worker waits."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._files = [(open_file(path), path) for path in journal.payloads]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="h5feed-journal")
        self._pending: Future[None] | None = None
        self._waiting: list[BlockResult] = []
        self._last = time.monotonic()

    def __enter__(self) -> "JournalWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True)
        for handle, _path in self._files:
            os.close(handle)

    def add(self, blocks: Sequence[BlockResult]) -> None:
        """Take blocks of blocks that were written (not yet synced)."""
        self._waiting += blocks

    def poll(self, now: bool = False) -> None:
        """Begin to sync what was added if it is time; raise what the last sync raised."""
        if self._pending is not None:
            if not self._pending.done():
                return
            self._pending.result()
            self._pending = None
        is_time = time.monotonic() >= self._last + _SECONDS_BETWEEN_SYNCS
        if self._waiting and (now or is_time):
            self._last = time.monotonic()
            blocks, self._waiting = self._waiting, []
            self._pending = self._thread.submit(self._save, blocks)

    def finish(self) -> None:
        """Bring everything that was added to the disk, and wait for it."""
        while self._waiting or self._pending is not None:
            if self._pending is not None:
                self._pending.exception()
            self.poll(now=True)

    def _save(self, blocks: Sequence[BlockResult]) -> None:
        for handle, path in self._files:
            sync_file(handle, path)
        self._journal.append(blocks)


# --- what the journal says, compared with what is there


def intact_blocks(
    paths: OutputPaths,
    specs: Sequence[FieldSpec],
    blocks: Sequence[BlockResult],
    *,
    progress: bool,
) -> int:
    """Return how many blocks, from the first on, have their pixels in the payload files.

    Every byte is read and compared with its checksum, on as many threads as there are cores.
    Raises OSError where a file cannot be opened or read.
    """
    total = blocks[-1].stop if blocks else 0
    with Progress(total, "checking", show=progress, brief=True) as bar:
        intact = 0
        for is_intact in _found_intact(paths, specs, blocks):
            if not is_intact:
                break
            bar.advance(blocks[intact].stop - blocks[intact].start)
            intact += 1
        if bar.done < total:
            bar.say(
                f"{paths.partial} does not hold what its journal says from image {bar.done:,} "
                f"on: {total - bar.done:,} images are packed again"
            )
    return intact


def _found_intact(
    paths: OutputPaths, specs: Sequence[FieldSpec], blocks: Sequence[BlockResult]
) -> Iterator[bool]:
    """Yield for each block whether its pixels are there; nothing where a file is missing."""
    positions = np.cumsum([paths.heads(specs), *(block.sizes for block in blocks)], axis=0).tolist()
    with ExitStack() as stack:
        handles = []
        for path in paths.payloads(specs):
            try:
                handles.append((open_file(path), path))
            except FileNotFoundError:
                return
            stack.callback(os.close, handles[-1][0])
        pool = stack.enter_context(ThreadPoolExecutor(available_cores()))
        check = partial(_is_intact, handles, specs)
        for first in range(0, len(blocks), _CHECKED_TOGETHER):
            some = blocks[first : first + _CHECKED_TOGETHER]
            yield from pool.map(check, some, positions[first:])


def _is_intact(
    handles: Sequence[tuple[int, Path]],
    specs: Sequence[FieldSpec],
    block: BlockResult,
    positions: Sequence[int],
) -> bool:
    at = list(positions)
    sizes = [field.tolist() for field in payload_sizes(specs, block.rows)]
    for item, expected in enumerate(block.rows["crc32"].tolist()):
        check = 0
        for k, (handle, path) in enumerate(handles):
            stop = at[k] + sizes[k][item]
            while at[k] < stop:
                with naming(path):
                    data = os.pread(handle, min(_READ_BYTES, stop - at[k]), at[k])
                if not data:
                    return False
                check = zlib.crc32(data, check)
                at[k] += len(data)
        if check != expected:
            return False
    return True
