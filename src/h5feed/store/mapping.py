"""The pixels of one packed file as memory: one private mapping, views of it, and hints."""

import mmap
import os
from typing import Any

import numpy as np

from h5feed.store.layout import UInt8
from h5feed.store.read import Extent, PackedFile

__all__ = ["Mapping"]

_NORESERVE = 0x4000  # Linux' MAP_NORESERVE: Python 3.11 lacks the name


class Mapping:
    """One file mapped once, copy on write.

    Private and writable: torch takes the pages without a warning, and a stray write can neither
    fault nor reach the file. Without swap reservation, so that files larger than memory map.
    Views stay valid for as long as they exist, also after `Mapping` itself is gone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open `path`, as `PackedFile` does, and map that very file."""
        self._file = PackedFile(path)
        self.index = self._file.index
        self._fd = self._file.fileno()
        self._map = _map_private(self._fd, self.index.size)
        self.data: UInt8 = np.frombuffer(self._map, np.uint8)
        """uint8 (size,): the whole file."""

    def item(self, extent: Extent, index: int) -> UInt8:
        """Return item `index` as a view, shape `extent.item_shape(index)`, without a copy."""
        start, length = extent.item_range(index)
        return self.data[start : start + length].reshape(extent.item_shape(index))

    def whole(self, extent: Extent) -> UInt8:
        """Return a fixed field as one view: (N, H, W, C), or (N, H·3/2, W) for NV12."""
        spec = extent.spec
        view = self.data[extent.start : extent.start + extent.nbytes]
        return view.reshape(extent.count, *spec.item_shape(spec.height, spec.width))

    def announce(self, start: int, length: int) -> None:
        """Tell the kernel that these bytes will be read soon; it returns at once."""
        self._file.announce(start, length)

    def in_memory(self, address: int) -> bool:
        """Whether the byte at `address` can be read without waiting for the disk.

        False where the system cannot tell.
        """
        if not hasattr(os, "RWF_NOWAIT"):
            return False
        try:
            return os.preadv(self._fd, [bytearray(1)], address, os.RWF_NOWAIT) == 1
        except OSError:  # EAGAIN: not there; EOPNOTSUPP: this file system cannot tell
            return False

    def restore(self, start: int, length: int) -> None:
        """Make these bytes the file's again where this process has written into them.

        Written back, not dropped with their pages (MADV_DONTNEED): a small neighbor on the same
        page may be in another thread's hands at this moment.
        """
        self.data[start : start + length] = np.frombuffer(
            os.pread(self._fd, length, start), np.uint8
        )


def _map_private(fd: int, size: int) -> mmap.mmap:
    options: dict[str, Any] = {"access": mmap.ACCESS_COPY}
    if os.name == "posix":
        flags = mmap.MAP_PRIVATE | (_NORESERVE if os.uname().sysname == "Linux" else 0)
        options = {"flags": flags, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    return mmap.mmap(fd, size, **options)
