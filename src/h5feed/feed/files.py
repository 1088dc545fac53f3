"""One or several packed files as one row of items: where every item lies, and views of it."""

from __future__ import annotations

import glob
import hashlib
import os
import shlex
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5feed.errors import DamagedItemError, H5FormatError, UsageError
from h5feed.jpeg import MAX_PIXELS
from h5feed.store import (
    SEGMENTS,
    Extent,
    FieldSpec,
    FieldType,
    FileIndex,
    MappedFile,
    SegmentsExtent,
    payload_names,
)

__all__ = [
    "BYTES_CHANGED",
    "GO_ON",
    "FilePath",
    "PackedFiles",
    "cannot_be",
    "check_alike",
    "expand_paths",
    "joint_fingerprint",
]

FilePath = str | os.PathLike[str]
Indices = npt.NDArray[np.int64]

_PAGE = 4096

BYTES_CHANGED = "its bytes are not those that were packed"
"""What is wrong with an item of another checksum."""

GO_ON = ', and on_error="skip" goes on without them'
"""What to do about a damaged item, in the words that end its error."""


class PackedFiles:
    """The stored items of one or several packed files, in order.

    Safe under fork and threads: after opening there is only memory to look at. It pickles as
    paths and fingerprints; unpickling opens the files again and raises H5FormatError where one
    has changed. Item indices here are plain: 0 ≤ index < len.

    Raises H5FormatError where an image is stored at more than `max_pixels` pixels: what a file
    says of its images decides how much memory is asked for, before anything is decoded.
    """

    mapped = True
    """Whether items are views of mapped files; else `item` reads them."""

    def __init__(self, paths: Sequence[FilePath], *, max_pixels: int = MAX_PIXELS) -> None:
        self._mappings = [MappedFile(path) for path in paths]
        self.indexes: list[FileIndex] = [mapping.index for mapping in self._mappings]
        """All of each file but its pixels."""
        check_alike(self.indexes)
        first = self.indexes[0]
        self.paths: list[str] = [index.path for index in self.indexes]
        """Absolute path of each file."""
        self.specs: dict[str, FieldSpec] = {n: e.spec for n, e in first.extents.items()}
        """What each pixel field holds, by name; "images" is first."""
        self.field_types: dict[str, FieldType] = {n: e.type for n, e in first.fields.items()}
        """What each further field holds, by name."""
        self.classes: tuple[str, ...] = first.classes
        self.labels: npt.NDArray[Any] = _join([i.labels for i in self.indexes])
        """int64 (N,), −1 where there is none; or float32 (N, K)."""
        self.source_shapes: npt.NDArray[np.int32] = _join([i.source_shapes for i in self.indexes])
        """(N, 2) height and width of each source image."""
        self.crc32: npt.NDArray[np.uint32] = _join([i.crc32 for i in self.indexes])
        """(N,) of each item's bytes as packed, its fields in order."""
        self.letterbox: npt.NDArray[np.int32] | None = (
            None if first.letterbox is None else _join([i.letterbox for i in self.indexes])
        )
        """(N, 4) top, left, height, width inside the letterbox, for fit="pad"."""
        self.fingerprint: str = joint_fingerprint(self.indexes)
        """SHA-256 (hex) of all files together; a single file's is its own."""
        self._starts: list[int] = np.cumsum([0, *map(len, self.indexes)]).tolist()
        self._readers = {
            name: [_reader(m, i.extents[name]) for m, i in self._files()] for name in self.specs
        }
        self._extents: dict[str, list[Extent | SegmentsExtent]] = {
            name: [index.pixel_parts[name] for index in self.indexes]
            for name in payload_names(list(self.specs.values()))
        }
        self._max_pixels = max_pixels
        self._check_max_pixels()

    def __len__(self) -> int:
        return self._starts[-1]

    def __reduce__(self) -> tuple[Any, ...]:
        fingerprints = [index.fingerprint for index in self.indexes]
        return _reopen, (self.paths, fingerprints, self._max_pixels)

    def reading(self) -> PackedFiles:
        """Return the same items, read from the disk by `item` instead of mapped.

        A failing disk then raises DamagedItemError; with a mapping it would end the process.
        """
        for mapping in self._mappings:
            mapping.keep_open()
        made = object.__new__(_ReadFiles)
        made.__dict__ |= self.__dict__
        made._readers = {
            name: [partial(m.read, i.extents[name]) for m, i in self._files()]
            for name in self.specs
        }
        return made

    @property
    def shards(self) -> tuple[Indices, Indices | None]:
        """How many items each file has, int64 (S,), and which item is stored at each place.

        The latter is int64 (N,), file after file; None where that is the order of the items.
        """
        return np.diff(self._starts), None

    def locate(self, index: int) -> tuple[int, int]:
        """Return (number of the file, index within it)."""
        if len(self.indexes) == 1:
            return 0, index
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def item(self, field: str, index: int) -> npt.NDArray[np.uint8]:
        """Return one item of a field as a read-only uint8 view of the file, without a copy.

        Shape (H, W, C) for raw, (H·3/2, W) for yuv420 (NV12), (bytes,) for encoded fields.
        """
        number, local = self.locate(index)
        return self._readers[field][number](local)

    def payloads(self, name: str, indices: Indices) -> tuple[npt.NDArray[np.uint8], Indices]:
        """Return the bytes of items (B,) of one of `payload_names`, and where each begins.

        Of a single mapped file that is all of it, and nothing is copied; else they are joined.
        """
        number, address, length = self._ranges(name, indices)
        if self.mapped and len(self._mappings) == 1:
            return self._mappings[0].data, address
        ranges = zip(*(a.tolist() for a in (indices, number, address, length)), strict=True)
        return np.concatenate([self._part(name, *one) for one in ranges]), length.cumsum() - length

    def segments(self, field: str, indices: Indices) -> npt.NDArray[np.uint16]:
        """Return the lengths of the restart segments of items (B,), one item's after the other."""
        name = f"{field}/{SEGMENTS}"
        data, starts = self.payloads(name, indices)
        stops = (starts + self.lengths(name, indices)).tolist()
        parts = [data[a:b] for a, b in zip(starts.tolist(), stops, strict=True)]
        return np.concatenate(parts).view("<u2")

    def lengths(self, name: str, indices: Indices) -> Indices:
        """int64 (B,): bytes that items have of one of `payload_names`."""
        return self._ranges(name, indices)[2]

    def _part(
        self, name: str, index: int, number: int, address: int, length: int
    ) -> npt.NDArray[np.uint8]:
        """Return what item `index` has of one of `payload_names`."""
        return self._mappings[number].data[address : address + length]

    def field_bytes(self, name: str, index: int) -> memoryview:
        """Return the bytes of one item of a further field: a read-only view of the file."""
        number, local = self.locate(index)
        start, length = self.indexes[number].fields[name].item_range(local)
        return self._mappings[number].data[start : start + length].data

    def fixed_fields(self, name: str) -> list[npt.NDArray[Any]]:
        """Return a further field of one shape as one view (N, …) for each file."""
        return [
            mapping.data[extent.start : extent.start + extent.nbytes]
            .view(extent.type.dtype)
            .reshape(extent.count, *extent.type.shape)
            for mapping, index in self._files()
            for extent in (index.fields[name],)
        ]

    def writable(self, field: str, index: int) -> npt.NDArray[np.uint8]:
        """Return the same as memory of the caller's own; see MappedFile.writable."""
        number, local = self.locate(index)
        return self._mappings[number].writable(self.indexes[number].extents[field], local)

    def whole(self, field: str) -> npt.NDArray[np.uint8]:
        """Return a fixed field of a single file as one view, shape (N, H, W, C) or NV12."""
        if len(self.paths) > 1 or not self.specs[field].is_fixed:
            raise UsageError(f"field {field!r} of {self.name} is not one array of one size")
        return self.wholes(field)[0]

    def writable_whole(self, field: str) -> npt.NDArray[np.uint8]:
        """Return what `whole` does as memory of the caller's own.

        Raises OSError where the system gives no memory for that.
        """
        self.whole(field)  # raises the errors
        return self._mappings[0].writable_whole(self.indexes[0].extents[field])

    def wholes(self, field: str) -> list[npt.NDArray[np.uint8]]:
        """Return a fixed field as one view for each file, shape (N, H, W, C) or NV12."""
        return [mapping.whole(index.extents[field]) for mapping, index in self._files()]

    def key(self, index: int) -> str:
        """Source path of an item, relative to the packed folder."""
        number, local = self.locate(index)
        return self.indexes[number].key(local)

    def keys(self) -> list[str]:
        """Source paths of all items: a list made anew, about 0.4 µs an item."""
        found: list[str] = []
        for index in self.indexes:
            data, ends = index.key_bytes.tobytes(), index.key_offsets.tolist()
            found += [os.fsdecode(data[a:b]) for a, b in pairwise(ends)]
        return found

    @property
    def stored_shapes(self) -> npt.NDArray[np.int32]:
        """int32 (N, 2): stored height and width of each item's image, read-only."""
        spec = self.specs["images"]
        if spec.is_fixed:
            return np.broadcast_to(np.array([spec.height, spec.width], np.int32), (len(self), 2))
        shapes: npt.NDArray[np.int32] = _join([i.extents["images"].shapes for i in self.indexes])
        return shapes

    def item_bytes(self, indices: npt.ArrayLike) -> Indices:
        """int64 (B,): bytes of each item in the file, all fields together."""
        where = np.asarray(indices, np.int64)
        total = np.zeros(len(where), np.int64)
        for name in self._extents:
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
                self._mappings[number].announce(start, length)
                total += length
        return total

    def in_memory(self, indices: npt.ArrayLike, field: str = "images") -> bool:
        """Whether all these items of a field can be read without waiting for the disk (1 µs each).

        Looks at the middle of each: its ends may have come with its neighbors.
        """
        number, start, length = self._ranges(field, np.asarray(indices, np.int64))
        middles = start + length // 2
        return all(
            self._mappings[file].in_memory(*middles[number == file].tolist())
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
        return crc == int(self.crc32[index])

    def damaged(self, field: str, index: int, what: str, then: str = "") -> DamagedItemError:
        """Make the error that names file, field, index in that file, and key of an item."""
        return DamagedItemError(
            f"{self.place(field, index)} {what}; check-h5 lists every damaged item{then}"
        )

    def place(self, field: str, index: int) -> str:
        """Say which item that is: file, index in that file, key."""
        number, local = self.locate(index)
        return f"{self.paths[number]}: item {local} of /{field} (key {self.key(index)!r})"

    @property
    def name(self) -> str:
        """What to call this source in a message."""
        more = len(self.paths) - 1
        return self.paths[0] + (f" and {more} more" if more else "")

    def _check_max_pixels(self) -> None:
        shapes = self.stored_shapes
        sizes = shapes[:1] if self.specs["images"].is_fixed else shapes
        areas = sizes.astype(np.int64).prod(axis=1)
        at = int(areas.argmax())
        if areas[at] > self._max_pixels:
            height, width = sizes[at].tolist()
            raise H5FormatError(
                f"{self.place('images', at)} is stored as {height}x{width}, more than "
                f"max_pixels={self._max_pixels}; give a higher max_pixels to H5Dataset if you "
                "trust the file"
            )

    def _files(self) -> list[tuple[MappedFile, FileIndex]]:
        return list(zip(self._mappings, self.indexes, strict=True))

    def _ranges(self, name: str, where: Indices) -> tuple[Indices, Indices, Indices]:
        """Return (file number, byte address, length) of each item, int64 (B,) each.

        Of what it has of `name`, one of `payload_names`.
        """
        extents = self._extents[name]
        if len(extents) == 1:
            return np.zeros_like(where), *_item_ranges(extents[0], where)
        starts = np.asarray(self._starts)
        number = np.searchsorted(starts, where, side="right") - 1
        address, length = np.empty_like(where), np.empty_like(where)
        for one in np.unique(number):
            mine = number == one
            address[mine], length[mine] = _item_ranges(extents[one], where[mine] - starts[one])
        return number, address, length


class _ReadFiles(PackedFiles):
    mapped = False

    def item(self, field: str, index: int) -> npt.NDArray[np.uint8]:
        try:
            return super().item(field, index)
        except OSError as ex:
            raise self.damaged(field, index, cannot_be(ex), GO_ON) from ex

    def _part(
        self, name: str, index: int, number: int, address: int, length: int
    ) -> npt.NDArray[np.uint8]:
        try:
            return self._mappings[number].read_bytes(address, length)
        except OSError as ex:
            field = name.partition("/")[0]
            raise self.damaged(field, index, cannot_be(ex), GO_ON) from ex


def cannot_be(reason: object) -> str:
    """Say what an item cannot be: decoded, or read where an OSError is the reason."""
    if isinstance(reason, OSError):
        return f"cannot be read: {reason.strerror} (errno {reason.errno})"
    return f"cannot be decoded: {reason}"


def _item_ranges(extent: Extent | SegmentsExtent, local: Indices) -> tuple[Indices, Indices]:
    if isinstance(extent, Extent) and extent.offsets is None:
        size = extent.spec.item_bytes
        return extent.start + local * size, np.full_like(local, size)
    assert extent.offsets is not None
    first = extent.offsets[local]
    return extent.start + first, extent.offsets[local + 1] - first


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


def _reader(mapping: MappedFile, extent: Extent) -> Callable[[int], npt.NDArray[np.uint8]]:
    """Return the shortest way to an item's view: indexing the whole field where it has one size."""
    if extent.spec.is_fixed:
        return mapping.whole(extent).__getitem__
    return partial(mapping.item, extent)


def _join(arrays: Sequence[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _reopen(paths: list[str], fingerprints: list[str], max_pixels: int) -> PackedFiles:
    """Open again what was pickled, and refuse a file that is not the same any more."""
    files = PackedFiles(paths, max_pixels=max_pixels)
    for index, wanted in zip(files.indexes, fingerprints, strict=True):
        if index.fingerprint != wanted:
            raise H5FormatError(
                f"{index.path}: the file has changed since this dataset was opened; "
                "open it again with H5Dataset"
            )
    return files


def expand_paths(root: FilePath | Sequence[FilePath]) -> list[str]:
    """Return the files that `root` names: one file, a glob pattern, or a sequence of files.

    A pattern's files come in sorted order. Raises UsageError where nothing is named, or a folder.
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
        if os.path.isdir(path):
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


def joint_fingerprint(indexes: Sequence[FileIndex]) -> str:
    """SHA-256 (hex) of several files in their order; a single file's is its own."""
    if len(indexes) == 1:
        return indexes[0].fingerprint
    return hashlib.sha256(" ".join(i.fingerprint for i in indexes).encode()).hexdigest()


def check_alike(indexes: Sequence[FileIndex]) -> None:
    """Refuse files that were not packed alike: a dataset has one set of fields and classes.

    Raises UsageError, naming the first two files that differ and in what.
    """
    first = indexes[0]
    for other in indexes[1:]:
        for what, have, want in (
            ("pixel fields", _fields(other), _fields(first)),
            ("further fields", _further(other), _further(first)),
            ("classes", other.classes, first.classes),
            ("kind of labels", _label_kind(other), _label_kind(first)),
            ("letterboxes", other.letterbox is None, first.letterbox is None),
        ):
            if have != want:
                raise UsageError(
                    f"{other.path} and {first.path} differ in their {what}; files of one dataset "
                    "must be packed with the same options and classes"
                )


def _fields(index: FileIndex) -> dict[str, FieldSpec]:
    return {name: extent.spec for name, extent in index.extents.items()}


def _further(index: FileIndex) -> dict[str, FieldType]:
    return {name: extent.type for name, extent in index.fields.items()}


def _label_kind(index: FileIndex) -> tuple[str, tuple[int, ...]]:
    return index.labels.dtype.str, index.labels.shape[1:]
