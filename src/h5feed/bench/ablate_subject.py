"""The trainer as a subject: its own step on its own loader, one configuration per process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h5feed.train.config import read_config
from h5feed.train.trial import endless, open_trial

__all__ = ["TrainerSteps"]

_AVERAGED = 5
"""The last fifth of the counted steps makes the final loss."""


class TrainerSteps:
    """Trains from `params["config"]` (a config.json), and yields each batch once it was used.

    `params["final_steps"]`: after how many steps the loss is looked at, for all rows alike; 0
    for never.
    Built when the first batch is asked for, so that rows compile one after another and share
    what the compiler keeps on the disk.
    """

    dtype = "uint8"
    layout = "NCHW"
    note = ""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._config = read_config(Path(params["config"]))
        self._final_steps: int = params["final_steps"]
        self._stack = ExitStack()
        self._trial: Any = None
        self._losses: list[Tensor] = []
        self._steps = 0
        self.files = [str(self._config.train)]

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of one epoch, each after the step made with it."""
        if self._trial is None:
            self._trial = self._stack.enter_context(open_trial(self._config))
            self._loader = self._trial.data.train_loader(self._trial.data.size)
            self._epoch = 0
        else:
            self._epoch += 1
            self._loader.set_epoch(self._epoch)
        try:
            for batch in self._loader:
                self._train(batch)
                yield batch
        finally:
            self._give_back()

    def _train(self, batch: Any) -> None:
        loss, _ = self._trial.step(iter((batch,)))
        self._steps += 1
        if self._steps <= self._final_steps:
            self._losses.append(loss)
        if self._steps % self._config.debug.log_every == 0:
            loss.item()

    def _give_back(self) -> None:
        """Leave the GPU's memory to the next row; weights and optimizer state stay."""
        if self._trial.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._trial is not None and self._trial.world.device.type == "cuda":
            torch.cuda.synchronize(self._trial.world.device)

    def extra(self) -> dict[str, Any]:
        """Return the final loss, making the steps that are missing to it, and the GPU's peak."""
        batches = endless(self._loader)
        while self._steps < self._final_steps:
            self._train(next(batches))
        batches.close()
        last = self._losses[-max(1, self._final_steps // _AVERAGED) :]
        device = self._trial.world.device
        cuda = device.type == "cuda"
        return {
            "final_loss": torch.stack(last).mean().item() if last else None,
            "device_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        }

    def close(self) -> None:
        """Let the trainer go."""
        self._stack.close()
