from dataclasses import replace

import pytest
from PIL import Image

from h5feed.bench import report
from h5feed.bench.report import Comparison, save_plot, save_sweep_plot
from h5feed.bench.rounds import Cold, Outcome


def outcome(name, *rates, ceiling=False, cold=None):
    ran = None if cold is None else Cold(rate=cold, read_bytes_per_image=1, resident_before=0)
    return Outcome(name=name, ceiling=ceiling, rates=rates, cold=ran)


REPORT = Comparison(
    title="a test",
    outcomes=(
        outcome("folder", 700.0, 800.0, 900.0, cold=300.0),
        outcome("H5Loader", 18_000.0, 20_000.0, 27_000.0, cold=4_000.0),
        outcome("bare", 25_000.0, ceiling=True),
        outcome("disk, cold", 5_000.0, ceiling=True),
    ),
    images=5000,
    batch_size=64,
    machine="2-core thing",
    facts={"versions": {"torch": "2.13"}},
)


def test_bars_say_rate_and_speed_up():
    folder, ours, bare = REPORT.bars()
    assert [bar.says for bar in (folder, ours, bare)] == [
        ("800", "1.0×"),
        ("20,000", "25.0×"),
        ("25,000", ""),
    ]
    assert [bar.kind for bar in (folder, ours, bare)] == ["other", "ours", "ceiling"]
    assert (ours.low, ours.value, ours.high) == (18_000.0, 20_000.0, 27_000.0)


def test_cold_runs_and_their_ceiling_are_a_group_of_their_own(tmp_path, monkeypatch):
    assert [bar.value for bar in REPORT.cold_bars()] == [300.0, 4_000.0, 5_000.0]
    drawn = {}
    monkeypatch.setattr(report, "draw_bars", lambda axes, groups, **_: drawn.update(groups))
    save_plot(REPORT, tmp_path / "a.png")
    assert {heading[:5]: len(group) for heading, group in drawn.items()} == {"Warm:": 3, "Cold:": 3}


def test_smoke_run_shows_no_speed_up():
    assert [bar.says[1] for bar in replace(REPORT, images=10).bars()] == ["", "", ""]


def test_a_failed_loader_is_shown_as_failed():
    failed = Outcome(name="FFCV", ceiling=False, error="broken")
    last = replace(REPORT, outcomes=(*REPORT.outcomes, failed)).bars()[-1]
    assert (last.value, last.says) == (None, ("failed", ""))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_image_is_written(tmp_path, ending):
    save_plot(REPORT, tmp_path / f"a.{ending}")
    assert (tmp_path / f"a.{ending}").stat().st_size > 5000
    if ending == "png":
        with Image.open(tmp_path / "a.png") as image:
            assert image.width > 1000


def test_a_sweep_is_drawn_over_workers_a_line_per_loader(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "_draw_line", lambda _panel, name, *_: drawn.append(name))
    reports = [
        replace(
            REPORT,
            batch_size=size,
            outcomes=tuple(replace(o, params={"workers": n}) for o in REPORT.outcomes[:3]),
        )
        for size in (64, 256)
        for n in (1, 2, 4)
    ]
    save_sweep_plot(reports, tmp_path / "a.png")
    assert drawn == ["folder", "H5Loader", "bare"] * 2  # a panel for each batch size
    monkeypatch.undo()
    save_sweep_plot(reports, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 1500
