"""How fast H5Loader is beside what bounds it, and beside FFCV: every figure, one run.

    python tools/bench_loader.py PHOTOS [--cifar FOLDER] [--ffcv PYTHON] [--work FOLDER]

PHOTOS and FOLDER hold a folder of pictures per class. All that a row compares takes turns, in
windows of --seconds; what is shown are medians of --rounds. Rows beside FFCV need an interpreter
that has it (--ffcv). FFCV's max_resolution keeps the aspect, so it stores about 0.75 of a
square's pixels, and its crops are made from those; pixels per second are of what is delivered.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from h5feed.augment import RandomCrop, RandomHorizontalFlip
from loader_bench import files, processes, subjects
from loader_bench.subjects import Window

CIFAR = (RandomCrop(32, padding=4), RandomHorizontalFlip())
BATCH, CIFAR_BATCH = 256, 512
HEAD = f"{'':26} {'ratio':>6} {'least':>6} {'ours':>10} {'other/s':>10} {'Mpix/s':>9}  CPU us/image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison: ours / other is to be at least `least`."""

    what: str
    ours: str
    other: str
    least: float
    pixels: int
    """Of a delivered image."""


ROWS = [
    Row(what="raw crop / bare loop", ours="raw", other="bare raw", least=0.95, pixels=224**2),
    Row(what="raw crop / FFCV raw", ours="raw", other="ffcv raw", least=3.2, pixels=224**2),
    Row(what="jpeg crop / bare loop", ours="jpeg", other="bare jpeg", least=1, pixels=224**2),
    Row(what="jpeg crop / FFCV jpg", ours="jpeg", other="ffcv jpg", least=1.6, pixels=224**2),
    Row(what="yuv420 crop / raw crop", ours="yuv420", other="raw", least=0.85, pixels=224**2),
    Row(what="gather / index_select", ours="gather", other="select", least=0.9, pixels=256**2),
    Row(what="CIFAR crop / FFCV", ours="cifar", other="ffcv cifar", least=2, pixels=32**2),
    Row(what="CIFAR gather / FFCV", ours="cifar gather", other="ffcv cifar", least=8, pixels=32**2),
]


def read_options() -> argparse.Namespace:
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
    return parser.parse_args()


def makers(options: argparse.Namespace) -> dict[str, Callable[[], Window]]:
    """Return what opens each subject."""
    work, threads, python = options.work, options.threads, options.ffcv
    photos = work / f"photos{options.times}"

    def file(store: str) -> Path:
        files.copies(options.photos, photos, options.times)
        return files.packed(photos, work / f"{store}.h5", size=256, store=store)

    def cifar() -> Path:
        return files.packed(options.cifar, work / "cifar.h5", size=32)

    def crop(store: str) -> Window:
        return subjects.loader(file(store), BATCH, threads, augment=subjects.CROP)

    def ffcv(mode: str) -> Window:
        return processes.ffcv(
            python,
            files.copies(options.photos, photos, options.times),
            work / f"{mode}.beton",
            mode=mode,
            longest=256,
            batch_size=BATCH,
            workers=threads,
            crop=224,
        )

    def ffcv_cifar() -> Window:
        return processes.ffcv(
            python,
            options.cifar,
            work / "cifar.beton",
            mode="raw",
            longest=32,
            batch_size=CIFAR_BATCH,
            workers=threads,
            crop=0,
        )

    return {
        "raw": lambda: crop("raw"),
        "jpeg": lambda: crop("jpeg"),
        "yuv420": lambda: crop("yuv420"),
        "bare raw": lambda: subjects.bare(file("raw"), BATCH, threads),
        "bare jpeg": lambda: subjects.bare(file("jpeg"), BATCH, threads),
        "gather": lambda: subjects.loader(file("raw"), BATCH, threads, augment_on="device"),
        "select": lambda: subjects.index_select(file("raw"), BATCH, threads),
        "cifar": lambda: subjects.loader(cifar(), CIFAR_BATCH, threads, augment=CIFAR),
        "cifar gather": lambda: subjects.loader(cifar(), CIFAR_BATCH, threads, augment_on="device"),
        "ffcv raw": lambda: ffcv("raw"),
        "ffcv jpg": lambda: ffcv("jpg"),
        "ffcv cifar": ffcv_cifar,
    }


def in_turns(
    windows: dict[str, Window], rounds: int, seconds: float
) -> dict[str, list[tuple[float, float]]]:
    """Return every subject's (rate, CPU per image), one per round, after one not counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in windows}
    for turn in range(rounds + 1):
        for name, window in windows.items():
            measured = window(seconds)
            if turn:
                found[name].append(measured)
    return found


def median_ratio(ours: list[float], other: list[float]) -> float:
    """Compare neighbors in time: a slow second of the machine falls on both."""
    return statistics.median(a / b for a, b in zip(ours, other, strict=True))


def show_rows(options: argparse.Namespace) -> None:
    """Measure and print the rows that compare subjects."""
    made = makers(options)
    rows = [
        row
        for row in ROWS
        if options.only in row.what
        and (options.ffcv or "FFCV" not in row.what)
        and (options.cifar or "CIFAR" not in row.what)
    ]
    names = dict.fromkeys(name for row in rows for name in (row.ours, row.other))
    found = in_turns({name: made[name]() for name in names}, options.rounds, options.seconds)
    rates = {name: [rate for rate, _ in values] for name, values in found.items()}
    cpu = {name: [spent * 1e6 for _, spent in values] for name, values in found.items()}
    print(HEAD)
    for row in rows:
        ours, other = rates[row.ours], rates[row.other]
        show(
            row.what,
            median_ratio(ours, other),
            row.least,
            statistics.median(ours),
            statistics.median(other),
            row.pixels,
            f"{statistics.median(cpu[row.ours]):8.1f} {statistics.median(cpu[row.other]):8.1f}",
        )


def show(
    what: str, ratio: float, least: float, ours: float, other: float, pixels: int, cpu: str = ""
) -> None:
    """Print one line of the table."""
    print(
        f"{what:26} {ratio:6.2f} {least:6.2f} {ours:10,.0f} {other:10,.0f} "
        f"{ours * pixels / 1e6:9,.0f} {cpu}"
    )


def show_cold(options: argparse.Namespace) -> None:
    """Measure and print cold reads of a 3 GB file in random order."""
    path = files.synthetic(options.work / "cold.h5", 16_384, 256, random=True)
    rates: dict[str, list[float]] = {"ours": [], "pread": []}
    for _ in range(options.rounds):
        for name, code, threads in (
            ("ours", processes.COLD_LOADER, options.threads),
            ("pread", processes.COLD_PREAD, 16),
        ):
            processes.evict(path)
            rates[name].append(processes.run(code, path, BATCH, threads, 16_384))
    ours, pread = (statistics.median(found) for found in rates.values())
    ratio = median_ratio(rates["ours"], rates["pread"])
    show("cold / 16 threads pread", ratio, 0.9, ours, pread, 256**2)


def show_start(options: argparse.Namespace) -> None:
    """Measure and print the first batch of an ImageNet-sized file, and the cost of scheduling."""
    path = files.synthetic(options.work / "imagenet.h5", 1_281_167, 8)
    found = [processes.run(processes.FIRST_BATCH, path) for _ in range(options.rounds)]
    first, opened = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"first batch of 1,281,167 items: {first:.3f} s (opening {opened:.3f}), at most 0.5")
    paths = [
        files.synthetic(options.work / f"{count}.h5", count, 2) for count in (10_000, 10_000_000)
    ]
    small, large = processes.run(processes.SCHEDULING, *paths)
    print(
        f"scheduling a batch of {BATCH}: {small * 1e6:.0f} us at 10,000 items, "
        f"{large * 1e6:.0f} us at 10,000,000: ratio {large / small:.3f}, at most 1.10"
    )


def main() -> None:
    """Measure what was asked for."""
    options = read_options()
    options.work.mkdir(parents=True, exist_ok=True)
    print(f"{options.threads} threads, medians of {options.rounds}, torch {torch.__version__}")
    show_rows(options)
    if not options.alone:
        show_cold(options)
        show_start(options)


if __name__ == "__main__":
    main()
