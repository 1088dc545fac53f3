"""Images per second over the number of workers: both engines, the bare kernels, and FFCV.

    python tools/bench_workers.py PHOTOS [--simulate FOLDER] [--ffcv PYTHON] [--json FILE]
        [--plot FILE]

PHOTOS holds a folder of images per class. Up to the cores of this machine all are measured as they
are. FOLDER has a sitecustomize.py that, with SIMCORES=1 in the environment, lets kernels wait
instead of compute: then more workers than cores "compute" side by side, and what bounds them is
Python, its lock and the hand-over. Such rows are marked as simulated. Real cores carry all that is
not a kernel even then: a row that keeps two thirds of them busy is marked as bound by them, for
from there on an image waits for a core at least as long as it uses one. Every row is a process of
its own; each of its windows is --seconds long.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from bench_loader import BATCH, CROP, PACKAGES, packed_photos
from h5feed import H5Dataset, H5Loader
from h5feed.bench.ceilings import CropLoop, RegionDecodeLoop
from h5feed.bench.system import describe_machine, machine_facts, versions
from h5feed.plotting import saved_figure
from h5feed.system import available_cores
from harness import copies, ffcv

__all__ = ["main"]

WORKERS, STORES, WINDOWS = (1, 2, 4, 8, 16), ("raw", "jpeg"), 3
BY = {"thread": "threads", "process": "processes", "bare": "bare kernels", "ffcv": "FFCV"}
PREFETCH = 4
_BOUND = 2 / 3  # of the real cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What so many workers made of one file."""

    store: str
    by: str
    workers: int
    simulated: bool
    rates: Sequence[float]
    """Images per second, of each window."""
    cpu: float
    """CPU seconds an image, all processes together."""
    cores: int
    """Real ones."""

    @property
    def rate(self) -> float:
        """Median of the windows."""
        return statistics.median(self.rates)

    @property
    def bound(self) -> bool:
        """Whether the real cores are what bounds it, rather than the simulated ones."""
        return self.simulated and self.rate * self.cpu >= _BOUND * self.cores

    def line(self, one: float) -> str:
        """Return a line of the table, beside the rate of one worker."""
        marks = ("simulated", "bound by the real cores") if self.bound else ("simulated",)
        share = self.rate / self.workers / one
        return (
            f"{self.store:5} {BY[self.by]:13} {self.workers:3} {self.rate:9,.0f} img/s  "
            f"efficiency {share:4.2f}  CPU {self.cpu * 1e6:6.1f} us/image  "
            f"{', '.join(marks) if self.simulated else ''}"
        ).rstrip()


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("--simulate", type=Path, help="folder of the simulation")
    parser.add_argument("--ffcv", help="interpreter that has FFCV")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "h5feed_bench"))
    parser.add_argument("--times", type=int, default=8, help="copies of each photo (%(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--json", type=Path, help="write everything measured here")
    parser.add_argument("--plot", type=Path, help="draw it here")
    return parser.parse_args(arguments)


def measure(path: str, by: str, workers: int, seconds: float) -> dict[str, Any]:
    """Measure one row in this process and its children."""
    return (_bare if by == "bare" else _loader)(path, by, workers, seconds)


def _loader(path: str, by: str, workers: int, seconds: float) -> dict[str, Any]:
    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "prefetch": PREFETCH}
    dataset = H5Dataset(path)
    size = min(BATCH, len(dataset))
    with H5Loader(dataset, size, augment=CROP, num_workers=workers, engine=by, **options) as loader:
        batches = _forever(lambda: loader)
        for _ in range(3 * PREFETCH):  # every slot is touched, and every file's pages mapped
            next(batches)
        rates, made, cpu = [], 0, _cpu()
        for _ in range(WINDOWS):
            count, began = 0, time.perf_counter()
            while (took := time.perf_counter() - began) < seconds or not count:
                count += len(next(batches)[0])
            rates.append(count / took)
            made += count
        return {"rates": rates, "cpu": (_cpu() - cpu) / made}


def _forever(epoch: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    while True:
        yield from epoch()


def _cpu() -> float:
    """Return CPU seconds of this process and of those below it that live."""
    below = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(spent.user + spent.system for spent in below)


def _bare(path: str, by: str, workers: int, seconds: float) -> dict[str, Any]:
    """Let processes that know nothing of each other run the bare kernels."""
    context = get_context("fork")
    answers, ready = context.SimpleQueue(), context.Barrier(workers)
    loops = [
        context.Process(target=_bare_loop, args=(path, seconds, ready, answers), daemon=True)
        for _ in range(workers)
    ]
    for loop in loops:
        loop.start()
    found = [answers.get() for _ in loops]
    for loop in loops:
        loop.join()
    rates = [sum(counts) / seconds for counts in zip(*(counts for counts, _ in found), strict=True)]
    made = sum(sum(counts) for counts, _ in found)
    return {"rates": rates, "cpu": sum(cpu for _, cpu in found) / made}


def _bare_loop(path: str, seconds: float, ready: Any, answers: Any) -> None:
    """Tell the images made in each window, at least one batch, and CPU seconds taken."""
    params = {"file": path, "batch_size": BATCH, "workers": 1, "crop": 224}
    encoded = H5Dataset(path).files.specs["images"].is_encoded
    loop = (RegionDecodeLoop if encoded else CropLoop)(params)
    batches = _forever(loop.epoch)
    for _ in range(PREFETCH):
        next(batches)
    ready.wait()
    begin, counts, cpu = time.perf_counter(), [0] * WINDOWS, time.process_time()
    while (window := int((time.perf_counter() - begin) / seconds)) < WINDOWS or not any(counts):
        counts[min(window, WINDOWS - 1)] += len(next(batches)[0])
    answers.put((counts, time.process_time() - cpu))
    loop.close()


def measure_apart(
    path: Path, by: str, workers: int, seconds: float, simulate: Path | None
) -> dict[str, Any]:
    """Measure one row in a process of its own, with the simulation where one is given."""
    environment = {name: value for name, value in os.environ.items() if name != "SIMCORES"}
    if simulate is not None:
        before = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([str(simulate), *before.split(os.pathsep)])
        environment["SIMCORES"] = "1"
    code = (
        "import bench_workers, json, sys; "
        "print(json.dumps(bench_workers.measure(*json.loads(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([str(path), by, workers, seconds])],
        cwd=Path(__file__).parent,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def sweep(options: argparse.Namespace) -> Iterator[Swept]:
    """Measure every row: those on real cores first, then the simulated ones."""
    cores = available_cores()
    for simulate in (None, options.simulate) if options.simulate else (None,):
        for store in STORES:
            path = packed_photos(options, store).absolute()
            row = partial(Swept, store=store, simulated=simulate is not None, cores=cores)
            for by in ("thread", "process", "bare"):
                for workers in options.workers:
                    if simulate is not None or workers <= cores:
                        found = measure_apart(path, by, workers, options.seconds, simulate)
                        yield row(by=by, workers=workers, **found)
            if options.ffcv and simulate is None:
                for workers in (n for n in options.workers if n <= cores):
                    yield row(by="ffcv", workers=workers, **_ffcv(options, store, workers))


def _ffcv(options: argparse.Namespace, store: str, workers: int) -> dict[str, Any]:
    photos = copies(options.photos, options.work / f"photos{options.times}", options.times)
    how: dict[str, Any] = {"variant": store, "size": 256, "crop": 224}
    window: Callable[[float], tuple[float, float]] = ffcv(
        options.ffcv, photos, options.work, batch_size=BATCH, workers=workers, **how
    )
    window(options.seconds)
    rates, cpu = zip(*(window(options.seconds) for _ in range(WINDOWS)), strict=True)
    return {"rates": list(rates), "cpu": statistics.median(cpu)}


def chosen(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return which engine engine="auto" takes, for each store and number of workers."""
    return {
        store: {
            str(workers): H5Loader(
                H5Dataset(packed_photos(options, store)), BATCH, augment=CROP, num_workers=workers
            ).engine
            for workers in options.workers
        }
        for store in STORES
    }


def draw(rows: Sequence[Swept], path: Path, caption: str) -> None:
    """Draw images/s over workers, a panel for each store: real cores solid, simulated ones not."""
    stores = list(dict.fromkeys(row.store for row in rows))
    title = "RandomResizedCrop(224) + flip of 256-pixel images, by workers"
    with saved_figure(
        path, extra="bench", title=title, caption=caption, width=10.5, columns=len(stores)
    ) as (figure, panels):
        for panel, store in zip(panels, stores, strict=True):
            for number, by in enumerate(BY):
                for simulated in (False, True):
                    some = [
                        r for r in rows if (r.store, r.by, r.simulated) == (store, by, simulated)
                    ]
                    label = f"{BY[by]}, {'simulated' if simulated else 'real'} cores"
                    if some:
                        panel.plot(
                            [row.workers for row in some],
                            [row.rate for row in some],
                            color=f"C{number}",
                            marker="o",
                            linestyle="--" if simulated else "-",
                            markerfacecolor="none" if simulated else None,
                            label=label,
                        )
            panel.set_title(store)
            panel.set_xlabel("workers")
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks := sorted({row.workers for row in rows}))
            panel.set_xticklabels([str(tick) for tick in ticks])
            panel.set_ylim(bottom=0)
        panels[0].set_ylabel("images per second")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what was asked for."""
    options = read_options(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    rows: list[Swept] = []
    machine = describe_machine(machine_facts(options.work))
    print(machine)
    for row in sweep(options):
        rows.append(row)
        first = next(
            r for r in rows if (r.store, r.by, r.simulated) == (row.store, row.by, row.simulated)
        )
        print(row.line(first.rate / first.workers), flush=True)
    auto = chosen(options)
    print("\n".join(f'{store}: engine="auto" takes {taken}' for store, taken in auto.items()))
    if options.json:
        found = {
            "run": f"{datetime.now(timezone.utc):%Y-%m-%d}",
            "machine": machine,
            "cores": available_cores(),
            "versions": versions(PACKAGES),
            "batch_size": BATCH,
            "prefetch": PREFETCH,
            "seconds": options.seconds,
            "auto": auto,
            "rows": [asdict(row) | {"rate": row.rate, "bound": row.bound} for row in rows],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        draw(rows, options.plot, f"{machine}. Medians of {WINDOWS} windows.")


if __name__ == "__main__":
    main()
