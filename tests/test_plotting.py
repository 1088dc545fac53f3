from pathlib import Path

import pytest
from PIL import Image

from h5feed.plotting import Bar, draw_bars, saved_figure


@pytest.fixture
def axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def said(axes):
    return [text.get_text() for text in axes.texts]


def widths(axes):
    return [round(bar.get_width()) for bar in axes.patches]


BARS = [
    Bar(name="folder", value=800.0, low=700.0, high=900.0, says=("800", "")),
    Bar(
        name="ours",
        value=20_000.0,
        low=18_000.0,
        high=27_000.0,
        says=("20,000", "25×"),
        kind="ours",
    ),
    Bar(name="bare loop", value=25_000.0, kind="ceiling", says=("25,000",)),
    Bar(name="memcpy", value=110_000.0, kind="ceiling", says=("110,000",)),
    Bar(name="broken", value=None, says=("failed",)),
]


def test_bars_begin_at_zero_and_numbers_stand_beside_the_axes(axes):
    draw_bars(axes, {"": BARS}, heads=("img/s",), unit="images per second")
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [bar.name for bar in BARS]
    assert said(axes) == ["800", "20,000", "25,000", "110,000", "failed", "img/s", "", "25×"]
    assert all(text.xy[0] == 1 for text in axes.texts)
    assert axes.get_xlim()[0] == 0
    assert axes.get_xlabel() == "images per second"


def test_whiskers_fit_and_a_far_ceiling_squeezes_nobody(axes):
    draw_bars(axes, {"": BARS}, unit="images per second")
    end = axes.get_xlim()[1]
    assert 27_000 < end < 30_000
    assert widths(axes) == [800, 20_000, 25_000, round(end)]


def test_only_ceilings_have_an_axis_too(axes):
    draw_bars(axes, {"": BARS[2:3]}, unit="images per second")
    assert axes.get_xlim()[1] > 25_000


def test_groups_have_headings_and_room_between_them(axes):
    draw_bars(axes, {"warm": BARS[:1], "cold": BARS[1:2]}, unit="images per second")
    assert said(axes)[:2] == ["warm", "cold"]
    first, second = axes.get_yticks()
    assert second - first > 1.5


def test_a_plot_is_written_in_one_style_and_leaves_no_state(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    for ending in ("png", "svg"):
        path = tmp_path / f"a.{ending}"
        how = {"extra": "bench", "title": "t " * 99, "caption": "c", "columns": 2}
        with saved_figure(path, **how) as (_, panels):
            for axes in panels:
                axes.plot([1, 2])
        assert path.stat().st_size > 5000
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (1600, 900)
    assert dict(matplotlib.rcParams) == before


def test_nothing_is_written_when_drawing_fails(tmp_path):
    path = Path(tmp_path, "a.png")
    with pytest.raises(ValueError, match="no"), saved_figure(path, extra="bench"):
        raise ValueError("no")
    assert not path.exists()
