"""How a packed file is read: validated by HDF5 once, then mapped into memory, or read by `pread`.

HDF5 opens the very descriptor that pixels come from, and has no part in reading them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import h5py
import numpy as np

from h5feed.disk import naming
from h5feed.errors import H5FormatError
from h5feed.store.gate import PACK_AGAIN, Gate, validated_index
from h5feed.store.layout import Extent, FileIndex, UInt8
from h5feed.text import printable

__all__ = [
    "FileReader",
    "MappedBytes",
    "MappedFile",
    "OpenFile",
    "map_file",
    "open_validated",
    "read_index",
]

Found = TypeVar("Found")
Opened = TypeVar("Opened", bound="OpenFile")

# Linux reads no more of one announcement than the device's read-ahead, 128 KiB by default, and
# drops the rest without a word (64 MiB announced at once: 8 MiB read, where that is 8 MiB).
_READAHEAD = 128 << 10


class OpenFile:
    """A file of which bytes are read, by a descriptor that may be closed in the meantime.

    Index, mapping and reads come from one descriptor: packing replaces a file by renaming, and
    a second opening by name may find another file, and mix labels of one with pixels of the other.
    Closed with the object, or by `close`; safe in threads and after a fork.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Take over `fd`, opened on `path`."""
        self._fd = fd
        self.path = str(path)
        """Absolute path."""
        status = os.fstat(fd)
        self._identity = status.st_dev, status.st_ino
        self.size = status.st_size
        """Bytes of the file."""

    @classmethod
    def by_name(cls, path: Path) -> OpenFile:
        """Open a plain file, without a look into it; OSError or H5FormatError where it is none."""
        _probe(path)
        return cls(path, os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))

    def __enter__(self: Opened) -> Opened:
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
        """Open the same file again where it was closed; see `descriptor`."""
        if self._fd < 0:
            self._fd = self._open_again()

    def _open_again(self) -> int:
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != self._identity:
            os.close(fd)
            raise OSError(errno.ESTALE, "the file has been replaced since it was opened", self.path)
        return fd

    def close(self) -> None:
        """Close the descriptor; a second time it does nothing."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from address `start` on; OSError where the system has not all."""
        with self.descriptor() as fd:
            data = os.pread(fd, length, start)
            while len(data) < length:
                more = os.pread(fd, length - len(data), start + len(data))
                if not more:
                    raise OSError(errno.ENODATA, "the file ends before it", self.path)
                data += more
        return data

    def announce(self, start: int, length: int) -> None:
        """Tell the kernel that these bytes will be read soon; it returns at once."""
        if hasattr(os, "posix_fadvise"):
            for at in range(start, start + length, _READAHEAD):
                size = min(_READAHEAD, start + length - at)
                os.posix_fadvise(self._fd, at, size, os.POSIX_FADV_WILLNEED)


class FileReader(OpenFile):
    """A packed file, opened once and held open.

    >>> with FileReader("photos.h5") as file:
    ...     item = file.item(file.index.extents["images"], 3)
    >>> item.shape, item.dtype
    ((64, 64, 3), dtype('uint8'))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and validate `path`.

        Raises FileNotFoundError (or another OSError) where the file cannot be read, and
        H5FormatError, one sentence, where it is anything but a finished and unaltered h5feed file.
        """
        absolute = Path(path).absolute()
        fd, self.index = open_validated(absolute, validated_index)
        super().__init__(absolute, fd)

    def item(self, extent: Extent, index: int) -> UInt8:
        """Read item `index`: uint8, shape `extent.item_shape(index)`, read-only."""
        data = self.read(*extent.item_range(index))
        return np.frombuffer(data, np.uint8).reshape(extent.item_shape(index))


def open_validated(
    path: Path, validate: Callable[[Gate, h5py.File], Found], **gate: str
) -> tuple[int, Found]:
    """Return a descriptor of the HDF5 file `path`, and what `validate` found in that very file.

    Further keyword arguments are the Gate's. Raises OSError and H5FormatError, one sentence.
    """
    _probe(path)
    fd = -1
    try:
        with _open_hdf5(path) as file:
            fd = os.dup(file.id.get_vfd_handle())
            made = Gate(path, os.fstat(fd).st_size, **gate)
            return fd, validate(made, file)
    except BaseException as ex:
        if fd >= 0:
            os.close(fd)
        if isinstance(ex, H5FormatError):
            raise
        if isinstance(ex, MemoryError):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from ex
        if not isinstance(ex, _OF_DAMAGE):
            raise
        reason = " ".join(str(ex).split())
        then = gate.get("then", PACK_AGAIN)
        raise _read_error(path, ex, reason) or H5FormatError(
            f"{path}: not a sound HDF5 file ({printable(reason)}); {then}"
        ) from ex


# what HDF5 and numpy raise for metadata that make no sense
_OF_DAMAGE: Final = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError)


def read_index(path: str | os.PathLike[str]) -> FileIndex:
    """Open, validate and close a packed file; raises what `FileReader` does.

    >>> index = read_index("photos.h5")
    >>> len(index), index.classes, index.key(1)
    (12, ('cat', 'dög'), '1/ü1.png')
    """
    with FileReader(path) as file:
        return file.index


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


class MappedBytes:
    """A file mapped once, read-only: nothing in this process can change what is read here.

    `item` gives views of the file's own memory; `writable` gives memory that may be written to.
    Views stay valid for as long as they exist, also after this object itself is gone.
    No descriptor stays open.
    """

    def __init__(self, file: OpenFile) -> None:
        """Map an opened file, and close it."""
        with file, naming(Path(file.path)):
            self.data: UInt8 = map_file(file.fileno(), file.size)
            """uint8 (size,): the whole file, read-only."""
        self._address = self.data.ctypes.data
        # Closed: a set may be thousands of files, and a process has a thousand descriptors.
        self._file = file
        self._copied: _CopyOnWrite | None = None

    def item(self, extent: Extent, index: int) -> UInt8:
        """Return item `index` as a view, shape `extent.item_shape(index)`, without a copy."""
        start, length = extent.item_range(index)
        return self.data[start : start + length].reshape(extent.item_shape(index))

    def read(self, extent: Extent, index: int) -> UInt8:
        """Return item `index` as `item` does, read into memory of its own.

        Raises OSError where the disk does not give it; touching a view then ends the process.
        """
        return self.read_bytes(*extent.item_range(index)).reshape(extent.item_shape(index))

    def read_bytes(self, start: int, length: int) -> UInt8:
        """Return bytes of the file as `read` does, read-only."""
        return np.frombuffer(self._file.read(start, length), np.uint8)

    def keep_open(self) -> None:
        """Keep a descriptor, for `read`; raises OSError where the file has been replaced."""
        self._file.keep_open()

    def whole(self, extent: Extent) -> UInt8:
        """Return a fixed field as one view: (N, H, W, C), or (N, H·3/2, W) for NV12."""
        return _field(self.data, extent)

    def writable(self, extent: Extent, index: int) -> UInt8:
        """Return item `index` as memory of the caller's own: what is written never gets further.

        Not to the file, nor to what is read here later. A view without a copy, until something
        has been written into one; and copies where the system cannot tell, or gives no memory
        that is copied on write.
        """
        if self._copied is None:
            self._copied = _CopyOnWrite(self._file)
        start, length = extent.item_range(index)
        view = self._copied.read(start, length)
        if view is None:
            view = self.data[start : start + length].copy()
        return view.reshape(extent.item_shape(index))

    def writable_whole(self, extent: Extent) -> UInt8:
        """Return a fixed field as `whole` does, in a mapping of its own that may be written to.

        Raises OSError where the system gives no memory for that, as with strict overcommit, and
        where the file has been replaced.
        """
        with self._file.descriptor() as fd:
            return _field(map_file(fd, self._file.size, writable=True), extent)

    def announce(self, start: int, length: int) -> None:
        """Tell the kernel that these bytes will be read soon; it returns at once."""
        for at in range(start, start + length, _READAHEAD):
            _advise(self._address + at, min(_READAHEAD, start + length - at))

    def in_memory(self, *addresses: int) -> bool:
        """Whether the bytes at `addresses` can all be read without waiting for the disk.

        False where the system cannot tell, and where the file has been replaced.
        """
        if not hasattr(os, "RWF_NOWAIT"):
            return False
        try:
            with self._file.descriptor() as fd:
                return all(os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT) for at in addresses)
        except OSError:  # EAGAIN: not there; EOPNOTSUPP: this file system cannot tell
            return False


class MappedFile(MappedBytes):
    """One packed file, mapped.

    >>> file = MappedFile("photos.h5")
    >>> extent = file.index.extents["images"]
    >>> file.item(extent, 3).flags.writeable, file.writable(extent, 3).flags.writeable
    (False, True)
    >>> file.whole(extent).shape
    (12, 64, 64, 3)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open `path`, as `FileReader` does, and map that very file."""
        absolute = Path(path).absolute()
        fd, self.index = open_validated(absolute, validated_index)
        super().__init__(OpenFile(absolute, fd))


def _field(data: UInt8, extent: Extent) -> UInt8:
    spec = extent.spec
    view = data[extent.start : extent.start + extent.nbytes]
    return view.reshape(extent.count, *spec.item_shape(spec.height, spec.width))


_EVERY: Final = 8  # reads: so often an earlier one is looked at again
_LATER: Final = 64  # reads: so much later, when a batch's worth of them may have been written


class _CopyOnWrite:
    """Views of a file that may be written to, each given only while its pages are the file's.

    The mapping is private: the kernel copies a page that is written to, and from then on every
    reader in this process would see that copy. /proc/self/pagemap tells
    (4 µs for 256² pixels; a copy costs 7 µs where its memory is used again at once, and 30 µs in a
    batch of 64). So every read looks at its pages first. The first one found written ends this
    for good: who writes once writes on, and the kernel's copies cost more than plain ones and stay.
    Pages are not dropped from under those who hold views; they go with the last view.
    """

    def __init__(self, file: OpenFile) -> None:
        self._data: UInt8 | None = None
        if _pagemap is not None:
            # strict overcommit counts such memory in full; the file may have been replaced
            with suppress(OSError), file.descriptor() as fd:
                self._data = map_file(fd, file.size, writable=True)
        self._address = 0 if self._data is None else self._data.ctypes.data
        self._reads = 0
        self._earlier: deque[tuple[int, int]] = deque([(0, 1)] * (_LATER // _EVERY))

    def read(self, start: int, length: int) -> UInt8 | None:
        """Return these bytes of the file as a writable view; None where a copy has to do."""
        data = self._data
        if data is None:
            return None
        written = self._written(start, length)
        self._reads += 1
        if self._reads % _EVERY == 0:  # else a first epoch's writes would fill the memory
            self._earlier.append((start, length))
            written = written or self._written(*self._earlier.popleft())
        if written:
            self._data = None
            return None
        return data[start : start + length]

    def _written(self, start: int, length: int) -> bool:
        """Whether any page of these bytes is no longer the file's (Linux' pagemap.rst)."""
        if _pagemap is None:
            return True
        first = (self._address + start) // mmap.PAGESIZE
        last = (self._address + start + length - 1) // mmap.PAGESIZE
        entries = os.pread(_pagemap, 8 * (last + 1 - first), 8 * first)
        return len(entries) == 0 or len(entries[_TOP::8].translate(None, _THE_FILES)) > 0


_TOP: Final = 7 if sys.byteorder == "little" else 0  # the byte with bits 56 to 63 of an entry
_PRESENT, _SWAPPED, _OF_FILE = 1 << 7, 1 << 6, 1 << 5
_THE_FILES: Final = bytes(
    top for top in range(256) if top & _OF_FILE or not top & (_PRESENT | _SWAPPED)
)


def _open_pagemap() -> int | None:
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, AttributeError):  # not Linux, or no /proc here
        return None


def _reopen_pagemap() -> None:
    global _pagemap
    if _pagemap is not None:
        os.close(_pagemap)
    _pagemap = _open_pagemap()


_pagemap = _open_pagemap()
if hasattr(os, "register_at_fork"):
    # what a child has from its parent tells of the parent's pages
    os.register_at_fork(after_in_child=_reopen_pagemap)


def map_file(fd: int, size: int, *, writable: bool = False) -> UInt8:
    """Return uint8 (size,): the file, or with `writable` memory that is copied when written to.

    Raises OSError where the system gives no such memory.
    """
    if _LIBC is not None:
        return np.asarray(_Mapped(fd, size, writable=writable))
    access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
    return np.frombuffer(mmap.mmap(fd, size, access=access), np.uint8)


def _advise(address: int, length: int) -> None:
    """Let the kernel read these bytes of a mapping ahead: fadvise's work, without a descriptor."""
    if _LIBC is not None:
        page = address - address % mmap.PAGESIZE
        _LIBC.madvise(page, address + length - page, mmap.MADV_WILLNEED)


_NORESERVE: Final = 0x4000  # Linux' MAP_NORESERVE: Python 3.11 lacks the name
_FAILED: Final = ctypes.c_void_p(-1).value
_LIBC: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _LIBC is not None:
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,  # off_t of the systems that Python is built for
    ]
    _LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Mapped:
    """A file mapped through libc, for as long as an array of it lives.

    Python's mmap would keep a descriptor of its own open for each mapping (until 3.13).
    """

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        self._size = size
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # without reserving swap, so that files larger than memory map
        flags = mmap.MAP_PRIVATE | _NORESERVE
        self._address = _LIBC.mmap(None, size, protection, flags, fd, 0)
        if self._address == _FAILED:
            self._size = 0
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self._address, not writable),
            "version": 3,
        }

    def __del__(self) -> None:
        if self._size:
            _LIBC.munmap(self._address, self._size)
