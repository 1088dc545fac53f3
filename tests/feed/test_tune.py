import pytest

from h5feed import H5Dataset, UsageError, augment, tune
from h5feed.feed.tune import Measured, TunePlan, _choose, _steps_to
from h5feed.feed.tune import tune as exported
from loaders import loader_threads, write_kind


@pytest.fixture
def ds(tmp_path):
    return H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=30))


def rows(*figures):
    return [
        Measured(num_workers=threads, prefetch=prefetch, images_per_s=speed, cpu_share=0.5)
        for threads, prefetch, speed in figures
    ]


def test_the_leanest_of_the_fast_settings_wins():
    def chosen(*figures):
        plan = _choose(rows(*figures))
        return plan.num_workers, plan.prefetch

    assert chosen((1, 2, 50), (1, 4, 60), (2, 2, 100), (2, 4, 102), (4, 2, 102)) == (2, 2)
    assert chosen((1, 2, 50), (2, 2, 90), (2, 4, 100)) == (2, 4)
    assert chosen((1, 2, 100), (2, 2, 80)) == (1, 2)


def test_threads_tried_end_with_all_there_may_be():
    assert _steps_to(1) == [1]
    assert _steps_to(2) == [1, 2]
    assert _steps_to(6) == [1, 2, 4, 6]


def test_the_plan_shows_its_evidence():
    evidence = tuple(rows((1, 2, 1234.4), (2, 2, 2345.6)))
    assert str(TunePlan(num_workers=2, prefetch=2, evidence=evidence)).splitlines() == [
        "workers  prefetch  images/s  CPU share",
        "      1         2      1234       50%",
        "      2         2      2346       50%  <- chosen",
    ]


def test_tune_measures_the_real_loader_within_the_cores_there_are(ds, monkeypatch):
    monkeypatch.setattr("h5feed.feed.options.available_cores", lambda: 3)
    before = loader_threads()  # another test's may still be ending
    plan = tune(ds, 4, seconds=0.2, augment=(augment.RandomResizedCrop(16),), views=2)
    tried = [(row.num_workers, row.prefetch) for row in plan.evidence]
    assert tried == [(t, p) for t in (1, 2, 3) for p in (2, 4)]
    assert all(row.images_per_s > 0 for row in plan.evidence)
    assert (plan.num_workers, plan.prefetch) in tried
    assert loader_threads() <= before
    assert exported is tune


def test_tune_refuses_what_it_is_to_find(ds, tmp_path):
    with pytest.raises(UsageError, match=r"tune\(\) finds num_workers and prefetch: leave it out"):
        tune(ds, 4, num_workers=2, prefetch=1)
    with pytest.raises(UsageError, match=r"indices=\[\] leave nothing to measure"):
        tune(ds, 4, indices=[])
