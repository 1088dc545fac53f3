"""The device's pass over a batch, as kernels that torch.compile makes of it."""

import threading
import warnings
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch

from h5feed.augment.on_device import run_batch
from h5feed.augment.plan import Plan

__all__ = ["CompiledBatch"]


class CompiledBatch:
    """`run_batch`, compiled at its first call; as it is, with one warning, where that fails.

    A batch of another length compiles once more, then for any length. Thread-safe.
    """

    def __init__(self, backend: str = "inductor") -> None:
        # Code of its own: dynamo counts compilations by code, and after eight it gives up.
        own = FunctionType(run_batch.__code__.replace(), run_batch.__globals__, "run_batch")
        self._run: Any = torch.compile(own, fullgraph=True, backend=backend)
        self._lock = threading.Lock()  # or each of several threads would compile
        self.error: str | None = None
        """Why it runs uncompiled, if it does."""

    def __call__(
        self,
        plan: Plan,
        packed: torch.Tensor,
        batch: torch.Tensor,
        sizes: Sequence[tuple[int, int]],
    ) -> torch.Tensor:
        """Return what run_batch returns."""
        with self._lock:
            if self.error is None:
                try:
                    made: torch.Tensor = self._run(plan, packed, batch, sizes)
                    return made
                except Exception as ex:
                    self._give_up(ex)
        return run_batch(plan, packed, batch, sizes)

    def _give_up(self, ex: Exception) -> None:
        reason = " ".join(str(ex).split("\n")[:2])  # dynamo's first line may only say who raised
        self.error = f"{type(ex).__name__}: {reason}"
        warnings.warn(
            f"torch.compile cannot make kernels of these ops ({self.error}); they run uncompiled",
            stacklevel=2,
        )
