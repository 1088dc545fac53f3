"""What was measured of one subject, and what looks wrong in it; only the standard library."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Cold", "Outcome", "suspicions"]

_JUMP = 1.5  # times the median: neither clock nor frequency of a busy machine moves CPU so far
_LEAST_JUMP = 0.1  # seconds of CPU: ten of the kernel's ticks
_LOST = 0.2  # of an epoch's time


@dataclass(frozen=True, slots=True, kw_only=True)
class Cold:
    """The first epoch after its files left the page cache."""

    rate: float
    """Images per second from the first batch on."""
    read_bytes_per_image: float | None
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
    """Images per second of each window."""
    cpu_per_image: tuple[float, ...] = ()
    """CPU seconds per image of each window."""
    epoch_rates: tuple[float, ...] = ()
    """Images per second of each whole epoch, its start and its end in it."""
    lost_share: float | None = None
    """Of the epochs' time, what went by between the last batch and the end: the most of all
    windows."""
    first_batch_seconds: float | None = None
    """Median, at the start of an epoch, workers running."""
    startup_seconds: float | None = None
    """To the very first batch: workers started, code compiled."""
    cpu_seconds_per_1000: float | None = None
    private_bytes: int | None = None
    mapped_bytes: int | None = None
    warm_read_bytes_per_image: float | None = None
    warmup_images: int = 0
    checked_images: int = 0
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
        """Median images per second."""
        return statistics.median(self.rates) if self.rates else None

    @property
    def spread(self) -> float | None:
        """Half the distance between the slowest and the fastest window, as part of the median."""
        if len(self.rates) < 2 or not self.rate:
            return None
        return (max(self.rates) - min(self.rates)) / 2 / self.rate


def suspicions(outcome: Outcome) -> list[str]:
    """Return what must be explained before the figures of `outcome` may be believed."""
    found = []
    if outcome.cpu_per_image:
        usual = statistics.median(outcome.cpu_per_image)
        for number, (spent, rate) in enumerate(
            zip(outcome.cpu_per_image, outcome.rates, strict=True), 1
        ):
            # `rate` images are about a second's: less than that is a few ticks of the clock.
            if spent > _JUMP * usual and (spent - usual) * rate > _LEAST_JUMP:
                found.append(
                    f"window {number} of {len(outcome.rates)} took {1e6 * spent:,.0f} µs of CPU an "
                    f"image, the median {1e6 * usual:,.0f}"
                )
    if (outcome.lost_share or 0.0) > _LOST:
        found.append(
            f"{outcome.lost_share:.0%} of its epochs' time goes by after the last batch: it may "
            "make batches that nobody gets"
        )
    return found
