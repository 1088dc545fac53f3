"""Turn the JSON of tools/peers/run.py into a page's table.

    python tools/peers_table.py benchmarks/peers.json --readme README.md

--readme replaces what stands between `<!-- peers: begin -->` and `<!-- peers: end -->`; without it
the table is printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _marks import put_into

HEADS = {"raw": "raw 256 px", "jpeg": "JPEG 256 px", "original": "original files"}


def _cell(result: dict[str, Any] | None, name: str) -> str:
    """Images per second of a rival, and its CPU seconds per 1,000 images."""
    if result is None:
        return ""
    found = next((o for o in result["outcomes"] if o["name"] == name), None)
    if found is None:
        return "–"
    if found["error"] is not None:
        return "failed"
    text = f"{found['images_per_second']:,.0f}"
    return f"**{text}**" if name == "h5feed" else text


def _row(name: str, columns: list[dict[str, Any]], raw: dict[str, Any]) -> str:
    """A rival's row; what one variant must stand for comes from the raw one."""
    cells = [_cell(result, name) for result in columns]
    found = next((o for o in raw["outcomes"] if o["name"] == name), {})
    spent, memory = found.get("cpu_seconds_per_1000"), found.get("private_bytes")
    cold = (found.get("cold") or {}).get("rate")
    made = raw["facts"]["conversions"].get(name)
    cells += [
        f"{cold:,.0f}" if cold else "–",
        f"{spent:.2f}" if spent else "–",
        f"{memory / 1e6:,.0f}" if memory and made else "–",
        f"{made['bytes'] / raw['pictures'] / 1000:,.0f}" if made else "–",
        f"{made['seconds']:,.0f}" if made else "–",
    ]
    shown = name if made or not found.get("ceiling") else f"*{name}*"
    return f"| {shown} | " + " | ".join(cells) + " |"


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


def _foot(result: dict[str, Any]) -> str:
    """What was done, on what, with which versions."""
    crop = result["outcomes"][0]["params"]["crop"]
    versions = ", ".join(f"{n} {v}" for n, v in result["facts"]["versions"].items())
    return (
        f"{result['machine']}; {result['pictures']:,} pictures, RandomResizedCrop({crop}) + flip "
        f"to uint8 batches of {result['batch_size']}, warm cache, medians of "
        f"{result['facts']['schedule']['repeats']}; w: workers{_stored_less(result)}. The last "
        f"five columns are of raw pixels; cold: img/s with an emptied page cache. In italics: the "
        f"ceiling, no loader at all. {versions}."
    )


def table(results: list[dict[str, Any]]) -> str:
    """Return the Markdown table: a row per rival, a column per variant and worker count."""
    names = list(dict.fromkeys(o["name"] for r in results for o in r["outcomes"]))
    raw = max((r for r in results if r["variant"] == "raw"), key=lambda r: r["workers"])
    heads = [f"{HEADS[r['variant']]}, {r['workers']}w" for r in results]
    heads += ["cold", "CPU s/1000", "memory MB", "kB/img", "conversion s"]
    fastest = max(results, key=lambda r: r["workers"])["outcomes"]
    order = {o["name"]: o["images_per_second"] or 0.0 for o in fastest}
    order |= {o["name"]: o["images_per_second"] or 0.0 for o in raw["outcomes"]}
    rows = [_row(name, results, raw) for name in sorted(names, key=lambda n: -order.get(n, 0.0))]
    lines = ["| loader, img/s | " + " | ".join(heads) + " |", "|---" + "|---:" * len(heads) + "|"]
    return "\n".join([*lines, *rows, "", _foot(raw)])


def main(given: Sequence[str] | None = None) -> int:
    """Print the table, or put it into its page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path, help="what tools/peers/run.py --json wrote")
    parser.add_argument("--readme", type=Path, help="the page to put the table into")
    options = parser.parse_args(given)
    text = table(json.loads(options.json.read_text()))
    if options.readme is None:
        print(text)
    else:
        put_into(options.readme, "peers", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
