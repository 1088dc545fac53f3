"""One made-up batch again and again: what training would reach if data cost nothing."""

from collections.abc import Iterator
from typing import Any

import torch

from h5feed.train.step import Batch

__all__ = ["SyntheticLoader", "random_batch"]


class SyntheticLoader:
    """The same random batch, on the device already, as often as an epoch has batches."""

    def __init__(self, batch: Batch, batches: int) -> None:
        self._batch, self._batches = batch, batches
        self._epoch, self._done = 0, 0

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        while self._done < self._batches:
            self._done += 1
            yield self._batch

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, which is like every other."""
        self._epoch, self._done = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches were handed out."""
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after as many."""
        self._epoch, self._done = state["epoch"], state["done"]


def random_batch(
    task: str, num_outputs: int, count: int, size: int, seed: int, device: torch.device
) -> Batch:
    """Return noise that has the types and shapes of a batch of `count` images of `size` px."""
    draws = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=draws)
    images = pixels.to(device).permute(0, 3, 1, 2)
    if task == "regression":
        return images, torch.randn(count, num_outputs, generator=draws).to(device)
    shape = (count, size, size) if task == "segmentation" else (count,)
    return images, torch.randint(0, num_outputs, shape, generator=draws).to(device)
