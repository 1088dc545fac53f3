"""What bench_loader.py found: as lines of a terminal, as JSON, and as a table for the README."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h5feed.bench.report import markdown_table

__all__ = ["HEAD", "Comparison", "Found", "markdown"]

HEAD = f"{'':26} {'ratio':>6} {'least':>6} {'ours':>10} {'other/s':>10} {'Mpix/s':>9}  CPU us/image"
_HEADS = ("measured", "H5Loader, img/s", "Mpixel/s", "against", "img/s", "ratio", "CPU µs/image")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """H5Loader beside something else: ours / other is to be at least `least`."""

    what: str
    title: str
    """What is measured, for the README; a ceiling's own name is `beside`."""
    beside: str
    """What the other one is, for the README."""
    ours: str
    other: str
    least: float
    pixels: int
    """Of a delivered image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A comparison measured: images per second of every round, CPU seconds per image."""

    row: Comparison
    ours: Sequence[float]
    other: Sequence[float]
    cpu: Sequence[float] = ()
    """Medians, of ours and of the other; none for what runs in processes that come and go."""

    @property
    def ratio(self) -> float:
        """Neighbors in time compared: a slow second of the machine falls on both."""
        return statistics.median(a / b for a, b in zip(self.ours, self.other, strict=True))

    def line(self) -> str:
        """Return a line below HEAD."""
        row, rate = self.row, statistics.median(self.ours)
        cpu = " ".join(f"{spent * 1e6:8.1f}" for spent in self.cpu)
        return (
            f"{row.what:26} {self.ratio:6.2f} {row.least:6.2f} {rate:10,.0f} "
            f"{statistics.median(self.other):10,.0f} {rate * row.pixels / 1e6:9,.0f} {cpu}"
        )

    def values(self) -> dict[str, Any]:
        """Return what stands in the JSON."""
        return {
            "what": self.row.what,
            "title": self.row.title,
            "beside": self.row.beside,
            "ratio": self.ratio,
            "least": self.row.least,
            "images_per_second": statistics.median(self.ours),
            "pixels_per_second": statistics.median(self.ours) * self.row.pixels,
            "other_per_second": statistics.median(self.other),
            "cpu_seconds_per_image": list(self.cpu),
            "rounds": {"ours": list(self.ours), "other": list(self.other)},
        }


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Return the README's table of what --json wrote: the last run, and the range over all runs."""
    results = runs[-1]
    rows = [_cells(row, runs) for row in results["rows"]]
    start, scheduling = results["start"], results["scheduling"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    small, large = (spent * 1e6 for spent in scheduling["seconds_per_batch"])
    foot = (
        f"{_machines(runs)}; {results['threads']} threads or workers each, in turns, medians of "
        f"{results['repeats']} in the last run, in brackets the slowest and fastest turn of all "
        f"runs, each of whole epochs; uint8 batches of {results['batch_size']}, CIFAR-10's of "
        f"{results['cifar_batch_size']}. FFCV stores photographs with max_resolution=256, about "
        f"0.75 of the pixels. First batch of {start['items']:,} items: {start['seconds']:.2f} s "
        f"after the import. Order, parameters and hand-over of a batch take {small:,.0f} µs at "
        f"{scheduling['items'][0]:,} items and {large:,.0f} µs at {scheduling['items'][1]:,}. "
        f"{versions}. `{results['command']}`"
    )
    return "\n".join([*markdown_table(_HEADS, rows, left={0, 3}), "", foot])


def _machines(runs: Sequence[dict[str, Any]]) -> str:
    return "; ".join(dict.fromkeys(f"{run['machine']} ({run['run']})" for run in runs))


def _turns(row: dict[str, Any], runs: Sequence[dict[str, Any]]) -> list[float]:
    """Return the ratio of each turn of each run that has the row."""
    return [
        ours / other
        for run in runs
        for same in run["rows"]
        if same["what"] == row["what"]
        for ours, other in zip(same["rounds"]["ours"], same["rounds"]["other"], strict=True)
    ]


def _cells(row: dict[str, Any], runs: Sequence[dict[str, Any]]) -> list[str]:
    turns = _turns(row, runs)
    cpu = " / ".join(f"{spent * 1e6:.1f}" for spent in row["cpu_seconds_per_image"])
    return [
        row["title"],
        f"**{row['images_per_second']:,.0f}**",
        f"{row['pixels_per_second'] / 1e6:,.0f}",
        row["beside"],
        f"{row['other_per_second']:,.0f}",
        f"{row['ratio']:.2f} ({min(turns):.2f}–{max(turns):.2f})",
        cpu or "–",
    ]
