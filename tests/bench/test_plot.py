from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from PIL import Image

from h5feed.bench.outcomes import Outcome
from h5feed.bench.plot import draw_bars, save_plot
from h5feed.bench.report import Report


def outcome(name, *rates, ceiling=False):
    return Outcome(name=name, ceiling=ceiling, rates=rates)


REPORT = Report(
    title="a test",
    outcomes=(
        outcome("folder", 700.0, 800.0, 900.0),
        outcome("H5Loader", 18_000.0, 20_000.0, 27_000.0),
        outcome("bare", 25_000.0, ceiling=True),
        outcome("memcpy", 110_000.0, ceiling=True),
    ),
    pictures=5000,
    batch_size=64,
    machine="2-core thing",
    facts={"versions": {"torch": "2.13"}},
)


@pytest.fixture
def axes():
    return Figure().subplots()


def said(axes):
    return [text.get_text() for text in axes.texts]


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_bars_say_rate_and_speed_up(axes):
    draw_bars(axes, REPORT)
    assert said(axes) == ["800", "20,000  (25.0×)"]
    assert [bar.get_width() for bar in axes.patches] == [800.0, 20_000.0]


def test_scale_is_linear_from_zero_and_holds_the_whiskers(axes):
    draw_bars(axes, REPORT)
    low, high = axes.get_xlim()
    assert axes.get_xscale() == "linear"
    assert low == 0
    assert high > 27_000


def test_a_near_ceiling_is_a_line_and_a_far_one_is_said(axes):
    draw_bars(axes, REPORT)
    assert legend(axes) == [
        "ceiling, bare: 25,000",
        "ceiling, memcpy: 110,000 (off the scale)",
    ]
    assert axes.get_xlim()[1] < 110_000


def test_scale_is_logarithmic_only_where_a_bar_would_vanish(axes):
    far = replace(REPORT, outcomes=(outcome("slow", 5.0), outcome("fast", 600.0)))
    draw_bars(axes, far)
    assert axes.get_xscale() == "log"


def test_smoke_run_shows_no_speed_up(axes):
    draw_bars(axes, replace(REPORT, pictures=10))
    assert said(axes) == ["800", "20,000"]


def test_a_failed_loader_is_shown_as_failed(axes):
    failed = Outcome(name="FFCV", ceiling=False, error="broken")
    draw_bars(axes, replace(REPORT, outcomes=(*REPORT.outcomes, failed)))
    assert said(axes)[-1] == "failed"


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture_is_written(tmp_path, ending):
    save_plot(REPORT, tmp_path / f"a.{ending}")
    assert (tmp_path / f"a.{ending}").stat().st_size > 5000
    if ending == "png":
        with Image.open(tmp_path / "a.png") as image:
            assert image.width > 1000
