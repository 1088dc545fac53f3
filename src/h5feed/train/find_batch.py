"""Which batch sizes fit into memory, and how fast each is."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from h5feed.errors import H5FeedError, UsageError
from h5feed.plotting import COLORS, OURS, PALE, saved_figure
from h5feed.system import available_memory, held_memory, is_out_of_memory
from h5feed.train.config import above_zero, at_least
from h5feed.train.distributed import World
from h5feed.train.loaders import Batch
from h5feed.train.trainer import TrainStep
from h5feed.train.trial import kept

__all__ = ["BatchRange", "BatchSizes", "BatchTrial", "draw_batch_sizes", "find_batch"]

_WARMUP = 2
"""Steps before the clock starts: the optimizer's state is made, kernels are chosen."""
_NEARLY = 0.98
"""A size this near to the highest speed is as good, and the smaller one is kept."""
_MARK, _MEMORY = COLORS[1], COLORS[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRange:
    """Which sizes are tried.

    >>> BatchRange(smallest=64, largest=512).seconds
    60.0
    """

    smallest: int = 8
    """First size; it is doubled until memory is full or the time is over."""
    largest: int = 8192
    """Size above which none is tried; no batch is larger than the set either."""
    seconds: float = 60.0
    """Time for all sizes together; a size that would take longer than what is left is not tried."""
    steps: int = 5
    """Timed steps of each size."""
    memory: float = 0.5
    """On the CPU: share of the available memory that a size may be expected to need (asking for
    more than there is would end the process, not raise an error)."""

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.largest:
            raise UsageError(
                f"--smallest {self.smallest} and --largest {self.largest}: sizes are at least 1, "
                "and climb from the smallest to the largest"
            )
        at_least(self, 1, "steps")
        above_zero(self, "memory", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial:
    """One size."""

    batch_size: int
    images_per_second: float | None
    """Median over the timed steps; None when the size does not fit."""
    memory_bytes: int | None
    """The highest so far: of the GPU's allocations, on the CPU of the process."""

    @property
    def fits(self) -> bool:
        """Whether a step could be made."""
        return self.images_per_second is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """What was found."""

    trials: tuple[BatchTrial, ...]
    """By size."""
    full: bool
    """Whether a size was met that does not fit; otherwise larger ones than tried may fit."""
    in_time: bool
    """Whether all sizes could be tried; otherwise the next one would have taken too long."""

    @property
    def largest(self) -> BatchTrial:
        """The largest size that fits."""
        return [trial for trial in self.trials if trial.fits][-1]

    @property
    def fastest(self) -> BatchTrial:
        """The smallest size within 2 % of the highest speed."""
        best = max(trial.images_per_second or 0.0 for trial in self.trials)
        return next(t for t in self.trials if (t.images_per_second or 0.0) >= _NEARLY * best)


def find_batch(
    step: TrainStep,
    make_batch: Callable[[int], Batch],
    world: World,
    options: BatchRange,
    tell: Callable[[BatchTrial], None] = lambda _trial: None,
    trying: Callable[[int, float], None] = lambda _size, _seconds: None,
) -> BatchSizes:
    """Try sizes, doubling until one does not fit, then halving the gap to a sixteenth.

    `trying` is called with a size and the seconds that it may take, `tell` with what came of it.
    `make_batch` returns a batch of a given size, on the device. After each trial the step and
    the generators are exactly as they were. Raises H5FeedError when not even the smallest fits.

    >>> from functools import partial
    >>> from h5feed.train.config import ModelConfig, TrainConfig
    >>> from h5feed.train.loaders import random_batch
    >>> from h5feed.train.trial import open_trial
    >>> model = ModelConfig(model="resnet9-small")
    >>> config = TrainConfig(train=Path("photos.h5"), batch_size=6, model=model)
    >>> with open_trial(config) as trial:
    ...     make = partial(
    ...         random_batch, "classification", 2, size=16, seed=0, device=trial.world.device
    ...     )
    ...     test = BatchRange(largest=32, steps=1, seconds=600)
    ...     sizes = find_batch(trial.step, make, trial.world, test)
    >>> [tried.batch_size for tried in sizes.trials]
    [8, 16, 32]
    """
    trials: dict[int, BatchTrial] = {}
    clock = _Clock(options.seconds)

    def fits(size: int) -> bool | None:
        """Whether a size fits; None where there is no time to find out."""
        if not clock.allows(size):
            return None
        trying(size, clock.expected(size))
        if _too_much(size, trials, world.device, options.memory):
            trial = BatchTrial(batch_size=size, images_per_second=None, memory_bytes=None)
        else:
            with clock.running(size):
                trial = _try(step, make_batch, world, size, options.steps)
        trials[size] = trial
        tell(trial)
        return trial.fits

    size = options.smallest
    while (good := fits(size)) and size < options.largest:
        size = min(2 * size, options.largest)
    full, in_time = good is False, good is not None
    if full and size == options.smallest:
        raise H5FeedError(
            f"not even a batch of {size} fits into memory: try --smallest 1, --grad-checkpointing, "
            "smaller images (--size) or --precision bf16"
        )
    if full:
        low = max(s for s, trial in trials.items() if trial.fits)
        in_time = _close_in(fits, low=low, high=size)
    found = tuple(trials[size] for size in sorted(trials))
    return BatchSizes(trials=found, full=full, in_time=in_time)


class _Clock:
    """The time that is left, and what a size will take of it: as much an image as the last one."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self._seconds_per_image = 0.0

    def expected(self, size: int) -> float:
        return self._seconds_per_image * size

    def allows(self, size: int) -> bool:
        return time.perf_counter() + self.expected(size) <= self._end

    @contextmanager
    def running(self, size: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds_per_image = (time.perf_counter() - began) / size


def _close_in(fits: Callable[[int], bool | None], *, low: int, high: int) -> bool:
    """Halve the gap between a size that fits and one that does not; False where time ran out."""
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        good = fits(middle)
        if good is None:
            return False
        low, high = (middle, high) if good else (low, middle)
    return True


def _try(
    step: TrainStep, make_batch: Callable[[int], Batch], world: World, size: int, steps: int
) -> BatchTrial:
    device, seconds = world.device, None
    torch.compiler.reset()  # else a second size would be compiled for every size, and slower
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with kept(step, world):
            seconds = _time(step, make_batch(size), steps, device)
    except (RuntimeError, MemoryError) as ex:
        if not is_out_of_memory(ex):
            raise
    # Here, not above: the error's traceback holds the tensors that filled the memory.
    gc.collect()
    memory = _peak_memory(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    rate = None if seconds is None else size / seconds
    return BatchTrial(batch_size=size, images_per_second=rate, memory_bytes=memory)


def _time(step: TrainStep, batch: Batch, steps: int, device: torch.device) -> float:
    """Return the median seconds of a step on `batch`."""
    taken = []
    for _ in range(_WARMUP + steps):
        began = time.perf_counter()
        step(repeat(batch))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[_WARMUP:])


def _too_much(size: int, trials: dict[int, BatchTrial], device: torch.device, share: float) -> bool:
    """Whether the CPU's memory would run out, going by how it grew from size to size."""
    known = sorted((t.batch_size, t.memory_bytes) for t in trials.values() if t.memory_bytes)
    available = _available_memory()
    if device.type != "cpu" or available is None or len(known) < 2:
        return False
    (less, before), (more, after) = known[-2:]
    growth = (after - before) / (more - less)
    return after + growth * (size - more) > share * available


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return held_memory(peak=True)


def _available_memory() -> int | None:
    """Return the bytes that this process could hold, those that it holds now included."""
    free = available_memory()
    held = held_memory()
    return None if free is None or held is None else free + held


def draw_batch_sizes(sizes: BatchSizes, path: Path, what: str = "") -> None:
    """Draw images per second and peak memory over the batch size, the fastest marked.

    `what` was trained goes into the caption.
    """
    trials = [trial for trial in sizes.trials if trial.fits]
    places = [trial.batch_size for trial in trials]
    too_large = [trial.batch_size for trial in sizes.trials if not trial.fits]
    best = sizes.fastest
    title = f"Batch sizes: {best.batch_size:,} is the smallest of the fastest"
    form: dict[str, Any] = {"height": 5.6, "rows": 2, "sharex": True}
    with saved_figure(path, extra="train", title=title, caption=what, **form) as (figure, panels):
        speed, memory = panels
        figure.get_layout_engine().set(w_pad=0.1)  # inches: labels would touch the edge
        speed.plot(places, [t.images_per_second for t in trials], "o-", color=OURS)
        speed.plot(best.batch_size, best.images_per_second, "o", color=_MARK, ms=9)
        speed.set_ylabel("images per second")
        peaks = [(t.memory_bytes or 0) / 1e9 for t in trials]
        memory.plot(places, peaks, "o-", color=_MEMORY)
        memory.set_ylabel("peak memory, GB")
        memory.set_xlabel("batch size")
        for panel in panels:
            panel.axvline(best.batch_size, color=_MARK, ls="--", lw=1.4)
            for number, size in enumerate(too_large):
                label = "does not fit" if number == 0 else None
                panel.axvline(size, color=PALE, ls=":", lw=1.4, label=label)
            panel.margins(y=0.08)
            panel.set_ylim(bottom=0)
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
        if too_large:
            memory.legend(loc="upper left")
        memory.set_xscale("log", base=2)
        doubled = [size for size in places if math.log2(size / places[0]).is_integer()]
        memory.set_xticks(doubled, [f"{size:,}" for size in doubled])
