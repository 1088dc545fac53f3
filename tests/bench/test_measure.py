import statistics
import threading
import time

import numpy as np
import pytest

from bench.fake_subjects import (
    Burning,
    Fake,
    Floats,
    HonestUntilTimed,
    OneClass,
    Repeating,
    Short,
    Slow,
)
from h5feed.bench import measure

EXPECTED = measure.Expectation(pictures=640, batch_size=64, height=32, width=32)


def warm(subject, seconds=0.3, expected=EXPECTED):
    return measure.warm_window(subject, expected, seconds=seconds, settle=0.0)


def test_slow_subject_is_measured_within_ten_percent():
    ratios = []
    for _ in range(3):  # the median: on a busy machine one window may fall into a pause
        subject = Slow({"seconds": 0.02})
        window = warm(subject, seconds=0.6)
        ratios.append(window.rate / subject.rate())
    assert statistics.median(ratios) == pytest.approx(1, rel=0.1)
    assert window.rate < 64 / 0.02
    assert window.warmup_pictures >= 3 * 64
    assert window.first_batch_seconds >= 0.02


def test_cpu_seconds_are_those_of_the_work():
    window = warm(Burning({"seconds": 0.02}), seconds=0.5)
    assert window.cpu_seconds / window.pictures == pytest.approx(0.02 / 64, rel=0.15)


def test_sleeping_costs_no_cpu():
    window = warm(Slow({"seconds": 0.02}), seconds=0.5)
    assert window.cpu_seconds < 0.2 * window.seconds


def test_honest_subject_passes_and_is_counted():
    check = measure.verify(Fake({}), EXPECTED, 3.0)
    assert check.epochs >= 1
    assert check.pictures >= 640
    assert check.distinct == 1.0


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (Repeating, r"only \d+% of its pictures differ from one another: it repeats"),
        (Short, r"delivered 512 pictures in one epoch of 640 \(or 640 without the last"),
        (Floats, r"delivered float32; it said uint8"),
    ],
)
def test_dishonest_subject_fails(subject, said):
    with pytest.raises(measure.DishonestError, match=said):
        measure.verify(subject({}), EXPECTED, 1.0)


def test_wrong_size_fails():
    with pytest.raises(measure.DishonestError, match=r"shape \(64, 16, 16, 3\); asked for"):
        measure.verify(Fake({"size": 16}), EXPECTED, 0.1)


def test_labels_of_one_class_fail_where_the_classes_are_known():
    expected = measure.Expectation(
        pictures=640,
        batch_size=64,
        height=32,
        width=32,
        label_counts=(60, 60, 60, 60, 60, 60, 70, 70, 70, 70),
    )
    measure.verify(Fake({}), expected, 3.0)
    with pytest.raises(measure.DishonestError, match="its labels fall into 1 classes of sizes"):
        measure.verify(OneClass({}), expected, 3.0)


def test_a_subject_that_cheats_only_under_the_clock_fails():
    with pytest.raises(measure.DishonestError, match="of its batches differ"):
        warm(HonestUntilTimed({"seconds": 0.0}))


def test_short_epoch_under_the_clock_fails():
    with pytest.raises(measure.DishonestError, match="delivered 512 pictures in one epoch"):
        warm(Short({}))


def test_a_ceiling_may_repeat():
    ceiling = measure.Expectation(pictures=640, batch_size=64, height=32, width=32, ceiling=True)
    assert warm(Repeating({}), expected=ceiling).pictures > 0


def test_last_incomplete_batch_may_be_dropped():
    expected = measure.Expectation(pictures=650, batch_size=64, height=32, width=32)
    assert measure.verify(Fake({}), expected, 3.0).epochs >= 1


def test_channels_first_is_probed_as_well():
    class Turned(Fake):
        layout = "NCHW"

        def batch(self):
            return np.moveaxis(super().batch(), -1, 1)

    assert measure.verify(Turned({}), EXPECTED, 0.1).distinct == 1.0


def test_cold_window_counts_from_the_first_batch():
    subject = Slow({"seconds": 0.01})
    window = measure.cold_window(subject, seconds=60)
    assert window.warmup_pictures == 64
    assert window.pictures == 640 - 64
    assert window.rate == pytest.approx(subject.rate(), rel=0.1)
    assert window.first_batch_seconds >= 0.01


def test_waits_until_work_ahead_is_done():
    until = time.process_time() + 0.3

    def work():
        while time.process_time() < until:
            pass

    busy = threading.Thread(target=work)
    busy.start()
    assert measure.wait_until_idle(patience=5.0)
    assert not busy.is_alive()
