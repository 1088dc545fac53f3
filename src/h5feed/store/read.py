"""How a packed file is opened: HDF5 validates it, through the descriptor that pixels come from.

Opening goes through the gate. It accepts what h5feed writes and nothing else: a file is data,
never code, and no address in it is believed before it has been checked against the file's size.
"""

import errno
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5feed.errors import H5FormatError
from h5feed.store.fingerprint import fingerprint
from h5feed.store.gate import Gate
from h5feed.store.layout import (
    FORMAT,
    FORMAT_VERSION,
    IMAGES,
    Columns,
    FieldSpec,
    Int32,
    Int64,
    UInt8,
    UInt32,
)

__all__ = ["Extent", "FileIndex", "PackedFile", "read_index"]

# Linux reads no more of one announcement than the device's read-ahead, 128 KiB by default, and
# drops the rest without a word (64 MiB announced at once: 8 MiB read, where that is 8 MiB).
_READAHEAD = 128 << 10

_COLUMNS = {"labels", "classes", "keys", "source_shapes", "crc32", "boxes"}
_SPEC_TEXTS = ("encoding", "color_space", "layout", "fit", "interpolation")
_SPEC_NUMBERS = ("height", "width", "channels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where one pixel field of one file lies."""

    spec: FieldSpec
    start: int
    """Byte address in the file of the first item."""
    count: int
    offsets: Int64 | None
    """(N+1,) bytes from `start`; None when every item has `spec.item_bytes`."""
    shapes: Int32 | None
    """(N, 2) stored height and width; None when all are `spec.height` × `spec.width`."""

    def item_range(self, index: int) -> tuple[int, int]:
        """Return (byte address in the file, length) of item `index`."""
        if self.offsets is None:
            size = self.spec.item_bytes
            return self.start + index * size, size
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.start + first, last - first

    def item_shape(self, index: int) -> tuple[int, ...]:
        """Shape of the uint8 array of item `index`: pixels, or encoded bytes (length,)."""
        if self.spec.is_encoded:
            return (self.item_range(index)[1],)
        if self.shapes is None:
            return self.spec.item_shape(self.spec.height, self.spec.width)
        height, width = self.shapes[index].tolist()
        return self.spec.item_shape(height, width)

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return (
            int(self.offsets[-1]) if self.offsets is not None else self.count * self.spec.item_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIndex:
    """All of a packed file but its pixels, validated and copied out."""

    path: str
    """Absolute path."""
    size: int
    """Bytes of the file."""
    extents: dict[str, Extent]
    """By field name; "images" is always there and first."""
    labels: Int64 | np.ndarray[Any, np.dtype[np.float32]]
    classes: tuple[str, ...]
    key_bytes: UInt8
    key_offsets: Int64
    source_shapes: Int32
    boxes: Int32 | None
    crc32: UInt32
    provenance: dict[str, Any]
    fingerprint: str
    """SHA-256 (hex) of everything here and, through crc32, of the pixels."""

    def __len__(self) -> int:
        return len(self.source_shapes)

    def key(self, index: int) -> str:
        """Source path of item `index`, relative to the packed folder."""
        first, last = self.key_offsets[index : index + 2].tolist()
        return os.fsdecode(self.key_bytes[first:last].tobytes())


class PackedFile:
    """A packed file, opened once and held open.

    Index, mapping and reads come from one descriptor: packing replaces a file by renaming, and
    whoever opens its name twice may get the labels of one and the pixels of another. Closed with
    the object, or by `close`; safe in threads and after a fork.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and validate `path`.

        Raises FileNotFoundError (or another OSError) where the file cannot be read, and
        H5FormatError, one sentence, where it is anything but a finished and unaltered h5feed file.
        """
        self._fd = -1
        try:
            self.index = self._open(Path(path).absolute())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "PackedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor; a second time it does nothing."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def _open(self, path: Path) -> FileIndex:
        _probe(path)
        try:
            with h5py.File(path, "r", driver="sec2", locking=False) as file:
                self._fd = os.dup(file.id.get_vfd_handle())
                return _index(Gate(path, os.fstat(self._fd).st_size), file)
        except H5FormatError:
            raise
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError) as ex:
            reason = " ".join(str(ex).split())
            raise _read_error(path, reason) or H5FormatError(
                f"{path}: not a sound HDF5 file ({reason}); pack the pictures again with pack-h5"
            ) from ex

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from address `start` on; OSError where the system has not all."""
        data = os.pread(self._fd, length, start)
        while len(data) < length:
            more = os.pread(self._fd, length - len(data), start + len(data))
            if not more:
                raise OSError(errno.ENODATA, "the file ends before it", self.index.path)
            data += more
        return data

    def item(self, extent: Extent, index: int) -> UInt8:
        """Read item `index`: uint8, shape `extent.item_shape(index)`, read-only."""
        data = self.read(*extent.item_range(index))
        return np.frombuffer(data, np.uint8).reshape(extent.item_shape(index))

    def announce(self, start: int, length: int) -> None:
        """Tell the kernel that these bytes will be read soon; it returns at once."""
        if hasattr(os, "posix_fadvise"):
            for at in range(start, start + length, _READAHEAD):
                size = min(_READAHEAD, start + length - at)
                os.posix_fadvise(self._fd, at, size, os.POSIX_FADV_WILLNEED)


def read_index(path: str | os.PathLike[str]) -> FileIndex:
    """Open, validate and close a packed file; raises what `PackedFile` does."""
    with PackedFile(path) as file:
        return file.index


def _probe(path: Path) -> None:
    """Raise OSError where `path` cannot be opened; a pipe or device is refused, not waited for."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        mode = os.fstat(fd).st_mode
    finally:
        os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise H5FormatError(f"{path}: not a regular file; give a file that pack-h5 has made")


def _read_error(path: Path, reason: str) -> OSError | None:
    """Return the system's error that HDF5 reports in words, None where the file itself is wrong."""
    codes = re.findall(r", errno = (\d+), error message = '", reason)
    return OSError(int(codes[-1]), os.strerror(int(codes[-1])), str(path)) if codes else None


def _index(gate: Gate, file: h5py.File) -> FileIndex:
    _check_root(gate, file)
    names = gate.members(file)
    fields = sorted(set(names) - _COLUMNS, key=lambda name: (name != IMAGES, name))
    if IMAGES not in fields:
        raise gate.refuse("it has no /images")
    labels = _labels(gate, file)
    extents = {name: _extent(gate, file, name, len(labels)) for name in fields}
    columns = _columns(gate, file, labels, boxes="boxes" in names)
    _check_ranges(gate, columns, extents[IMAGES].spec)
    provenance, seal = gate.text(file, "provenance"), gate.text(file, "fingerprint")
    specs = [extent.spec for extent in extents.values()]
    offsets = {name: extent.offsets for name, extent in extents.items()}
    shapes = {name: extent.shapes for name, extent in extents.items()}
    if fingerprint(specs, columns, provenance, offsets, shapes) != seal:
        raise gate.refuse("its fingerprint does not match its contents (altered or damaged)")
    return FileIndex(
        path=str(gate.path),
        size=gate.size,
        extents=extents,
        labels=columns.labels,
        classes=columns.classes,
        key_bytes=columns.key_bytes,
        key_offsets=columns.key_offsets,
        source_shapes=columns.source_shapes,
        boxes=columns.boxes,
        crc32=columns.crc32,
        provenance=json.loads(provenance),
        fingerprint=seal,
    )


def _check_root(gate: Gate, file: h5py.File) -> None:
    if "format" not in file.attrs or gate.text(file, "format") != FORMAT:
        raise H5FormatError(
            f"{gate.path}: an HDF5 file, but not h5feed's (no attribute format={FORMAT!r}); "
            "make one with pack-h5"
        )
    version = gate.integer(file, "format_version")
    if version != FORMAT_VERSION:
        raise H5FormatError(
            f"{gate.path}: format_version={version}, and this h5feed reads {FORMAT_VERSION}; "
            "update h5feed or pack the pictures again"
        )
    if "complete" not in file.attrs or gate.integer(file, "complete") != 1:
        raise gate.refuse("it was never finished (attribute complete is not set)")
    if file.userblock_size:
        raise gate.refuse("it has a user block, which h5feed never writes")


def _labels(gate: Gate, file: h5py.File) -> Any:
    data = gate.dataset(file, "labels")
    if (data.dtype, data.ndim) not in ((np.dtype("<i8"), 1), (np.dtype("<f4"), 2)):
        raise gate.refuse(f"/labels is {data.dtype} {data.shape}, not int64 (N) or float32 (N,K)")
    if data.shape[0] < 1:
        raise gate.refuse("it has no items")
    return data[()]


def _columns(gate: Gate, file: h5py.File, labels: Any, *, boxes: bool) -> Columns:
    count = len(labels)
    keys = gate.group(file, "keys", {"bytes", "offsets"})
    key_bytes = gate.array(keys, "bytes", "|u1", (None,))
    key_offsets = gate.array(keys, "offsets", "<i8", (count + 1,))
    _check_offsets(gate, "/keys/offsets", key_offsets, len(key_bytes))
    return Columns(
        labels=labels,
        classes=_classes(gate, file),
        key_bytes=key_bytes,
        key_offsets=key_offsets,
        source_shapes=gate.array(file, "source_shapes", "<i4", (count, 2)),
        crc32=gate.array(file, "crc32", "<u4", (count,)),
        boxes=gate.array(file, "boxes", "<i4", (count, 4)) if boxes else None,
    )


def _classes(gate: Gate, file: h5py.File) -> tuple[str, ...]:
    data = gate.dataset(file, "classes")
    if data.dtype.kind != "S" or data.ndim != 1:
        raise gate.refuse(f"/classes is {data.dtype} {data.shape}, not fixed-length strings (K)")
    return tuple(name.decode("utf-8", "surrogateescape") for name in data[()].tolist())


def _extent(gate: Gate, file: h5py.File, name: str, count: int) -> Extent:
    spec = _spec(gate, file, name)
    if spec.is_fixed:
        data = gate.dataset(file, name)
        gate.expect(data, "|u1", spec.dataset_shape(count))
        start = gate.address(data)
        return Extent(spec=spec, start=start, count=count, offsets=None, shapes=None)
    group = gate.group(file, name, {"bytes", "offsets", "shapes"})
    data = gate.dataset(group, "bytes")
    gate.expect(data, "|u1", (None,))
    offsets = gate.array(group, "offsets", "<i8", (count + 1,))
    shapes = gate.array(group, "shapes", "<i4", (count, 2))
    _check_offsets(gate, f"/{name}/offsets", offsets, data.shape[0])
    if shapes.min() < 1:
        raise gate.refuse(f"/{name}/shapes has a side below 1")
    if not spec.is_encoded:
        _check_sizes(gate, spec, offsets, shapes)
    start = gate.address(data)
    return Extent(spec=spec, start=start, count=count, offsets=offsets, shapes=shapes)


def _spec(gate: Gate, file: h5py.File, name: str) -> FieldSpec:
    holder = file[name]
    values: dict[str, str | int] = {key: gate.text(holder, key) for key in _SPEC_TEXTS}
    values |= {key: gate.integer(holder, key) for key in _SPEC_NUMBERS}
    try:
        return FieldSpec.from_attributes(name, values)
    except ValueError as ex:
        raise gate.refuse(f"/{name}: {ex}") from ex


def _check_offsets(gate: Gate, name: str, offsets: Int64, total: int) -> None:
    if offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
        raise gate.refuse(f"{name} is not rising from 0 to {total}")


def _check_ranges(gate: Gate, columns: Columns, spec: FieldSpec) -> None:
    """Refuse numbers that later code would index or divide by."""
    labels, known = columns.labels, len(columns.classes)
    if labels.ndim == 1 and labels.min() < -1:
        raise gate.refuse("/labels has a number below −1")
    if known and labels.ndim == 1 and labels.max() >= known:
        raise gate.refuse(f"/labels has a class number outside 0 to {known - 1}")
    if columns.source_shapes.min() < 1:
        raise gate.refuse("/source_shapes has a side below 1")
    if columns.boxes is not None:
        boxes = columns.boxes.astype(np.int64)
        ends = boxes[:, :2] + boxes[:, 2:]
        if (
            boxes[:, :2].min() < 0
            or boxes[:, 2:].min() < 1
            or (ends > (spec.height, spec.width)).any()
        ):
            raise gate.refuse("/boxes has a box outside the stored picture")


def _check_sizes(gate: Gate, spec: FieldSpec, offsets: Int64, shapes: Int32) -> None:
    if spec.encoding == "yuv420" and (shapes % 2).any():
        raise gate.refuse(f"/{spec.name}/shapes has an odd side in a yuv420 field")
    height, width = shapes.astype(np.int64).T
    if not np.array_equal(np.diff(offsets), spec.pixel_bytes(height, width)):
        raise gate.refuse(f"/{spec.name}/offsets does not agree with its shapes")
