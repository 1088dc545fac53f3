"""Subjects measured in turn: A B C, A B C, so that a machine that slows down slows all of them.

First every subject is opened and verified, then the timed windows go round, each as long as the
next. Cold runs come last, one process at a time: the kernel does not drop a page of a file that
somebody has mapped. What was measured of a subject is its `Outcome`; `suspicions` says what looks
wrong in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import system
from .measure import Expectation
from .process import Remote, SubjectError

__all__ = ["LONGEST_WINDOW", "Cold", "Entry", "Outcome", "Schedule", "run", "suspicions"]

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
class Rates:
    """What the windows of one loader or one training came to.

    >>> Rates(rates=(90.0, 100.0, 110.0)).rate, Rates(rates=(90.0, 100.0, 110.0)).spread
    (100.0, 0.1)
    """

    rates: tuple[float, ...] = ()
    """Images per second of each window."""

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
class Outcome(Rates):
    """What became of one subject."""

    name: str
    ceiling: bool
    note: str = ""
    dtype: str = ""
    layout: str = ""
    disk_bytes: int = 0
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
    """False: it goes on computing when it is not asked, at the cost of the others."""
    cold: Cold | None = None
    params: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """What its own `extra()` told after its last window."""
    error: str | None = None


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


Tell = Callable[[str], None]
LONGEST_WINDOW = 300.0
"""Seconds: half of what `Remote` waits for an answer before it ends the subject."""
_PLACES = frozenset(
    {"file", "images", "data", "small"}
)  # of this machine: of no use to anybody else


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A subject to be measured."""

    name: str
    """What the table calls it."""
    command: tuple[str, ...]
    """Starts its host process."""
    params: dict[str, Any]
    """Handed to its factory."""
    expected: Expectation
    files: tuple[str, ...]
    """What it reads: brought into the page cache first, evicted before the cold run."""
    bytes_read: int | None = None
    """On disk, where `files` hold more than this subject reads."""
    required: bool = True
    """Whether its failure ends the run (our own) or is reported in its row (a rival's)."""
    cold: bool = True
    """Whether a cold run of it means anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long, and how often."""

    seconds: float = 2.0
    """Length of a timed window."""
    repeats: int = 3
    """Windows per subject."""
    settle: float = 0.3
    """Warm-up inside a window before its clock starts."""
    verify: float = 1.0
    """Untimed pass: checks, memory, first warm-up."""
    epochs: int = 0
    """Turns in which a whole epoch is measured as well, after the window."""
    cold: float = 0.0
    """Longest cold run; 0 leaves cold runs out."""


class _Running:
    """A subject with its process and what has been measured of it so far."""

    def __init__(self, entry: Entry, remote: Remote) -> None:
        self.entry = entry
        self.remote = remote
        self.facts: dict[str, Any] = {}
        self.check: dict[str, Any] = {}
        self.windows: list[dict[str, Any]] = []
        self.epochs: list[float] = []
        self.extra: dict[str, Any] = {}
        self.cold: Cold | None = None
        self.error: str | None = None

    def step(self, work: Callable[..., None], *arguments: object) -> None:
        """Do `work(*arguments)`, unless the subject has failed; a required one's failure raises."""
        if self.error is not None:
            return
        try:
            work(*arguments)
        except SubjectError as ex:
            if self.entry.required:
                named = SubjectError(
                    f"{self.entry.name}: {ex}", dishonest=ex.dishonest, trace=ex.trace
                )
                raise named from None
            self.error = str(ex)

    def open(self) -> None:
        """Take the answer to the opening that was sent when the process started."""
        self.facts = self.remote.receive()

    def verify(self, seconds: float) -> None:
        self.check = self.remote.ask({"do": "verify", "seconds": seconds})

    def measure(self, schedule: Schedule) -> None:
        request = {"do": "warm", "seconds": schedule.seconds, "settle": schedule.settle}
        self.windows.append(self.remote.ask(request))

    def measure_epoch(self) -> None:
        self.epochs += self.remote.ask({"do": "epochs", "seconds": 0.0})["rates"]

    def tell(self) -> None:
        self.extra = self.remote.ask({"do": "extra"})

    def outcome(self) -> Outcome:
        """Return what was measured."""
        total = {
            key: sum(window[key] or 0 for window in self.windows)
            for key in ("images", "cpu_seconds", "read_bytes", "warmup_images")
        }
        images = total["images"]
        firsts = [window["first_batch_seconds"] for window in self.windows]
        return Outcome(
            name=self.entry.name,
            ceiling=self.entry.expected.ceiling,
            note=self.facts.get("note", ""),
            dtype=self.facts.get("dtype", ""),
            layout=self.facts.get("layout", ""),
            disk_bytes=self.entry.bytes_read or self.facts.get("bytes", 0),
            rates=tuple(window["images"] / window["seconds"] for window in self.windows),
            cpu_per_image=tuple(w["cpu_seconds"] / w["images"] for w in self.windows),
            epoch_rates=tuple(self.epochs),
            lost_share=max(
                (w["lost_share"] for w in self.windows if w["lost_share"] is not None), default=None
            ),
            first_batch_seconds=statistics.median(firsts) if firsts else None,
            startup_seconds=self.check.get("startup_seconds"),
            cpu_seconds_per_1000=1000 * total["cpu_seconds"] / images if images else None,
            private_bytes=self.check.get("private_bytes"),
            mapped_bytes=self.check.get("mapped_bytes"),
            warm_read_bytes_per_image=total["read_bytes"] / images if images else None,
            warmup_images=total["warmup_images"],
            checked_images=self.check.get("images", 0),
            distinct=self.check.get("distinct"),
            idle=all(window["idle"] for window in self.windows),
            cold=self.cold,
            params={k: v for k, v in self.entry.params.items() if k not in _PLACES},
            extra=self.extra,
            error=self.error,
        )


def _open_request(entry: Entry) -> dict[str, Any]:
    return {"do": "open", "params": entry.params, "expected": asdict(entry.expected)}


def _start(entry: Entry) -> _Running:
    running = _Running(entry, Remote(entry.command))
    running.remote.send(_open_request(entry))
    return running


def _warm_cache(entries: Iterable[Entry]) -> None:
    """Read every file once, so that no subject pays for another one's cold start."""
    for file in {*system.files_below(name for entry in entries for name in entry.files)}:
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def _cold(running: _Running, remote: Remote, seconds: float) -> None:
    """Run the subject anew after its files were evicted; nobody else has them open by now."""
    entry, files = running.entry, system.files_below(map(Path, running.entry.files))
    if not system.evict(files):
        return
    resident = system.resident_share(files)
    remote.ask(_open_request(entry))
    window = remote.ask({"do": "cold", "seconds": seconds})
    remote.close()
    if not window["images"]:
        return  # the epoch is one batch long
    read = window["read_bytes"]
    running.cold = Cold(
        rate=window["images"] / window["seconds"],
        read_bytes_per_image=(
            None if read is None else read / (window["images"] + window["warmup_images"])
        ),
        resident_before=resident,
    )


def _quit(running: Sequence[_Running]) -> None:
    for one in running:
        one.remote.send({"do": "quit"})


def _warm(running: Sequence[_Running], schedule: Schedule, tell: Tell) -> None:
    """Open and verify all, then let the windows go round."""
    for one in running:
        one.step(one.open)
    for one in running:
        tell(f"checking {one.entry.name}")
        one.step(one.verify, schedule.verify)
    for turn in range(schedule.repeats):
        for one in running:
            tell(f"round {turn + 1} of {schedule.repeats}: {one.entry.name}")
            one.step(one.measure, schedule)
            if turn < schedule.epochs and not one.entry.expected.ceiling:
                one.step(one.measure_epoch)
    for one in running:
        one.step(one.tell)


def _cold_all(running: Sequence[_Running], seconds: float, tell: Tell) -> None:
    """Cold runs, in fresh processes that are started together and open their files in turn."""
    with ExitStack() as stack:
        fresh = [stack.enter_context(Remote(one.entry.command)) for one in running]
        for one, remote in zip(running, fresh, strict=True):
            tell(f"cold: {one.entry.name}")
            one.step(_cold, one, remote, seconds)


def run(entries: Sequence[Entry], schedule: Schedule, tell: Tell = lambda _: None) -> list[Outcome]:
    """Measure `entries` in turn and return their outcomes in the same order.

    Raises:
        SubjectError: A required subject failed or was dishonest.
    """
    _warm_cache(entries)
    tell(f"starting {len(entries)} loaders")
    running: list[_Running] = []
    with ExitStack() as stack:
        for entry in entries:
            running.append(_start(entry))
            stack.callback(running[-1].remote.close)
        stack.callback(_quit, running)  # called first: they end at the same time
        _warm(running, schedule, tell)
    if schedule.cold:
        _cold_all([one for one in running if one.entry.cold], schedule.cold, tell)
    return [one.outcome() for one in running]
