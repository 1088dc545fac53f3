import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5feed.augment import Pipeline, RandomResizedCrop
from h5feed.feed.random import Draws
from h5feed.feed.sampling import Drawing, Steps

SHAPES = {
    "samples": st.integers(0, 60),
    "batch_size": st.integers(1, 12),
    "world_size": st.integers(1, 5),
}


def ranks(**options):
    return [Steps(rank=rank, **options) for rank in range(options.get("world_size", 1))]


def taken(steps):
    parts = [steps.positions(k) for k in range(len(steps))]
    return np.concatenate([np.empty(0, np.int64), *parts])


@given(**SHAPES, drop_last=st.booleans(), tail=st.sampled_from(["pad", "drop"]))
@settings(max_examples=300, deadline=None)
def test_ranks_have_equal_steps_of_equal_shares(**options):
    everyone = ranks(**options)
    shares = [[len(s.positions(k)) for k in range(len(s))] for s in everyone]
    assert all(share == shares[0] for share in shares)
    assert all(0 < n <= options["batch_size"] for n in shares[0])
    assert all(n == options["batch_size"] for n in shares[0][:-1])


@given(**SHAPES)
@settings(max_examples=300, deadline=None)
def test_padding_sees_every_position_and_counts_its_repeats(**options):
    everyone = ranks(tail="pad", **options)
    seen = np.concatenate([taken(s) for s in everyone])
    repeats = sum(s.repeats(k) for s in everyone for k in range(len(s)))
    assert set(seen.tolist()) == set(range(options["samples"]))
    assert len(seen) == options["samples"] + repeats
    assert repeats < options["world_size"]


@given(**SHAPES)
@settings(max_examples=300, deadline=None)
def test_dropping_repeats_nothing_and_leaves_out_less_than_a_sample_each(**options):
    everyone = ranks(tail="drop", **options)
    seen = np.concatenate([taken(s) for s in everyone])
    assert sorted(seen.tolist()) == list(range(len(seen)))
    assert options["samples"] - len(seen) < options["world_size"]
    assert sum(s.repeats(k) for s in everyone for k in range(len(s))) == 0


@given(**SHAPES, tail=st.sampled_from(["pad", "drop"]))
@settings(max_examples=200, deadline=None)
def test_drop_last_leaves_only_full_batches(**options):
    for steps in ranks(drop_last=True, **options):
        assert len(steps) == options["samples"] // steps.stride
        assert all(steps.share(k) == options["batch_size"] for k in range(len(steps)))


@given(**SHAPES, data=st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_left_is_the_same_at_any_batch_and_world_size(data, **options):
    first = Steps(**options)
    done = data.draw(st.integers(0, len(first)))
    consumed = first.consumed(done)
    assert consumed == min(done * first.stride, options["samples"])
    rest = ranks(
        samples=options["samples"],
        batch_size=data.draw(st.integers(1, 12)),
        world_size=data.draw(st.integers(1, 5)),
        start=consumed,
    )
    seen = np.concatenate([taken(s) for s in rest])
    repeats = sum(s.repeats(k) for s in rest for k in range(len(s)))
    assert set(range(consumed, options["samples"])) <= set(seen.tolist())
    assert len(seen) == options["samples"] - consumed + repeats


def test_a_step_is_one_run_of_positions_shared_in_rank_order():
    everyone = ranks(samples=20, batch_size=3, world_size=2)
    assert [s.positions(1).tolist() for s in everyone] == [[6, 7, 8], [9, 10, 11]]
    assert [s.positions(3).tolist() for s in everyone] == [[18], [19]]
    assert [s.first(3) for s in everyone] == [18, 19]


def test_padding_goes_on_from_the_beginning():
    everyone = ranks(samples=7, batch_size=2, world_size=3)
    assert [s.positions(1).tolist() for s in everyone] == [[6], [0], [1]]
    assert [s.repeats(1) for s in everyone] == [0, 1, 1]


COUNT = 1_000_000


def pixels(fit, *, boxes=None):
    """A million images of one stored size, as far as parameters need to know them."""
    stored = np.broadcast_to(np.int32([32, 32]), (COUNT, 2))
    source = np.tile(np.int32([60, 80]), (COUNT, 1))
    specs = {"images": SimpleNamespace(fit=fit)}
    return SimpleNamespace(stored_shapes=stored, source_shapes=source, specs=specs, boxes=boxes)


def draw(pixels, indices):
    pipeline = Pipeline([RandomResizedCrop(16)])
    pipeline.bind((32, 32))
    drawing = Drawing(pixels, pipeline)
    return lambda: drawing(Draws(1, 0, indices), indices)


@pytest.mark.parametrize("fit", ["stretch", "crop"])
def test_a_batch_of_parameters_costs_no_more_memory_in_a_large_set(fit):
    drawn = draw(pixels(fit), np.random.default_rng(0).integers(0, COUNT, 256))
    tracemalloc.start()
    try:
        drawn()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "a million rows are 8 MB"
    finally:
        tracemalloc.stop()


def test_parameters_of_more_samples_than_there_are_images():
    few = pixels("stretch")
    few.stored_shapes, few.source_shapes = few.stored_shapes[:3], few.source_shapes[:3]
    indices = np.array([2, 0, 1] * 5)
    assert len(draw(few, indices)()) == 15


def test_each_sample_has_its_own_sizes():
    """A tall image's crops are squeezed otherwise than a wide one's."""
    mixed = pixels("stretch")
    mixed.source_shapes[::2] = 80, 60
    rows = draw(mixed, np.arange(2000))().views[0][0]
    tall, wide = rows[::2, 2:4].mean(axis=0), rows[1::2, 2:4].mean(axis=0)
    assert tall[0] < tall[1]
    assert wide[0] > wide[1]
