import statistics

import numpy as np
import pytest

from bench.fake_subjects import (
    Burning,
    Clock,
    Fake,
    Floats,
    HonestUntilTimed,
    OneClass,
    Repeating,
    Short,
    Slow,
    Wasteful,
)
from h5feed.bench import measure

EXPECTED = measure.Expectation(images=640, batch_size=64, height=32, width=32)


@pytest.fixture
def clock(monkeypatch):
    """The measuring code's clock, which only subjects set forward."""
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


def warm(subject, seconds=0.3, expected=EXPECTED):
    return measure.warm_window(subject, expected, seconds=seconds, settle=0.0)


@pytest.mark.parametrize("seconds", [0.002, 0.02, 0.5])
def test_a_window_is_what_the_clock_says(clock, seconds):
    subject = Fake({"seconds": seconds, "clock": clock})
    window = warm(subject, seconds=0.6)
    assert window.rate == pytest.approx(64 / seconds)
    assert window.images == 64 * max(round(0.6 / seconds), 5 if seconds == 0.5 else 6)
    assert window.warmup_images == 3 * 64
    assert window.first_batch_seconds == pytest.approx(seconds)


def test_slow_subject_is_measured_within_ten_percent():
    """By the real clock, against the times of the very batches that were counted."""
    ratios = []
    for _ in range(5):  # the median: a pause may fall between a batch and the look at the clock
        subject = Slow({"seconds": 0.02})
        window = warm(subject)
        ratios.append(window.rate / subject.rate(window.images))
        assert window.rate < 64 / 0.02
    assert statistics.median(ratios) == pytest.approx(1, rel=0.1)


def test_cpu_seconds_are_those_of_the_work():
    subject = Burning({"burn": 0.02})
    window = warm(subject, seconds=0.5)
    spent = subject.spent[-1] - subject.spent[-1 - window.images // 64]
    # The system counts in ticks of 10 ms.
    assert window.cpu_seconds == pytest.approx(spent, rel=0.1, abs=0.03)


def test_sleeping_costs_no_cpu():
    window = warm(Slow({"seconds": 0.02}), seconds=0.5)
    assert window.cpu_seconds < 0.2 * window.seconds


def test_honest_subject_passes_and_is_counted(clock):
    check = measure.verify(Fake({"clock": clock}), EXPECTED, 3.0)
    assert check.epochs == 2
    assert check.images == 25 * 64
    assert check.distinct == 1.0
    assert check.startup_seconds == 0.125


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (Repeating, r"only \d+% of its images differ from one another: it repeats"),
        (Short, r"delivered 512 images in one epoch of 640 \(or 640 without the last"),
        (Floats, r"delivered float32; it said uint8"),
    ],
)
def test_dishonest_subject_fails(clock, subject, said):
    with pytest.raises(measure.DishonestError, match=said):
        measure.verify(subject({"clock": clock}), EXPECTED, 1.5)


def test_wrong_size_fails():
    with pytest.raises(measure.DishonestError, match=r"shape \(64, 16, 16, 3\); asked for"):
        measure.verify(Fake({"size": 16}), EXPECTED, 0.1)


def test_labels_of_one_class_fail_where_the_classes_are_known(clock):
    expected = measure.Expectation(
        images=640,
        batch_size=64,
        height=32,
        width=32,
        label_counts=(60, 60, 60, 60, 60, 60, 70, 70, 70, 70),
    )
    measure.verify(Fake({"clock": clock}), expected, 1.5)
    with pytest.raises(measure.DishonestError, match="its labels fall into 1 classes of sizes"):
        measure.verify(OneClass({"clock": clock}), expected, 1.5)


def test_a_subject_that_cheats_only_under_the_clock_fails(clock):
    with pytest.raises(measure.DishonestError, match="of its batches differ"):
        warm(HonestUntilTimed({"clock": clock}), seconds=20.0)


def test_short_epoch_under_the_clock_fails(clock):
    with pytest.raises(measure.DishonestError, match="delivered 512 images in one epoch"):
        warm(Short({"clock": clock}), seconds=1.5)


def test_a_ceiling_may_repeat(clock):
    ceiling = measure.Expectation(images=640, batch_size=64, height=32, width=32, ceiling=True)
    assert warm(Repeating({"clock": clock}), expected=ceiling).images > 0


def test_last_incomplete_batch_may_be_dropped(clock):
    expected = measure.Expectation(images=650, batch_size=64, height=32, width=32)
    assert measure.verify(Fake({"clock": clock}), expected, 1.5).epochs == 1


def test_channels_first_is_probed_as_well():
    class Turned(Fake):
        layout = "NCHW"

        def batch(self):
            return np.moveaxis(super().batch(), -1, 1)

    assert measure.verify(Turned({}), EXPECTED, 0.1).distinct == 1.0


def test_cold_window_counts_from_the_first_batch(clock):
    window = measure.cold_window(Fake({"seconds": 0.01, "clock": clock}), seconds=60)
    assert window.warmup_images == 64
    assert window.images == 640 - 64
    assert window.rate == pytest.approx(64 / 0.01)
    assert window.first_batch_seconds == pytest.approx(0.01)


def test_cold_window_ends_when_its_time_is_over(clock):
    window = measure.cold_window(Fake({"seconds": 1.0, "clock": clock}), seconds=2.5)
    assert window.images == 3 * 64


@pytest.mark.parametrize(
    ("used", "looks", "idle"),
    [
        ([0.05, 0.0, 0.05, 0.0, 0.0], 5, True),  # a worker may get no turn in one stretch
        ([0.001, 0.001], 2, True),
        ([0.0625] * 100, 17, False),
    ],
)
def test_waits_until_work_ahead_is_done(clock, monkeypatch, used, looks, idle):
    """`used`: CPU seconds of each stretch of 62.5 ms; `looks`: after how many it is decided."""
    slept = []

    def sleep(seconds):
        clock.now += seconds
        slept.append(seconds)

    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(measure.system, "cpu_seconds", lambda: sum(used[: len(slept)]))
    assert measure.wait_until_idle(patience=1.0, calm=0.0625) is idle
    assert len(slept) == looks


def test_batches_that_nobody_gets_show_in_the_time_after_the_last_one(clock):
    assert warm(Fake({"clock": clock}), seconds=3.0).lost_share == 0
    assert warm(Wasteful({"clock": clock}), seconds=6.0).lost_share == pytest.approx(0.5)
    assert warm(Fake({"clock": clock}), seconds=0.5).lost_share is None  # no epoch ended


def test_whole_epochs_count_from_the_asking_to_the_end(clock):
    found = measure.whole_epochs(Fake({"clock": clock}), EXPECTED, seconds=2.0)
    assert [rate for rate, _ in found] == pytest.approx([640 / 1.25] * 2)
    ((rate, cpu),) = measure.whole_epochs(Wasteful({"clock": clock}), EXPECTED, seconds=0.1)
    assert rate == pytest.approx(640 / 2.5)
    assert 0 <= cpu < 1
    with pytest.raises(measure.DishonestError, match="delivered 512 images in one epoch"):
        measure.whole_epochs(Short({"clock": clock}), EXPECTED, seconds=0.1)
