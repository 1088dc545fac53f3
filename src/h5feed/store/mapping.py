"""The pixels of one packed file as memory: mapped once, views of it, and hints to the kernel."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections import deque
from contextlib import suppress
from typing import Any, Final

import numpy as np

from h5feed.store.layout import Extent, UInt8
from h5feed.store.read import READAHEAD, PackedFile

__all__ = ["Mapping"]


class Mapping:
    """One file mapped once, read-only: nothing in this process can change what is read here.

    `writable` is for whoever must be handed memory that can be written to. Views stay valid for as
    long as they exist, also after `Mapping` itself is gone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open `path`, as `PackedFile` does, and map that very file."""
        with PackedFile(path) as file:
            self.index = file.index
            self.data: UInt8 = _map(file.fileno(), self.index.size)
        self._address = self.data.ctypes.data
        # Closed: a set may be thousands of files, and a process has a thousand descriptors.
        self._file = file
        """uint8 (size,): the whole file, read-only."""
        self._copied: _CopyOnWrite | None = None

    def item(self, extent: Extent, index: int) -> UInt8:
        """Return item `index` as a view, shape `extent.item_shape(index)`, without a copy."""
        start, length = extent.item_range(index)
        return self.data[start : start + length].reshape(extent.item_shape(index))

    def read(self, extent: Extent, index: int) -> UInt8:
        """Return item `index` as `item` does, read into memory of its own.

        Raises OSError where the disk does not give it; touching a view then ends the process.
        After `keep_open`.
        """
        return self._file.item(extent, index)

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
            return _field(_map(fd, self.index.size, writable=True), extent)

    def announce(self, start: int, length: int) -> None:
        """Tell the kernel that these bytes will be read soon; it returns at once."""
        for at in range(start, start + length, READAHEAD):
            _advise(self._address + at, min(READAHEAD, start + length - at))

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


def _field(data: UInt8, extent: Extent) -> UInt8:
    spec = extent.spec
    view = data[extent.start : extent.start + extent.nbytes]
    return view.reshape(extent.count, *spec.item_shape(spec.height, spec.width))


_EVERY: Final = 8  # reads: so often an earlier one is looked at again
_LATER: Final = 64  # reads: so much later, when a batch's worth of them may have been written


class _CopyOnWrite:
    """Views of a file that may be written to, each given only while its pages are the file's.

    The mapping is private: a page that is written is copied by the kernel and is this process's
    own from then on, and so would be what the next reader of it sees. /proc/self/pagemap tells
    (4 µs for 256² pixels; a copy costs 7 µs where its memory is used again at once, and 30 µs in a
    batch of 64). So every read looks at its pages first. The first one found written ends this
    for good: who writes once writes on, and the kernel's copies cost more than plain ones and stay.
    Pages are not dropped from under those who hold views; they go with the last view.
    """

    def __init__(self, file: PackedFile) -> None:
        self._data: UInt8 | None = None
        if _pagemap is not None:
            # strict overcommit counts such memory in full; the file may have been replaced
            with suppress(OSError), file.descriptor() as fd:
                self._data = _map(fd, file.index.size, writable=True)
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


def _map(fd: int, size: int, *, writable: bool = False) -> UInt8:
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
