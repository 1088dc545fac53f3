import tracemalloc
from functools import partial
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from h5feed import BlockShuffleSampler, H5Dataset, H5Loader, ShuffleSampler, UsageError
from h5feed.augment import Pipeline, RandomResizedCrop
from h5feed.feed.order import FullShuffle
from h5feed.feed.random import SeededDraws
from h5feed.feed.sampling import Drawing, SampleOrder, Steps
from loaders import write_kind

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


def files(fit, *, letterbox=None):
    """A million images of one stored size, as far as parameters need to know them."""
    stored = np.broadcast_to(np.int32([32, 32]), (COUNT, 2))
    source = np.tile(np.int32([60, 80]), (COUNT, 1))
    specs = {"images": SimpleNamespace(fit=fit)}
    return SimpleNamespace(
        stored_shapes=stored, source_shapes=source, specs=specs, letterbox=letterbox
    )


def draw(files, indices):
    pipeline = Pipeline([RandomResizedCrop(16)])
    pipeline.bind((32, 32))
    drawing = Drawing(files, pipeline)
    return lambda: drawing(SeededDraws(1, 0, indices), indices)


@pytest.mark.parametrize("fit", ["stretch", "crop"])
def test_a_batch_of_parameters_costs_no_more_memory_in_a_large_set(fit):
    drawn = draw(files(fit), np.random.default_rng(0).integers(0, COUNT, 256))
    tracemalloc.start()
    try:
        drawn()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "a million rows are 8 MB"
    finally:
        tracemalloc.stop()


def test_parameters_of_more_samples_than_there_are_images():
    few = files("stretch")
    few.stored_shapes, few.source_shapes = few.stored_shapes[:3], few.source_shapes[:3]
    indices = np.array([2, 0, 1] * 5)
    assert len(draw(few, indices)()) == 15


def test_each_sample_has_its_own_sizes():
    """A tall image's crops are squeezed otherwise than a wide one's."""
    mixed = files("stretch")
    mixed.source_shapes[::2] = 80, 60
    rows = draw(mixed, np.arange(2000))().views[0][0]
    tall, wide = rows[::2, 2:4].mean(axis=0), rows[1::2, 2:4].mean(axis=0)
    assert tall[0] < tall[1]
    assert wide[0] > wide[1]


@pytest.mark.parametrize(
    ("sampler", "shuffle"),
    [
        (ShuffleSampler(range(40), seed=3), {"shuffle": True}),
        (
            BlockShuffleSampler(range(40), block=3, window=2, seed=3),
            {"shuffle": "block", "block": 3, "window": 2},
        ),
    ],
    ids=["full", "block"],
)
def test_torchs_dataloader_in_the_order_of_h5loader(tmp_path, sampler, shuffle):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=40))
    stock = DataLoader(range(40), batch_size=7, sampler=sampler)
    with H5Loader(ds, 7, seed=3, with_index=True, **shuffle) as loader:
        for epoch in (0, 1, 4):
            sampler.set_epoch(epoch)
            loader.set_epoch(epoch)
            expected = [indices.tolist() for *_, indices in loader]
            assert [batch.tolist() for batch in stock] == expected
    with H5Loader(ds, 7, sampler=sampler, with_index=True) as loader:  # and H5Loader takes them
        loader.set_epoch(4)
        assert [indices.tolist() for *_, indices in loader] == expected


@pytest.mark.parametrize("kind", [ShuffleSampler, partial(BlockShuffleSampler, block=3, window=2)])
@pytest.mark.parametrize(("count", "world_size"), [(12, 3), (13, 4), (2, 5), (0, 2)])
def test_ranks_share_what_a_sampler_gives(kind, count, world_size):
    shares = [kind(range(count), rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert [len(list(share)) for share in shares] == [len(share) for share in shares]
    whole = list(kind(range(count)))
    dealt = [index for step in zip(*shares, strict=True) for index in step]
    assert dealt[:count] == whole
    assert sorted(whole) == list(range(count))


def test_a_sampler_of_millions_begins_at_once_and_keeps_no_list(monkeypatch):
    asked = []
    ask = FullShuffle.__call__
    monkeypatch.setattr(
        FullShuffle, "__call__", lambda self, p: (asked.append(len(p)), ask(self, p))[1]
    )
    some = list(islice(ShuffleSampler(range(10_000_000)), 5000))
    assert len(set(some)) == 5000
    assert asked == [4096, 4096]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ShuffleSampler(range(4), seed=1.5), "seed=1.5 must be a whole number"),
        (lambda: ShuffleSampler(range(4), rank=2, world_size=2), "rank=2 is not in 0 to"),
        (lambda: ShuffleSampler(range(4)).set_epoch(-1), "epoch=-1 must be a whole number of at"),
        (lambda: BlockShuffleSampler(range(4), block=0), "block=0 must be a whole number of at"),
        (
            lambda: SampleOrder(
                4,
                shuffle=False,
                sampler=ShuffleSampler(range(4), world_size=2),
                indices=None,
                block=1,
                window=1,
            ),
            "ShuffleSampler gives one of 2 ranks its share, and H5Loader would split that again",
        ),
    ],
)
def test_samplers_refuse_a_wrong_argument(make, text):
    with pytest.raises(UsageError, match=text):
        make()
