"""curves.png: what a run did, at a glance."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from h5feed.plotting import COLORS, OURS, picture
from h5feed.train.log import CURVES, METRICS, read_metrics

__all__ = ["draw_curves"]

_VAL, _RATE, _WAIT = COLORS[1], COLORS[2], COLORS[3]
_POINTS = 200
"""Of a line at most; there are more readings in a long run."""


def draw_curves(out: Path, metric: str) -> Path:
    """Draw the run in folder `out` and return the picture's path.

    Four panels over the steps: loss, `metric`, learning rate, and images per second with the
    share of time spent waiting for data. Raises ImportError without matplotlib.
    """
    lines = read_metrics(out / METRICS)
    read = [line for line in lines if line["kind"] == "train"]
    val = [line for line in lines if line["kind"] == "val"]
    train, steps = _windows(read)
    last = (val or train or [{}])[-1]
    title = f"{out.name}: {metric} {last[metric]:.4g}" if metric in last else out.name
    caption = (
        f"train: means of {steps:,} steps, with augmentation, mixing and label smoothing where "
        "they are on; val: after each epoch, without them."
    )
    path = out / CURVES
    form: dict[str, Any] = {"width": 11.0, "height": 7.0, "rows": 2, "columns": 2, "sharex": True}
    with picture(path, extra="train", title=title, caption=caption, **form) as (_, panels):
        for panel, name in zip(panels[:2], ("loss", metric), strict=True):
            _line(panel, train, name, OURS, label="train")
            _line(panel, val, name, _VAL, label="val", marker="o" if len(val) < 40 else "")
            panel.set_ylabel(name)
            if train or val:
                panel.legend()
        _line(panels[2], read, "lr", _RATE)
        panels[2].set_ylabel("learning rate")
        panels[2].set_ylim(bottom=0)
        _speed(panels[3], train)
        for panel in panels[2:]:
            panel.set_xlabel("step")
    return path


def _windows(read: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Average readings over windows of about equally many steps; returns them, and how many.

    Readings at an epoch's end, and the first of the next epoch, are of the few steps that were
    left over: drawn as they are, they would jump about.
    """
    before, counted = 0, []
    for line in read:
        counted.append((max(1, line["step"] - before), line))
        before = line["step"]
    whole = max([steps for steps, _ in counted] + [-(-before // _POINTS)])
    windows: list[list[tuple[int, dict[str, Any]]]] = []
    held = whole
    for steps, line in counted:
        if held >= whole:
            windows.append([])
            held = 0
        windows[-1].append((steps, line))
        held += steps
    if len(windows) > 1 and held < whole:
        left_over = windows.pop()
        windows[-1] += left_over
    return [_mean(window) for window in windows], whole


def _mean(window: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the mean of readings, by their steps, at the last one's step."""
    total, last = sum(steps for steps, _ in window), window[-1][1]
    mean = {
        name: sum(steps * line[name] for steps, line in window) / total
        for name in last
        if all(isinstance(line.get(name), float) for _, line in window)
    }
    if all(line.get("images_per_s") for _, line in window):  # a rate: by the time of the steps
        mean["images_per_s"] = total / sum(steps / line["images_per_s"] for steps, line in window)
    return {**last, **mean}


def _line(panel: Any, lines: Sequence[dict[str, Any]], name: str, color: str, **style: Any) -> None:
    points = [(line["step"], line[name]) for line in lines if name in line]
    if points:
        panel.plot(*zip(*points, strict=True), color=color, **style)


def _speed(panel: Any, train: Sequence[dict[str, Any]]) -> None:
    _line(panel, train, "images_per_s", OURS)
    panel.set_ylabel("images per second")
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    wait = panel.twinx()
    shares = [100 * line["data_wait"] for line in train]
    wait.fill_between([line["step"] for line in train], shares, color=_WAIT, alpha=0.3, lw=0)
    wait.set_ylim(0, 100)
    wait.grid(visible=False)
    wait.set_ylabel("waiting for data, %", color=_WAIT)
