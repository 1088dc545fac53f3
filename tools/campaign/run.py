"""Try to break packing, files and loaders, thousands of times, each time reproducibly.

    python tools/campaign/run.py --minutes 2
    python tools/campaign/run.py --only metadata --seed 17 --cases 1      # one case again

Every case is a process of its own, forked from one that has imported everything, with a folder of
its own and a seed that alone decides what it does (a kill after some milliseconds excepted). A
wrong result, a hang, a traceback or a signal is a failure: it is printed with the command that
repeats it, its folder is kept under --keep, and the exit status is 1. The families share the time
by their weights. Linux alone, for fork, /proc and limits; without the right to mount file systems,
the cases about full disks are left out, which is said.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cv2
import folders
import kills
import limits
import loading
import mutations
import torch
from cases import DEADLINE, CaseResult, Family, run_case
from material import Material, make_material, small_steps

import h5feed

FAMILIES: dict[str, tuple[Family, int]] = {
    "kill": (kills.kill, 4),
    "concurrent": (kills.concurrent, 2),
    "limits": (limits.limited_packing, 3),
    "disk": (limits.full_disk, 3),
    "reading": (limits.limited_reading, 2),
    "folder": (folders.hostile_folder, 4),
    "manifest": (folders.hostile_manifest, 3),
    "pixels": (mutations.mutated_pixels, 2),
    "metadata": (mutations.mutated_metadata, 3),
    "forged": (mutations.forged, 4),
    "resumed": (loading.resumed, 3),
    "truncated": (loading.truncated, 1),
}
"""Each with its share of the time."""


@dataclass(slots=True)
class Tally:
    """What became of one family's cases."""

    what: str
    cases: int = 0
    seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="run for this long in all (default 2)")
    parser.add_argument("--cases", type=int, help="of each family, and job, instead of minutes")
    parser.add_argument("--only", action="append", choices=sorted(FAMILIES), help="these families")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each family")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds a case may take")
    parser.add_argument("--keep", type=Path, help="where failed cases are kept (default: beside)")
    parser.add_argument("--json", type=Path, help="write counts, machine and versions to this file")
    parser.add_argument("--list", action="store_true", help="say what the families are, and end")
    options = parser.parse_args(arguments)
    if options.minutes is None and options.cases is None:
        options.minutes = 2.0
    return options


def main(arguments: Sequence[str] | None = None, families: Mapping[str, Any] = FAMILIES) -> int:
    """Run cases until time or count is reached; return the exit status."""
    options = read_options(arguments)
    if options.list:
        for name, (family, weight) in families.items():
            print(f"{name:<16} {weight:>3}  {_what(family)}")
        return 0
    chosen = {name: families[name] for name in options.only or families}
    if "disk" in chosen and not limits.can_mount():
        print("disk: left out, this user may not mount file systems")
        del chosen["disk"]
    cv2.setNumThreads(1)
    torch.set_num_threads(1)  # a process with threads cannot be forked safely
    small_steps()
    scratch = Path(tempfile.mkdtemp(prefix="h5feed-campaign-", dir=_fast_folder()))
    try:
        tallies = _campaign(options, chosen, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    failures = _report(tallies)
    if options.json is not None:
        options.json.write_text(json.dumps(_facts(options, tallies), indent=1) + "\n")
    return 1 if failures else 0


def _campaign(
    options: argparse.Namespace, chosen: Mapping[str, tuple[Family, int]], scratch: Path
) -> dict[str, Tally]:
    material = make_material(scratch / "material")
    gc.collect()
    gc.freeze()  # or the collector would touch, and so copy, what every case shares
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    parts = [scratch / f"part{job}.json" for job in range(options.jobs)]
    jobs = []
    for job, part in enumerate(parts):
        jobs.append(os.fork())
        if not jobs[-1]:
            try:
                made = _share(options, chosen, scratch, material, until, job)
                part.write_text(json.dumps({name: asdict(tally) for name, tally in made.items()}))
            finally:
                os._exit(0)
    for child in jobs:
        os.waitpid(child, 0)
    return _sum([json.loads(part.read_text()) for part in parts])


def _share(
    options: argparse.Namespace,
    chosen: Mapping[str, tuple[Family, int]],
    scratch: Path,
    material: Material,
    until: float | None,
    job: int,
) -> dict[str, Tally]:
    """Run one job's share: of each family, every so many'th seed."""
    keep = options.keep or Path(tempfile.gettempdir(), f"campaign-failures-{os.getppid()}")
    tallies = {name: Tally(_what(family)) for name, (family, _) in chosen.items()}
    while (name := _next(tallies, chosen, options, until)) is not None:
        tally = tallies[name]
        seed = options.seed + tally.cases * options.jobs + job
        folder = scratch / f"{name}-{seed}"
        outcome = run_case(name, chosen[name][0], seed, folder, material, options.deadline)
        tally.cases += 1
        tally.seconds += outcome.seconds
        if outcome.failure is not None:
            tally.failures.append({"seed": seed, "failure": outcome.failure.partition("\n")[0]})
            _show(outcome, folder, keep)
    return tallies


def _sum(parts: Sequence[Mapping[str, Any]]) -> dict[str, Tally]:
    tallies = {name: Tally(tally["what"]) for name, tally in parts[0].items()}
    for part in parts:
        for name, tally in part.items():
            tallies[name].cases += tally["cases"]
            tallies[name].seconds += tally["seconds"]
            tallies[name].failures += tally["failures"]
    return tallies


def _fast_folder() -> str | None:
    """Return a folder in memory where there is a large one: packing waits for the disk else."""
    shared = "/dev/shm"
    large = os.path.isdir(shared) and shutil.disk_usage(shared).free > 2 << 30
    return shared if large and os.access(shared, os.W_OK) else None


def _next(
    tallies: Mapping[str, Tally],
    chosen: Mapping[str, tuple[Family, int]],
    options: argparse.Namespace,
    until: float | None,
) -> str | None:
    """Return the family that has had the least of its share of the time."""
    if until is not None and time.monotonic() >= until:
        return None
    left = [n for n, t in tallies.items() if options.cases is None or t.cases < options.cases]
    return min(left, key=lambda name: tallies[name].seconds / chosen[name][1], default=None)


def _show(outcome: CaseResult, folder: Path, keep: Path) -> None:
    assert outcome.failure is not None
    kept = keep / folder.name
    shutil.rmtree(kept, ignore_errors=True)
    keep.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", folder, kept], check=False)  # copies pipes and holes, too
    shutil.rmtree(folder, ignore_errors=True)
    lines = outcome.failure.splitlines()
    print(f"FAILED {outcome.family}, seed {outcome.seed}: {lines[0][:300]}")
    print("\n".join(f"    {line}" for line in lines[1:60]))
    again = f"--only {outcome.family} --seed {outcome.seed} --cases 1"
    print(f"  again: python tools/campaign/run.py {again}")
    print(f"  kept:  {kept}", flush=True)


def _report(tallies: Mapping[str, Tally]) -> int:
    for name, tally in tallies.items():
        failed = len(tally.failures)
        print(f"{name:<12} {tally.cases:>6} cases {failed:>4} failed {tally.seconds:>8.1f} s")
    failures = sum(len(tally.failures) for tally in tallies.values())
    print(f"{sum(tally.cases for tally in tallies.values()):,} cases, {failures:,} failed")
    return failures


def _what(family: Family) -> str:
    return (family.__doc__ or "").partition("\n")[0]


def _facts(options: argparse.Namespace, tallies: Mapping[str, Tally]) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "cases": sum(tally.cases for tally in tallies.values()),
        "failed": sum(len(tally.failures) for tally in tallies.values()),
        "seed": options.seed,
        "minutes": options.minutes,
        "families": {name: asdict(tally) for name, tally in tallies.items()},
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "versions": {
            "h5feed": h5feed.__version__,
            "commit": commit,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
