"""The journal of a run: what is safely on the disk, so that an interrupted run can go on.

One header (what was packed, how, with which versions) and one entry per block of pictures, in
order without gaps. An entry is appended only after the pixels it speaks of were synced; so
whatever the journal says is true, and a torn last entry costs one block.
"""

import json
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from h5feed.errors import PackError
from h5feed.packing.encode import Record, Skip

__all__ = ["Header", "Journal", "JournalWriter"]

_FRAME = struct.Struct("<4sIII")  # magic, bytes of JSON, bytes of rows, CRC-32 of both
_MAGIC = b"h5fj"
_SECONDS_BETWEEN_SYNCS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What has to be the same for a run to go on."""

    source: str
    """Digest over names, sizes, times and labels of all pictures."""
    count: int
    content: dict[str, Any]
    """The options that decide the file's bytes."""
    versions: dict[str, str]

    def differences(self, now: "Header") -> list[str]:
        """Say in words where `now` differs from this header."""
        said = []
        if (self.source, self.count) != (now.source, now.count):
            said.append(f"the source has changed ({self.count:,} pictures then, {now.count:,} now)")
        for then, today in ((self.content, now.content), (self.versions, now.versions)):
            said += [
                f"{name} was {then.get(name)!r} and is {today.get(name)!r}"
                for name in sorted({*then, *today})
                if then.get(name) != today.get(name)
            ]
        return said


class Journal:
    """A journal file, open for appending."""

    def __init__(self, file: IO[bytes], row_type: np.dtype[np.void]) -> None:
        self._file, self._row_type = file, row_type
        self.stop = 0
        """All pictures before this one are safe."""

    @classmethod
    def create(cls, path: Path, header: Header, row_type: np.dtype[np.void]) -> "Journal":
        """Begin a new journal at `path`."""
        # Without Python's buffer: on a full disk its last flush would fail again at closing.
        file = path.open("w+b", buffering=0)
        journal = cls(file, row_type)
        fields = {name: getattr(header, name) for name in header.__dataclass_fields__}
        journal._append(json.dumps(fields).encode(), b"")
        journal.sync()
        return journal

    @classmethod
    def reopen(
        cls, path: Path, header: Header, row_type: np.dtype[np.void]
    ) -> "tuple[Journal, list[Record]] | None":
        """Open a journal to go on; return it and its entries, or None where it holds nothing.

        Raises PackError where source, options or versions are not what they were.
        """
        file = path.open("r+b", buffering=0)
        journal = cls(file, row_type)
        frames = journal._frames()
        first = next(frames, None)
        if first is None:  # killed before the header was whole
            file.close()
            return None
        said = Header(**json.loads(first[0])).differences(header)
        if said:
            raise PackError(
                f"{path} cannot be resumed: {'; '.join(said)}. Give what it was begun with, or "
                "--overwrite to begin anew"
            )
        end = file.tell()
        records = []
        for text, rows in frames:
            records.append(journal._record(json.loads(text), rows))
            end = file.tell()
        file.truncate(end)  # the torn last entry of a run that was killed while it wrote
        file.seek(end)
        return journal, records

    def append(self, records: Sequence[Record]) -> None:
        """Add entries; what they speak of must be on the disk already."""
        for record in records:
            facts = {
                "start": record.start,
                "stop": record.stop,
                "skips": record.skips,
                "sizes": record.sizes,
                "source_bytes": record.source_bytes,
            }
            self._append(json.dumps(facts).encode(), record.rows.tobytes())
            self.stop = record.stop

    def sync(self) -> None:
        """Bring what was appended to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, text: bytes, rows: bytes) -> None:
        check = zlib.crc32(rows, zlib.crc32(text))
        left = memoryview(_FRAME.pack(_MAGIC, len(text), len(rows), check) + text + rows)
        while left:
            left = left[self._file.write(left) :]

    def _frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the whole frames up to the first torn one."""
        while len(head := self._file.read(_FRAME.size)) == _FRAME.size:
            magic, text_bytes, rows_bytes, check = _FRAME.unpack(head)
            body = self._file.read(text_bytes + rows_bytes) if magic == _MAGIC else b""
            if len(body) != text_bytes + rows_bytes or zlib.crc32(body) != check:
                return
            yield body[:text_bytes], body[text_bytes:]

    def _record(self, facts: dict[str, Any], rows: bytes) -> Record:
        self.stop = facts["stop"]
        return Record(
            start=facts["start"],
            stop=facts["stop"],
            rows=np.frombuffer(rows, self._row_type),
            skips=tuple(Skip(*skip) for skip in facts["skips"]),
            sizes=tuple(facts["sizes"]),
            source_bytes=facts["source_bytes"],
        )


class JournalWriter:
    """Syncs pixels and appends entries from a thread of its own, so that no worker waits."""

    def __init__(self, journal: Journal, payloads: Sequence[Path]) -> None:
        self._journal = journal
        self._files = [path.open("r+b") for path in payloads]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="h5feed-journal")
        self._pending: Future[None] | None = None
        self._waiting: list[Record] = []
        self._last = time.monotonic()

    def __enter__(self) -> "JournalWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True)
        for file in self._files:
            file.close()

    def add(self, records: Sequence[Record]) -> None:
        """Take records of blocks that were written (not yet synced)."""
        self._waiting += records

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
            records, self._waiting = self._waiting, []
            self._pending = self._thread.submit(self._save, records)

    def finish(self) -> None:
        """Bring everything that was added to the disk, and wait for it."""
        while self._waiting or self._pending is not None:
            if self._pending is not None:
                self._pending.exception()
            self.poll(now=True)

    def _save(self, records: Sequence[Record]) -> None:
        for file in self._files:
            _sync_data(file.fileno())
        self._journal.append(records)
        self._journal.sync()


def _sync_data(handle: int) -> None:
    getattr(os, "fdatasync", os.fsync)(handle)  # macOS has fsync alone
