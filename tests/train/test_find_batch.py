from functools import partial

import pytest
import torch

from h5feed.errors import H5FeedError, UsageError
from h5feed.train import find_batch as module
from h5feed.train.find_batch import BatchRange, BatchTrial, draw_batch_sizes, find_batch
from h5feed.train.loaders import random_batch
from train.trials import WORLD, make_step, random_draws

torch.set_num_threads(1)


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def batch(size, *, limit=10**9, error=FULL):
    if size > limit:
        raise error
    return random_batch("classification", 4, size, 8, 0, WORLD.device)


def find(tmp_path, *, limit=10**9, error=FULL, smallest=8, largest=1024, **options):
    made = partial(batch, limit=limit, error=error)
    step = make_step(tmp_path, **options)
    return find_batch(step, made, WORLD, BatchRange(smallest=smallest, largest=largest, steps=1))


class Clock:
    """Stands still, except while a size is tried: a second an image."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(module, "_time", self.timed)

    def timed(self, step, batch, steps, device):
        self.now += len(batch[0])
        return 1.0


def test_a_size_that_would_take_longer_than_is_left_is_not_tried(tmp_path, monkeypatch):
    Clock(monkeypatch)
    said = []
    found = find_batch(
        make_step(tmp_path),
        batch,
        WORLD,
        BatchRange(smallest=8, largest=8192, steps=1, seconds=60),
        trying=lambda size, seconds: said.append((size, seconds)),
    )
    assert [trial.batch_size for trial in found.trials] == [8, 16, 32]  # 64 more would be 120
    assert (found.full, found.in_time) == (False, False)
    assert said == [(8, 0.0), (16, 16.0), (32, 32.0)]


def test_closing_in_ends_in_time_too(tmp_path, monkeypatch):
    Clock(monkeypatch)
    made = partial(batch, limit=40)
    options = BatchRange(smallest=8, largest=8192, steps=1, seconds=130)
    found = find_batch(make_step(tmp_path), made, WORLD, options)
    assert (found.full, found.in_time) == (True, False)
    assert found.largest.batch_size == 40


@pytest.mark.parametrize("limit", [8, 37, 64, 100, 1023])
def test_it_finds_the_largest_that_fits_within_a_sixteenth(tmp_path, limit):
    found = find(tmp_path, limit=limit)
    assert found.full
    assert limit * 15 / 16 - 1 <= found.largest.batch_size <= limit
    assert all(trial.fits == (trial.batch_size <= limit) for trial in found.trials)


def test_the_largest_to_be_tried_bounds_it(tmp_path):
    found = find(tmp_path, smallest=8, largest=48)
    assert [trial.batch_size for trial in found.trials] == [8, 16, 32, 48]
    assert not found.full
    assert all(trial.memory_bytes > 0 for trial in found.trials)


def test_nothing_that_fits_is_an_error(tmp_path):
    with pytest.raises(H5FeedError, match="not even a batch of 8 fits into memory"):
        find(tmp_path, limit=4)


def test_other_errors_pass(tmp_path):
    with pytest.raises(RuntimeError, match="shapes"):
        find(tmp_path, limit=8, error=RuntimeError("shapes do not match"))


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_a_step_that_breaks_in_the_middle_is_put_back(tmp_path):
    step = make_step(tmp_path)
    before = [value.clone() for value in step.net.state_dict().values()]
    draws = random_draws()
    move, calls = step.optimizer.step, []

    def step_that_breaks():
        calls.append(1)
        move()
        if step.net_batch > 32:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    class Sized:
        def __call__(self, size):
            object.__setattr__(self, "size", size)
            return batch(size)

    sizes = Sized()
    step_type = type(step)
    step_type.net_batch = property(lambda _self: sizes.size)
    try:
        step.optimizer.step = step_that_breaks
        found = find_batch(step, sizes, WORLD, BatchRange(smallest=16, largest=256, steps=1))
    finally:
        del step_type.net_batch
    assert found.largest.batch_size in (31, 32)
    assert all(
        torch.equal(a, b) for a, b in zip(before, step.net.state_dict().values(), strict=True)
    )
    assert step.optimizer.state_dict()["state"] == {}
    assert step.count == 0
    assert random_draws() == draws


def test_on_the_cpu_a_size_that_would_end_the_process_is_not_tried(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(module, "_peak_memory", lambda _device: max(made) * 10**9 // 32)
    monkeypatch.setattr(module, "_available_memory", lambda: 4 * 10**9)
    step = make_step(tmp_path)
    found = find_batch(
        step,
        lambda size: (made.append(size), batch(size))[1],
        WORLD,
        BatchRange(smallest=32, largest=1024, steps=1, memory=0.8),
    )
    # An image takes 1/32 GB, and 80 % of 4 GB are to be had: 102 of them
    assert made[:2] == [32, 64]
    assert max(made) == found.largest.batch_size
    assert 96 <= max(made) <= 102
    assert found.full


def test_the_fastest_is_the_smallest_of_those_that_are_nearly_as_fast():
    def trial(size, rate):
        return BatchTrial(batch_size=size, images_per_second=rate, memory_bytes=1)

    trials = (trial(8, 50.0), trial(16, 99.0), trial(32, 100.0), trial(64, None))
    found = module.BatchSizes(trials=trials, full=True, in_time=True)
    assert found.fastest.batch_size == 16
    assert found.largest.batch_size == 32


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"smallest": 0}, "--smallest 0"),
        ({"smallest": 16, "largest": 8}, "--largest 8"),
        ({"steps": 0}, "--steps 0 is too small"),
        ({"seconds": 0.0}, "--seconds 0.0 is too small"),
    ],
)
def test_wrong_ranges_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        BatchRange(**options)


def test_it_draws(tmp_path):
    pytest.importorskip("matplotlib")
    draw_batch_sizes(find(tmp_path, limit=40, largest=64), tmp_path / "batch.png")
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")
