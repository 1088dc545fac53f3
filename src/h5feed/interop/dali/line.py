"""One built pipeline, on its way from pass to pass."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from h5feed.feed.order import Order
from h5feed.interop.dali.agenda import Agenda, Pass
from h5feed.interop.dali.feed import Feed

__all__ = ["Line"]

_ABANDONED: list[Any] = []
"""Pipelines of the process that this one was forked from: to destroy one here would wait for ever
for its threads, which a fork leaves behind."""


class Line:
    """A pipeline, its feed, and the agenda that both go by. It serves one pass at a time."""

    def __init__(self, feed: Feed, agenda: Agenda, pipeline: Any, device: torch.device) -> None:
        self._feed = feed
        self._agenda = agenda
        self._pipeline = pipeline
        self._device = device
        self._number = -1
        """Of the present pass, as DALI counts them."""
        self._under_way = False
        self._pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            _ABANDONED.append(self._pipeline)

    def begin(self, which: Pass, order: Order) -> None:
        """Begin a pass, in this order: the first batches are in the making."""
        if self._under_way:
            self._leave()
        self._number += 1
        self._agenda.note(self._number, which)
        self._feed.begin(self._number, which, order)
        self._pipeline.reset()
        self._under_way = True
        self._pipeline.schedule_run()

    def receive(self) -> list[torch.Tensor]:
        """Return the outputs of the next batch, in DALI's own memory, and order another one.

        That memory is free again when nobody holds the tensors. Raises RuntimeError where DALI
        could not make it; the line is of no use then.
        """
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
        shared = self._pipeline.share_outputs(cuda_stream=stream)
        tensors = [from_dlpack(batch.as_tensor()) for batch in shared]
        self._pipeline.release_outputs()
        self._pipeline.schedule_run()
        return tensors

    def complete(self) -> None:
        """Note that the pass has given all its batches."""
        self._under_way = False

    def _leave(self) -> None:
        """Take what is in the making out of the pipeline: only an empty one can be reset."""
        self._agenda.leave(self._number)
        while True:
            try:
                self._pipeline.share_outputs()
            except StopIteration:
                return
            self._pipeline.release_outputs()
            self._pipeline.schedule_run()
