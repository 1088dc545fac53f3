"""How fast H5Loader is beside what bounds it, and beside FFCV: every figure, one run.

    python tools/bench_loader.py PHOTOS [--cifar FOLDER] [--ffcv PYTHON] [--json FILE]

PHOTOS and FOLDER hold a folder of images per class. All that a row compares takes turns, in
windows of --seconds; what is shown are medians of --rounds. Rows beside FFCV need an interpreter
that has it (--ffcv). FFCV's max_resolution keeps the aspect, so it stores about 0.75 of a
square's pixels, and its crops are made from those; pixels per second are of what is delivered.
`tools/pages.py loader FILE` makes a table of what --json wrote.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from h5feed.bench.system import describe_machine, machine_facts, versions
from loader_bench import files, processes
from loader_bench.results import HEAD, Found
from loader_bench.rows import BATCH, CIFAR_BATCH, COLD, chosen, makers
from loader_bench.subjects import Window

PACKAGES = ("h5feed", "torch", "numpy", "opencv-python-headless", "simplejpeg")
COLD_ITEMS, IMAGENET, SCHEDULED = 16_384, 1_281_167, (10_000, 10_000_000)


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


def compare(options: argparse.Namespace) -> list[Found]:
    """Measure the rows that compare subjects."""
    made, rows = makers(options), chosen(options)
    names = dict.fromkeys(name for row in rows for name in (row.ours, row.other))
    found = in_turns({name: made[name]() for name in names}, options.rounds, options.seconds)
    rates = {name: [rate for rate, _ in values] for name, values in found.items()}
    cpu = {name: statistics.median(spent for _, spent in v) for name, v in found.items()}
    return [
        Found(
            row=row,
            ours=rates[row.ours],
            other=rates[row.other],
            cpu=(cpu[row.ours], cpu[row.other]),
        )
        for row in rows
    ]


def measure_cold(options: argparse.Namespace) -> Found:
    """Measure cold reads of a 3 GB file in random order."""
    path = files.synthetic(options.work / "cold.h5", COLD_ITEMS, 256, random=True)
    rates: dict[str, list[float]] = {"ours": [], "pread": []}
    for _ in range(options.rounds):
        for name, code, threads in (
            ("ours", processes.COLD_LOADER, options.threads),
            ("pread", processes.COLD_PREAD, 16),
        ):
            processes.evict(path)
            rates[name].append(processes.run(code, path, BATCH, threads, COLD_ITEMS))
    return Found(row=COLD, ours=rates["ours"], other=rates["pread"])


def measure_start(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print how long the first batch of an ImageNet-sized file takes."""
    path = files.synthetic(options.work / "imagenet.h5", IMAGENET, 8)
    found = [processes.run(processes.FIRST_BATCH, path) for _ in range(options.rounds)]
    first, opened = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"first batch of {IMAGENET:,} items: {first:.3f} s (opening {opened:.3f}), at most 0.5")
    return {"items": IMAGENET, "seconds": first, "opening_seconds": opened}


def measure_scheduling(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print the cost of scheduling a batch of a small and of a large file."""
    paths = [files.synthetic(options.work / f"{count}.h5", count, 2) for count in SCHEDULED]
    small, large = processes.run(processes.SCHEDULING, *paths)
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
        installed["ffcv"] = processes.version(options.ffcv, "ffcv")
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
    where |= {"start": measure_start(options), "scheduling": measure_scheduling(options)}
    if options.json:
        rows = [one.values() for one in found]
        kept = json.loads(options.json.read_text()) if options.json.exists() else []
        runs = [run for run in kept if run["run"] != options.run]
        runs.append({"run": options.run, **where, "rows": rows})
        options.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
