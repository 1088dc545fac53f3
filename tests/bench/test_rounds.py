import sys
from pathlib import Path

import pytest

from h5feed.bench.measure import Expectation
from h5feed.bench.process import Remote, SubjectError
from h5feed.bench.rounds import Entry, Schedule, run

SCHEDULE = Schedule(seconds=0.25, repeats=2, settle=0.0, verify=0.1, epochs=1)


def entry(kind, *, name=None, required=True, files=(), **params):
    return Entry(
        name=name or kind,
        command=(sys.executable, str(Path(__file__).with_name("fake_subjects.py")), kind),
        params=params,
        expected=Expectation(images=640, batch_size=64, height=32, width=32),
        files=files,
        required=required,
    )


def test_subjects_take_turns_and_slow_is_slow():
    told = []
    slow, fast = run(
        [entry("Clocked", name="Slow", seconds=0.02), entry("Clocked", name="Fast", seconds=0.005)],
        SCHEDULE,
        told.append,
    )
    assert len(slow.rates) == len(fast.rates) == 2
    assert slow.rate == pytest.approx(64 / 0.02)
    assert fast.rate == pytest.approx(64 / 0.005)
    assert slow.epoch_rates == pytest.approx([64 / 0.02])
    assert len(slow.cpu_per_image) == 2
    rounds = [line for line in told if line.startswith("round")]
    assert [line.rpartition(" ")[2] for line in rounds] == ["Slow", "Fast", "Slow", "Fast"]
    assert slow.private_bytes is None or slow.private_bytes > 10 << 20
    assert slow.note == "made for a test"


def test_a_cheat_fails_the_run():
    with pytest.raises(
        SubjectError, match=r"Repeating: DishonestError: only \d+% of its images"
    ) as caught:
        run([entry("Fake"), entry("Repeating")], SCHEDULE)
    assert caught.value.dishonest


def test_a_rival_that_fails_keeps_its_row():
    good, bad, cheat = run(
        [
            entry("Fake", required=False),
            entry("Fake", required=False, fail="open"),
            entry("Repeating", required=False),
        ],
        SCHEDULE,
    )
    assert good.error is None
    assert bad.error == "ValueError: cannot be opened"
    assert bad.rate is None
    assert "repeats what it has" in cheat.error


def test_cold_run_starts_with_an_empty_cache(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(bytes(1 << 20))
    schedule = Schedule(seconds=0.1, repeats=1, settle=0.0, verify=0.1, cold=1.0)
    (outcome,) = run([entry("Fake", files=(str(file),))], schedule)
    assert outcome.cold.rate > 0
    assert outcome.cold.resident_before in (0.0, None)


def test_a_process_that_dies_is_one_error():
    command = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with (
        Remote(command) as remote,
        pytest.raises(SubjectError, match=r"its process ended \(exit code 1.*no such thing"),
    ):
        remote.ask({"do": "verify", "seconds": 1})


def test_a_silent_process_is_given_up():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with Remote(command) as remote, pytest.raises(SubjectError, match="allowed 1 s"):
        remote.ask({"do": "verify", "seconds": 1}, timeout=1)
