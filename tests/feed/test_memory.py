"""Slots that come back, and page-locked memory, with a stand-in for the CUDA runtime."""

import gc
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from h5feed import UsageError
from h5feed.feed.memory import PageLocked, Ring


def ring(keep=2, dtype=np.uint8):
    return Ring((4, 3, 2), np.dtype(dtype), keep=keep)


def address(slot):
    return slot.rows.ctypes.data


def test_a_slot_is_used_again_when_its_tensor_is_gone():
    slots = ring()
    slot = slots.take()
    tensor = slot.lend(4)
    assert tensor.shape == (4, 3, 2)
    assert tensor.data_ptr() == address(slot)
    other = slots.take()
    assert other is not slot
    del tensor
    assert slots.take() is slot
    assert len(slots) == 2


ALIASES = {
    "detach": lambda t: t.detach(),
    "numpy": lambda t: t.numpy(),
    "view": lambda t: t.view(-1),
    "slice": lambda t: t[1:2],
    "permute": lambda t: t.permute(2, 0, 1),
    "item of numpy": lambda t: t.numpy()[0],
    "data": lambda t: t.data,
    "storage": lambda t: t.untyped_storage(),
    "memoryview": lambda t: memoryview(t.numpy()),
    "other type": lambda t: t.view(torch.int8),
    "dlpack": lambda t: torch.from_dlpack(t),
    "in a list": lambda t: [t],
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES.keys())
def test_a_slot_is_not_used_again_while_an_alias_lives(alias):
    slots = ring()
    slot = slots.take()
    tensor = slot.lend(3)
    held = alias(tensor)
    del tensor
    gc.collect()
    assert slots.take() is not slot
    del held
    gc.collect()
    assert slots.take() is slot


def test_a_lent_slot_survives_garbage_collection():
    """Nothing but the tensor holds it, and cycles among its parts would be collected."""
    slots = ring()
    slot = slots.take()
    where, tensor = address(slot), slot.lend(4)
    del slot
    gc.collect()
    assert len(slots) == 1
    del tensor
    assert address(slots.take()) == where


def test_a_slot_returns_from_another_thread_and_after_its_ring():
    slots = ring()
    tensor = slots.take().lend(4)
    tensor[:] = 7
    del slots
    gc.collect()
    assert (tensor == 7).all()


def test_what_was_held_beyond_need_is_freed():
    slots = ring(keep=2)
    held = [slots.take().lend(4) for _ in range(10)]
    assert len(slots) == 10
    assert slots.nbytes == 10 * 24
    held.clear()
    assert len(slots) == 2


def test_slots_begin_with_a_cache_line():
    """Whole images are copied there a tenth faster than to where numpy's arrays begin."""
    slots = ring(keep=20)
    assert {address(slots.take()) % 64 for _ in range(20)} == {0}


def test_slots_have_the_type_asked_for():
    assert ring(dtype=np.float32).take().lend(1).dtype == torch.float32


def test_go_home_frees_a_slot_that_was_never_lent():
    slots = ring()
    slot = slots.take()
    slot.go_home()
    assert slots.take() is slot


def test_no_python_runs_when_a_tensor_ends():
    """A Ctrl-C that comes in a Python function which runs because an object ends is lost."""
    slots = ring(keep=1)
    tensors = [slots.take().lend(4) for _ in range(3)]
    called = []
    sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code.co_name)))
    tensors.pop()
    sys.setprofile(None)
    assert [name for event, name in called if event == "call"] == []
    back = slots.take()
    assert len(slots) == 3
    assert back.rows.shape == (4, 3, 2)


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
