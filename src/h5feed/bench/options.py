"""The options of bench-h5."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from h5feed.bench.report import SMOKE_BATCHES
from h5feed.bench.rounds import Schedule
from h5feed.errors import UsageError

__all__ = ["CompareOptions"]

_USUAL_BATCH = 256
_SMALLEST_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What is compared, and for how long."""

    images: Path | None = None
    """The folder that FILE was packed from: measured as it is used today."""
    batch_size: int | None = None
    """Pictures per batch; otherwise 256, or down to 64 for a small set and with --quick."""
    crop: int = 224
    """Side of the random crop that every loader makes."""
    workers: int | None = None
    """Worker processes or threads of each loader; otherwise one per core, at most 8."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where batches are delivered; auto: a GPU if there is one."""
    seconds: float = 1.5
    """Length of a timed window."""
    repeats: int = 3
    """Windows per loader; they take turns."""
    quick: bool = False
    """A first look in under 20 seconds: two short windows, small batches, no cold runs."""
    no_cold: bool = False
    """Leave out the cold runs, which ask the kernel to drop FILE and DIR from its cache."""
    sweep: bool = False
    """Measure several worker counts and batch sizes (many times as long)."""
    only: tuple[str, ...] = ()
    """Measure only loaders whose name contains one of these."""

    def check(self) -> None:
        """Raise UsageError for a value out of range."""
        least_of = {"batch_size": 1, "crop": 8, "workers": 1, "repeats": 1, "seconds": 0.05}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name}={value} is too small: give {least} or more")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device=cuda, but torch sees no GPU here: give cpu")

    @property
    def batch(self) -> int:
        """Pictures per batch where nothing is known of the set."""
        return self.batch_size or (_SMALLEST_BATCH if self.quick else _USUAL_BATCH)

    def for_set_of(self, pictures: int) -> CompareOptions:
        """Return these options with a batch size that `pictures` fill several times, if any."""
        size = self.batch
        while self.batch_size is None and _SMALLEST_BATCH < size > pictures // SMOKE_BATCHES:
            size //= 2
        return replace(self, batch_size=size)

    @property
    def where(self) -> str:
        """The device that `device` means here."""
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    @property
    def schedule(self) -> Schedule:
        """Times of one comparison."""
        if self.quick:
            return Schedule(seconds=0.2, repeats=2, settle=0.0, verify=0.0)
        cold = 0.0 if self.no_cold else 4.0
        return Schedule(seconds=self.seconds, repeats=self.repeats, cold=cold)
