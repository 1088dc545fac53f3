"""How a packed file comes to be: payload first, then HDF5's metadata around it.

Worker processes write pixels into a plain file at known addresses. When all are there, HDF5
writes a skeleton (a sparse file with all metadata and small arrays, but no pixels); everything
but its pixels is copied around the payload. So pixels are written once, by as many processes
as there are, without MPI, and the result equals what HDF5 would have written alone.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import numpy as np

from h5feed.store.fingerprint import canonical_json, fingerprint
from h5feed.store.layout import ALIGNMENT, FORMAT, FORMAT_VERSION, LIBVER, Columns, FieldSpec

__all__ = ["finalize", "head_bytes", "write_file"]

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
    with TemporaryDirectory() as folder:
        places = _skeleton(Path(folder, "head"), fields, columns, {}, offsets, shapes)
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
) -> None:
    """Turn the payload in `partial` into the finished file `out`, all or nothing.

    `partial` holds the first field's items back to back from `head_bytes(fields)` on; `side`
    names a plain file for each further field, items back to back from byte 0. Fields that are
    not fixed bring `offsets` (int64, N+1) and `shapes` (int32, N×2). Interrupted anywhere, it
    can simply be called again: the payload in `partial` is never overwritten.
    """
    skeleton = partial.with_name(partial.name + ".skeleton")
    places = _skeleton(skeleton, fields, columns, provenance, offsets, shapes)
    first = fields[0].name
    if places[first][0] != head_bytes(fields):
        raise AssertionError(f"HDF5 put {first} at {places[first][0]}, not after the head")
    with skeleton.open("rb") as source, partial.open("r+b") as target:
        end = os.fstat(source.fileno()).st_size
        target.truncate(end)
        for start, stop in _between(list(places.values()), end):
            _copy(source.fileno(), start, target.fileno(), start, stop - start)
        for name, path in side.items():
            start, length = places[name]
            with path.open("rb") as payload:
                _copy(payload.fileno(), 0, target.fileno(), start, length)
        os.fsync(target.fileno())
    partial.replace(out)
    _sync_folder(out.parent)
    for path in (skeleton, *side.values()):
        path.unlink(missing_ok=True)


def write_file(
    out: Path,
    fields: Sequence[FieldSpec],
    columns: Columns,
    payloads: Mapping[str, Iterable[Payload]],
    provenance: dict[str, Any] | None = None,
    *,
    shapes: Arrays | None = None,
) -> None:
    """Write a whole file from items in memory: the same bytes as packing would give.

    `payloads` has every field's items in order; `shapes` the stored sizes (int32, N×2) of the
    items of fields that are not fixed.
    """
    partial = out.with_name(out.name + ".partial")
    offsets: dict[str, np.ndarray[Any, Any] | None] = {}
    side = {f.name: partial.with_name(f"{partial.name}.{f.name}") for f in fields[1:]}
    for spec in fields:
        with side.get(spec.name, partial).open("wb") as file:
            file.seek(0 if spec.name in side else head_bytes(fields))
            sizes = [file.write(bytes(item)) for item in payloads[spec.name]]
        offsets[spec.name] = None if spec.is_fixed else np.cumsum([0, *sizes], dtype=np.int64)
    finalize(
        partial,
        out,
        fields,
        columns,
        provenance or {},
        offsets=offsets,
        shapes=shapes or {},
        side=side,
    )


def _skeleton(
    path: Path,
    fields: Sequence[FieldSpec],
    columns: Columns,
    provenance: dict[str, Any],
    offsets: Arrays,
    shapes: Arrays,
) -> dict[str, tuple[int, int]]:
    """Write all but the pixels; return each pixel field's (address, bytes)."""
    text = canonical_json(provenance)
    # Two steps: only pixels are aligned (a threshold of 1: the first field's address must not
    # depend on its size), and small arrays follow without a page of padding each.
    with h5py.File(
        path, "w", libver=LIBVER, alignment_threshold=1, alignment_interval=ALIGNMENT
    ) as file:
        places = {spec.name: _reserve(file, spec, len(columns), offsets) for spec in fields}
    with h5py.File(path, "r+", libver=LIBVER) as file:
        for spec in fields:
            _describe(file[spec.name], spec, offsets, shapes)
        _add_columns(file, columns)
        facts: dict[str, str | int] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "complete": 1,
            "provenance": text,
            "fingerprint": fingerprint(fields, columns, text, offsets, shapes),
        }
        for key, value in facts.items():
            file.attrs[key] = _attribute(value)
    return places


def _reserve(file: h5py.File, spec: FieldSpec, count: int, offsets: Arrays) -> tuple[int, int]:
    """Make a field's extent; return its address and bytes."""
    if spec.is_fixed:
        pixels = _add_pixels(file, spec.name, spec.dataset_shape(count))
    else:
        ends = offsets[spec.name]
        assert ends is not None
        pixels = _add_pixels(_new_group(file, spec.name), "bytes", (int(ends[-1]),))
    return pixels.id.get_offset(), pixels.id.get_storage_size()


def _describe(holder: Any, spec: FieldSpec, offsets: Arrays, shapes: Arrays) -> None:
    if not spec.is_fixed:
        _add_array(holder, "offsets", offsets[spec.name])
        _add_array(holder, "shapes", shapes[spec.name])
    for key, value in spec.attributes().items():
        holder.attrs[key] = _attribute(value)


def _add_pixels(parent: h5py.Group, name: str, shape: tuple[int, ...]) -> h5py.Dataset:
    """Reserve a contiguous extent without writing it."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    space = h5py.h5s.create_simple(shape)
    made = h5py.h5d.create(parent.id, name.encode(), h5py.h5t.STD_U8LE, space, plist)
    return h5py.Dataset(made)


def _add_columns(file: h5py.File, columns: Columns) -> None:
    names = [name.encode("utf-8", "surrogateescape") for name in columns.classes]
    width = max([1, *map(len, names)])
    kind = h5py.string_dtype("utf-8", width)
    _add_array(file, "labels", columns.labels)
    _add_array(file, "classes", np.array(names, dtype=f"S{width}").astype(kind))
    keys = _new_group(file, "keys")
    _add_array(keys, "bytes", columns.key_bytes)
    _add_array(keys, "offsets", columns.key_offsets)
    _add_array(file, "source_shapes", columns.source_shapes)
    _add_array(file, "crc32", columns.crc32)
    if columns.boxes is not None:
        _add_array(file, "boxes", columns.boxes)


def _add_array(parent: h5py.Group, name: str, array: np.ndarray[Any, Any] | None) -> None:
    parent.create_dataset(name, data=array, track_times=False)


def _new_group(parent: h5py.Group, name: str) -> h5py.Group:
    """Make a group without a time stamp: the same input must give the same bytes."""
    plist = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    plist.set_obj_track_times(False)
    return h5py.Group(h5py.h5g.create(parent.id, name.encode(), gcpl=plist))


def _attribute(value: str | int) -> Any:
    return np.bytes_(value.encode()) if isinstance(value, str) else np.int64(value)


def _between(places: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the (start, stop) stretches of [0, end) outside the given extents."""
    gaps, at = [], 0
    for start, length in sorted(places):
        gaps.append((at, start))
        at = start + length
    return [*gaps, (at, end)]


def _copy(source: int, start: int, target: int, at: int, count: int) -> None:
    done = 0
    while done < count:
        block = os.pread(source, min(_COPY_BYTES, count - done), start + done)
        if not block:
            raise OSError(f"a payload file ends {count - done} bytes early")
        done += os.pwrite(target, block, at + done)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every file system lets a folder be opened or synced
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
