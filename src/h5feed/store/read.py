"""How a packed file is opened: HDF5 validates it, through the descriptor that pixels come from.

Opening goes through the gate. It accepts what h5feed writes and nothing else: a file is data,
never code, and no address in it is believed before it has been checked against the file's size.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5feed.errors import H5FormatError
from h5feed.store.fingerprint import fingerprint
from h5feed.store.gate import (
    Gate,
    check_offsets,
    check_ranges,
    check_sizes,
    check_spec,
    read_provenance,
)
from h5feed.store.layout import (
    FORMAT,
    FORMAT_VERSION,
    IMAGES,
    MASKS,
    Columns,
    Extent,
    FieldSpec,
    Int32,
    Int64,
    UInt8,
    UInt32,
    images_spec,
    masks_spec,
)
from h5feed.text import printable

__all__ = ["READAHEAD", "FileIndex", "PackedFile", "read_index"]

# Linux reads no more of one announcement than the device's read-ahead, 128 KiB by default, and
# drops the rest without a word (64 MiB announced at once: 8 MiB read, where that is 8 MiB).
READAHEAD = 128 << 10

_MEMBERS = {IMAGES, MASKS, "labels", "classes", "keys", "source_shapes", "crc32", "boxes"}
_SPEC_TEXTS = ("encoding", "color_space", "layout", "fit", "interpolation")
_SPEC_NUMBERS = ("height", "width", "channels")


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

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Give the descriptor, or one for this moment where it was closed: of this very file.

        Raises OSError where that file has been replaced or deleted.
        """
        if self._fd >= 0:
            yield self._fd
            return
        fd = self._open_again()
        try:
            yield fd
        finally:
            os.close(fd)

    def keep_open(self) -> None:
        """Open the same file again where it was closed, for `read` and `item`; see `descriptor`."""
        if self._fd < 0:
            self._fd = self._open_again()

    def _open_again(self) -> int:
        path = self.index.path
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        if _identity(fd) != self._identity:
            os.close(fd)
            raise OSError(errno.ESTALE, "the file has been replaced since it was opened", path)
        return fd

    def close(self) -> None:
        """Close the descriptor; a second time it does nothing."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def _open(self, path: Path) -> FileIndex:
        _probe(path)
        try:
            with _open_hdf5(path) as file:
                self._fd = os.dup(file.id.get_vfd_handle())
                self._identity = _identity(self._fd)
                return _index(Gate(path, os.fstat(self._fd).st_size), file)
        except H5FormatError:
            raise
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError) as ex:
            reason = " ".join(str(ex).split())
            raise _read_error(path, ex, reason) or H5FormatError(
                f"{path}: not a sound HDF5 file ({printable(reason)}); "
                "pack the images again with pack-h5"
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
            for at in range(start, start + length, READAHEAD):
                size = min(READAHEAD, start + length - at)
                os.posix_fadvise(self._fd, at, size, os.POSIX_FADV_WILLNEED)


def read_index(path: str | os.PathLike[str]) -> FileIndex:
    """Open, validate and close a packed file; raises what `PackedFile` does."""
    with PackedFile(path) as file:
        return file.index


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _open_hdf5(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r", driver="sec2", locking=False)
    except OSError as ex:
        if "locking flag" not in str(ex):
            raise
        # This process has it open through h5py, and must lock it here as it does there.
        return h5py.File(path, "r", driver="sec2")


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


def _read_error(path: Path, error: Exception, reason: str) -> OSError | None:
    """Return the system's error, that HDF5 may report in words; None where the file is wrong."""
    codes = re.findall(r", errno = (\d+), error message = '", reason)
    code = int(codes[-1]) if codes else getattr(error, "errno", None)
    return OSError(code, os.strerror(code), str(path)) if code else None


def _index(gate: Gate, file: h5py.File) -> FileIndex:
    _check_root(gate, file)
    names = gate.members(file)
    for name in names:
        if name not in _MEMBERS:
            raise gate.refuse(f"/{name} is nothing that h5feed writes")
    if IMAGES not in names:
        raise gate.refuse("it has no /images")
    labels = _labels(gate, file)
    extents = {IMAGES: _extent(gate, file, IMAGES, len(labels))}
    if MASKS in names:
        extents[MASKS] = _extent(gate, file, MASKS, len(labels), extents[IMAGES].spec)
    columns = _columns(gate, file, labels, boxes="boxes" in names)
    check_ranges(gate, columns, extents[IMAGES].spec)
    check_sizes(gate, extents)
    provenance, seal = gate.text(file, "provenance"), gate.text(file, "fingerprint")
    specs = [extent.spec for extent in extents.values()]
    offsets = {name: extent.offsets for name, extent in extents.items()}
    shapes = {name: extent.shapes for name, extent in extents.items()}
    starts = [extent.start for extent in extents.values()]
    if fingerprint(specs, starts, columns, provenance, offsets, shapes) != seal:
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
        provenance=read_provenance(gate, provenance),
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
            "update h5feed or pack the images again"
        )
    if "complete" not in file.attrs or gate.integer(file, "complete") != 1:
        raise gate.refuse("it was never finished (attribute complete is not set)")
    if file.userblock_size:
        raise gate.refuse("it has a user block, which h5feed never writes")


def _labels(gate: Gate, file: h5py.File) -> Any:
    data = gate.dataset(file, "labels")
    if (data.dtype, data.ndim) not in ((np.dtype("<i8"), 1), (np.dtype("<f4"), 2)):
        raise gate.refuse(f"/labels is {data.dtype} {data.shape}, not int64 (N) or float32 (N,K)")
    if data.size < 1:
        raise gate.refuse("it has no items" if data.shape[0] < 1 else "/labels has no targets")
    return data[()]


def _columns(gate: Gate, file: h5py.File, labels: Any, *, boxes: bool) -> Columns:
    count = len(labels)
    keys = gate.group(file, "keys", {"bytes", "offsets"})
    key_bytes = gate.array(keys, "bytes", "|u1", (None,))
    key_offsets = gate.array(keys, "offsets", "<i8", (count + 1,))
    check_offsets(gate, "/keys/offsets", key_offsets, len(key_bytes))
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


def _extent(
    gate: Gate, file: h5py.File, name: str, count: int, images: FieldSpec | None = None
) -> Extent:
    spec = _spec(gate, file, name, images)
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
    check_offsets(gate, f"/{name}/offsets", offsets, data.shape[0])
    start = gate.address(data)
    return Extent(spec=spec, start=start, count=count, offsets=offsets, shapes=shapes)


def _spec(gate: Gate, file: h5py.File, name: str, images: FieldSpec | None) -> FieldSpec:
    holder = file[name]
    values: dict[str, str | int] = {key: gate.text(holder, key) for key in _SPEC_TEXTS}
    values |= {key: gate.integer(holder, key) for key in _SPEC_NUMBERS}
    try:
        spec = FieldSpec.from_attributes(name, values)
    except ValueError as ex:
        raise gate.refuse(f"/{name}: {ex}") from ex
    wanted = images_spec(spec.encoding, spec.height, spec.width, spec.fit)
    return check_spec(gate, spec, wanted if images is None else masks_spec(images))
