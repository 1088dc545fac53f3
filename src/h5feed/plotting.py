"""How every plot of h5feed looks: one size of type, one set of colors, bars of one kind.

Plots stay readable at half their size, tell colors apart for color-blind readers (the palette
of Okabe and Ito, https://jfly.uni-koeln.de/color), and name their units. Nothing here uses pyplot:
no display is needed, and no global state is left behind.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from h5feed.optional import require

__all__ = ["COLORS", "FAINT", "INK", "OTHERS", "OURS", "PALE", "Bar", "draw_bars", "saved_figure"]

OURS, OTHERS, INK, PALE, FAINT = "#0072B2", "#B5BDC4", "#22262A", "#5B6268", "#DDE1E4"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Lines of a plot, in this order."""

_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": "cycler('color', ['" + "', '".join(COLORS) + "'])",
    "grid.color": FAINT,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "text.color": INK,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}
_TITLE, _CAPTION = 12.5, 8.5  # points
_DPI = 200


@contextmanager
def saved_figure(
    path: Path,
    *,
    extra: str,
    title: str = "",
    caption: str = "",
    width: float = 8.0,
    height: float = 4.5,
    rows: int = 1,
    columns: int = 1,
    **subplots: Any,
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield (figure, its panels row by row) to be drawn into, and write `path` at the end.

    The ending of `path` says PNG, SVG or PDF; `width` and `height` are inches; `extra` is named
    where matplotlib is missing (ImportError); `subplots` go to `Figure.subplots`. Nothing is
    written where the block raises.
    """
    require("matplotlib", extra)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, **subplots)
        yield figure, list(panels.flat)
        if title:
            wrapped = _wrapped(title, width, _TITLE)
            figure.suptitle(wrapped, x=0.01, ha="left", size=_TITLE, weight="bold")
        if caption:
            text = _wrapped(caption, width, _CAPTION)
            figure.supxlabel(text, x=0.01, ha="left", size=_CAPTION, color=PALE)
        figure.savefig(path)


def _wrapped(text: str, width: float, size: float) -> str:
    """Break each line of `text`, at `size` points, so that it fits `width` inches."""
    most = int(72 * width / ((0.62 if size == _TITLE else 0.55) * size))  # titles are bold
    return "\n".join(textwrap.fill(line, most) for line in text.splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a bar chart: its length, its spread, and what is written beside it."""

    name: str
    value: float | None
    """None: nothing is drawn, and `says` tells why."""
    low: float | None = None
    """End of the whisker below `value`, and with `high` above it."""
    high: float | None = None
    says: tuple[str, ...] = ()
    """Cells of the columns to the right of the bars."""
    kind: Literal["ours", "other", "ceiling"] = "other"
    """A ceiling is an outline: it bounds the others, and is none of them."""
    mark: float | None = None
    """A second value, as an upright stroke."""


_FACES = {"ours": OURS, "other": OTHERS, "ceiling": "none"}
_FAR = 1.6  # a ceiling beyond so many times the longest bar would squeeze all others


def draw_bars(
    axes: Any, groups: Mapping[str, Sequence[Bar]], *, heads: Sequence[str] = (), unit: str
) -> None:
    """Draw groups of bars from the top down, each under its heading ("" for none).

    What bars say stands in columns beside the axes, below `heads`, where no bar, whisker or line
    can run through it. Ceilings far beyond all bars end in an arrow.
    """
    placed: list[tuple[float, Bar]] = []
    row = 0.0
    for heading, bars in groups.items():
        if heading:
            row += 0.35 if placed else 0.0
            axes.text(
                0,
                row,
                heading,
                weight="bold",
                va="center",
                transform=_by_row(axes),
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )
            row += 0.85
        placed += [(row + k, bar) for k, bar in enumerate(bars)]
        row += len(bars)
    end = _end([bar for _, bar in placed])
    for place, bar in placed:
        _draw_bar(axes, place, bar, end)
    axes.set_yticks([place for place, _ in placed], [bar.name for _, bar in placed])
    axes.set_ylim(row - 0.4, -0.6 - 0.4 * bool(heads))
    axes.set_xlim(0, end)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _write_columns(axes, placed, heads)


def _by_row(axes: Any) -> Any:
    """Return the transform whose x is a share of the axes' width and whose y is a row."""
    return axes.get_yaxis_transform()


def _end(bars: Sequence[Bar]) -> float:
    """Return where the axis ends: behind the longest whisker, and ceilings that are near it."""
    longest = max(
        (bar.high or bar.value or 0.0 for bar in bars if bar.kind != "ceiling"), default=0
    )
    bounds = [bar.value or 0.0 for bar in bars if bar.kind == "ceiling"]
    bounds += [bar.mark or 0.0 for bar in bars]
    near = [bound for bound in bounds if bound < _FAR * longest or not longest]
    return 1.04 * max([longest, *near]) or 1.0


def _draw_bar(axes: Any, place: float, bar: Bar, end: float) -> None:
    if bar.value is None:
        return
    ceiling = bar.kind == "ceiling"
    axes.barh(
        place,
        min(bar.value, end),
        height=0.62 if ceiling else 0.7,
        facecolor=_FACES[bar.kind],
        edgecolor=PALE if ceiling else "none",
        linestyle="--" if ceiling else "-",
        linewidth=1.1 if ceiling else 0,
    )
    if bar.value > end:
        axes.plot(0.985, place, ">", color=PALE, transform=_by_row(axes))
    elif bar.low is not None and bar.high is not None:
        spread = [[bar.value - bar.low], [min(bar.high, end) - bar.value]]
        axes.errorbar(bar.value, place, xerr=spread, fmt="none", ecolor=INK, lw=1.1, capsize=3)
    if bar.mark is not None:
        for color, wide in (("white", 4.0), (INK, 1.6)):
            axes.plot(min(bar.mark, end), place, "|", color=color, ms=11, mew=wide, zorder=3)


def _write_columns(axes: Any, placed: Sequence[tuple[float, Bar]], heads: Sequence[str]) -> None:
    """Write each column flush right, as wide as its longest cell, beginning beside the axes."""
    size, offset = 9.5, 4.0
    count = max((len(bar.says) for _, bar in placed), default=0)
    style: dict[str, Any] = {
        "xycoords": _by_row(axes),
        "textcoords": "offset points",
        "va": "center",
        "ha": "right",
        "size": size,
        "annotation_clip": False,
    }
    top = axes.get_ylim()[1] + 0.25
    for k in range(count):
        cells = [(place, bar.says[k]) for place, bar in placed if k < len(bar.says)]
        head = heads[k] if k < len(heads) else ""
        offset += 14 + 0.58 * size * max(len(text) for text in (head, *(cell for _, cell in cells)))
        for place, text in cells:
            axes.annotate(text, (1, place), xytext=(offset, 0), **style)
        if head:
            axes.annotate(head, (1, top), xytext=(offset, 0), **(style | {"color": PALE}))
