"""Batch memory that is used again, and never while somebody still holds it.

A fresh 38 MB batch costs as much in page faults as the crops that fill it (6,400 images/s against
13,300 into memory used before), so batches are written into slots that come back.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from h5feed.errors import UsageError
from h5feed.system import available_memory, total_memory

__all__ = [
    "PageLocked",
    "Ring",
    "SharedMemory",
    "Slot",
    "check_room",
]

_SHARE = 0.8
"""Of the memory that is free, what batches may take; a training step makes more of each."""
_ALWAYS = 1 << 30
"""Bytes that are not worth a refusal: what is free changes, and there may be swap."""
_FLAGS = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_LINE = 64  # bytes: a cache line, and the widest vector of a CPU


class _Loan(weakref.ref[Any]):
    """Watches a lent array, and keeps its slot until then."""

    __slots__ = ("slot",)
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # an array has none
    slot: Slot


class _Home:
    """Where the slots of a ring come back to.

    Arrays end in any thread, in the middle of anything. All that happens then is C code: a signal
    handler can run in a Python function, and Python drops what is raised while an object ends, so
    that a Ctrl-C in it would be lost. Hence two weak references, of which one brings the slot
    home and the other forgets them both; the oldest free slot makes place for one too many.
    """

    def __init__(self, keep: int) -> None:
        self.free: deque[Slot | _Loan] = deque(maxlen=keep)
        self._lent: dict[_Loan, _Loan] = {}

    def watch(self, array: NDArray[Any], slot: Slot) -> None:
        """Let `slot` come home when `array` ends."""
        loan = _Loan(array, self.free.append)
        loan.slot = slot
        self._lent[_Loan(array, self._lent.pop)] = loan


class Slot:
    """The memory of one batch of one field: `rows` (batch, ...) is written, then lent."""

    __slots__ = ("__weakref__", "_home", "rows")

    def __init__(self, rows: NDArray[Any], home: _Home) -> None:
        self.rows = rows
        self._home = home

    def lend(self, count: int) -> torch.Tensor:
        """Return the first `count` rows as a tensor; the slot goes home when nobody holds them.

        What is watched is the temporary array that the tensor's storage keeps alive: it lives as
        long as any alias, also one by detach(), numpy() or a slice, while a weak reference to the
        tensor itself would fire as soon as only such aliases are left.
        """
        array = self.rows[:count]
        self._home.watch(array, self)
        return torch.from_numpy(array)

    def go_home(self) -> None:
        """Make the slot free; where enough others are, the oldest lets its memory go."""
        self._home.free.append(self)


class Ring:
    """Slots of one shape: as many as are in use at once, allocated when first needed.

    A slot's first use pays its page faults, in the thread that writes it.

    Args:
        shape: of a batch, batch first.
        dtype: of its elements.
        keep: how many free slots stay; what the caller held beyond that is freed on its return.
        pinned: page-locked memory, for copies to a CUDA device.
        shared: where the memory is to come from, which then is `pinned` or not by itself.

    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        keep: int,
        pinned: bool = False,
        shared: SharedMemory | None = None,
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self.keep = keep
        self._pinned = pinned
        self._shared = shared
        self._pid = os.getpid()
        self._home = _Home(keep)
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()

    def __len__(self) -> int:
        """Return how many slots there are, free or not."""
        return len(self._slots)

    @property
    def batch_size(self) -> int:
        """Rows of a slot."""
        return self._shape[0]

    @property
    def batch_bytes(self) -> int:
        """Bytes of one slot."""
        return math.prod(self._shape) * self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all slots together."""
        return len(self) * self.batch_bytes

    def take(self) -> Slot:
        """Return a slot that nobody holds, a new one if need be."""
        if self._shared is not None and self._pid != os.getpid():
            # In a forked child: what is shared is its parent's to write.
            self._pid, self._home, self._slots = os.getpid(), _Home(self.keep), weakref.WeakSet()
        try:
            back = self._home.free.pop()
        except IndexError:
            slot = Slot(self._allocate(), self._home)
            self._slots.add(slot)
            return slot
        return back if isinstance(back, Slot) else back.slot

    def _allocate(self) -> NDArray[Any]:
        if self._shared is not None:
            piece = self._shared.allocate(self.batch_bytes)
            return piece.view(self._dtype).reshape(self._shape)
        if not self._pinned:
            return _aligned(self.batch_bytes).view(self._dtype).reshape(self._shape)
        memory = torch.empty(self.batch_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        pinned: NDArray[Any] = memory.view(self._dtype).reshape(self._shape)
        return pinned


def _aligned(size: int) -> NDArray[np.uint8]:
    """Return uint8 (size,) that begins with a cache line.

    numpy's own large arrays begin 16 bytes behind a page, and take whole images 10 % more slowly.
    """
    memory = np.empty(size + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return memory[begin : begin + size]


class _Piece(weakref.ref[Any]):
    """Watches memory that was given out."""

    __slots__ = ("begin", "size")
    __eq__ = object.__eq__
    __hash__ = object.__hash__
    begin: int
    size: int


class SharedMemory:
    """Memory that worker processes see as well: one sparse file without a name, mapped whole.

    Anonymous, by descriptor: /dev/shm has 64 MB in many containers, and is missing in some. The
    file is as large as the machine's memory and takes what is written to. Pieces are given out,
    and are free again when no array of theirs is left; then their pages go back to the system.
    After a fork the child's memory begins anew. For one thread.

    Args:
        device: a CUDA device that copies from it: pieces are page-locked, once each.

    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._pid = -1
        self._top = 0

    def fileno(self) -> int:
        """Return the descriptor."""
        self._begin()
        return self._file.fileno()

    def address(self, array: NDArray[Any]) -> int:
        """Return where in the file an array of a piece begins."""
        return _address(array) - self._address

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """Return uint8 (size,), zeros, at the beginning of a page."""
        self._begin()
        self._reclaim()
        array_size, size = size, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._free.get(size):
            begin = self._free[size].pop()
        else:
            begin, self._top = self._top, self._top + size
            if self._top > len(self._map):
                raise MemoryError("all memory of this machine is batches that somebody holds")
        array = np.frombuffer(self._map, np.uint8, array_size, begin)
        if self._device is not None:
            _lock_pages(array, self._device)
        piece = _Piece(array, self._gone.append)
        piece.begin, piece.size = begin, size
        self._given[begin] = piece
        return array

    def _begin(self) -> None:
        if self._pid == os.getpid():
            return
        self._file = _open_unnamed()
        self._map = _map_sparse(self._file.fileno())
        self._address = _address(np.frombuffer(self._map, np.uint8, 1))
        self._top = 0
        self._free: dict[int, list[int]] = {}
        self._given: dict[int, _Piece] = {}
        # What ends, ends in any thread, in the middle of anything: only C code may run then.
        self._gone: deque[_Piece] = deque()
        self._pid = os.getpid()

    def _reclaim(self) -> None:
        while self._gone:
            piece = self._gone.popleft()
            del self._given[piece.begin]
            if self._device is not None:
                _unlock_pages(self._address + piece.begin, self._device)
            if hasattr(mmap, "MADV_REMOVE"):
                with suppress(OSError):  # a file system that has no holes keeps the pages
                    self._map.madvise(mmap.MADV_REMOVE, piece.begin, piece.size)
            self._free.setdefault(piece.size, []).append(piece.begin)


def _address(array: NDArray[Any]) -> int:
    at: int = array.__array_interface__["data"][0]
    return at


def _open_unnamed() -> IO[bytes]:
    """Open a file that lies in memory; a deleted one in the temporary folder where none can."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return open(os.memfd_create("h5feed-batches"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _map_sparse(fd: int) -> mmap.mmap:
    """Map a file as large as the machine's memory, or as large as the limits of this process."""
    size = -(-max(total_memory() or 0, _ALWAYS) // mmap.PAGESIZE) * mmap.PAGESIZE
    while True:
        try:
            os.ftruncate(fd, size)
            return mmap.mmap(fd, size)
        except (OSError, ValueError, OverflowError):
            if size <= _ALWAYS // 16:
                raise
            size = size // 2 // mmap.PAGESIZE * mmap.PAGESIZE


def _lock_pages(memory: NDArray[np.uint8], device: torch.device) -> None:
    """Page-lock memory for copies; where the system locks no more, copies are slower."""
    with torch.cuda.device(device):
        status = int(_cuda().cudaHostRegister(memory.ctypes.data, len(memory), _FLAGS))
    if status != 0:
        _clear_last_error(device)


def _unlock_pages(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        status = int(_cuda().cudaHostUnregister(address))
    if status != 0:
        _clear_last_error(device)


def check_room(rings: Sequence[Ring], batches: int) -> None:
    """Raise UsageError where so many batches in memory are more than what is free has room for.

    Sizes are what a file says, and memory is only taken as it is written: this ends in a sentence
    what would end in a killed process, or in one that pushes all others out of memory.
    """
    need = batches * sum(ring.batch_bytes for ring in rings)
    free = available_memory()
    free = total_memory() if free is None else free
    if free is not None and need > max(_SHARE * free, _ALWAYS):
        raise UsageError(
            f"batch_size={rings[0].batch_size}: {batches} batches in memory, as prefetch has it, "
            f"take {need / 1e9:,.1f} GB, and of the {free / 1e9:,.1f} GB that are free here they "
            f"may take {_SHARE:.0%}; give a smaller batch_size or prefetch, or crop the images in "
            "augment"
        )


class PageLocked:
    """`size` bytes of page-locked memory, seen by the CPU and, under the same address, by a device.

    Registered rather than allocated by torch, whose pinned blocks have sizes that are powers of
    two: of a 130 GB set half the memory would be lost.

    Raises UsageError where the system does not lock so much.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        try:
            self.bytes = np.frombuffer(_allocate(size), np.uint8)
        except OSError as ex:
            raise _refuse(size, str(ex.strerror)) from ex
        """uint8 (size,)."""
        self._device = device
        address = self.bytes.ctypes.data
        with torch.cuda.device(device):
            status = int(_cuda().cudaHostRegister(address, size, _FLAGS))
        if status != 0:
            _clear_last_error(device)
            raise _refuse(size, f"CUDA error {status}")
        release = weakref.finalize(self, _unregister, self.bytes, device)
        release.atexit = False  # the process's end frees it

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What torch.as_tensor reads. With unified addressing the device's address is the host's.

        https://docs.nvidia.com/cuda/cuda-c-programming-guide: "Unified Virtual Address Space".
        """
        return {
            "shape": self.bytes.shape,
            "typestr": "|u1",
            "data": (self.bytes.ctypes.data, False),
            "version": 3,
        }

    def on_device(self) -> torch.Tensor:
        """Return the bytes as a CUDA tensor, which kernels read over the bus; it keeps them."""
        with torch.cuda.device(self._device):
            return torch.as_tensor(self, device=self._device)


def _refuse(size: int, reason: str) -> UsageError:
    return UsageError(
        f'residency="pinned": {size / 1e9:.1f} GB of memory could not be page-locked ({reason}); '
        'use residency="stream"'
    )


def _clear_last_error(device: torch.device) -> None:
    """Take CUDA's last error, which the next kernel of anybody would else report as its own.

    torch.cuda.cudart() has no cudaGetLastError; torch calls it after each kernel that it starts.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def _allocate(size: int) -> mmap.mmap:
    """Return memory of the process's own, in large pages where the system has them."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _unregister(memory: Any, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a kernel may still be reading
    _cuda().cudaHostUnregister(memory.ctypes.data)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
