"""Page-locked memory, with a stand-in for the CUDA runtime."""

import gc
from contextlib import nullcontext

import pytest
import torch

from h5feed import UsageError
from h5feed.feed.pagelock import PageLocked

DEVICE = torch.device("cuda", 1)


class Runtime:
    """What is taken of the CUDA runtime; notes each call."""

    def __init__(self, status=0):
        self.status = status
        self.calls = []

    def cudaHostRegister(self, address, size, flags):
        self.calls.append(("register", address, size, flags))
        return self.status

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: made.calls.append(("wait", device))
    )
    return made


def test_memory_is_registered_once_and_freed_after_the_device_is_done(runtime):
    locked = PageLocked(10_000, DEVICE)
    address = locked.bytes.ctypes.data
    assert runtime.calls == [("register", address, 10_000, 3)]  # portable, mapped
    assert address % 4096 == 0
    locked.bytes[:] = 7
    held = locked.bytes
    del locked
    gc.collect()
    assert runtime.calls[1:] == [("wait", DEVICE), ("unregister", address)]
    assert (held == 7).all()


def test_a_device_sees_the_bytes_under_the_hosts_address(runtime):
    locked = PageLocked(64, DEVICE)
    assert locked.__cuda_array_interface__ == {
        "shape": (64,),
        "typestr": "|u1",
        "data": (locked.bytes.ctypes.data, False),
        "version": 3,
    }


def test_memory_that_cannot_be_locked_is_one_error(runtime, monkeypatch):
    def next_kernel(*size, device):
        runtime.calls.append(("kernel", device))
        raise RuntimeError("CUDA error: out of memory")  # as torch reports the last error

    monkeypatch.setattr(torch, "ones", next_kernel)
    runtime.status = 2
    with pytest.raises(UsageError) as caught:
        PageLocked(1_500_000, DEVICE)
    assert str(caught.value) == (
        'residency="pinned": 0.0 GB of memory could not be page-locked (CUDA error 2); use '
        'residency="stream"'
    )
    gc.collect()
    assert [name for name, *_ in runtime.calls] == ["register", "kernel"]


def test_memory_that_cannot_be_had_is_one_error(runtime):
    with pytest.raises(
        UsageError, match=r"could not be page-locked \(Cannot allocate memory\); use"
    ):
        PageLocked(1 << 60, DEVICE)
    assert runtime.calls == []
