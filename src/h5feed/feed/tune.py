"""How many loader threads and how much prefetch this machine, file and pipeline want: measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from time import perf_counter, process_time
from typing import Any

import torch

from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.loader import H5Loader
from h5feed.feed.setup import choose_threads

__all__ = ["Measured", "Plan", "tune"]

_PREFETCH = (2, 4)
_GOOD_ENOUGH = 0.97  # of the best: beyond, another thread takes more from the trainer than it gives
_ROUNDS = 2  # in turns, so that a slow second of the machine does not fall on one setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One setting, and what it did."""

    threads: int
    prefetch: int
    images_per_s: float
    cpu_share: float
    """CPU seconds of this process per second and core that it may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The setting to use, `H5Loader(ds, …, threads=plan.threads, prefetch=plan.prefetch)`."""

    threads: int
    prefetch: int
    evidence: tuple[Measured, ...]
    """All settings measured, in the order of threads and prefetch."""

    def __str__(self) -> str:
        lines = ["threads  prefetch  images/s  CPU share"]
        for row in self.evidence:
            chosen = (row.threads, row.prefetch) == (self.threads, self.prefetch)
            lines.append(
                f"{row.threads:7}  {row.prefetch:8}  {row.images_per_s:8.0f}  "
                f"{row.cpu_share:8.0%}{'  <- chosen' if chosen else ''}"
            )
        return "\n".join(lines)


def tune(ds: H5Dataset, batch_size: int, *, seconds: float = 4.0, **options: Any) -> Plan:
    """Measure the real loader under several settings and return the leanest that keeps up.

    Never more threads than `threads="auto"` would allow: the cores this process may use, less
    the trainer's share. Of those within 3 % of the fastest, the fewest threads win, then the
    smaller prefetch.

    Args:
        ds: as for H5Loader.
        batch_size: as for H5Loader.
        seconds: how long to measure, about.
        options: everything else H5Loader takes, but threads and prefetch.

    Raises UsageError where there is no batch, or threads or prefetch is among the options.
    """
    given = sorted({"threads", "prefetch"} & set(options))
    if given:
        raise UsageError(f"tune() finds {' and '.join(given)}: leave it out")
    probe = H5Loader(ds, batch_size, **options)  # what it holds for the device, all others share
    if len(probe) == 0:
        other = "".join(f", {name}={value!r}" for name, value in options.items())
        raise UsageError(
            f"{len(ds)} samples, batch_size={batch_size}{other} leave nothing to measure"
        )
    most = choose_threads("auto", torch.device(options.get("device", "cpu")))
    settings = [(threads, prefetch) for threads in _steps_to(most) for prefetch in _PREFETCH]
    runs: dict[tuple[int, int], list[Measured]] = {setting: [] for setting in settings}
    share = seconds / (len(settings) * _ROUNDS)
    for _ in range(_ROUNDS):
        for threads, prefetch in settings:
            with H5Loader(ds, batch_size, threads=threads, prefetch=prefetch, **options) as loader:
                runs[threads, prefetch].append(_measure(loader, share, most))
    evidence = [max(found, key=lambda row: row.images_per_s) for found in runs.values()]
    return _choose(evidence)


def _choose(evidence: list[Measured]) -> Plan:
    best = max(row.images_per_s for row in evidence)
    good = [row for row in evidence if row.images_per_s >= _GOOD_ENOUGH * best]
    chosen = min(good, key=lambda row: (row.threads, row.prefetch))
    return Plan(threads=chosen.threads, prefetch=chosen.prefetch, evidence=tuple(evidence))


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
        threads=loader.threads,
        prefetch=loader.prefetch,
        images_per_s=images / elapsed,
        cpu_share=(process_time() - cpu) / elapsed / cores,
    )
