"""The options of bench-h5."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from h5feed.bench.report import SMOKE_BATCHES
from h5feed.bench.rounds import LONGEST_WINDOW, Schedule
from h5feed.errors import UsageError
from h5feed.feed.files import PackedFiles

__all__ = ["CompareOptions", "stored_side"]

_USUAL_BATCH = 256
_SMALLEST_BATCH = 64
_USUAL_CROP, _SMALLEST_CROP = 224, 8


def stored_side(pixels: PackedFiles) -> int | None:
    """Return the short side that images are stored at, in pixels; None: each its own."""
    spec = pixels.specs["images"]
    return min(spec.height, spec.width) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What is compared, and for how long."""

    images: Path | None = None
    """The folder that FILE was packed from: measured as it is used today."""
    batch_size: int | None = None
    """Images per batch; otherwise 256, or down to 64 for a small set and with --quick.
    Never more than FILE holds."""
    crop: int | None = None
    """Side of the random crop that every loader makes; otherwise 224, or the stored images'
    short side where that is less."""
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
        least_of = {
            "batch_size": 1,
            "crop": _SMALLEST_CROP,
            "workers": 1,
            "repeats": 1,
            "seconds": 0.05,
        }
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and not value >= least:  # NaN is not
                raise UsageError(f"{name}={value} is too small: give {least} or more")
        if self.seconds > LONGEST_WINDOW:
            raise UsageError(
                f"seconds={self.seconds} is too large: give {LONGEST_WINDOW:g} or less"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device=cuda, but torch sees no GPU here: give cpu")

    @property
    def batch(self) -> int:
        """Images per batch where nothing is known of the set."""
        return self.batch_size or (_SMALLEST_BATCH if self.quick else _USUAL_BATCH)

    @property
    def side(self) -> int:
        """Side of the crop where nothing is known of the file."""
        return self.crop or _USUAL_CROP

    def for_file(self, pixels: PackedFiles) -> CompareOptions:
        """Return these options with the batch size and the crop that a file's images ask for."""
        side = min(self.side, stored_side(pixels) or self.side)
        crop = self.crop or max(side, _SMALLEST_CROP)
        return replace(self.for_set_of(len(pixels)), crop=crop)

    def for_set_of(self, count: int) -> CompareOptions:
        """Return these options with a batch size that `count` images fill several times, if any."""
        size = self.batch
        while self.batch_size is None and _SMALLEST_BATCH < size > count // SMOKE_BATCHES:
            size //= 2
        return replace(self, batch_size=min(size, count))

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
