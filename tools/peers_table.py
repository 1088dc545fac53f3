"""Turn the JSON of tools/peers/run.py into a page's tables.

    python tools/peers_table.py benchmarks/peers.json --readme README.md

--readme replaces what stands between `<!-- peers: begin -->` and `<!-- peers: end -->`; without it
the tables are printed. Results that look wrong and are not explained make no table (see
tools/peers/results.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers/adapters"))

from results import (
    Setting,
    findings,
    load,
    ratios,
    setting,
    settings_of,
    together,
    unexplained,
    why,
)

from _marks import put_into

HEADS = {"raw": "raw 256 px", "jpeg": "JPEG 256 px", "original": "original files"}


def _cell(results: Sequence[dict[str, Any]], wanted: Setting, name: str) -> str:
    """Images per second of a loader, and how far the windows of all runs are spread."""
    found = together(results, wanted, name)
    if found is None:
        return "–"
    if found.rate is None:
        return "failed"
    text = f"{found.rate:,.0f}"
    text = f"**{text}**" if name == "h5feed" else text
    return text if found.spread is None else f"{text} ±{found.spread:.0%}"


def _row(results: Sequence[dict[str, Any]], name: str, raw: dict[str, Any]) -> str:
    """A loader's row; what one variant must stand for comes from the last run's raw one."""
    cells = [_cell(results, wanted, name) for wanted in settings_of(results)]
    found = next((o for o in raw["outcomes"] if o["name"] == name), {})
    spent, memory = found.get("cpu_seconds_per_1000"), found.get("private_bytes")
    cold = (found.get("cold") or {}).get("rate")
    made = raw["facts"]["conversions"].get(name)
    cells += [
        f"{cold:,.0f}" if cold else "–",
        f"{spent:.2f}" if spent else "–",
        f"{memory / 1e6:,.0f}" if memory and made else "–",
        f"{made['bytes'] / raw['images'] / 1000:,.0f}" if made else "–",
        f"{made['seconds']:,.0f}" if made else "–",
    ]
    ceiling = any(o["ceiling"] for r in results for o in r["outcomes"] if o["name"] == name)
    return f"| {f'*{name}*' if ceiling else name} | " + " | ".join(cells) + " |"


def _stored_less(result: dict[str, Any]) -> str:
    """Say who stores fewer pixels than h5feed, and how many."""
    stored = {n: told["pixels"] for n, told in result["facts"]["conversions"].items()}
    ours = stored.get("h5feed")
    fewer = [
        f"{n} stores {p / ours:.2f} of the pixels"
        for n, p in stored.items()
        if ours and p < 0.95 * ours
    ]
    return "; ".join(["", *fewer])


def _foot(results: Sequence[dict[str, Any]], result: dict[str, Any]) -> str:
    """What was done, on what, with which versions; `result` is the last run's raw one."""
    crop = result["outcomes"][0]["params"]["crop"]
    versions = ", ".join(f"{n} {v}" for n, v in result["facts"]["versions"].items())
    windows = result["facts"]["schedule"]["repeats"]
    return (
        f"{_runs(results)}; {result['images']:,} images, RandomResizedCrop({crop}) + flip "
        f"to uint8 batches of {result['batch_size']}, warm cache, medians of {windows} windows in "
        "the last run; ±: half the range of all windows of all runs; w: workers"
        f"{_stored_less(result)}. The last five columns are of raw pixels, in the last run; cold: "
        "img/s with an emptied page cache. In italics: ceilings, the work without a loader. "
        f"{versions}."
    )


def _runs(results: Sequence[dict[str, Any]]) -> str:
    """Name the runs, each with its machine."""
    machines = {result["run"]: result["machine"] for result in results}
    return "; ".join(f"{machine} ({run})" for run, machine in machines.items())


def _explained(results: Sequence[dict[str, Any]], path: Path) -> list[str]:
    return [f"{finding} ({why(finding, path)})  " for finding in findings(results)]


def _range(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"**{statistics.median(values):.2f}×** ({min(values):.2f}–{max(values):.2f})"


def gains(results: Sequence[dict[str, Any]], other: str = "FFCV") -> list[str]:
    """Return the lines of the table of h5feed's speed over another's, turn by turn."""
    lines = [
        f"| h5feed / {other}, turn by turn | windows | whole epochs |",
        "|---|---:|---:|",
    ]
    for wanted in settings_of(results):
        warm = ratios(results, wanted, "h5feed", other)
        whole = ratios(results, wanted, "h5feed", other, "epoch_rates")
        if warm:
            name = f"{HEADS[wanted[0]]}, {wanted[1]}w"
            lines.append(f"| {name} | {_range(warm)} | {_range(whole)} |")
    return lines if len(lines) > 2 else []


def table(results: Sequence[dict[str, Any]], path: Path = Path("peers.json")) -> str:
    """Return the Markdown tables: loaders by variant and worker count, then h5feed beside FFCV.

    `path` is where explanations are looked for.
    """
    names = list(dict.fromkeys(o["name"] for r in results for o in r["outcomes"]))
    raw = max((r for r in results if r["variant"] == "raw"), key=lambda r: (r["run"], r["workers"]))
    wanted = settings_of(results)
    heads = [f"{HEADS[variant]}, {workers}w" for variant, workers in wanted]
    heads += ["cold", "CPU s/1000", "memory MB", "kB/img", "conversion s"]
    order = {}
    for name in names:
        rates = [together(results, one, name) for one in (setting(raw), *wanted[::-1])]
        order[name] = next((found.rate for found in rates if found and found.rate), 0.0)
    rows = [_row(results, name, raw) for name in sorted(names, key=lambda n: -order[n])]
    lines = ["| loader, img/s | " + " | ".join(heads) + " |", "|---" + "|---:" * len(heads) + "|"]
    parts = [[*lines, *rows], [_foot(results, raw)], _explained(results, path), gains(results)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def main(given: Sequence[str] | None = None) -> int:
    """Print the tables, or put them into their page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path, help="what tools/peers/run.py --json wrote")
    parser.add_argument("--readme", type=Path, help="the page to put the tables into")
    options = parser.parse_args(given)
    results = load(options.json)
    if doubts := unexplained(results, options.json):
        print("\n".join(f"not explained: {doubt}" for doubt in doubts), file=sys.stderr)
        return 1
    text = table(results, options.json)
    if options.readme is None:
        print(text)
    else:
        put_into(options.readme, "peers", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
