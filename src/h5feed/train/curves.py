"""curves.png: what a run did, at a glance."""

from pathlib import Path
from typing import Any

from h5feed._optional import require
from h5feed.train.log import CURVES, METRICS, read_metrics

__all__ = ["draw_curves"]

_TRAIN, _VAL = "tab:blue", "tab:orange"


def draw_curves(out: Path, metric: str) -> Path:
    """Draw the run in folder `out` and return the picture's path.

    Four panels over the steps: loss, `metric`, learning rate, and images per second with the
    share of time spent waiting for data. Raises ImportError without matplotlib.
    """
    require("matplotlib", "train")
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    lines = read_metrics(out / METRICS)
    train = [line for line in lines if line["kind"] == "train"]
    val = [line for line in lines if line["kind"] == "val"]
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    for panel, name in zip(panels[0], ("loss", metric), strict=True):
        _line(panel, train, name, _TRAIN, "train")
        _line(panel, val, name, _VAL, "val", marker="o")
        panel.set_ylabel(name)
        panel.legend()
    _line(panels[1, 0], train, "lr", "tab:green", "")
    panels[1, 0].set_ylabel("learning rate")
    _speed(panels[1, 1], train)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[1]:
        panel.set_xlabel("step")
    last = (val or train or [{}])[-1]
    figure.suptitle(f"{out}: {metric} {last[metric]:.4g}" if metric in last else str(out))
    path = out / CURVES
    figure.savefig(path, dpi=110)
    return path


def _line(
    panel: Any, lines: list[dict[str, Any]], name: str, color: str, label: str, marker: str = ""
) -> None:
    points = [(line["step"], line[name]) for line in lines if name in line]
    if points:
        panel.plot(*zip(*points, strict=True), color=color, label=label, marker=marker, ms=4)


def _speed(panel: Any, train: list[dict[str, Any]]) -> None:
    _line(panel, train, "images_per_s", "tab:purple", "images/s")
    panel.set_ylabel("images/s")
    panel.set_ylim(bottom=0)
    steps = [line["step"] for line in train]
    shares = [100 * line["data_wait"] for line in train]
    wait = panel.twinx()
    wait.fill_between(steps, shares, color="tab:red", alpha=0.25, lw=0)
    wait.set_ylim(0, 100)
    wait.set_ylabel("waiting for data, %", color="tab:red")
