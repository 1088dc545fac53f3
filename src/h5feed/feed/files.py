"""One or several packed files as one row of items: where every item lies, and views of it."""

from __future__ import annotations

import glob
import os
import shlex
import sys
import threading
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from h5feed.errors import DamagedItemError, H5FormatError, UsageError
from h5feed.jpeg import MAX_PIXELS
from h5feed.store import (
    SEGMENTS,
    Extent,
    FieldExtent,
    FieldSpec,
    FieldType,
    MappedBytes,
    MappedFile,
    SetIndex,
    is_set,
    listed_index,
    open_index,
    payload_names,
    read_index,
)

__all__ = [
    "BYTES_CHANGED",
    "GO_ON",
    "FilePath",
    "PackedFiles",
    "cannot_be",
    "expand_paths",
]

FilePath = str | os.PathLike[str]
Indices = NDArray[np.int64]
U8 = NDArray[np.uint8]

_PAGE = 4096
_MOST_MAPPED: Final = 16_384 if sys.platform == "linux" else 128
"""Files mapped at a time. Linux maps 65,530 pieces by default, and items that are written to take
a second one a file; elsewhere Python keeps a descriptor for each."""
_MOST_KEPT: Final = 64  # files whose descriptors stay open to be read from

BYTES_CHANGED = "its bytes are not those that were packed"
"""What is wrong with an item of another checksum."""

GO_ON = ', and on_error="skip" goes on without them'
"""What to do about a damaged item, in the words that end its error."""


class PackedFiles:
    """The stored items of packed files, or of a set, in the order of a dataset.

    Of one file or several listed ones that is the order in which they are stored, file after file;
    of a set that of the source. Listed files are opened at once, the shards of a set when the
    first of their items is needed; no descriptor stays open, and of many shards the one mapped
    first is let go (its views live on).

    Safe under fork and threads. It pickles as paths and fingerprints; unpickling opens the files
    again and raises H5FormatError where one has changed. Item indices here are plain:
    0 ≤ index < len.

    Raises H5FormatError where an image is stored at more than `max_pixels` pixels: what a file
    says of its images decides how much memory is asked for, before anything is decoded.
    """

    mapped = True
    """Whether items are views of mapped files; else `item` reads them."""

    def __init__(
        self,
        paths: Sequence[FilePath],
        *,
        max_pixels: int = MAX_PIXELS,
        index: SetIndex | None = None,
    ) -> None:
        self.paths: list[str]
        """Absolute path of each listed file; of a set, of its folder alone."""
        self._opened: deque[int] = deque()
        self._lock = threading.Lock()
        if len(paths) == 1 and os.path.isdir(paths[0]):
            self.index = index or open_index(paths[0])
            """All of the files but their pixels."""
            self.paths = [os.path.dirname(self.index.path)]
            self._shards: list[_OpenShard | None] = [None] * len(self.index.paths)
        else:
            files = [MappedFile(path) for path in paths]
            self.index = listed_index([file.index for file in files])
            for file in files:
                del file.index  # its columns are joined now: not twice in memory
            self.paths = list(self.index.paths)
            self._shards = [self._readers(file, number) for number, file in enumerate(files)]
        index = self.index
        self.specs: dict[str, FieldSpec] = index.specs
        """What each pixel field holds, by name; "images" is first."""
        self.field_types: dict[str, FieldType] = index.fields
        """What each further field holds, by name."""
        self.classes: tuple[str, ...] = index.classes
        self.fingerprint: str = index.fingerprint
        """SHA-256 (hex) of all files together; a single file's is its own."""
        self.label_shape: tuple[int, ...] = index.columns["labels"].shape[1:]
        """() where each item has a class number, else (K,)."""
        self.has_letterbox = "letterbox" in index.columns
        """Whether images lie in letterboxes, for fit="pad"."""
        self._starts: list[int] = index.starts.tolist()
        self._order = index.columns.get("order")
        self._believed = np.full(len(index.paths), not index.checksums)
        self._max_pixels = max_pixels
        self._check_max_pixels()

    def __len__(self) -> int:
        return self._starts[-1]

    def __reduce__(self) -> tuple[Any, ...]:
        if self.index.path:
            of = (self.fingerprint, len(self.index.paths), len(self.classes))
            return _reopen_set, (self.paths[0], *of, self._max_pixels)
        return _reopen, (self.paths, list(self.index.fingerprints), self._max_pixels)

    def reading(self) -> PackedFiles:
        """Return the same items, read from the disk by `item` instead of mapped.

        A failing disk then raises DamagedItemError; with a mapping it would end the process.
        """
        made = object.__new__(_ReadFiles)
        made.__dict__ |= self.__dict__
        made._opened, made._lock = deque(self._opened), threading.Lock()
        made._shards = [
            None if shard is None else made._readers(shard.mapping, number)
            for number, shard in enumerate(self._shards)
        ]
        return made

    @property
    def shards(self) -> tuple[Indices, NDArray[Any] | None]:
        """How many items each file has, int64 (S,), and which item is stored at each place.

        The latter is an integer (N,), file after file; None where that is the order of the items.
        """
        return np.diff(self.index.starts), self.index.columns.get("positions")

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """How the images were packed: a single file's, of several or a set the first one's."""
        if not self.index.path:
            return self.index.plan
        return {"plan": self.index.plan} | read_index(self.index.paths[0]).provenance

    @property
    def in_order(self) -> bool:
        """Whether items are in the order in which they are stored."""
        return self._order is None

    @property
    def is_single(self) -> bool:
        """Whether all items lie in one file, in their order."""
        return len(self._shards) == 1 and self._order is None

    def locate(self, index: int) -> tuple[int, int]:
        """Return (number of the file, index within it)."""
        if self._order is not None:
            number, place = self._places(np.array([index]))
            return int(number[0]), int(place[0]) - self._starts[int(number[0])]
        if len(self._shards) == 1:
            return 0, index
        number_ = bisect_right(self._starts, index) - 1
        return number_, index - self._starts[number_]

    def _places(self, where: Indices) -> tuple[Indices, Indices]:
        """Return file numbers and stored positions of items (B,), int64 both.

        What the index says of these files is believed from then on; H5FormatError where it is
        damaged.
        """
        if len(self._shards) == 1 and self._order is None:
            return np.zeros_like(where), where
        position = where
        if self._order is not None:
            if len(where) and int(where.max()) >= len(self):  # an order made of damaged /positions
                raise self.index.refuse("its /positions lead beyond the last item (damaged)")
            position = self._order[where].astype(np.int64)
            if len(position) and int(position.max()) >= len(self):
                raise self.index.refuse("its /order leads beyond the last item (damaged)")
        number = np.searchsorted(self.index.starts, position, side="right") - 1
        if not self._believed[number].all():
            for one in np.unique(number).tolist():
                self._believe(one)
        if self._order is not None and (self.index.columns["positions"][position] != where).any():
            raise self.index.refuse("its /order and /positions do not agree (damaged)")
        return number, position

    def _believe(self, number: int) -> None:
        """Have what the index says of a file checked, once."""
        if not self._believed[number]:
            self.index.check_rows(number)
            self._believed[number] = True

    def _open(self, number: int) -> _OpenShard:
        """Return what reads a file, mapped now if it is not."""
        shard = self._shards[number]
        if shard is not None:
            return shard
        self._believe(number)
        shard = self._readers(self.index.open_shard(number), number)
        with self._lock:
            self._shards[number] = shard
            self._opened.append(number)
            if len(self._opened) > _MOST_MAPPED:
                self._shards[self._opened.popleft()] = None
        return shard

    def _readers(self, mapping: MappedBytes, number: int) -> _OpenShard:
        """Return what reads each field of a file."""
        extents = self.index.extents(number)
        readers = {name: _reader(mapping, extent) for name, extent in extents.items()}
        return _OpenShard(mapping, extents, self.index.further(number), readers)

    def item(self, field: str, index: int) -> U8:
        """Return one item of a field as a read-only uint8 view of the file, without a copy.

        Shape (H, W, C) for raw, (H·3/2, W) for yuv420 (NV12), (bytes,) for encoded fields.
        """
        number, local = self.locate(index)
        return (self._shards[number] or self._open(number)).readers[field](local)

    def items(self, field: str, indices: Indices) -> Iterator[U8]:
        """Give items (B,) as `item` does, one after the other."""
        number, position = self._places(indices)
        local = position - self.index.starts[number]
        shards = self._shards
        for one, at in zip(number.tolist(), local.tolist(), strict=True):
            yield (shards[one] or self._open(one)).readers[field](at)

    def payloads(self, name: str, indices: Indices) -> tuple[U8, Indices]:
        """Return the bytes of items (B,) of one of `payload_names`, and where each begins.

        Of a single mapped file that is all of it, and nothing is copied; else they are joined.
        """
        number, address, length = self._ranges(name, indices)
        if self.mapped and len(self._shards) == 1:
            return self._open(0).mapping.data, address
        ranges = zip(*(a.tolist() for a in (indices, number, address, length)), strict=True)
        return np.concatenate([self._part(name, *one) for one in ranges]), length.cumsum() - length

    def segments(self, field: str, indices: Indices) -> NDArray[np.uint16]:
        """Return the lengths of the restart segments of items (B,), one item's after the other."""
        name = f"{field}/{SEGMENTS}"
        data, starts = self.payloads(name, indices)
        stops = (starts + self.lengths(name, indices)).tolist()
        parts = [data[a:b] for a, b in zip(starts.tolist(), stops, strict=True)]
        return np.concatenate(parts).view("<u2")

    def lengths(self, name: str, indices: Indices) -> Indices:
        """int64 (B,): bytes that items have of one of `payload_names`."""
        return self._ranges(name, indices)[2]

    def _part(self, name: str, index: int, number: int, address: int, length: int) -> U8:
        """Return what item `index` has of one of `payload_names`."""
        return self._open(number).mapping.data[address : address + length]

    def field_bytes(self, name: str, index: int) -> memoryview:
        """Return the bytes of one item of a further field: a read-only view of the file."""
        number, local = self.locate(index)
        shard = self._open(number)
        start, length = shard.further[name].item_range(local)
        return shard.mapping.data[start : start + length].data

    def fixed_field(self, name: str, indices: Indices | None = None) -> NDArray[Any]:
        """Return items (B,), or all, of a further field of one shape: (B, …).

        All items of a single file are a view.
        """
        if self.is_single:
            whole = self._fixed(0, name)
            return whole if indices is None else np.take(whole, indices, axis=0)
        kind = self.field_types[name]
        number, position = self._places(np.arange(len(self)) if indices is None else indices)
        made = np.empty((len(number), *kind.shape), kind.dtype)
        for one in np.unique(number).tolist():
            mine = number == one
            made[mine] = self._fixed(one, name)[position[mine] - self._starts[one]]
        return made

    def _fixed(self, number: int, name: str) -> NDArray[Any]:
        shard = self._open(number)
        extent = shard.further[name]
        data = shard.mapping.data[extent.start : extent.start + extent.nbytes]
        values: NDArray[Any] = data.view(extent.type.dtype)
        return values.reshape(extent.count, *extent.type.shape)

    def writable(self, field: str, index: int) -> U8:
        """Return the same as memory of the caller's own; see MappedFile.writable."""
        number, local = self.locate(index)
        shard = self._open(number)
        return shard.mapping.writable(shard.extents[field], local)

    def whole(self, field: str) -> U8:
        """Return a fixed field of a single file as one view, shape (N, H, W, C) or NV12."""
        if not self.is_single or not self.specs[field].is_fixed:
            raise UsageError(f"field {field!r} of {self.name} is not one array of one size")
        return next(self.wholes(field))[0]

    def writable_whole(self, field: str) -> U8:
        """Return what `whole` does as memory of the caller's own.

        Raises OSError where the system gives no memory for that.
        """
        self.whole(field)  # raises the errors
        shard = self._open(0)
        return shard.mapping.writable_whole(shard.extents[field])

    def wholes(self, field: str) -> Iterator[tuple[U8, Indices]]:
        """Give a fixed field of each file as one view (n, H, W, C) or NV12, and which items."""
        places = self.index.columns.get("positions", np.arange(len(self)))
        for number, (first, last) in enumerate(pairwise(self._starts)):
            shard = self._open(number)
            yield shard.mapping.whole(shard.extents[field]), places[first:last].astype(np.int64)

    def copy_whole(self, field: str, indices: Indices, out: U8) -> None:
        """Copy small items (B,) of a fixed field into `out` (B, …), those of a file together."""
        number, position = self._places(indices)
        for one in np.unique(number).tolist():
            shard = self._open(one)
            mine = number == one
            local = position[mine] - self._starts[one]
            out[mine] = shard.mapping.whole(shard.extents[field])[local]

    def rows(self, name: str, indices: Indices) -> NDArray[Any]:
        """Return rows (B, …) of a column of all items.

        name: "labels", "source_shapes", "crc32", "letterbox" or "shapes", as the properties of
        about the same names have them.
        """
        if name == "shapes" and (size := self.specs["images"].common_size) is not None:
            return np.broadcast_to(np.array(size, np.int32), (len(indices), 2))
        _, position = self._places(indices)
        # indexing by rows takes eight times as long, 16 µs for 256 samples of ten million
        taken: NDArray[Any] = np.take(self.index.columns[name], position, axis=0)
        return taken

    def row(self, name: str, index: int) -> NDArray[Any]:
        """Return what a column has for one item."""
        found: NDArray[Any]
        if self.is_single and name in self.index.columns:
            found = self.index.columns[name][index]
        else:
            found = self.rows(name, np.array([index]))[0]
        return found

    def _column(self, name: str) -> NDArray[Any]:
        """Return a column of all items, in their order: of a set a copy, and every row checked."""
        self._check_columns(name)
        column = self.index.columns[name]
        whole: NDArray[Any] = column
        return whole if self._order is None else np.take(whole, self._order, axis=0)

    def _check_columns(self, *names: str) -> None:
        """Refuse columns of an index of which any row is damaged."""
        for number in range(len(self._shards)):
            self.index.check_rows(number, (*names, "positions", "order"))

    @property
    def labels(self) -> NDArray[Any]:
        """int64 (N,), −1 where there is none; or float32 (N, K)."""
        found: NDArray[Any] = self._column("labels")
        return found

    @property
    def source_shapes(self) -> NDArray[np.int32]:
        """int32 (N, 2): height and width of each source image."""
        found: NDArray[np.int32] = self._column("source_shapes")
        return found

    @property
    def stored_shapes(self) -> NDArray[np.int32]:
        """int32 (N, 2): stored height and width of each item's image, read-only."""
        if (size := self.specs["images"].common_size) is not None:
            return np.broadcast_to(np.array(size, np.int32), (len(self), 2))
        found: NDArray[np.int32] = self._column("shapes")
        return found

    def key(self, index: int) -> str:
        """Source path of an item, relative to the packed folder."""
        return self._key(*self.locate(index))

    def _key(self, number: int, local: int) -> str:
        first, last = self.index.rows("keys", number)[local : local + 2].tolist()
        return os.fsdecode(self.index.rows("key_bytes", number)[first:last].tobytes())

    def keys(self) -> list[str]:
        """Source paths of all items: a list made anew, about 0.4 µs an item."""
        self._check_columns("keys", "key_bytes")
        found: list[str] = []
        for number in range(len(self._shards)):
            ends = self.index.rows("keys", number).tolist()
            text = self.index.rows("key_bytes", number).tobytes()
            found += [os.fsdecode(text[a:b]) for a, b in pairwise(ends)]
        return found if self._order is None else [found[at] for at in self._order.tolist()]

    def item_bytes(self, indices: npt.ArrayLike) -> Indices:
        """int64 (B,): bytes of each item in the file, all fields together."""
        where = np.asarray(indices, np.int64)
        total = np.zeros(len(where), np.int64)
        for name in payload_names(list(self.specs.values())):
            total += self.lengths(name, where)
        return total

    def announce(self, indices: npt.ArrayLike, fields: Sequence[str] | None = None) -> int:
        """Tell the kernel that these items will be read soon, in this order.

        Returns at once, with the number of bytes announced. Items that follow one another in
        the file are announced together.
        """
        where = np.asarray(indices, np.int64)
        total = 0
        for name in payload_names([self.specs[field] for field in fields or self.specs]):
            for number, start, length in _merged(*self._ranges(name, where)):
                self._open(number).mapping.announce(start, length)
                total += length
        return total

    def in_memory(self, indices: npt.ArrayLike, field: str = "images") -> bool:
        """Whether all these items of a field can be read without waiting for the disk (1 µs each).

        Looks at the middle of each: its ends may have come with its neighbors.
        """
        number, start, length = self._ranges(field, np.asarray(indices, np.int64))
        middles = start + length // 2
        return all(
            self._open(file).mapping.in_memory(*middles[number == file].tolist())
            for file in np.unique(number).tolist()
        )

    def is_intact(self, index: int) -> bool:
        """Whether an item, all fields of it, has the checksum it was packed with (1 GB/s)."""
        crc = 0
        for field in self.specs:
            crc = zlib.crc32(self.item(field, index).data, crc)
            if self.specs[field].encoding == "jpeg":
                crc = zlib.crc32(self.segments(field, np.array([index])).data, crc)
        for field in self.field_types:
            crc = zlib.crc32(self.field_bytes(field, index), crc)
        return crc == int(self.row("crc32", index))

    def damaged(self, field: str, index: int, what: str, then: str = "") -> DamagedItemError:
        """Make the error that names file, field, index in that file, and key of an item."""
        return DamagedItemError(
            f"{self.place(field, index)} {what}; check-h5 lists every damaged item{then}"
        )

    def place(self, field: str, index: int) -> str:
        """Say which item that is: file, index in that file, key."""
        return self._place(field, *self.locate(index))

    def _place(self, field: str, number: int, local: int) -> str:
        key = self._key(number, local)
        return f"{self.index.paths[number]}: item {local} of /{field} (key {key!r})"

    @property
    def name(self) -> str:
        """What to call these files in a message."""
        more = len(self.paths) - 1
        return self.paths[0] + (f" and {more} more" if more else "")

    def _check_max_pixels(self) -> None:
        areas = self.index.largest.astype(np.int64).prod(axis=1)
        number = int(areas.argmax())
        if areas[number] <= self._max_pixels:
            return
        height, width = self.index.largest[number].tolist()
        local = 0
        if "shapes" in self.index.columns:
            self._believe(number)
            shapes = self.index.rows("shapes", number).astype(np.int64)
            local = int(shapes.prod(axis=1).argmax())
        place = self._place("images", number, local)
        raise H5FormatError(
            f"{place} is stored as {height}x{width}, more than max_pixels={self._max_pixels}; give "
            "a higher max_pixels to H5Dataset if you trust the file"
        )

    def _ranges(self, name: str, where: Indices) -> tuple[Indices, Indices, Indices]:
        """Return (file number, byte address, length) of each item, int64 (B,) each.

        Of what it has of `name`, one of `payload_names`.
        """
        index = self.index
        number, position = self._places(where)
        start = index.addresses[name][number]
        size = index.item_bytes(name)
        if size is not None:
            local = position - index.starts[number]
            return number, start + local * size, np.full_like(where, size)
        ends, at = index.columns[name], position + number
        first = ends[at]
        return number, start + first, ends[at + 1] - first


class _OpenShard(NamedTuple):
    """What reads one file."""

    mapping: MappedBytes
    extents: dict[str, Extent]
    further: dict[str, FieldExtent]
    readers: dict[str, Callable[[int], U8]]
    """Item → its bytes or pixels, by field."""


class _ReadFiles(PackedFiles):
    mapped = False

    def _readers(self, mapping: MappedBytes, number: int) -> _OpenShard:
        if len(self.index.paths) <= _MOST_KEPT:
            mapping.keep_open()
        extents = self.index.extents(number)
        readers: dict[str, Callable[[int], U8]]
        readers = {name: partial(mapping.read, extent) for name, extent in extents.items()}
        return _OpenShard(mapping, extents, self.index.further(number), readers)

    def item(self, field: str, index: int) -> U8:
        try:
            return super().item(field, index)
        except OSError as ex:
            raise self.damaged(field, index, cannot_be(ex), GO_ON) from ex

    def items(self, field: str, indices: Indices) -> Iterator[U8]:
        for index in indices.tolist():
            yield self.item(field, index)

    def _part(self, name: str, index: int, number: int, address: int, length: int) -> U8:
        try:
            return self._open(number).mapping.read_bytes(address, length)
        except OSError as ex:
            field = name.partition("/")[0]
            raise self.damaged(field, index, cannot_be(ex), GO_ON) from ex


def cannot_be(reason: object) -> str:
    """Say what an item cannot be: decoded, or read where an OSError is the reason."""
    if isinstance(reason, OSError):
        return f"cannot be read: {reason.strerror} (errno {reason.errno})"
    return f"cannot be decoded: {reason}"


def _merged(number: Indices, start: Indices, length: Indices) -> list[tuple[int, int, int]]:
    """Join ranges whose pages touch, keeping the order of first need."""
    if len(start) == 0:
        return []
    stop = start + length
    gap = (start[1:] - stop[:-1] >= _PAGE) | (start[1:] < start[:-1])
    first = np.flatnonzero(np.r_[True, gap | (number[1:] != number[:-1])])
    last = np.r_[first[1:], len(start)] - 1
    return list(
        zip(
            number[first].tolist(),
            start[first].tolist(),
            (stop[last] - start[first]).tolist(),
            strict=True,
        )
    )


def _reader(mapping: MappedBytes, extent: Extent) -> Callable[[int], U8]:
    """Return the shortest way to an item's view: indexing the whole field where it has one size."""
    if extent.spec.is_fixed:
        return mapping.whole(extent).__getitem__
    return partial(mapping.item, extent)


def _reopen(paths: list[str], fingerprints: list[str], max_pixels: int) -> PackedFiles:
    """Open again what was pickled, and refuse a file that is not the same any more."""
    files = PackedFiles(paths, max_pixels=max_pixels)
    for path, have, wanted in zip(paths, files.index.fingerprints, fingerprints, strict=True):
        if have != wanted:
            raise _changed(path, "file")
    return files


def _reopen_set(
    folder: str, fingerprint: str, shards: int, classes: int, max_pixels: int
) -> PackedFiles:
    """Open again a set that was pickled, as it was: without what has been appended since."""
    index = open_index(folder)
    if index.fingerprint != fingerprint and len(index.paths) > shards:
        index = index.first(shards, classes)
    if index.fingerprint != fingerprint:
        raise _changed(folder, "set")
    return PackedFiles([folder], max_pixels=max_pixels, index=index)


def _changed(path: str, what: str) -> H5FormatError:
    return H5FormatError(
        f"{path}: the {what} has changed since this dataset was opened; open it again with "
        "H5Dataset"
    )


def expand_paths(root: FilePath | Sequence[FilePath]) -> list[str]:
    """Return the files that `root` names: one file, a set's folder, a pattern, or several files.

    A pattern's files come in sorted order. Raises UsageError where nothing is named, or a folder
    that is not a set, or a set among several files.
    """
    if isinstance(root, str | os.PathLike):
        paths = _matching(os.path.expanduser(os.fspath(root)))
    elif isinstance(root, Sequence) and all(isinstance(path, str | os.PathLike) for path in root):
        paths = [os.fspath(path) for path in root]
    else:
        raise UsageError(f"root={root!r} is not a path: give a packed file, or a list of some")
    if not paths:
        raise UsageError(f"root={root!r} names no file; give at least one packed file")
    for path in paths:
        if not os.path.isdir(path):
            continue
        if is_set(path) and len(paths) > 1:
            raise UsageError(
                f"root has the set {path!r} among others: give it alone, or join them with "
                "`merge-h5 A B OUT`"
            )
        if not is_set(path):
            if glob.glob(os.path.join(glob.escape(path), "shard-*-of-*.h5")):
                raise UsageError(
                    f"root={path!r} is a set without its index: finish it with "
                    f"`merge-h5 {shlex.quote(path)}`"
                )
            out = shlex.quote(Path(path).resolve().name + ".h5")
            raise UsageError(
                f"root={path!r} is a folder: pack it with `pack-h5 {shlex.quote(path)} {out}`, and "
                "give that file"
            )
    return paths


def _matching(name: str) -> list[str]:
    if Path(name).exists() or not glob.has_magic(name):
        return [name]
    paths = sorted(glob.glob(name, recursive=True))
    if not paths:
        raise UsageError(f"root={name!r} matches no file; check the pattern")
    return paths
