"""Host memory that a CUDA device reads by itself: page-locked, under one address for both."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from h5feed.errors import UsageError

__all__ = ["PageLocked"]

_FLAGS = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


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
