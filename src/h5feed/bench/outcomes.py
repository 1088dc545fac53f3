"""What was measured of one subject; nothing but the standard library."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Cold", "Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cold:
    """The first epoch after its files left the page cache."""

    rate: float
    """Pictures per second from the first batch on."""
    read_bytes_per_picture: float | None
    resident_before: float | None
    """Share of its files still in the page cache when it began: 0 is really cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one subject."""

    name: str
    ceiling: bool
    note: str = ""
    dtype: str = ""
    layout: str = ""
    disk_bytes: int = 0
    rates: tuple[float, ...] = ()
    """Pictures per second of each window."""
    first_batch_seconds: float | None = None
    """Median, at the start of an epoch, workers running."""
    startup_seconds: float | None = None
    """To the very first batch: workers started, code compiled."""
    cpu_seconds_per_1000: float | None = None
    private_bytes: int | None = None
    mapped_bytes: int | None = None
    warm_read_bytes_per_picture: float | None = None
    warmup_pictures: int = 0
    checked_pictures: int = 0
    distinct: float | None = None
    idle: bool = True
    """False: it goes on computing when nobody asks, at the cost of the others."""
    cold: Cold | None = None
    params: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """What its own `extra()` told after its last window."""
    error: str | None = None

    @property
    def rate(self) -> float | None:
        """Median pictures per second."""
        return statistics.median(self.rates) if self.rates else None
