"""How fast H5Loader is beside what bounds it, and beside FFCV: every figure, one run.

    python tools/bench_loader.py PHOTOS [--cifar FOLDER] [--ffcv PYTHON] [--json FILE]

PHOTOS and FOLDER hold a folder of images per class. All that a row compares takes turns, in
windows of --seconds; what is shown are medians of --rounds. Rows beside FFCV need an interpreter
that has it (--ffcv). FFCV's max_resolution keeps the aspect, so it stores about 0.75 of a
square's pixels, and its crops are made from those; pixels per second are of what is delivered.
`tools/pages.py loader FILE` makes a table of what --json wrote.
`tools/bench_workers.py` is the same over the number of workers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from h5feed import H5Dataset, H5Loader
from h5feed.augment import RandomCrop, RandomHorizontalFlip, RandomResizedCrop
from h5feed.augment.cpu import readable
from h5feed.bench.ceilings import CropLoop, RegionDecodeLoop, python_seconds
from h5feed.bench.measure import Subject
from h5feed.bench.report import markdown_table
from h5feed.bench.system import describe_machine, evict, machine_facts, versions
from harness import (
    Window,
    copies,
    ffcv,
    in_turns,
    of_subject,
    packed,
    run_code,
    synthetic,
    version_of,
)

__all__ = ["main", "markdown"]

PACKAGES = ("h5feed", "torch", "numpy", "opencv-python-headless", "simplejpeg")
COLD_ITEMS, IMAGENET, SCHEDULED = 16_384, 1_281_167, (10_000, 10_000_000)
HEAD = f"{'':26} {'ratio':>6} {'least':>6} {'ours':>10} {'other/s':>10} {'Mpix/s':>9}  CPU us/image"
_HEADS = ("measured", "H5Loader, img/s", "Mpixel/s", "against", "img/s", "ratio", "CPU µs/image")


@dataclass(frozen=True, slots=True)
class Pair:
    """H5Loader beside something else: ours / other is to be at least `least`."""

    what: str
    title: str
    """What is measured, for the README; a ceiling's own name is `beside`."""
    beside: str
    """What the other one is, for the README."""
    ours: str
    other: str
    least: float
    pixels: int
    """Of a delivered image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPair:
    """A comparison measured: images per second of every round, CPU seconds per image."""

    row: Pair
    ours: Sequence[float]
    other: Sequence[float]
    cpu: Sequence[float] = ()
    """Medians, of ours and of the other; none for what runs in processes that come and go."""

    @property
    def ratio(self) -> float:
        """Neighbors in time compared: a slow second of the machine falls on both."""
        return statistics.median(a / b for a, b in zip(self.ours, self.other, strict=True))

    def line(self) -> str:
        """Return a line below HEAD."""
        row, rate = self.row, statistics.median(self.ours)
        cpu = " ".join(f"{spent * 1e6:8.1f}" for spent in self.cpu)
        return (
            f"{row.what:26} {self.ratio:6.2f} {row.least:6.2f} {rate:10,.0f} "
            f"{statistics.median(self.other):10,.0f} {rate * row.pixels / 1e6:9,.0f} {cpu}"
        )

    def values(self) -> dict[str, Any]:
        """Return what stands in the JSON."""
        return {
            "what": self.row.what,
            "title": self.row.title,
            "beside": self.row.beside,
            "ratio": self.ratio,
            "least": self.row.least,
            "images_per_second": statistics.median(self.ours),
            "pixels_per_second": statistics.median(self.ours) * self.row.pixels,
            "other_per_second": statistics.median(self.other),
            "cpu_seconds_per_image": list(self.cpu),
            "rounds": {"ours": list(self.ours), "other": list(self.other)},
        }


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Return the README's table of what --json wrote: the last run, and the range over all runs."""
    results = runs[-1]
    rows = [_cells(row, runs) for row in results["rows"]]
    start, scheduling = results["start"], results["scheduling"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    small, large = (spent * 1e6 for spent in scheduling["seconds_per_batch"])
    foot = (
        f"{_machines(runs)}; {results['threads']} threads or workers each, in turns, medians of "
        f"{results['repeats']} in the last run, in brackets the slowest and fastest turn of all "
        f"runs, each of whole epochs; uint8 batches of {results['batch_size']}, CIFAR-10's of "
        f"{results['cifar_batch_size']}. FFCV stores photographs with max_resolution=256, about "
        f"0.75 of the pixels. First batch of {start['items']:,} items: {start['seconds']:.2f} s "
        f"after the import. Order, parameters and hand-over of a batch take {small:,.0f} µs at "
        f"{scheduling['items'][0]:,} items and {large:,.0f} µs at {scheduling['items'][1]:,}. "
        f"{_python(results)}{versions}. `{results['command']}`"
    )
    return "\n".join([*markdown_table(_HEADS, rows, left={0, 3}), "", foot])


def _python(results: dict[str, Any]) -> str:
    """Say what Python takes for an image; runs before 2026-11-22 have not measured it."""
    spent = results.get("python_seconds_per_image", {}).items()
    shown = ", ".join(f"{seconds * 1e6:.1f} µs ({name})" for name, seconds in spent)
    return f"Of an image Python takes {shown}, one thread at a time. " if shown else ""


def _machines(runs: Sequence[dict[str, Any]]) -> str:
    return "; ".join(dict.fromkeys(f"{run['machine']} ({run['run']})" for run in runs))


def _turns(row: dict[str, Any], runs: Sequence[dict[str, Any]]) -> list[float]:
    """Return the ratio of each turn of each run that has the row."""
    return [
        ours / other
        for run in runs
        for same in run["rows"]
        if same["what"] == row["what"]
        for ours, other in zip(same["rounds"]["ours"], same["rounds"]["other"], strict=True)
    ]


def _cells(row: dict[str, Any], runs: Sequence[dict[str, Any]]) -> list[str]:
    turns = _turns(row, runs)
    cpu = " / ".join(f"{spent * 1e6:.1f}" for spent in row["cpu_seconds_per_image"])
    return [
        row["title"],
        f"**{row['images_per_second']:,.0f}**",
        f"{row['pixels_per_second'] / 1e6:,.0f}",
        row["beside"],
        f"{row['other_per_second']:,.0f}",
        f"{row['ratio']:.2f} ({min(turns):.2f}–{max(turns):.2f})",
        cpu or "–",
    ]


BATCH, CIFAR_BATCH = 256, 512
CROP = (RandomResizedCrop(224), RandomHorizontalFlip())
CIFAR_CROP = (RandomCrop(32, padding=4), RandomHorizontalFlip())
_SAID = "RandomResizedCrop(224) + flip"

ROWS = [
    # what, title, beside, ours, other, least, pixels
    Pair("raw crop / bare loop", f"raw 256 px, {_SAID}", "the bare kernels in a thread pool",
        "raw", "bare raw", 0.95, 224**2),
    Pair("raw crop / FFCV raw", "the same", "FFCV, raw",
        "raw", "ffcv raw", 3.3, 224**2),
    Pair("jpeg crop / bare loop", f"JPEG 256 px, {_SAID}", "whole decoding and the bare kernels",
        "jpeg", "bare jpeg", 1.15, 224**2),
    Pair("jpeg crop / region loop", "the same", "decoding what the crop needs and the bare kernels",
        "jpeg", "bare region", 0.9, 224**2),
    Pair("jpeg crop / FFCV jpg", "the same", "FFCV, jpg",
        "jpeg", "ffcv jpg", 2, 224**2),
    Pair("yuv420 crop / raw crop", f"yuv420 256 px, {_SAID}", "H5Loader, raw",
        "yuv420", "raw", 0.85, 224**2),
    Pair("set crop / file crop", f"raw 256 px as a set of 32 MB shards, {_SAID}",
        "H5Loader, the same in one file", "set", "raw", 0.97, 224**2),
    Pair("set gather / file gather", "raw 256 px as a set, bytes for a device",
        "H5Loader, the same in one file", "set gather", "gather", 0.97, 256**2),
    Pair("gather / index_select", "raw 256 px, bytes for a device",
        "torch.index_select in a thread pool", "gather", "select", 0.95, 256**2),
    Pair("CIFAR crop / FFCV", "CIFAR-10, RandomCrop(32, padding=4) + flip",
        "FFCV, flip + translate", "cifar", "ffcv cifar", 3.4, 32**2),
    Pair("CIFAR gather / FFCV", "CIFAR-10, bytes for a device", "FFCV, flip + translate",
        "cifar gather", "ffcv cifar", 8, 32**2),
]  # fmt: skip
COLD = Pair("cold / 16 threads pread", "3 GB from the disk, random order", "bare pread, 16 threads",
    "ours", "pread", 0.9, 256**2)  # fmt: skip

COLD_LOADER = """
    import json, sys, time
    from h5feed import H5Dataset, H5Loader
    path, batch, threads, limit = sys.argv[1], *map(int, sys.argv[2:])
    ds = H5Dataset(path)
    began, count = time.perf_counter(), 0
    with H5Loader(ds, batch, shuffle=True, num_workers=threads, seed=1) as loader:
        for images, _ in loader:
            count += len(images)
            if count >= limit:
                break
        print(json.dumps(count / (time.perf_counter() - began)))
"""
"""H5Loader gathering whole images in random order: PATH BATCH THREADS IMAGES."""

COLD_PREAD = """
    import json, os, sys, time
    from concurrent.futures import ThreadPoolExecutor
    from h5feed.feed.order import FullShuffle
    from h5feed.store import read_index
    import numpy as np
    path, batch, threads, limit = sys.argv[1], *map(int, sys.argv[2:])
    index = read_index(path)
    extent = index.extents["images"]
    order = FullShuffle(len(index), 1, 0)(np.arange(limit))
    fd = os.open(path, os.O_RDONLY)
    size = extent.spec.item_bytes
    def read(part):
        buffer = [memoryview(bytearray(size))]
        for item in part:
            os.preadv(fd, buffer, extent.start + item * size)
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(read, [part.tolist() for part in np.array_split(order, 64 * threads)]))
        print(json.dumps(limit / (time.perf_counter() - began)))
"""
"""Bare pread of the same images in the same order: PATH BATCH THREADS IMAGES."""

FIRST_BATCH = """
    import json, sys, time
    from h5feed import H5Dataset, H5Loader
    from h5feed.augment import RandomHorizontalFlip, RandomResizedCrop
    began = time.perf_counter()
    ds = H5Dataset(sys.argv[1])
    opened = time.perf_counter() - began
    ops = (RandomResizedCrop(224), RandomHorizontalFlip())
    with H5Loader(ds, 256, shuffle=True, augment=ops, num_workers=2) as loader:
        next(iter(loader))
        print(json.dumps([time.perf_counter() - began, opened]))
"""

SCHEDULING = """
    import json, sys, time
    from h5feed import H5Dataset, H5Loader
    from h5feed.augment import RandomHorizontalFlip, RandomResizedCrop
    from h5feed.feed.rows import Augmented
    Augmented.fill = lambda *arguments: None  # the payload
    ops = (RandomResizedCrop(2), RandomHorizontalFlip())
    found = []
    for path in sys.argv[1:]:
        options = {"shuffle": True, "drop_last": True, "num_workers": 1}
        found.append(H5Loader(H5Dataset(path), 256, augment=ops, **options))
    times = [[] for _ in found]
    for turn in range(6):
        for loader, spent in zip(found, times):
            count, began = 0, time.process_time()
            while count < 2340:  # sixty epochs of ten thousand, or a part of one
                for _ in loader:
                    count += 1
                    if count == 2340:
                        break
            spent.append((time.process_time() - began) / count)
    print(json.dumps([min(spent) for spent in times]))
"""
"""CPU seconds per batch with nothing to fill, for each file: PATHS."""


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--ffcv", help="interpreter that has FFCV")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "h5feed_bench"))
    parser.add_argument("--times", type=int, default=8, help="copies of each photo (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--alone", action="store_true", help="leave out cold, first, scheduling")
    parser.add_argument("--json", type=Path, help="add everything measured to this file's runs")
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    parser.add_argument("--run", default=today, help="name of this run (the day, %(default)s)")
    options = parser.parse_args(arguments)
    if options.json and options.alone:
        parser.error("--json writes all figures: leave --alone out")
    return options


def compare(options: argparse.Namespace) -> list[MeasuredPair]:
    """Measure the rows that compare subjects."""
    made, rows = makers(options), chosen(options)
    names = dict.fromkeys(name for row in rows for name in (row.ours, row.other))
    windows = {name: partial(made[name](), options.seconds) for name in names}
    found = in_turns(windows, options.rounds)
    rates = {name: [rate for rate, _ in values] for name, values in found.items()}
    cpu = {name: statistics.median(spent for _, spent in v) for name, v in found.items()}
    return [
        MeasuredPair(
            row=row,
            ours=rates[row.ours],
            other=rates[row.other],
            cpu=(cpu[row.ours], cpu[row.other]),
        )
        for row in rows
    ]


def chosen(options: argparse.Namespace) -> list[Pair]:
    """Return the rows asked for, of those that can be measured here."""
    return [
        row
        for row in ROWS
        if options.only in row.what
        and (options.ffcv or "FFCV" not in row.what)
        and (options.cifar or "CIFAR" not in row.what)
    ]


def packed_photos(options: argparse.Namespace, store: str, shards: str = "") -> Path:
    """Return the photos packed at 256 pixels: a file, or a set of shards of that size."""
    photos = options.work / f"photos{options.times}"
    copies(options.photos, photos, options.times)
    if shards:
        return packed(photos, options.work / f"{store}_set", size=256, store=store, shards=shards)
    return packed(photos, options.work / f"{store}.h5", size=256, store=store)


def packed_cifar(options: argparse.Namespace) -> Path:
    """Return CIFAR-10 packed."""
    return packed(options.cifar, options.work / "cifar.h5", size=32)


def makers(options: argparse.Namespace) -> dict[str, Callable[[], Window]]:
    """Return what opens each subject."""
    work, threads = options.work, options.threads
    photos = work / f"photos{options.times}"
    file, cifar = partial(packed_photos, options), partial(packed_cifar, options)
    a_set = partial(packed_photos, options, "raw", "32MB")

    def loader(path: Path, batch_size: int, **how: Any) -> Window:
        made = H5Loader(
            H5Dataset(path), batch_size, shuffle=True, num_workers=threads, drop_last=True, **how
        )
        return of_subject(InProcess(lambda: made))

    def loop(store: str, kind: Callable[[dict[str, Any]], Subject]) -> Window:
        params = {"file": str(file(store)), "batch_size": BATCH, "workers": threads, "crop": 224}
        return of_subject(kind(params))

    def beside(source: Path, batch_size: int, **params: Any) -> Window:
        return ffcv(options.ffcv, source, work, batch_size=batch_size, workers=threads, **params)

    def ffcv_photos(variant: str) -> Window:
        copies(options.photos, photos, options.times)
        return beside(photos, BATCH, variant=variant, size=256, crop=224)

    return {
        "raw": lambda: loader(file("raw"), BATCH, augment=CROP),
        "jpeg": lambda: loader(file("jpeg"), BATCH, augment=CROP),
        "yuv420": lambda: loader(file("yuv420"), BATCH, augment=CROP),
        "set": lambda: loader(a_set(), BATCH, augment=CROP),
        "set gather": lambda: loader(a_set(), BATCH, augment_on="device"),
        "bare raw": lambda: loop("raw", CropLoop),
        "bare jpeg": lambda: loop("jpeg", CropLoop),
        "bare region": lambda: loop("jpeg", RegionDecodeLoop),
        "gather": lambda: loader(file("raw"), BATCH, augment_on="device"),
        "select": lambda: of_subject(InProcess(index_select(file("raw"), BATCH, threads))),
        "cifar": lambda: loader(cifar(), CIFAR_BATCH, augment=CIFAR_CROP),
        "cifar gather": lambda: loader(cifar(), CIFAR_BATCH, augment_on="device"),
        "ffcv raw": lambda: ffcv_photos("raw"),
        "ffcv jpg": lambda: ffcv_photos("jpeg"),
        "ffcv cifar": lambda: beside(options.cifar, CIFAR_BATCH, variant="raw", size=32, padding=4),
    }


class InProcess:
    """A subject that calls `made` for each epoch's batches; every batch is let go of at once."""

    dtype, layout, note = "uint8", "NHWC", ""

    def __init__(self, made: Callable[[], Iterable[Any]]) -> None:
        self.files: list[str] = []
        self._made = made

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield (images, labels) of one epoch."""
        yield from self._made()

    def synchronize(self) -> None:
        """CPU batches are there when they are handed out."""

    def close(self) -> None:
        """It lasts as long as the process."""


def index_select(path: Path, batch_size: int, threads: int) -> Callable[[], Iterator[Any]]:
    """Return epochs of torch.index_select into one buffer, a share of it per thread."""
    images = readable(H5Dataset(path).files.whole("images"))
    out = torch.zeros((batch_size, *images.shape[1:]), dtype=torch.uint8)
    order = torch.randperm(len(images))
    share = -(-batch_size // (2 * threads))
    pool = ThreadPoolExecutor(threads)

    def fill(begin: int, start: int) -> None:
        torch.set_num_threads(1)
        rows = out[start : start + share]
        torch.index_select(images, 0, order[begin + start : begin + start + len(rows)], out=rows)

    def epoch() -> Iterator[Any]:
        for begin in range(0, len(images) - batch_size + 1, batch_size):
            starts = range(0, batch_size, share)
            list(pool.map(fill, [begin] * len(starts), starts))
            yield out, None

    return epoch


def measure_cold(options: argparse.Namespace) -> MeasuredPair:
    """Measure cold reads of a 3 GB file in random order."""
    path = synthetic(options.work / "cold.h5", COLD_ITEMS, 256, random=True)

    def cold(code: str, threads: int) -> float:
        evict([path])
        rate: float = run_code(code, path, BATCH, threads, COLD_ITEMS)
        return rate

    sides = {
        "ours": partial(cold, COLD_LOADER, options.threads),
        "pread": partial(cold, COLD_PREAD, 16),
    }
    rates = in_turns(sides, options.rounds)
    return MeasuredPair(row=COLD, ours=rates["ours"], other=rates["pread"])


def measure_start(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print how long the first batch of an ImageNet-sized file takes."""
    path = synthetic(options.work / "imagenet.h5", IMAGENET, 8)
    found = [run_code(FIRST_BATCH, path) for _ in range(options.rounds)]
    first, opened = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"first batch of {IMAGENET:,} items: {first:.3f} s (opening {opened:.3f}), at most 0.5")
    return {"items": IMAGENET, "seconds": first, "opening_seconds": opened}


def measure_python(options: argparse.Namespace) -> dict[str, float]:
    """Measure and print what Python takes for an image, CPU seconds in which its lock is held."""
    stores = ("raw", "yuv420", "jpeg")
    subjects = {one: (packed_photos(options, one), CROP, BATCH) for one in stores}
    if options.cifar:
        subjects["CIFAR"] = packed_cifar(options), CIFAR_CROP, CIFAR_BATCH
    measures = {
        name: partial(python_seconds, *subject, seconds=options.seconds)
        for name, subject in subjects.items()
    }
    found = {name: statistics.median(v) for name, v in in_turns(measures, options.rounds).items()}
    for name, spent in found.items():
        most = 30 if name == "jpeg" else 12
        print(
            f"Python takes {spent * 1e6:.1f} us an image ({name}), at most {most}: threads make at "
            f"most {1 / spent:,.0f} img/s"
        )
    return found


def measure_scheduling(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print the cost of scheduling a batch of a small and of a large file."""
    paths = [synthetic(options.work / f"{count}.h5", count, 2) for count in SCHEDULED]
    small, large = run_code(SCHEDULING, *paths)
    print(
        f"scheduling a batch of {BATCH}: {small * 1e6:.0f} us at {SCHEDULED[0]:,} items, "
        f"{large * 1e6:.0f} us at {SCHEDULED[1]:,}: ratio {large / small:.3f}, at most 1.10"
    )
    return {"items": SCHEDULED, "seconds_per_batch": (small, large), "ratio": large / small}


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures must not be without."""
    facts = machine_facts(options.work)
    installed = versions(PACKAGES)
    if options.ffcv:
        installed["ffcv"] = version_of(options.ffcv, "ffcv")
    return {
        "command": " ".join(["python", "tools/bench_loader.py", *_places_left_out(sys.argv[1:])]),
        "machine": describe_machine(facts),
        "facts": facts,
        "versions": installed,
        "threads": options.threads,
        "repeats": options.rounds,
        "seconds": options.seconds,
        "batch_size": BATCH,
        "cifar_batch_size": CIFAR_BATCH,
    }


def _places_left_out(arguments: list[str]) -> list[str]:
    """Return the command line with a word for each path of this machine."""
    words = {"--cifar": "CIFAR/train", "--ffcv": "PYTHON", "--work": "FOLDER", "--json": "FILE"}
    shown, before = [], ""
    for argument in arguments:
        plain = before.startswith("--") or argument.startswith("--")
        shown.append(words.get(before, argument) if plain else "PHOTOS")
        before = argument
    return shown


def main(arguments: list[str] | None = None) -> None:
    """Measure what was asked for."""
    options = read_options(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    where = circumstances(options)
    print(f"{options.threads} threads, medians of {options.rounds}; {where['machine']}")
    print(HEAD, flush=True)
    found = compare(options)
    print("\n".join(one.line() for one in found), flush=True)
    if options.alone:
        return
    found.append(measure_cold(options))
    print(found[-1].line(), flush=True)
    where |= {
        "start": measure_start(options),
        "scheduling": measure_scheduling(options),
        "python_seconds_per_image": measure_python(options),
    }
    if options.json:
        rows = [one.values() for one in found]
        kept = json.loads(options.json.read_text()) if options.json.exists() else []
        runs = [run for run in kept if run["run"] != options.run]
        runs.append({"run": options.run, **where, "rows": rows})
        options.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
