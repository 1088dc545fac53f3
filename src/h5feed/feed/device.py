"""Where batches go: nowhere further, or to a CUDA device; and images that lie there.

All knowledge of streams and events is behind `DeviceTransfer`: the loader reads the same for both.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, get_args

import torch

from h5feed.augment.cpu import readable
from h5feed.errors import UsageError
from h5feed.feed.files import PackedFiles
from h5feed.feed.memory import PageLocked, Slot
from h5feed.system import available_memory

__all__ = [
    "Copies",
    "CudaTransfer",
    "DeviceTransfer",
    "HostTransfer",
    "Residency",
    "Resident",
    "choose_residency",
    "choose_resident",
    "open_transfer",
    "reside",
]


Ticket = Any
"""What `close` returned for a batch; `receive` takes it."""

Residency = Literal["stream", "device", "pinned", "auto"]

_OF_DEVICE = 0.25  # of its free memory: the model and its activations come later
_OF_HOST = 0.5  # of the memory that is free: page-locked pages can't be given to anyone else

_PIECE = 64 << 20  # bytes copied at a time: what is in flight beside the set itself
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

_LOCK = threading.Lock()
_SHARED: weakref.WeakValueDictionary[tuple[str, str, bool], Resident] = (
    weakref.WeakValueDictionary()
)


class Event(Protocol):
    """Something that comes to pass on a device."""

    def query(self) -> bool:
        """Whether it has."""
        ...


class DeviceTransfer(Protocol):
    """The way of a batch from its slots to the tensors that the consumer gets.

    A loader thread does `with transfer.stream(): send(...)…; close(...)`; the consumer's thread
    does `receive`. None of them waits for a device.
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


class HostTransfer:
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


class CudaTransfer:
    """Batches are copied from pinned slots on a stream of their own, overlapping compute.

    Outputs belong to the caching allocator; `record_stream` tells it that the consumer's stream
    uses what the transfer's stream allocated. A slot comes back by its copy's event.
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
        """Return the context of the transfer's own stream."""
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


def open_transfer(device: str | torch.device) -> DeviceTransfer:
    """Return the transfer to `device`, where "gpu" is "cuda"; UsageError for any other kind."""
    try:
        wanted = torch.device("cuda" if device == "gpu" else device)
    except RuntimeError:  # torch lists all the names it knows
        wanted = torch.device("meta")
    if wanted.type == "cpu":
        return HostTransfer()
    if wanted.type != "cuda":
        raise UsageError(f"device={str(device)!r} is not one H5Loader sends to: cpu or cuda")
    if not torch.cuda.is_available():
        raise UsageError(f"device={str(device)!r}, but this torch sees no CUDA device")
    return CudaTransfer(wanted)


def choose_residency(
    asked: Residency,
    files: PackedFiles,
    transfer: DeviceTransfer,
    *,
    augment_on: str,
    free_host: Callable[[], int | None] = available_memory,
) -> tuple[Residency, str]:
    """Return "stream", "device" or "pinned", and why.

    Raises UsageError for any other value, and for one that these files or `augment_on` rule out.
    """
    if asked not in get_args(Residency):
        raise UsageError(f"residency={asked!r} is none of {', '.join(get_args(Residency))}")
    if asked == "stream":
        return asked, "as asked"
    obstacle = _obstacle(files, augment_on)
    if asked != "auto":
        if obstacle is not None:
            raise UsageError(f'residency="{asked}": {obstacle[0]}; {obstacle[1]}')
        return asked, "as asked"
    if obstacle is not None:
        return "stream", obstacle[0]
    if transfer.device.type == "cpu":
        return "stream", "batches stay on the CPU"
    return _by_size(files, transfer, free_host() or 0)


def _obstacle(files: PackedFiles, augment_on: str) -> tuple[str, str] | None:
    """Return why a device cannot gather these images, and what to do; None if it can."""
    spec = files.specs["images"]
    if not spec.is_fixed:
        return (
            f"a device gathers images of one size in bytes, and store={spec.encoding}, "
            f"fit={spec.fit} has many",
            'pack with --store raw or yuv420 and a --fit other than keep, or use residency="stream"'
            + (" (DaliLoader decodes JPEG on a GPU)" if spec.is_encoded else ""),
        )
    if augment_on == "cpu":
        return (
            'augment_on="cpu" needs the images in the loader\'s threads',
            'leave augment_on out, or use residency="stream"',
        )
    return None


def _by_size(files: PackedFiles, transfer: DeviceTransfer, host: int) -> tuple[Residency, str]:
    size = len(files) * files.specs["images"].item_bytes
    free = transfer.free_bytes()
    if size <= _OF_DEVICE * free:
        return "device", f"{_gb(size)} of {_gb(free)} that are free on {transfer.device}"
    copies = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each process keeps its own
    wanted = size * copies
    each = f" in each of {copies} processes" if copies > 1 else ""
    if wanted <= _OF_HOST * host:
        return "pinned", f"{_gb(size)}{each}: too much for {transfer.device}, but not for the host"
    return "stream", f"{_gb(size)}{each}: too much for {transfer.device} and for the host's memory"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


class Resident:
    """The images of all files, copied once; UsageError where there is no room for them.

    Args:
        files: what to copy; its images have one size in bytes.
        transfer: to the device that gathers.
        pinned: keep them in page-locked memory, from which the device reads; else on the device.

    """

    def __init__(self, files: PackedFiles, transfer: DeviceTransfer, *, pinned: bool) -> None:
        spec = files.specs["images"]
        self._shape = spec.item_shape(spec.height, spec.width)
        self.nbytes = len(files) * spec.item_bytes
        """Bytes taken."""
        written, read = transfer.reserve(self.nbytes, pinned=pinned)
        _copy(files, written)
        # In wide words: the device moves them with a fraction of the instructions, and over the
        # bus in requests of full size.
        word = next(w for w in _WORDS if spec.item_bytes % w.itemsize == 0)
        self._rows = read.view(word).view(len(files), spec.item_bytes // word.itemsize)

    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        """Return items `indices`, int64 (B,) on the device, as stored: uint8 (B, H, W, 3) or NV12.

        The present stream does it; the host waits for nothing.
        """
        made = self._rows.index_select(0, indices)
        if self._rows.is_cuda:  # its memory must outlive what this stream reads of it
            self._rows.record_stream(torch.cuda.current_stream(self._rows.device))
        return made.view(torch.uint8).view(len(indices), *self._shape)


def reside(files: PackedFiles, transfer: DeviceTransfer, *, pinned: bool) -> Resident:
    """Return the images of `pixels` for `transfer`'s device: those that another loader has, if any.

    A loader for training and one for scoring over parts of one file share them.
    """
    key = (files.fingerprint, str(transfer.device), pinned)
    with _LOCK:
        found = _SHARED.get(key)
        if found is None:
            found = _SHARED[key] = Resident(files, transfer, pinned=pinned)
        return found


def choose_resident(
    asked: Residency, files: PackedFiles, transfer: DeviceTransfer, *, augment_on: str
) -> tuple[Residency, str, Resident | None]:
    """Return where the images lie, why, and what gathers them where a device does.

    As `choose_residency` says; but "auto" falls back to streaming if there turns out to be no room,
    or if the system refuses to lock the pages.
    """
    mode, why = choose_residency(asked, files, transfer, augment_on=augment_on)
    if mode == "stream":
        return mode, why, None
    try:
        return mode, why, reside(files, transfer, pinned=mode == "pinned")
    except UsageError as ex:
        if asked != "auto":
            raise
        return "stream", str(ex).partition(";")[0], None


def _copy(files: PackedFiles, written: torch.Tensor) -> None:
    """Copy the images of all files, in the items' order, into uint8 (bytes,)."""
    size = files.specs["images"].item_bytes
    rows, step, at = written.view(-1, size), max(1, _PIECE // size), 0
    for file, items in files.wholes("images"):
        source = readable(file.reshape(-1)).view(-1, size)
        for begin in range(0, len(source), step):
            piece = source[begin : begin + step]
            if files.in_order:
                rows[at : at + len(piece)].copy_(piece)
            else:
                where = torch.from_numpy(items[begin : begin + step]).to(rows.device)
                rows.index_copy_(0, where, piece.to(rows.device))
            at += len(piece)
