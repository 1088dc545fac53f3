"""How much of a GPU's memory one loader among several takes, while all of them are open."""

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["GpuShare"]


@dataclass(slots=True)
class GpuShare:
    """What a loader holds; nothing where there is no GPU.

    torch knows what its own allocator gave out. What DALI and others allocate is what the driver
    misses beyond that.
    """

    device: torch.device
    cuda: Any = torch.cuda
    """Or what stands in for it in a test."""
    held: int = 0
    """Bytes of torch's that were taken when it was opened, and stay: images on the device."""
    outside: int = 0
    """Bytes that were taken beside torch's."""
    peak: int = 0
    """Most bytes of torch's while it ran, less what the others hold; with the model's."""

    @property
    def total(self) -> int | None:
        """Bytes in all; None without a GPU."""
        return None if self.device.type == "cpu" else self.peak + self.outside

    def opened(self, before: tuple[int, int]) -> None:
        """Note what opening has taken, `before` being `now()` of that time."""
        self.held = self.now()[0] - before[0]

    def tried(self, before: tuple[int, int]) -> None:
        """Note what opening it and a first run have taken beside torch's memory."""
        self.outside = max(0, self.now()[1] - before[1])

    def begin(self) -> None:
        """Begin a window."""
        if self.device.type != "cpu":
            self.cuda.reset_peak_memory_stats(self.device)

    def end(self, others: int) -> None:
        """End a window, in which the other loaders held `others` bytes of torch's."""
        if self.device.type != "cpu":
            most = self.cuda.max_memory_allocated(self.device)
            self.peak = max(self.peak, most - others)

    def now(self) -> tuple[int, int]:
        """Return the bytes that torch has given out, and those that it knows nothing of."""
        if self.device.type == "cpu":
            return 0, 0
        free, total = self.cuda.mem_get_info(self.device)
        outside = total - free - self.cuda.memory_reserved(self.device)
        return self.cuda.memory_allocated(self.device), outside
