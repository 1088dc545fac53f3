"""Where batches go once their bytes are in memory: nowhere further, or to a CUDA device.

All knowledge of streams and events is behind `Lane`, so that the loader reads the same for both.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from h5feed.errors import UsageError
from h5feed.feed.pagelock import PageLocked
from h5feed.feed.slots import Slot

__all__ = ["Copies", "CudaLane", "HostLane", "Lane", "open_lane"]


class Event(Protocol):
    """Something that comes to pass on a device."""

    def query(self) -> bool:
        """Whether it has."""
        ...


Ticket = Any
"""What `close` returned for a batch; `receive` takes it."""


class Lane(Protocol):
    """The way of a batch from its slots to the tensors that the consumer gets.

    A loader thread does `with lane.stream(): send(...)…; close(...)`; the consumer's thread does
    `receive`. None of them waits for a device.
    """

    device: torch.device
    pinned: bool
    """Whether slots are to be page-locked."""

    def stream(self) -> AbstractContextManager[Any]:
        """Return the context in which a batch is sent and changed on the device."""
        ...

    def send(self, slot: Slot, count: int) -> torch.Tensor:
        """Return the first `count` rows of a slot, on the device."""
        ...

    def close(self, slots: Sequence[Slot]) -> Ticket:
        """End the sending of one batch; its slots become free once they have been read."""
        ...

    def receive(self, ticket: Ticket, tensors: Sequence[torch.Tensor]) -> None:
        """Make the consumer's stream wait for the batch, and its memory wait for that stream."""
        ...

    def reclaim(self) -> None:
        """Free the slots that have been read by now."""
        ...

    def reserve(self, size: int, *, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uint8 (size,) to write to, and the same memory as the device reads it.

        On the device, or page-locked on the host. Raises UsageError where there is no room.
        """
        ...

    def free_bytes(self) -> int:
        """Return the bytes of the device's memory that nobody uses."""
        ...


class HostLane:
    """Batches stay where they were written: the slot itself is lent to the consumer."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.pinned = False

    def stream(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def send(self, slot: Slot, count: int) -> torch.Tensor:
        """Return the rows of the slot itself; it is free again when nobody holds them."""
        return slot.lend(count)

    def close(self, slots: Sequence[Slot]) -> Ticket:
        """Do nothing: lent slots come back by themselves."""
        return None

    def receive(self, ticket: Ticket, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: the batch is there."""

    def reclaim(self) -> None:
        """Do nothing."""

    def reserve(self, size: int, *, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return plain memory twice."""
        memory = torch.empty(size, dtype=torch.uint8)
        return memory, memory

    def free_bytes(self) -> int:
        """Return 0: the host's memory is not a device's."""
        return 0


class Copies:
    """Slots that a device is still reading, and the event after which each batch's are free."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Event, Sequence[Slot]]] = deque()
        self._lock = threading.Lock()

    def add(self, event: Event, slots: Sequence[Slot]) -> None:
        """Note that `slots` are free once `event` has passed."""
        self._under_way.append((event, slots))

    def reclaim(self) -> None:
        """Send home what has been read; events pass in the order they were recorded."""
        with self._lock:
            while self._under_way and self._under_way[0][0].query():
                for slot in self._under_way.popleft()[1]:
                    slot.go_home()


class CudaLane:
    """Batches are copied from pinned slots on a stream of their own, overlapping compute.

    Outputs belong to the caching allocator; `record_stream` tells it that the consumer's stream
    uses what the lane's stream allocated. A slot comes back by its copy's event.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        index = cuda.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self.pinned = True
        self._cuda = cuda
        """torch.cuda, or what stands in for it in a test."""
        self._stream = cuda.Stream(self.device)
        self._copies = Copies()

    def stream(self) -> AbstractContextManager[Any]:
        """Return the context of the lane's own stream."""
        context: AbstractContextManager[Any] = self._cuda.stream(self._stream)
        return context

    def send(self, slot: Slot, count: int) -> torch.Tensor:
        """Start the copy of the rows and return their place on the device."""
        return torch.from_numpy(slot.rows[:count]).to(self.device, non_blocking=True)

    def close(self, slots: Sequence[Slot]) -> Ticket:
        """Record the event at which copies and kernels of the batch are done."""
        event = self._cuda.Event()
        event.record(self._stream)
        self._copies.add(event, slots)
        return event

    def receive(self, ticket: Ticket, tensors: Sequence[torch.Tensor]) -> None:
        """Order the consumer's stream behind the batch; the host waits for nothing."""
        consumer = self._cuda.current_stream(self.device)
        consumer.wait_event(ticket)
        for tensor in tensors:
            if tensor.is_cuda:  # what a target_transform made may have stayed
                tensor.record_stream(consumer)

    def reclaim(self) -> None:
        """Free the slots whose copies are done."""
        self._copies.reclaim()

    def reserve(self, size: int, *, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory of the device, or memory of the host that it reads by itself."""
        if pinned:
            locked = PageLocked(size, self.device)
            return torch.from_numpy(locked.bytes), locked.on_device()
        try:
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as ex:
            raise UsageError(
                f'residency="device": the images take {size / 1e9:.1f} GB, and {self.device} has '
                f'{self.free_bytes() / 1e9:.1f} GB free; use residency="pinned" or "stream"'
            ) from ex
        return memory, memory

    def free_bytes(self) -> int:
        """Return what the driver has free and what torch keeps unused."""
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused


def open_lane(device: str | torch.device) -> Lane:
    """Return the lane to `device`, where "gpu" is "cuda"; UsageError for any other kind."""
    try:
        wanted = torch.device("cuda" if device == "gpu" else device)
    except RuntimeError:  # torch lists all the names it knows
        wanted = torch.device("meta")
    if wanted.type == "cpu":
        return HostLane()
    if wanted.type != "cuda":
        raise UsageError(f"device={str(device)!r} is not one H5Loader sends to: cpu or cuda")
    if not torch.cuda.is_available():
        raise UsageError(f"device={str(device)!r}, but this torch sees no CUDA device")
    return CudaLane(wanted)
