"""A whole field of images where the device gathers its own batches: no bytes pass the CPU."""

from __future__ import annotations

import threading
import weakref

import torch

from h5feed.augment.cpu import readable
from h5feed.errors import UsageError
from h5feed.feed.device import Lane
from h5feed.feed.residency import Residency, choose_residency
from h5feed.feed.source import Pixels

__all__ = ["Resident", "choose_resident", "reside"]

_PIECE = 64 << 20  # bytes copied at a time: what is in flight beside the set itself
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

_LOCK = threading.Lock()
_SHARED: weakref.WeakValueDictionary[tuple[str, str, bool], Resident] = (
    weakref.WeakValueDictionary()
)


class Resident:
    """The images of all files, copied once; UsageError where there is no room for them.

    Args:
        pixels: what to copy; its images have one size in bytes.
        lane: to the device that gathers.
        pinned: keep them in page-locked memory, from which the device reads; else on the device.

    """

    def __init__(self, pixels: Pixels, lane: Lane, *, pinned: bool) -> None:
        spec = pixels.specs["images"]
        self._shape = spec.item_shape(spec.height, spec.width)
        self.nbytes = len(pixels) * spec.item_bytes
        """Bytes taken."""
        written, read = lane.reserve(self.nbytes, pinned=pinned)
        _copy(pixels, written)
        # In wide words: the device moves them with a fraction of the instructions, and over the
        # bus in requests of full size.
        word = next(w for w in _WORDS if spec.item_bytes % w.itemsize == 0)
        self._rows = read.view(word).view(len(pixels), spec.item_bytes // word.itemsize)

    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        """Return items `indices`, int64 (B,) on the device, as stored: uint8 (B, H, W, 3) or NV12.

        The present stream does it; the host waits for nothing.
        """
        made = self._rows.index_select(0, indices)
        if self._rows.is_cuda:  # its memory must outlive what this stream reads of it
            self._rows.record_stream(torch.cuda.current_stream(self._rows.device))
        return made.view(torch.uint8).view(len(indices), *self._shape)


def reside(pixels: Pixels, lane: Lane, *, pinned: bool) -> Resident:
    """Return the images of `pixels` for `lane`'s device: those that another loader has, if any.

    A loader for training and one for scoring over parts of one file share them.
    """
    key = (pixels.fingerprint, str(lane.device), pinned)
    with _LOCK:
        found = _SHARED.get(key)
        if found is None:
            found = _SHARED[key] = Resident(pixels, lane, pinned=pinned)
        return found


def choose_resident(
    asked: Residency, pixels: Pixels, lane: Lane, *, augment_on: str
) -> tuple[Residency, str, Resident | None]:
    """Return where the images lie, why, and what gathers them where a device does.

    What `choose_residency` says; but "auto" streams what there turns out to be no room for, or
    what the system does not lock.
    """
    mode, why = choose_residency(asked, pixels, lane, augment_on=augment_on)
    if mode == "stream":
        return mode, why, None
    try:
        return mode, why, reside(pixels, lane, pinned=mode == "pinned")
    except UsageError as ex:
        if asked != "auto":
            raise
        return "stream", str(ex).partition(";")[0], None


def _copy(pixels: Pixels, written: torch.Tensor) -> None:
    """Copy the images of all files, one after another, into uint8 (bytes,)."""
    at = 0
    for file in pixels.wholes("images"):
        source = readable(file.reshape(-1))
        for begin in range(0, len(source), _PIECE):
            piece = source[begin : begin + _PIECE]
            written[at : at + len(piece)].copy_(piece)
            at += len(piece)
