import itertools
import tracemalloc
from functools import partial
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Subset

from h5feed import (
    BlockShuffleSampler,
    H5Dataset,
    H5Loader,
    ShardShuffleSampler,
    ShuffleSampler,
    UsageError,
)
from h5feed.augment import Pipeline, RandomResizedCrop
from h5feed.feed.options import choose_nodes
from h5feed.feed.order import FullShuffle, ShardShuffle
from h5feed.feed.random import SeededDraws
from h5feed.feed.sampling import Drawing, SampleOrder, Steps
from loaders import write_kind
from packed import random_images, write_set

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


# --- streams of shards, shared out among machines ------------------------------------------------

STREAMS = {
    "streams": st.integers(1, 24),
    "nodes": st.integers(1, 6),
    "ranks": st.integers(1, 3),
    "samples": st.integers(0, 300),
    "batch_size": st.integers(1, 12),
    "start": st.integers(0, 200),
}


@given(**STREAMS, tail=st.sampled_from(["pad", "drop"]), drop_last=st.booleans())
@settings(max_examples=400, deadline=None)
def test_nodes_take_all_positions_of_a_step_and_resume_anywhere(
    nodes, ranks, samples, start, tail, drop_last, **options
):
    options |= {"tail": tail, "drop_last": drop_last}
    start = min(start, samples)
    everyone = [
        Steps(
            rank=rank,
            world_size=nodes * ranks,
            nodes=nodes,
            samples=samples,
            start=start,
            **options,
        )
        for rank in range(nodes * ranks)
    ]
    lone = Steps(
        world_size=nodes * ranks, samples=samples, start=start, **{**options, "streams": 1}
    )
    assert {len(steps) for steps in everyone} == {len(lone)}
    for step in range(len(lone)):
        parts = [steps.positions(step) for steps in everyone]
        assert {len(part) for part in parts} == {lone.share(step)}
        taken = np.sort(np.concatenate(parts))
        end = lone.consumed(step + 1) if tail == "pad" or step < len(lone) - 1 else None
        fresh = np.unique(taken)
        fresh = fresh[fresh >= lone.consumed(step)]
        repeats = sum(steps.repeats(step) for steps in everyone)
        assert len(taken) - repeats == len(fresh)
        np.testing.assert_array_equal(fresh, np.arange(len(fresh)) + lone.consumed(step))
        if end is not None:
            assert len(fresh) == end - lone.consumed(step)
        assert repeats < nodes * ranks


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("start", [0, 37])
def test_a_node_has_streams_of_its_own(nodes, start):
    for step in (0, 1, 5):
        seen = [
            {
                int(p) % 8
                for rank in range(2)
                for p in Steps(
                    samples=10_000,
                    batch_size=11,
                    rank=2 * node + rank,
                    world_size=2 * nodes,
                    start=start,
                    streams=8,
                    nodes=nodes,
                ).positions(step)
            }
            for node in range(nodes)
        ]
        assert all(len(streams) == 8 // nodes for streams in seen)
        assert set().union(*seen) == set(range(8))


@pytest.mark.parametrize(
    ("nodes", "most"), [(1, 300), (4, 303), (16, 315), (3, 345), (5, 385), (32, 640)]
)
def test_nodes_read_hardly_a_shard_twice(nodes, most):
    """At most one between neighbours; all of a stream's where nodes do not divide the streams."""
    counts = np.full(300, 50)
    order = ShardShuffle(counts, 1, 0, streams=16, window=3)
    read = 0
    for node in range(nodes):
        steps = Steps(
            samples=len(order),
            batch_size=33,
            rank=node,
            world_size=nodes,
            streams=16,
            nodes=nodes,
        )
        samples = order(np.concatenate([steps.positions(k) for k in range(len(steps))]))
        read += len(np.unique(samples // 50))
    assert 300 <= read <= most


def test_what_fills_the_last_step_was_just_read():
    """Not the first samples of the epoch, whose shards are gone."""
    everyone = [
        Steps(samples=1003, batch_size=10, rank=rank, world_size=4, streams=8, nodes=4)
        for rank in range(4)
    ]
    last = [steps.positions(len(steps) - 1) for steps in everyone]
    assert sum(steps.repeats(len(steps) - 1) for steps in everyone) == 1
    assert min(part.min() for part in last) > 990
    streams = [set((part % 8).tolist()) for part in last]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(streams, 2))


def test_choose_nodes(monkeypatch):
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    assert choose_nodes(6) == 6
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    assert choose_nodes(6) == 3
    assert choose_nodes(1) == 1  # given rank=0, world_size=1: every process reads everything
    assert choose_nodes(7) == 7
    monkeypatch.setenv("GROUP_WORLD_SIZE", "some")
    assert choose_nodes(6) == 6


COUNT = 1_000_000


def files(fit):
    """A million images of one stored size, as far as parameters need to know them."""
    stored = np.broadcast_to(np.int32([32, 32]), (COUNT, 2))
    source = np.tile(np.int32([60, 80]), (COUNT, 1))
    columns = {"shapes": stored, "source_shapes": source}
    return SimpleNamespace(
        specs={"images": SimpleNamespace(fit=fit)},
        has_letterbox=False,
        columns=columns,
        rows=lambda name, indices: (
            np.take(columns[name], indices, axis=0)
            if name == "source_shapes"
            else columns[name][: len(indices)]
        ),
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
    few.columns["source_shapes"] = few.columns["source_shapes"][:3]
    indices = np.array([2, 0, 1] * 5)
    assert len(draw(few, indices)()) == 15


def test_each_sample_has_its_own_sizes():
    """A tall image's crops are squeezed otherwise than a wide one's."""
    mixed = files("stretch")
    mixed.columns["source_shapes"][::2] = 80, 60
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


@pytest.fixture
def shards(tmp_path):
    """Three files of 11, 7 and 9 images, and what is left of them in a Subset of a Concat."""
    paths = [write_kind(tmp_path / f"{n}.h5", "raw", count=n) for n in (11, 7, 9)]
    parts = ConcatDataset([H5Dataset(paths[:2]), H5Dataset(paths[2])])
    return H5Dataset(paths), Subset(parts, [26, 3, 1, 17, 0, 12, 4, 5, 20, 21, 9])


@pytest.mark.parametrize("part", [False, True])
def test_shards_come_in_one_order_from_samplers_and_loaders(shards, part):
    ds = shards[part]
    sampler = ShardShuffleSampler(ds, streams=2, window=1, seed=3)
    stock = DataLoader(range(len(ds)), batch_size=4, sampler=sampler)
    with H5Loader(ds, 4, shuffle="shards", streams=2, window=1, seed=3, with_index=True) as loader:
        for epoch in (0, 5):
            sampler.set_epoch(epoch)
            loader.set_epoch(epoch)
            places = torch.cat(list(stock))
            assert sorted(places.tolist()) == list(range(len(ds)))
            items = torch.tensor(ds.indices)[places] if part else places
            assert torch.cat([indices for *_, indices in loader]).tolist() == items.tolist()


@pytest.mark.parametrize("indices", [None, [0, 29, 7, 8, 14, 20, 2, 27]])
def test_shards_of_a_set_come_one_after_the_other(tmp_path, indices):
    """Its items are counted in another order than that in which shards hold them."""
    ds = H5Dataset(write_set(tmp_path / "set", random_images(30, (32, 32)), shards=4))
    options = {"shuffle": "shards", "streams": 1, "window": 1, "indices": indices}
    with H5Loader(ds, 4, with_index=True, **options) as loader:
        found = torch.cat([batch for *_, batch in loader]).tolist()
    assert sorted(found) == sorted(range(30) if indices is None else indices)
    shards = [ds.files.locate(index)[0] for index in found]
    assert len(list(itertools.groupby(shards))) == len(set(shards)) > 1


def test_ranks_of_a_sampler_have_shards_of_their_own(shards):
    shares = [
        list(ShardShuffleSampler(shards[0], streams=3, window=1, rank=rank, world_size=3))
        for rank in range(3)
    ]
    assert [len(share) for share in shares] == [9, 9, 9]
    assert sorted(itertools.chain(*shares)) == list(range(27))
    read = [np.unique(np.searchsorted([11, 18], share, side="right")) for share in shares]
    assert sum(map(len, read)) <= 5


def test_repeats_keep_to_their_streams(shards):
    options = {"shuffle": "shards", "streams": 3, "window": 1, "repeats": 2, "with_index": True}
    with H5Loader(shards[0], 27, **options) as loader:
        [(*_, indices)] = loader
    for stream in range(3):
        mine = indices[stream::3].tolist()  # nine samples, the last without its repeat
        assert mine[:8:2] == mine[1:8:2]
        assert len(set(mine)) == 5


def test_indices_keep_to_their_shards(shards):
    """`indices` are a part of each shard, and repeated ones stay repeated."""
    indices = [20, 3, 3, 25, 19, 18, 0, 26]
    loader = H5Loader(
        shards[0], 2, shuffle="shards", streams=1, window=1, indices=indices, with_index=True
    )
    with loader:
        found = torch.cat([batch for *_, batch in loader]).tolist()
    assert sorted(found) == sorted(indices)
    assert {tuple(sorted(found[:3])), tuple(sorted(found[3:]))} & {(0, 3, 3), (20, 25, 26)} or (
        sorted(found[-3:]) == [0, 3, 3]
    )


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
            lambda: ShardShuffleSampler(range(4)),
            r"dataset=range\(0, 4\) is not an H5Dataset, nor a Sub",
        ),
        (
            lambda: SampleOrder(
                4,
                shuffle=False,
                sampler=ShuffleSampler(range(4), world_size=2),
                indices=None,
                block=1,
                window=1,
                streams=1,
                shards=(np.array([4]), None),
            ),
            "ShuffleSampler gives one of 2 ranks its share, and H5Loader would split that again",
        ),
    ],
)
def test_samplers_refuse_a_wrong_argument(make, text):
    with pytest.raises(UsageError, match=text):
        make()
