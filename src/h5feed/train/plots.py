"""The plots of a run: its curves, and what its last scoring mistook for what."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from h5feed.feed.sheet import class_colors
from h5feed.optional import require
from h5feed.plotting import COLORS, INK, OURS, PALE, saved_figure
from h5feed.train.log import CONFUSION, CURVES, METRICS, PREDICTIONS, class_name, read_metrics
from h5feed.train.tasks import Scored

__all__ = ["draw_curves", "draw_scored"]

_VAL, _RATE, _WAIT = COLORS[1], COLORS[2], COLORS[3]
_POINTS = 200
"""Of a line at most; there are more readings in a long run."""


def draw_curves(out: Path, metric: str) -> Path:
    """Draw the run in folder `out` and return the plot's path.

    Four panels over the steps: loss, `metric`, learning rate, and images per second with the
    share of time spent waiting for data. Raises ImportError without matplotlib.

    >>> Path("run").mkdir()
    >>> with Path("run", "metrics.jsonl").open("w") as file:
    ...     for step in (20, 40):
    ...         print(f'{{"kind": "val", "step": {step}, "loss": {9 / step}}}', file=file)
    >>> draw_curves(Path("run"), "accuracy").name
    'curves.png'
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
    with saved_figure(path, extra="train", title=title, caption=caption, **form) as (_, panels):
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


def draw_scored(out: Path, scored: Scored, classes: Sequence[str], ignore_index: int) -> None:
    """Draw what a scoring found into folder `out`: confusion.png, and predictions.png of masks.

    Raises ImportError without matplotlib.
    """
    if scored.confusion is not None and len(scored.confusion) > 1:
        _draw_confusion(out / CONFUSION, scored, classes)
    if scored.drawn is not None:
        _draw_predictions(out / PREDICTIONS, scored, classes, ignore_index)


_NUMBERED, _NAMED = 20, 60
"""Most classes for which a cell of the matrix has room for a number, and a row for a name."""


def _draw_confusion(path: Path, scored: Scored, classes: Sequence[str]) -> None:
    """Shares of each true class by predicted class, in percent."""
    assert scored.confusion is not None
    table = scored.confusion.double()
    shares = (100 * table / table.sum(1, keepdim=True)).nan_to_num().numpy()
    count = len(shares)
    side = min(12.0, 4.0 + 0.36 * count)
    what = "pixels" if scored.drawn is not None else "images"
    title = f"{path.parent.name}: confusion of {count} classes"
    caption = (
        f"of each true class (row) the share predicted as each class (column), in percent; "
        f"{table.sum().item():,.0f} {what} of the last scoring."
    )
    with saved_figure(
        path, extra="train", title=title, caption=caption, width=side + 1.2, height=side
    ) as (figure, (panel, *_)):
        image = panel.imshow(shares, cmap="Blues", vmin=0, vmax=100)
        panel.set(xlabel="predicted class", ylabel="true class")
        panel.grid(visible=False)
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0)
        if count <= _NAMED:
            names = [_short(class_name(classes, number)) for number in range(count)]
            upright = all(len(name) <= 2 for name in names)
            panel.set_xticks(range(count), names, rotation=0 if upright else 90)
            panel.set_yticks(range(count), names)
        if count <= _NUMBERED:
            for row, column in zip(*(shares >= 0.5).nonzero(), strict=True):
                share = shares[row, column]
                color = "white" if share > 55 else INK
                panel.text(column, row, f"{share:.0f}", ha="center", va="center", color=color)
        figure.colorbar(image, label="percent of the true class", shrink=0.8).outline.set_visible(
            False
        )


def _short(name: str) -> str:
    return name if len(name) <= 22 else name[:21] + "…"


def _draw_predictions(
    path: Path, scored: Scored, classes: Sequence[str], ignore_index: int
) -> None:
    """Rows of image, mask and predicted mask, the classes in the colors of show-h5's sheets."""
    assert scored.drawn is not None
    images, masks, predicted = scored.drawn
    colors = class_colors()
    ignored = masks == ignore_index
    seen = np.union1d(masks[~ignored].numpy(), predicted.numpy()).tolist()
    high, wide = images.shape[2:]
    title = f"{path.parent.name}: the first {len(images)} images of the last scoring"
    with saved_figure(
        path,
        extra="train",
        title=title,
        width=7.5,
        height=1.4 + 2.4 * len(images) * high / wide,
        rows=len(images),
        columns=3,
    ) as (figure, panels):
        for panel, name in zip(panels, ("image", "mask", "prediction"), strict=False):
            panel.set_title(name)
        black = np.zeros(3, np.uint8)
        for row, (image, mask, guess) in enumerate(zip(images, masks, predicted, strict=True)):
            hidden = (mask == ignore_index).numpy()[..., None]
            panels[3 * row].imshow(image.permute(1, 2, 0).to(torch.uint8).numpy())
            drawn = colors[mask.numpy().astype(np.int64).clip(0, 255)]
            panels[3 * row + 1].imshow(np.where(hidden, black, drawn))
            panels[3 * row + 2].imshow(colors[guess.numpy().clip(0, 255)])
        for panel in panels:
            panel.set_axis_off()
        patches = require("matplotlib.patches", "train")
        handles = [
            patches.Patch(
                facecolor=colors[min(number, 255)] / 255,
                edgecolor=PALE,
                label=class_name(classes, number),
            )
            for number in seen
        ]
        if bool(ignored.any()):
            handles.append(patches.Patch(facecolor="black", label="not scored"))
        figure.legend(handles=handles, loc="outside lower center", ncols=6)
