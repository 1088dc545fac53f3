"""What run.py measured, over all its runs: kept, brought together, and looked at with suspicion.

The JSON file is a list of settings, each of one run (a day and a machine), one variant and one
worker count. What looks wrong in it must be explained in the file beside it, NAME_explained.json, a
list of {"loader", "variant", "about", "why"}: `about` is a part of the finding's text. Without that
run.py fails, and peers_table.py makes no table.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h5feed.bench.report import Comparison, from_dict
from h5feed.bench.rounds import suspicions

__all__ = [
    "VARIANTS",
    "Finding",
    "Together",
    "findings",
    "load",
    "ratios",
    "save",
    "setting",
    "settings_of",
    "together",
    "unexplained",
    "why",
]

VARIANTS = {"raw": "raw pixels, 256 px", "jpeg": "JPEG, 256 px", "original": "original files"}
Result = dict[str, Any]
Setting = tuple[str, int]
"""Variant and worker count."""


def setting(result: Result) -> Setting:
    """Return the setting that a result is of."""
    return result["variant"], result["workers"]


def load(path: Path) -> list[Result]:
    """Return all settings of all runs in the file; none if there is no file."""
    return list(json.loads(path.read_text())) if path.exists() else []


def save(results: Sequence[Result], path: Path) -> list[Result]:
    """Merge `results` into the JSON file, each in the place of its run's former ones."""
    fresh = {(r["run"], *setting(r)) for r in results}
    merged = [r for r in load(path) if (r["run"], *setting(r)) not in fresh] + [*results]
    merged.sort(key=lambda r: (r["run"], list(VARIANTS).index(r["variant"]), r["workers"]))
    path.write_text(json.dumps(merged, ensure_ascii=False, indent=1) + "\n")
    return merged


def settings_of(results: Iterable[Result]) -> list[Setting]:
    """Return the settings that were measured in any run, in order."""
    return sorted(
        {setting(result) for result in results}, key=lambda s: (list(VARIANTS).index(s[0]), s[1])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """One loader in one setting, all runs together."""

    rate: float | None
    """Images per second: the median of the runs' medians."""
    low: float | None
    """The slowest of all windows of all runs."""
    high: float | None
    ceiling: bool

    @property
    def spread(self) -> float | None:
        """Half the distance between the slowest and the fastest window, as part of `rate`."""
        if self.rate is None or self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2 / self.rate


def _outcomes(results: Iterable[Result], wanted: Setting, name: str) -> list[Any]:
    """Return the loader's outcome in each run that measured it in this setting."""
    return [
        outcome
        for result in results
        if setting(result) == wanted
        for outcome in result["outcomes"]
        if outcome["name"] == name
    ]


def together(results: Iterable[Result], wanted: Setting, name: str) -> Together | None:
    """Return one loader's figures of all runs; None where no run tried it."""
    found = _outcomes(results, wanted, name)
    if not found:
        return None
    medians = [o["images_per_second"] for o in found if o["images_per_second"]]
    windows = [rate for o in found for rate in o["rates"]]
    return Together(
        rate=statistics.median(medians) if medians else None,
        low=min(windows, default=None),
        high=max(windows, default=None),
        ceiling=found[0]["ceiling"],
    )


def ratios(
    results: Iterable[Result], wanted: Setting, ours: str, other: str, what: str = "rates"
) -> list[float]:
    """Return ours/other of each turn of each run.

    Neighbors in time: a slow second of the machine falls on both. `what` is "rates" (windows) or
    "epoch_rates" (whole epochs).
    """
    found = []
    for result in results:
        sides = [_outcomes([result], wanted, name) for name in (ours, other)]
        if all(sides):
            turns = zip(*(side[0].get(what) or () for side in sides), strict=False)
            found += [mine / theirs for mine, theirs in turns]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that must be explained before the figures may be believed."""

    run: str
    loader: str
    variant: str
    workers: int
    text: str

    def __str__(self) -> str:
        return f"{self.loader}, {VARIANTS[self.variant]}, run {self.run}: {self.text}"


def findings(results: Sequence[Result]) -> list[Finding]:
    """Return all that looks wrong: within a setting, and in two workers beside one."""
    found = []
    for result in results:
        for outcome in from_dict(Comparison, result).outcomes:
            said = suspicions(outcome)
            if slower := _slower(results, result, outcome.name):
                said.append(slower)
            found += [
                Finding(
                    run=result["run"],
                    loader=outcome.name,
                    variant=result["variant"],
                    workers=result["workers"],
                    text=f"with {result['workers']} worker{'s' * (result['workers'] > 1)}, {text}",
                )
                for text in said
            ]
    return found


def _slower(results: Sequence[Result], more: Result, name: str) -> str | None:
    """Say that a loader is slower than with fewer workers in the same run."""
    rate = together([more], setting(more), name)
    for fewer in results:
        same = fewer["run"] == more["run"] and fewer["variant"] == more["variant"]
        before = together([fewer], setting(fewer), name) if same else None
        if before is None or fewer["workers"] >= more["workers"]:
            continue
        if rate and rate.rate and before.rate and rate.rate < before.rate:
            return (
                f"{rate.rate:,.0f} img/s are slower than with {fewer['workers']} "
                f"({before.rate:,.0f})"
            )
    return None


def why(finding: Finding, path: Path) -> str | None:
    """Return the explanation recorded beside the JSON file `path`, or None."""
    notes = path.with_name(f"{path.stem}_explained.json")
    for note in json.loads(notes.read_text()) if notes.exists() else []:
        named = (note["loader"], note["variant"]) == (finding.loader, finding.variant)
        if named and note["about"] in finding.text:
            return str(note["why"])
    return None


def unexplained(results: Sequence[Result], path: Path) -> list[Finding]:
    """Return the findings without an explanation beside the JSON file `path`."""
    return [finding for finding in findings(results) if why(finding, path) is None]
