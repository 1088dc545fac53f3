"""Measure every rival on the same images, the same crops, the same clock.

    python tools/peers/rivals.py
    python tools/peers/run.py IMAGES --json peers.json --plot peers.png

IMAGES has a folder per class. With --times K every image is copied K times first, so that an
epoch of a small set lasts longer than it takes to start one. Each rival converts the images by
its own means in its own environment (raw pixels at 256 px, JPEG at 256 px, original files), then
all take turns, once per variant and worker count. Each setting is saved when it is done, so that
a run that was interrupted goes on where it was when it is started again with the same --run;
--again measures what is there already anew. Runs of other days and machines stay in the file, and
count in tables. A rival that is missing or fails is reported. A result that looks wrong (CPU that
jumps, time lost after an epoch's last batch, two workers slower than one) ends the run with exit
status 1 until it is explained; see results.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "adapters"))

from _common import SIZE, labeled_files
from PIL import Image
from results import VARIANTS, load, save, save_plot, setting, unexplained
from rivals import CEILINGS, RIVALS, Rival

from h5feed.bench import rounds, system
from h5feed.bench.measure import Expectation
from h5feed.bench.process import Remote, SubjectError
from h5feed.bench.report import Comparison, as_dict, as_text, from_dict
from harness import copies, version_of


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path, help="a folder with a folder per class")
    parser.add_argument("--times", type=int, default=1, help="copies of each image (%(default)s)")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="environments")
    parser.add_argument(
        "--work", type=Path, default=Path(".venv-peers/work"), help="converted data"
    )
    parser.add_argument("--only", nargs="+", default=[], help="rivals whose name contains one")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=0.8, help="length of a timed window")
    parser.add_argument("--repeats", type=int, default=7, help="windows per rival")
    parser.add_argument("--epochs", type=int, default=3, help="turns with a whole epoch as well")
    parser.add_argument("--cold", type=float, default=0.0, help="longest cold run in s; 0: none")
    parser.add_argument("--convert-only", action="store_true", help="stop before measuring")
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    parser.add_argument("--run", default=today, help="name of this run (the day, %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure anew what this run has")
    parser.add_argument("--json", type=Path, required=True, help="results: kept and added to")
    parser.add_argument("--plot", type=Path, help="plot of all results in the JSON file")
    return parser.parse_args(arguments)


def tell(text: str) -> None:
    """Say what is going on."""
    print(text, file=sys.stderr, flush=True)


def version(rival: Rival, peers: Path) -> str | None:
    """Return the rival's version, or None where its environment lacks it."""
    return version_of(str(rival.python(peers)), rival.distribution)


def source_pixels(source: Path) -> float:
    """Return the mean number of pixels of a source image."""
    total = 0
    files = labeled_files(source)
    for path, _ in files:
        with Image.open(path) as image:
            total += image.width * image.height
    return total / len(files)


def convert(
    rival: Rival, variant: str, source: Path, *, work: Path, peers: Path, workers: int
) -> dict[str, Any]:
    """Convert with the rival's own means; return what an earlier run did where there is one.

    Returns: data (path), files (all that it reads), seconds, bytes (of these files), pixels (mean
    of a stored image). Raises SubjectError where the adapter fails.
    """
    out = work / "converted" / source.name / Path(rival.adapter).stem / variant
    note = out / "converted.json"
    if note.exists():
        return dict(json.loads(note.read_text()))
    shutil.rmtree(out, ignore_errors=True)
    (out / "data").mkdir(parents=True)
    params = {
        "source": str(source.resolve()),
        "out": str((out / "data").resolve()),
        "variant": variant,
        "workers": workers,
    }
    with Remote(rival.command(peers)) as remote:
        told = dict(remote.ask({"do": "convert", "params": params}, timeout=3600))
    told.setdefault("files", [told["data"]])
    told["bytes"] = sum(file.stat().st_size for file in system.files_below(told["files"]))
    told.setdefault("pixels", source_pixels(source) if variant == "original" else SIZE * SIZE)
    note.write_text(json.dumps(told))
    return told


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
        if version(rival, options.peers) is None:
            left_out.append(f"{rival.name}: not installed in {options.peers} (rivals.py says why)")
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
    ceilings = [one for one in CEILINGS if "h5feed" in converted and variant in one.variants]
    expected = {
        "images": len(labels),
        "batch_size": options.batch_size,
        "height": options.crop,
        "width": options.crop,
        "label_counts": tuple(sorted(Counter(labels).values())),
    }
    told = converted | {one.name: converted["h5feed"] for one in ceilings}
    return [
        rounds.Entry(
            name=rival.name,
            command=rival.command(options.peers),
            params={
                "name": rival.name,
                "data": told[rival.name]["data"],
                "variant": variant,
                "workers": workers,
                "batch_size": options.batch_size,
                "crop": options.crop,
            },
            expected=Expectation(**expected, ceiling=rival in ceilings),
            files=tuple(told[rival.name]["files"]),
            bytes_read=told[rival.name]["bytes"],
            required=False,
            cold=rival not in ceilings,
        )
        for rival in (*RIVALS, *ceilings)
        if rival.name in told
    ]


def _schedule(variant: str, workers: int, options: argparse.Namespace) -> rounds.Schedule:
    """Cold runs and whole epochs take long: only where the table shows them."""
    most = workers == max(options.workers)
    return rounds.Schedule(
        seconds=options.seconds,
        repeats=options.repeats,
        settle=0.2,
        verify=0.5,
        cold=options.cold if most and variant == "raw" else 0.0,
        epochs=options.epochs if most and variant != "original" else 0,
    )


def measure(
    variant: str, workers: int, source: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure one setting and return its report, with the conversions, as JSON values."""
    converted, left_out = convert_all(variant, source, options)
    labels = [label for _, label in labeled_files(source)]
    schedule = _schedule(variant, workers, options)
    outcomes = rounds.run(entries(variant, workers, converted, labels, options), schedule, tell)
    facts = system.machine_facts(options.work)
    versions = {rival.name: version(rival, options.peers) for rival in RIVALS}
    made = Comparison(
        title=f"{VARIANTS[variant]}, {workers} worker{'s' * (workers > 1)}: random crop to "
        f"{options.crop}² and flip, uint8 batches of {options.batch_size}",
        outcomes=tuple(outcomes),
        images=len(labels),
        batch_size=options.batch_size,
        machine=system.describe_machine(facts),
        facts={
            "machine": facts,
            "versions": {name: found for name, found in versions.items() if found},
            "schedule": asdict(schedule),
            "times": options.times,
            "conversions": {
                name: {key: told[key] for key in ("seconds", "bytes", "pixels")}
                for name, told in converted.items()
            },
        },
        left_out=tuple(left_out),
    )
    named = {"run": options.run, "variant": variant, "workers": workers}
    return named | as_dict(made)


def settings(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return (variant, workers) of all that is to be measured.

    A window of original files lasts seconds: they are measured with the most workers only.
    """
    return [
        (variant, workers)
        for variant in options.variants
        for workers in sorted(options.workers)
        if variant != "original" or workers == max(options.workers)
    ]


def measure_all(source: Path, options: argparse.Namespace) -> None:
    """Measure every setting that this run lacks; each is saved and printed when it is done."""
    there = {setting(r) for r in load(options.json) if r["run"] == options.run}
    for variant, workers in settings(options):
        if (variant, workers) in there and not options.again:
            tell(f"{VARIANTS[variant]}, {workers} workers: in {options.json} already (--again?)")
            continue
        result = measure(variant, workers, source, options)
        save([result], options.json)
        print(as_text(from_dict(Comparison, result)), "\n", flush=True)


def convert_only(source: Path, options: argparse.Namespace) -> None:
    """Convert for every rival and say who could not."""
    for variant in options.variants:
        for who in convert_all(variant, source, options)[1]:
            tell(who)


def main() -> int:
    """Convert, measure, save, draw."""
    options = read_options()
    source = options.images
    if options.times > 1:
        repeated = options.work / "sources" / f"{source.name}-x{options.times}"
        source = copies(source, repeated, options.times)
    if options.convert_only:
        convert_only(source, options)
        return 0
    status = 0
    try:
        measure_all(source, options)
    except KeyboardInterrupt:
        tell(f"interrupted: the settings that were done are in {options.json}")
        status = 130
    found = load(options.json)
    if options.plot is not None and found:
        save_plot(found, options.plot)
    return status or _explained(found, options.json)


def _explained(found: list[dict[str, Any]], path: Path) -> int:
    """Say what must be explained; return the exit status."""
    doubts = unexplained(found, path)
    for doubt in doubts:
        tell(f"not to be believed before it is explained: {doubt}")
    return 1 if doubts else 0


if __name__ == "__main__":
    raise SystemExit(main())
