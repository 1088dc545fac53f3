"""What run.py measured, over all its runs: kept, brought together, doubted, put into tables.

The JSON file is a list of settings, each of one run (a day and a machine), one variant and one
worker count. What looks wrong in it must be explained in the file beside it, NAME_explained.json, a
list of {"loader", "variant", "about", "why"}: `about` is a part of the finding's text. Without that
run.py fails, and tools/pages.py makes no table.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h5feed.bench.report import Chart, Comparison, draw_chart, from_dict
from h5feed.bench.rounds import suspicions
from h5feed.plotting import Bar

__all__ = [
    "VARIANTS",
    "Finding",
    "Together",
    "findings",
    "gain",
    "gains",
    "load",
    "ratios",
    "save",
    "save_plot",
    "setting",
    "settings_of",
    "table",
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


def gain(results: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table of all loaders at the most workers, the fastest first."""
    most = max(workers for _, workers in settings_of(results))
    wanted = [one for one in settings_of(results) if one[1] == most]
    ceilings = {o["name"] for r in results for o in r["outcomes"] if o["ceiling"]}
    names = dict.fromkeys(o["name"] for r in results for o in r["outcomes"])
    rates = {
        name: [found and found.rate for one in wanted for found in [together(results, one, name)]]
        for name in names
        if name not in ceilings
    }
    lines = ["| | " + " | ".join(HEADS[variant] for variant, _ in wanted) + " |"]
    lines.append("|---" + "|---:" * len(wanted) + "|")
    for name in sorted(rates, key=lambda name: [-(rate or 0) for rate in rates[name]]):
        bold = "**" if name == "h5feed" else ""
        cells = [f"{bold}{rate:,.0f}{bold}" if rate else "–" for rate in rates[name]]
        lines.append(f"| {bold}{name}{bold} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"{_runs(results)}."])


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


def _bars(results: Sequence[dict[str, Any]], variant: str) -> list[Bar]:
    """A bar per loader for the most workers, fastest first; the fewest as a stroke."""
    counts = [workers for kind, workers in settings_of(results) if kind == variant]
    most, fewest = (variant, counts[-1]), (variant, counts[0])
    names = dict.fromkeys(o["name"] for r in results if setting(r) == most for o in r["outcomes"])
    bars = []
    for name in names:
        found, single = (together(results, wanted, name) for wanted in (most, fewest))
        assert found is not None
        says = ("failed", "") if found.rate is None else (f"{found.rate:,.0f}", "")
        if found.rate is not None and found.spread is not None:
            says = (says[0], f"±{found.spread:.0%}")
        bars.append(
            Bar(
                name=name + _pixels(results, most, name),
                value=found.rate,
                low=found.low,
                high=found.high,
                says=says,
                kind="ceiling" if found.ceiling else "ours" if name == "h5feed" else "other",
                mark=single.rate if single and most != fewest else None,
            )
        )
    return sorted(bars, key=lambda bar: (bar.kind == "ceiling", -(bar.value or 0.0)))


def _pixels(results: Sequence[dict[str, Any]], wanted: tuple[str, int], name: str) -> str:
    """Say how much less than the others a rival stores, where it does."""
    stored = {
        who: told["pixels"]
        for result in results
        if setting(result) == wanted
        for who, told in result["facts"]["conversions"].items()
    }
    if name not in stored or "h5feed" not in stored:
        return ""
    share = stored[name] / stored["h5feed"]
    return f" ({share:.0%} of the pixels)" if share < 0.95 else ""


def _plot_caption(results: Sequence[dict[str, Any]]) -> str:
    last = results[-1]
    runs = len({result["run"] for result in results})
    fewest = min(result["workers"] for result in results)
    return (
        f"{last['machine']}. {last['images']:,} images, RandomResizedCrop(224) and flip to uint8 "
        f"batches of {last['batch_size']}, files in the page cache; {runs} "
        f"run{'s' * (runs > 1)}. Bars: {last['workers']} workers, median of the windows; whiskers "
        f"and ±: slowest and fastest window; stroke: {fewest} worker{'s' * (fewest > 1)}. "
        "Dashed outlines: ceilings, the work without a loader."
    )


def save_plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw all variants in `results` (run.py's JSON)."""
    variants = dict.fromkeys(variant for variant, _ in settings_of(results))
    groups = {
        VARIANTS[variant][0].upper() + VARIANTS[variant][1:]: _bars(results, variant)
        for variant in variants
    }
    title = "Loaders side by side: images per second"
    chart = Chart(groups, title, _plot_caption(results), heads=("img/s", "±"), apart=True)
    draw_chart(chart, path)
