"""How a packed file comes to be: payload first, then HDF5's metadata around it.

Worker processes write pixels into a plain file at known addresses. When all are there, HDF5
makes all the rest in memory (metadata and small arrays, without the pixels), and that is written
around the payload. So pixels are written once, by as many processes as there are, without MPI;
and HDF5, which crashes where a write fails, never meets a disk that is full.
"""

import encodings.ascii  # noqa: F401 - h5py wants it for a file object, when no descriptor may be left
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5feed.disk import create_file, naming, open_file, rename_file, sync_file, write_at
from h5feed.store.fields import FIELDS, FieldExtent, FieldValues
from h5feed.store.layout import (
    ALIGNMENT,
    FORMAT,
    FORMAT_VERSION,
    LIBVER,
    SEGMENTS,
    Columns,
    FieldSpec,
    canonical_json,
    fingerprint,
    payload_names,
    segment_offsets,
)
from h5feed.store.read import read_index

__all__ = [
    "MemoryFile",
    "add_extent",
    "attribute_value",
    "between",
    "finalize",
    "head_bytes",
    "new_group",
    "side_files",
    "write_file",
]

_COPY_BYTES = 8 << 20

Arrays = Mapping[str, np.ndarray[Any, Any] | None]
Payload = bytes | np.ndarray[Any, Any]


def head_bytes(fields: Sequence[FieldSpec]) -> int:
    """Return the byte address of the first field's payload in any file of these fields."""
    columns = Columns(
        labels=np.zeros(1, np.int64),
        classes=(),
        key_bytes=np.zeros(1, np.uint8),
        key_offsets=np.array([0, 1]),
        source_shapes=np.ones((1, 2), np.int32),
        crc32=np.zeros(1, np.uint32),
    )
    offsets = {f.name: None if f.is_fixed else np.array([0, 1]) for f in fields}
    shapes = {f.name: None if f.is_fixed else np.ones((1, 2), np.int32) for f in fields}
    _, places = _around_pixels(fields, columns, {}, offsets, shapes, {})
    return places[fields[0].name][0]


def finalize(
    partial: Path,
    out: Path,
    fields: Sequence[FieldSpec],
    columns: Columns,
    provenance: dict[str, Any],
    *,
    offsets: Arrays,
    shapes: Arrays,
    side: Mapping[str, Path],
    further: Mapping[str, FieldValues] | None = None,
    check: bool = True,
) -> None:
    """Turn the payload in `partial` into the finished file `out`, all or nothing.

    `partial` holds the first field's items back to back from `head_bytes(fields)` on; `side`
    names a plain file for each other one of `payload_names`, items back to back from byte 0.
    Fields that are not fixed bring `offsets` (int64, N+1) and `shapes` (int32, N×2). `further` has
    the values of further fields, over which `columns.crc32` goes on. Interrupted anywhere, it can
    simply be called again: the payload in `partial` is never overwritten. Raises OSError that names
    the file, and H5FormatError where `check` finds that no reader would open it.
    """
    rest, places = _around_pixels(fields, columns, provenance, offsets, shapes, further or {})
    first = fields[0].name
    if places[first][0] != head_bytes(fields):
        raise AssertionError(f"HDF5 put {first} at {places[first][0]}, not after the head")
    target = open_file(partial)
    try:
        with naming(partial):
            os.ftruncate(target, rest.size)
        for name, path in side.items():
            _copy(path, partial, target, *places[name])
        rest.write_around(list(places.values()), target, partial)
    finally:
        os.close(target)
    if check:
        read_index(partial)
    rename_file(partial, out)
    for path in side.values():
        path.unlink(missing_ok=True)


def write_file(
    out: Path,
    fields: Sequence[FieldSpec],
    columns: Columns,
    payloads: Mapping[str, Iterable[Payload]],
    provenance: dict[str, Any] | None = None,
    *,
    shapes: Arrays | None = None,
    further: Mapping[str, FieldValues] | None = None,
) -> None:
    """Write a whole file from items in memory: the same bytes as packing would give.

    `payloads` has the items of each of `payload_names` in order; `shapes` the stored sizes (int32,
    N×2) of the items of fields that are not fixed; `further` the values of further fields. What
    fails leaves nothing behind. Whether the items make sense is not checked: that is for the gate
    to find out.
    """
    partial = out.with_name(out.name + ".partial")
    offsets: dict[str, np.ndarray[Any, Any] | None] = {}
    side = side_files(partial, fields)
    first = head_bytes(fields)
    fixed = {spec.name for spec in fields if spec.is_fixed}
    try:
        for name in payload_names(fields):
            path, head = (side[name], 0) if name in side else (partial, first)
            ends = _write_items(path, payloads[name], head)
            offsets[name] = None if name in fixed else np.array(ends, dtype=np.int64)
        finalize(
            partial,
            out,
            fields,
            columns,
            provenance or {},
            offsets=offsets,
            shapes=shapes or {},
            side=side,
            further=further,
            check=False,
        )
    except BaseException:
        for path in (partial, *side.values()):
            path.unlink(missing_ok=True)
        raise


def side_files(partial: Path, fields: Sequence[FieldSpec]) -> dict[str, Path]:
    """Return a plain file for each of `payload_names` but the first, which `partial` holds."""
    return {
        name: partial.with_name(f"{partial.name}.{name.rpartition('/')[2]}")
        for name in payload_names(fields)[1:]
    }


def _write_items(path: Path, items: Iterable[Payload], head: int) -> list[int]:
    """Write items back to back behind `head` bytes; return where each begins, and the end."""
    ends = [0]
    handle = create_file(path)
    try:
        for item in items:
            data = bytes(item)
            write_at(handle, data, head + ends[-1], path)
            ends.append(ends[-1] + len(data))
    finally:
        os.close(handle)
    return ends


class MemoryFile:
    """A file object for HDF5 to write into; what is never written takes no memory.

    An exception inside HDF5's calls would leave it in an undefined state, so the one that can
    happen waits in `error` until HDF5 is done.
    """

    _PAGE = 1 << 20

    def __init__(self) -> None:
        self.size = 0
        self.error: MemoryError | None = None
        self._at = 0
        self._pages: dict[int, bytearray] = {}

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Yield (address, bytes) of all there is from `start` to `stop`, zeros too."""
        while start < stop:
            number, first = divmod(start, self._PAGE)
            last = min(self._PAGE, first + stop - start)
            page = self._pages.get(number) or bytes(self._PAGE)
            yield start, memoryview(page)[first:last]
            start += last - first

    def write_around(self, places: list[tuple[int, int]], handle: int, path: Path) -> None:
        """Write all outside of `places`, (start, bytes) each, into an open file; and sync that."""
        for start, stop in between(places, self.size):
            for at, block in self.blocks(start, stop):
                write_at(handle, block, at, path)
        sync_file(handle, path)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go there."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        """Return where it stands."""
        return self._at

    def truncate(self, size: int) -> int:
        """Have that many bytes."""
        self.size = size
        return size

    def flush(self) -> None:
        """Do nothing: it is memory."""

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes; h5py takes nothing for a file that cannot be read so."""
        data = bytearray(max(0, self.size - self._at) if size < 0 else size)
        return bytes(data[: self.readinto(data)])

    def readinto(self, target: Any) -> int:
        """Fill `target`, and return how many bytes there were."""
        view = memoryview(target).cast("B")
        count = min(len(view), max(0, self.size - self._at))
        for at, block in self.blocks(self._at, self._at + count):
            view[at - self._at : at - self._at + len(block)] = block
        self._at += count
        return count

    def write(self, data: Any) -> int:
        """Write all of `data`; where memory ran out, `error` says so."""
        view = memoryview(data).cast("B")
        try:
            self._store(view)
        except MemoryError as ex:
            self.error = ex
        self._at += len(view)
        self.size = max(self.size, self._at)
        return len(view)

    def _store(self, view: memoryview) -> None:
        at, left = self._at, view
        while left:
            number, first = divmod(at, self._PAGE)
            if number not in self._pages:
                self._pages[number] = bytearray(self._PAGE)
            count = min(len(left), self._PAGE - first)
            self._pages[number][first : first + count] = left[:count]
            at, left = at + count, left[count:]


def _around_pixels(
    fields: Sequence[FieldSpec],
    columns: Columns,
    provenance: dict[str, Any],
    offsets: Arrays,
    shapes: Arrays,
    further: Mapping[str, FieldValues],
) -> tuple[MemoryFile, dict[str, tuple[int, int]]]:
    """Make all but the pixels; return it, and (address, bytes) of each of `payload_names`."""
    text = canonical_json(provenance)
    # Two steps: only pixels are aligned (a threshold of 1: the first field's address must not
    # depend on its size), and small arrays follow without a page of padding each.
    memory = MemoryFile()
    with h5py.File(
        memory, "w", libver=LIBVER, alignment_threshold=1, alignment_interval=ALIGNMENT
    ) as file:
        places: dict[str, tuple[int, int]] = {}
        for spec in fields:
            places |= _reserve(file, spec, len(columns), offsets, shapes)
        extents = _add_further(file, further)
    if memory.error is not None:
        raise memory.error
    starts = [start if length else 0 for start, length in places.values()]
    with h5py.File(memory, "r+", libver=LIBVER) as file:
        for spec in fields:
            _describe(file[spec.name], spec, offsets, shapes)
        _add_columns(file, columns)
        facts: dict[str, str | int] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "complete": 1,
            "provenance": text,
            "fingerprint": fingerprint(fields, starts, columns, text, offsets, shapes, extents),
        }
        for key, value in facts.items():
            file.attrs[key] = attribute_value(value)
    if memory.error is not None:
        raise memory.error
    return memory, places


def _reserve(
    file: h5py.File, spec: FieldSpec, count: int, offsets: Arrays, shapes: Arrays
) -> dict[str, tuple[int, int]]:
    """Make a field's extents; return their addresses and bytes by `payloads`."""
    if spec.is_fixed:
        made = [add_extent(file, spec.name, spec.dataset_shape(count))]
    else:
        ends, sizes = offsets[spec.name], shapes[spec.name]
        assert ends is not None
        group = new_group(file, spec.name)
        made = [add_extent(group, "bytes", (int(ends[-1]),))]
        if spec.encoding == "jpeg":
            assert sizes is not None
            lengths = int(segment_offsets(sizes)[-1]) // 2
            made.append(add_extent(group, SEGMENTS, (lengths,), h5py.h5t.STD_U16LE))
    places = [(data.id.get_offset(), data.id.get_storage_size()) for data in made]
    return dict(zip(spec.payloads, places, strict=True))


def _add_further(file: h5py.File, further: Mapping[str, FieldValues]) -> dict[str, FieldExtent]:
    """Write the further fields, aligned as pixels are; return where each lies."""
    if not further:
        return {}
    group, extents = new_group(file, FIELDS), {}
    for name, values in sorted(further.items()):
        if values.offsets is None:
            holder = data = _add_array(group, name, values.data)
        else:
            holder = new_group(group, name)
            data = _add_array(holder, "bytes", values.data)
            _add_array(holder, "offsets", values.offsets)
        for key, value in values.type.attributes().items():
            holder.attrs[key] = attribute_value(value)
        extents[name] = FieldExtent(
            type=values.type,
            start=data.id.get_offset() or 0,
            count=len(values),
            offsets=values.offsets,
        )
    return extents


def _describe(holder: Any, spec: FieldSpec, offsets: Arrays, shapes: Arrays) -> None:
    if not spec.is_fixed:
        _add_array(holder, "offsets", offsets[spec.name])
        _add_array(holder, "shapes", shapes[spec.name])
    for key, value in spec.attributes().items():
        holder.attrs[key] = attribute_value(value)


def add_extent(
    parent: h5py.Group, name: str, shape: tuple[int, ...], kind: Any = h5py.h5t.STD_U8LE
) -> h5py.Dataset:
    """Reserve a contiguous extent without writing it."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    space = h5py.h5s.create_simple(shape)
    made = h5py.h5d.create(parent.id, name.encode(), kind, space, plist)
    return h5py.Dataset(made)


def _add_columns(file: h5py.File, columns: Columns) -> None:
    names = [name.encode("utf-8", "surrogateescape") for name in columns.classes]
    width = max([1, *map(len, names)])
    kind = h5py.string_dtype("utf-8", width)
    _add_array(file, "labels", columns.labels)
    _add_array(file, "classes", np.array(names, dtype=f"S{width}").astype(kind))
    keys = new_group(file, "keys")
    _add_array(keys, "bytes", columns.key_bytes)
    _add_array(keys, "offsets", columns.key_offsets)
    _add_array(file, "source_shapes", columns.source_shapes)
    _add_array(file, "crc32", columns.crc32)
    if columns.letterbox is not None:
        _add_array(file, "letterbox", columns.letterbox)
    if columns.positions is not None:
        _add_array(file, "positions", columns.positions)


def _add_array(parent: h5py.Group, name: str, array: np.ndarray[Any, Any] | None) -> h5py.Dataset:
    return parent.create_dataset(name, data=array, track_times=False)


def new_group(parent: h5py.Group, name: str) -> h5py.Group:
    """Make a group without a time stamp: the same input must give the same bytes."""
    plist = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    plist.set_obj_track_times(False)
    return h5py.Group(h5py.h5g.create(parent.id, name.encode(), gcpl=plist))


def attribute_value(value: str | int) -> Any:
    """Return text or number as an attribute of fixed size has it."""
    return np.bytes_(value.encode()) if isinstance(value, str) else np.int64(value)


def between(places: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the (start, stop) stretches of [0, end) outside the given extents."""
    gaps, at = [], 0
    for start, length in sorted(places):
        gaps.append((at, start))
        at = start + length
    return [*gaps, (at, end)]


def _copy(source: Path, partial: Path, target: int, at: int, count: int) -> None:
    """Copy the first `count` bytes of the file `source` to byte `at` of `partial`."""
    handle = open_file(source)
    try:
        for start in range(0, count, _COPY_BYTES):
            with naming(source):
                block = os.pread(handle, min(_COPY_BYTES, count - start), start)
            if len(block) < min(_COPY_BYTES, count - start):
                raise OSError(
                    errno.EIO, f"ends {count - start - len(block)} bytes early", str(source)
                )
            write_at(target, block, at + start, partial)
    finally:
        os.close(handle)
