"""How fast each loader is, alone and before a model's training step: loaders by turns.

And how much of a GPU's memory each takes, while all of them are open.

All loaders feed the same step in the same process, so that the model is compiled once and the
CPU seconds of a window are its loader's and the step's own.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from gpu.loaders import Way
from h5feed.bench import measure
from h5feed.train.config import TrainConfig
from h5feed.train.trial import Trial, open_trial
from harness import wait_for

__all__ = ["GpuShare", "measure_loaders"]


class _TrainedLoader:
    """A loader, with the training step behind it if any, as bench's subjects are."""

    dtype = "uint8"
    layout = "NCHW"
    note = ""

    def __init__(self, trial: Trial, loader: Any, *, trains: bool) -> None:
        self._trial, self.loader, self._trains = trial, loader, trains
        self._epoch = -1
        self.files: list[str] = []

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        self._epoch += 1
        self.loader.set_epoch(self._epoch)
        for batch in self.loader:
            if self._trains:
                self._trial.step(iter((batch,)))
            yield batch

    def synchronize(self) -> None:
        wait_for(self._trial.world.device)

    def close(self) -> None:
        close = getattr(self.loader, "close", None)
        if close is not None:
            close()


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


@dataclass(slots=True)
class _Taking:
    """A way that takes part, and what was measured of it."""

    way: Way
    subject: _TrainedLoader | None = None
    windows: list[measure.Window] = field(default_factory=list)
    memory: GpuShare | None = None
    error: str | None = None


def measure_loaders(
    config: TrainConfig,
    taking: Sequence[Way],
    *,
    images: int,
    seconds: float,
    repeats: int,
    trains: bool = True,
) -> list[dict[str, Any]]:
    """Train `config`'s model with each of `taking` in turn; returns a row for each.

    `config` names the packed file. Without `trains` batches are taken and nothing is done with
    them. A way that fails has its reason in its row.
    """
    free = replace(config, data=replace(config.data, loader="synthetic"))
    with open_trial(free) as trial:
        found = [_Taking(way) for way in taking]
        expected = partial(
            measure.Expectation,
            images=images,
            batch_size=config.batch_size,
            height=trial.data.size,
            width=trial.data.size,
        )
        for one in found:
            print(f"opening {one.way.name}, {one.way.threads} threads", flush=True)
            opened = partial(_TrainedLoader, trains=trains)
            expectation = expected(ceiling=one.way.ceiling)
            _guarded(one, partial(_begin, one, trial, opened, expectation, seconds))
        for turn in range(repeats):
            print(f"round {turn + 1} of {repeats}", flush=True)
            for one in found:
                expectation = expected(ceiling=one.way.ceiling)
                others = sum(other.memory.held for other in found if other.memory) - (
                    one.memory.held if one.memory else 0
                )
                _guarded(one, partial(_window, one, expectation, seconds, others))
        for one in found:
            if one.subject is not None:
                one.subject.close()
    ceiling = next((_rate(one) for one in found if one.way.ceiling), None)
    return [_row(one, ceiling) for one in found]


def _guarded(one: _Taking, work: Callable[[], None]) -> None:
    """Do `work`, unless `one` has failed; a failure is told in its row and ends nothing."""
    if one.error is not None:
        return
    try:
        work()
    except Exception as ex:
        one.error = f"{type(ex).__name__}: {str(ex).splitlines()[0] if str(ex) else ''}"
        print(f"{one.way.name} failed: {one.error}", flush=True)


def _begin(
    one: _Taking,
    trial: Trial,
    opened: Callable[[Trial, Any], _TrainedLoader],
    expected: measure.Expectation,
    seconds: float,
) -> None:
    one.memory = GpuShare(trial.world.device)
    before = one.memory.now()
    one.subject = opened(trial, one.way.open(trial))
    one.memory.opened(before)
    measure.verify(one.subject, expected, seconds / 2)
    one.memory.tried(before)
    measure.wait_until_idle()


def _window(one: _Taking, expected: measure.Expectation, seconds: float, others: int) -> None:
    assert one.subject is not None
    assert one.memory is not None
    one.memory.begin()
    one.windows.append(measure.warm_window(one.subject, expected, seconds=seconds, settle=0.2))
    one.memory.end(others)
    measure.wait_until_idle()


def _rate(one: _Taking) -> float | None:
    return statistics.median(w.rate for w in one.windows) if one.windows else None


def _row(one: _Taking, ceiling: float | None) -> dict[str, Any]:
    rate = _rate(one)
    images = sum(window.images for window in one.windows)
    share = rate / ceiling if rate and ceiling else None
    return {
        "name": one.way.name,
        "threads": one.way.threads,
        "ceiling": one.way.ceiling,
        "images_per_second": rate,
        "rates": [window.rate for window in one.windows],
        "share_of_ceiling": share,
        "input_bound": None if share is None or one.way.ceiling else 1 - share,
        "cpu_seconds_per_1000": 1000 * sum(w.cpu_seconds for w in one.windows) / images
        if images
        else None,
        "device_bytes": one.memory.total if one.memory else None,
        "error": one.error,
    }
