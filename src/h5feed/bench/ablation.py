"""What an ablation is asked for, and what it finds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h5feed.bench.rounds import LONGEST_WINDOW
from h5feed.bench.tricks import Published
from h5feed.errors import UsageError
from h5feed.train.config import at_least

__all__ = ["AblateOptions", "Ablation", "Row"]

_BATCHES = 8
"""An epoch of fewer batches measures how epochs start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblateOptions:
    """What is measured, and for how long."""

    images: Path | None = None
    """The folder that TRAIN was packed from: the plain loop reads it file by file."""
    seconds: float = 2.0
    """Length of a timed window; longer where six batches take longer."""
    repeats: int = 3
    """Windows of each row; they take turns."""
    final_steps: int = 30
    """Steps after which the loss is compared: over the last fifth of them."""
    leave_one_out: bool = True
    """Measure all tricks but one, too, for each of them."""
    only: tuple[str, ...] = ()
    """Only tricks whose name contains one of these."""

    def __post_init__(self) -> None:
        at_least(self, 0.05, "seconds")
        at_least(self, 1, "repeats", "final_steps")
        if self.seconds > LONGEST_WINDOW:
            most = f"it must be at most {LONGEST_WINDOW:g}"
            raise UsageError(f"--seconds {self.seconds} is too large: {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration, measured."""

    name: str
    group: str
    """cumulative (each with one trick more), without (all but one), or beside (all and one)."""
    tricks: tuple[str, ...]
    """Those that are on."""
    rates: tuple[float, ...] = ()
    """Images per second of each window."""
    ratio: float | None = None
    """What its trick is worth: to the row before; of "without" rows, of all to this one."""
    epoch_seconds: float | None = None
    memory_bytes: int | None = None
    """Peak of the GPU's allocations; on the CPU of the process and its workers."""
    final_loss: float | None = None
    ceiling: float | None = None
    """Images per second with data that costs nothing."""
    input_bound: float | None = None
    """1 − t_synthetic / t_real; below 0 where the difference drowns in the spread, or where
    something is wrong (see `doubts`)."""
    doubts: tuple[str, ...] = ()
    """What must be explained before the row may be believed."""
    cpu_seconds_per_1000: float | None = None
    published: Published | None = None
    error: str | None = None

    @property
    def rate(self) -> float | None:
        """Median images per second."""
        return statistics.median(self.rates) if self.rates else None

    @property
    def spread(self) -> float | None:
        """Half the distance between the slowest and the fastest window, as part of the median."""
        if len(self.rates) < 2 or not self.rate:
            return None
        return (max(self.rates) - min(self.rates)) / 2 / self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """All rows, and where they were measured."""

    title: str
    rows: tuple[Row, ...]
    images: int
    batch_size: int
    machine: str
    facts: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def is_smoke(self) -> bool:
        """Whether the set is too small for speeds to mean anything."""
        return self.images < _BATCHES * self.batch_size
