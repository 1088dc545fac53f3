"""Tables and plots of what gpu_run.py wrote: for the README, from the JSON files alone."""

import json
import statistics
from pathlib import Path
from typing import Any

from h5feed.bench.ablate import Ablation
from h5feed.bench.report import as_markdown, from_dict, markdown_table, number, save_plot
from h5feed.plotting import COLORS, INK, saved_figure

__all__ = ["draw", "markdown"]


def markdown(folder: Path) -> str:
    """Return a section for each JSON file of `folder` that gpu_run.py wrote, by name."""
    sections = [_SECTIONS[kind](values) for kind, values, _ in _results(folder)]
    return "\n\n".join(sections)


def draw(folder: Path) -> list[Path]:
    """Draw a PNG beside each JSON file that has one."""
    drawn = []
    for kind, values, path in _results(folder):
        plot = path.with_suffix(".png")
        if kind == "loaders":
            _draw_loaders(values, plot)
        elif kind == "ablation":
            save_plot(from_dict(Ablation, values["ablation"]), plot)
        else:
            continue
        drawn.append(plot)
    return drawn


def _results(folder: Path) -> list[tuple[str, dict[str, Any], Path]]:
    found = []
    for path in sorted(folder.glob("*.json")):
        values = json.loads(path.read_text())
        if isinstance(values, dict) and values.get("kind") in _SECTIONS:
            found.append((values["kind"], values, path))
    return found


def _spread(rates: list[float]) -> str:
    if not rates:
        return "–"
    return f"±{(max(rates) - min(rates)) / 2 / statistics.median(rates):.0%}"


def _where(values: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in values["facts"]["versions"].items())
    drawn = " Drawn images." if values["facts"].get("drawn") else ""
    return f"{values['machine']}. {versions}.{drawn}"


def _loaders(values: dict[str, Any]) -> str:
    heads = ["loader", "threads", "img/s", "spread", "of ceiling", "input-bound", "CPU s/1000"]
    heads += ["GPU GB", "remark"]
    rows = [
        [
            f"[{row['name']}]" if row["ceiling"] else row["name"],
            number(row["threads"], ".0f"),
            number(row["images_per_second"], ",.0f"),
            _spread(row["rates"]),
            number(row["share_of_ceiling"], ".3f"),
            number(row["input_bound"], ".1%"),
            number(row["cpu_seconds_per_1000"], ".2f"),
            number(row["device_bytes"], ",.1f", 1e-9),
            f"failed: {row['error']}" if row["error"] else "",
        ]
        for row in values["rows"]
    ]
    table = markdown_table(heads, rows, {0, len(heads) - 1})
    return "\n".join([f"**{values['title']}**", "", *table, "", _where(values)])


def _ablation(values: dict[str, Any]) -> str:
    return as_markdown(from_dict(Ablation, values["ablation"]))


def _cifar(values: dict[str, Any]) -> str:
    heads = ["seed", "accuracy", "seconds", f"seconds to {values['target']:.0%}"]
    rows = [
        [
            str(run["seed"]),
            f"{run['accuracy']:.2%}",
            f"{run['seconds']:.2f}",
            number(run["seconds_to_target"], ".2f"),
        ]
        for run in values["runs"]
    ]
    mean = number(values["seconds_to_target_mean"], ".2f")
    rows.append(["mean", f"{values['accuracy_mean']:.2%}", f"{values['seconds_mean']:.2f}", mean])
    note = (
        f"Scoring after every epoch is in the seconds; compiling and warming up is not: "
        f"{values['compile_and_warmup_seconds']:.0f} s. {values['reached']} of "
        f"{len(values['runs'])} runs got there. Elsewhere: {values['anchors']}."
    )
    table = markdown_table(heads, rows, {0})
    return "\n".join([f"**{values['title']}**", "", *table, "", f"{note} {_where(values)}"])


def _ops(values: dict[str, Any]) -> str:
    heads = ["ops", "eager ms", "compiled ms", "compiled in s", "largest difference", "remark"]
    rows = [
        [
            row["name"],
            number(row["eager_ms"], ".3f"),
            number(row["compiled_ms"], ".3f"),
            number(row["compile_seconds"], ".0f"),
            number(row["most_off"], ".3g"),
            row["error"] or "",
        ]
        for row in values["rows"]
    ]
    table = markdown_table(heads, rows, {0, len(heads) - 1})
    return "\n".join([f"**{values['title']}**", "", *table, "", _where(values)])


_SECTIONS = {"loaders": _loaders, "ablation": _ablation, "cifar": _cifar, "ops": _ops}


def _draw_loaders(values: dict[str, Any], path: Path) -> None:
    """Images per second over loader threads; other loaders and the ceiling as lines."""
    measured = [row for row in values["rows"] if row["images_per_second"]]
    series: dict[str, list[dict[str, Any]]] = {}
    for row in measured:
        series.setdefault(row["name"], []).append(row)
    counts = sorted({row["threads"] for row in measured if row["threads"]})
    words = {"title": values["title"], "caption": _where(values)}
    with saved_figure(path, extra="bench", **words) as (_, (axes,)):
        for number, (name, rows) in enumerate(series.items()):
            marker = "osD^"[number // len(COLORS)]
            rates = [row["images_per_second"] for row in rows]
            if rows[0]["threads"] is None:
                axes.axhline(rates[0], color=INK, ls="--", lw=1, label=f"{name}: {rates[0]:,.0f}")
            else:
                axes.plot([row["threads"] for row in rows], rates, marker=marker, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("loader threads, or worker processes")
        axes.set_ylabel("images per second")
        axes.legend()
