"""Measure every rival on the same pictures, the same crops, the same clock.

    python tools/peers/install.py
    python tools/peers/run.py IMAGES --json peers.json --plot peers.png

IMAGES has a folder per class. With --times K every picture is copied K times first, so that an
epoch of a small set lasts longer than it takes to start one. Each rival converts the pictures by
its own means in its own environment (raw pixels at 256 px, JPEG at 256 px, original files), then
all take turns, once per variant and worker count. Each setting is saved when it is done, in the
place of its former results; the others stay, so that a run may be interrupted and go on with
--variants and --workers. A rival that is missing or fails is reported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "adapters"))

from _common import pictures
from conversions import convert, prepare_source
from h5feed_bench import machine, report, rounds, words
from h5feed_bench.measure import Expectation
from h5feed_bench.remote import SubjectError
from rivals import CEILING, RIVALS, Rival

VARIANTS = {"raw": "raw pixels, 256 px", "jpeg": "JPEG, 256 px", "original": "original files"}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path, help="a folder with a folder per class")
    parser.add_argument("--times", type=int, default=1, help="copies of each picture (%(default)s)")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="environments")
    parser.add_argument(
        "--work", type=Path, default=Path(".venv-peers/work"), help="converted data"
    )
    parser.add_argument("--only", nargs="+", default=[], help="rivals whose name contains one")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a timed window")
    parser.add_argument("--repeats", type=int, default=3, help="windows per rival")
    parser.add_argument("--cold", type=float, default=0.0, help="longest cold run in s; 0: none")
    parser.add_argument("--convert-only", action="store_true", help="stop before measuring")
    parser.add_argument("--json", type=Path, required=True, help="results: kept and added to")
    parser.add_argument("--plot", type=Path, help="picture of all results in the JSON file")
    return parser.parse_args(arguments)


def tell(text: str) -> None:
    """Say what is going on."""
    print(text, file=sys.stderr, flush=True)


def version_of(rival: Rival, peers: Path) -> str | None:
    """Return the rival's version, or None where its environment lacks it."""
    code = f"from importlib.metadata import version; print(version({rival.distribution!r}))"
    try:
        done = subprocess.run([rival.python(peers), "-c", code], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def convert_all(
    variant: str, source: Path, options: argparse.Namespace
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return each rival's conversion by name, and who takes no part with the reason."""
    done, left_out = {}, []
    for rival in RIVALS:
        if options.only and not any(part in rival.name for part in options.only):
            continue
        if variant not in rival.variants:
            left_out.append(f"{rival.name}: has no {VARIANTS[variant]}")
            continue
        if version_of(rival, options.peers) is None:
            left_out.append(f"{rival.name}: not installed in {options.peers} (install.py says why)")
            continue
        tell(f"{VARIANTS[variant]}: converting for {rival.name}")
        try:
            done[rival.name] = convert(
                rival,
                variant,
                source,
                work=options.work,
                peers=options.peers,
                workers=max(options.workers),
            )
        except SubjectError as ex:
            left_out.append(f"{rival.name}: conversion failed: {ex}")
    return done, left_out


def entries(
    variant: str,
    workers: int,
    converted: dict[str, dict[str, Any]],
    labels: list[int],
    options: argparse.Namespace,
) -> list[rounds.Entry]:
    """Return the rivals of one comparison, and the ceiling if h5feed is among them."""
    expected = {
        "pictures": len(labels),
        "batch_size": options.batch_size,
        "height": options.crop,
        "width": options.crop,
        "label_counts": tuple(sorted(Counter(labels).values())),
    }
    told = dict(converted)
    if "h5feed" in told:
        told[CEILING.name] = told["h5feed"]
    return [
        rounds.Entry(
            name=rival.name,
            command=rival.command(options.peers),
            params={
                "data": told[rival.name]["data"],
                "variant": variant,
                "workers": workers,
                "batch_size": options.batch_size,
                "crop": options.crop,
            },
            expected=Expectation(**expected, ceiling=rival is CEILING),
            files=tuple(told[rival.name]["files"]),
            bytes_read=told[rival.name]["bytes"],
            required=False,
            cold=rival is not CEILING,
        )
        for rival in (*RIVALS, CEILING)
        if rival.name in told
    ]


def measure(
    variant: str, workers: int, source: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure one setting and return its report, with the conversions, as JSON values."""
    converted, left_out = convert_all(variant, source, options)
    labels = [label for _, label in pictures(source)]
    schedule = rounds.Schedule(
        seconds=options.seconds, repeats=options.repeats, cold=options.cold, verify=1.0
    )
    outcomes = rounds.run(entries(variant, workers, converted, labels, options), schedule, tell)
    facts = machine.machine(options.work)
    versions = {rival.name: version_of(rival, options.peers) for rival in RIVALS}
    made = report.Report(
        title=f"{VARIANTS[variant]}, {workers} worker{'s' * (workers > 1)}: random crop to "
        f"{options.crop}² and flip, uint8 batches of {options.batch_size}",
        outcomes=tuple(outcomes),
        pictures=len(labels),
        batch_size=options.batch_size,
        machine=machine.describe(facts),
        facts={
            "machine": facts,
            "versions": {name: version for name, version in versions.items() if version},
            "schedule": asdict(schedule),
            "times": options.times,
            "conversions": {
                name: {key: told[key] for key in ("seconds", "bytes", "pixels")}
                for name, told in converted.items()
            },
        },
        left_out=tuple(left_out),
    )
    return {"variant": variant, "workers": workers} | report.as_dict(made)


def save(results: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Merge `results` into the JSON file and return all that it holds."""
    fresh = {(r["variant"], r["workers"]) for r in results}
    kept = json.loads(path.read_text()) if path.exists() else []
    merged = [r for r in kept if (r["variant"], r["workers"]) not in fresh] + results
    merged.sort(key=lambda r: (list(VARIANTS).index(r["variant"]), r["workers"]))
    path.write_text(json.dumps(merged, ensure_ascii=False, indent=1) + "\n")
    return merged


def measure_all(source: Path, options: argparse.Namespace) -> None:
    """Measure every setting; each is saved and printed when it is done."""
    for variant in options.variants:
        for workers in options.workers:
            result = measure(variant, workers, source, options)
            save([result], options.json)
            print(words.as_text(report.from_dict(result)), "\n", flush=True)


def convert_only(source: Path, options: argparse.Namespace) -> None:
    """Convert for every rival and say who could not."""
    for variant in options.variants:
        for who in convert_all(variant, source, options)[1]:
            tell(who)


def main() -> int:
    """Convert, measure, save, draw."""
    options = read_options()
    source = prepare_source(options.images, options.times, options.work)
    if options.convert_only:
        convert_only(source, options)
        return 0
    status = 0
    try:
        measure_all(source, options)
    except KeyboardInterrupt:
        tell(f"interrupted: the settings that were done are in {options.json}")
        status = 130
    if options.plot is not None and options.json.exists():
        from picture import save_peers_plot

        save_peers_plot(json.loads(options.json.read_text()), options.plot)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
