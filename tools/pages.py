"""Put every figure of the pages into its place, from what benchmarks/ holds.

    python tools/pages.py            write the tables of README.md and docs/tricks.md
    python tools/pages.py --check    exit 1, and name what differs from benchmarks/

A table stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. A figure in a sentence is
compared, and changed by hand. benchmarks/README.md says which command wrote which file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import peers_table
from _marks import put_into
from h5feed.bench.ablate import Ablation
from h5feed.bench.report import Comparison, as_markdown, from_dict
from loader_bench.results import markdown as loader_table
from tricks_table import tricks_table

__all__ = ["differences", "main"]

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def _read(name: str) -> Any:
    return json.loads((BENCHMARKS / name).read_text())


def _ablation() -> Ablation:
    return from_dict(Ablation, _read("ablate.json"))


def _measured(name: str) -> str:
    """Return what was compared, and in one sentence what came of it."""
    found = from_dict(Comparison, _read(name))
    return f"{found.title} ({found.machine}): {found.headline()}"


def _peers() -> str:
    path = BENCHMARKS / "peers.json"
    results = peers_table.load(path)
    if doubts := peers_table.unexplained(results, path):
        raise SystemExit("\n".join(f"not explained: {doubt}" for doubt in doubts))
    return peers_table.table(results, path)


def _campaign() -> str:
    """Return what was tried against the library, how often, and how much of it failed."""
    found = _read("campaign.json")
    failed = f"{found['failed']:,}" if found["failed"] else "none"
    lines = [
        f"{found['cases']:,} cases in {found['minutes']:g} minutes ({found['machine']}); {failed} "
        "wrong, hung or with a traceback:",
        "",
        "| family | cases | what is done, and what has to hold |",
        "|---|---:|---|",
    ]
    for name, tally in found["families"].items():
        lines.append(f"| {name} | {tally['cases']:,} | {tally['what']} |")
    return "\n".join(lines)


TABLES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {
        "peers": _peers,
        "loader": lambda: loader_table(_read("loader.json")),
        "bench": lambda: _measured("bench.json"),
        "train": lambda: _measured("train.json"),
        "campaign": _campaign,
        "ablate": lambda: as_markdown(_ablation()),
    },
    "docs/tricks.md": {"tricks": lambda: tricks_table([_ablation()])},
}
"""By page, then by mark. The table of a GPU is tools/gpu_run.py's."""


def _accuracy() -> str:
    found = _read("accuracy.json")
    files, packed, difference, width = (
        100 * found[key] for key in ("files_mean", "packed_mean", "difference", "half_width_95")
    )
    both = f"{files:.1f} % both" if f"{files:.1f}" == f"{packed:.1f}" else f"{files:.1f} %"
    return f"({both}): packed − files = {difference:+.2f} ± {width:.2f} points"


def _trained(name: str, said: Callable[[Mapping[str, Any]], str]) -> Callable[[], str]:
    """Return what a recipe of the README reached, and in how many seconds, over all runs."""

    def sentence() -> str:
        found = [run["recipes"][name] for run in _read("training.json")]
        times = sorted(round(recipe["seconds"]) for recipe in found)
        span = f"{times[0]}" if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
        return f"{said(found[-1])}{span} seconds"

    return sentence


SENTENCES: Mapping[str, Sequence[Callable[[], str]]] = {
    "README.md": [
        _accuracy,
        _trained("samples", lambda _: ""),
        _trained("cifar", lambda found: f"{100 * found['val']['accuracy']:.1f} % after "),
        _trained(
            "scenes", lambda found: f"mean IoU {found['val']['mean IoU']:.2f} after 12 epochs, "
        ),
    ]
}
"""By page: words that must stand in it, line breaks apart."""


def differences(root: Path = ROOT) -> Iterator[str]:
    """Say what in the pages is not what benchmarks/ holds."""
    for page, tables in TABLES.items():
        text = (root / page).read_text()
        for name, made in tables.items():
            whole = f"<!-- {name}: begin -->\n{made()}\n<!-- {name}: end -->"
            if whole not in text:
                yield f"{page}: the table {name!r} is another one: run python tools/pages.py"
    for page, sentences in SENTENCES.items():
        text = " ".join((root / page).read_text().split())
        for said in (made() for made in sentences):
            if said not in text:
                yield f"{page} lacks the words {said!r}, which benchmarks/ gives"


def main(given: Sequence[str] | None = None) -> int:
    """Write the tables, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    options = parser.parse_args(given)
    for page, tables in {} if options.check else TABLES.items():
        for name, made in tables.items():
            put_into(ROOT / page, name, made())
    found = list(differences())
    print("\n".join(found) or "every figure is the one that benchmarks/ holds")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
