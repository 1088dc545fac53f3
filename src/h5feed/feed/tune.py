"""How many workers and how much prefetch this machine, file and pipeline want: measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from time import perf_counter, process_time
from typing import Any

import torch

from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.loader import H5Loader
from h5feed.feed.options import choose_workers

__all__ = ["Measured", "TunePlan", "tune"]

_PREFETCH = (2, 4)
_GOOD_ENOUGH = 0.97  # of the best: beyond, another worker takes more from the trainer than it gives
_ROUNDS = 2  # in turns, so that a slow second of the machine does not fall on one setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One setting, and what it did."""

    num_workers: int
    prefetch: int
    images_per_s: float
    cpu_share: float
    """CPU seconds of this process per second and core that it may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePlan:
    """The setting to use: `H5Loader(…, num_workers=plan.num_workers, prefetch=plan.prefetch)`."""

    num_workers: int
    prefetch: int
    evidence: tuple[Measured, ...]
    """All settings measured, in the order of num_workers and prefetch."""

    def __str__(self) -> str:
        lines = ["workers  prefetch  images/s  CPU share"]
        for row in self.evidence:
            chosen = (row.num_workers, row.prefetch) == (self.num_workers, self.prefetch)
            lines.append(
                f"{row.num_workers:7}  {row.prefetch:8}  {row.images_per_s:8.0f}  "
                f"{row.cpu_share:8.0%}{'  <- chosen' if chosen else ''}"
            )
        return "\n".join(lines)


def tune(ds: H5Dataset, batch_size: int, *, seconds: float = 4.0, **options: Any) -> TunePlan:
    """Measure the real loader under several settings and return the leanest that keeps up.

    >>> plan = tune(H5Dataset("photos.h5"), 8, seconds=0.1)
    >>> loader = H5Loader(
    ...     H5Dataset("photos.h5"), 8, num_workers=plan.num_workers, prefetch=plan.prefetch
    ... )

    Never more workers than `num_workers="auto"` would allow: the cores this process may use, less
    the trainer's share. Of those within 3 % of the fastest, the fewest workers win, then the
    smaller prefetch.

    Args:
        ds: as for H5Loader.
        batch_size: as for H5Loader.
        seconds: how long to measure, about.
        options: everything else H5Loader takes, but num_workers and prefetch; shuffle is True
            unless you give it, or a sampler.

    Raises UsageError where there is no batch, or num_workers or prefetch is among the options.
    """
    given = sorted({"num_workers", "prefetch"} & set(options))
    if given:
        raise UsageError(f"tune() finds {' and '.join(given)}: leave it out")
    ordered = {"shuffle": options.get("sampler") is None, **options}  # as in training
    probe = H5Loader(ds, batch_size, **ordered)  # what it holds for the device, all others share
    if len(probe) == 0:
        other = "".join(f", {name}={value!r}" for name, value in options.items())
        raise UsageError(
            f"{len(ds)} samples, batch_size={batch_size}{other} leave nothing to measure"
        )
    most = choose_workers("auto", torch.device(options.get("device", "cpu")))
    settings = [(workers, prefetch) for workers in _steps_to(most) for prefetch in _PREFETCH]
    runs: dict[tuple[int, int], list[Measured]] = {setting: [] for setting in settings}
    share = seconds / (len(settings) * _ROUNDS)
    for _ in range(_ROUNDS):
        for workers, prefetch in settings:
            with H5Loader(
                ds, batch_size, num_workers=workers, prefetch=prefetch, **ordered
            ) as loader:
                runs[workers, prefetch].append(_measure(loader, share, most))
    evidence = [max(found, key=lambda row: row.images_per_s) for found in runs.values()]
    return _choose(evidence)


def _choose(evidence: list[Measured]) -> TunePlan:
    best = max(row.images_per_s for row in evidence)
    good = [row for row in evidence if row.images_per_s >= _GOOD_ENOUGH * best]
    chosen = min(good, key=lambda row: (row.num_workers, row.prefetch))
    return TunePlan(
        num_workers=chosen.num_workers, prefetch=chosen.prefetch, evidence=tuple(evidence)
    )


def _steps_to(most: int) -> list[int]:
    """Return 1, 2, 4, … and `most`."""
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def _measure(loader: H5Loader, seconds: float, cores: int) -> Measured:
    """Run passes for some seconds, after the batches that touch every slot for the first time."""
    for _ in islice(loader, loader.prefetch + 2):
        pass
    images, wall, cpu = 0, perf_counter(), process_time()
    while perf_counter() - wall < seconds:
        for batch in loader:
            images += len(batch[1] if torch.is_tensor(batch[1]) else batch[1][0])
            if perf_counter() - wall >= seconds:
                break
    elapsed = perf_counter() - wall
    return Measured(
        num_workers=loader.num_workers,
        prefetch=loader.prefetch,
        images_per_s=images / elapsed,
        cpu_share=(process_time() - cpu) / elapsed / cores,
    )
