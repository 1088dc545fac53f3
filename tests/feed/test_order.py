import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h5feed.feed.order import (
    BlockShuffle,
    FullShuffle,
    Listed,
    Repeated,
    Sequential,
    ShardShuffle,
    permute,
    permute_each,
    spread_out,
)


def everything(order):
    return order(np.arange(len(order)))


@given(
    st.one_of(st.integers(1, 300), st.integers(1, 70).map(lambda n: n * n)), st.integers(0, 2**64)
)
@settings(max_examples=200, deadline=None)
def test_permute_is_a_permutation(count, key):
    assert sorted(permute(np.arange(count), count, key).tolist()) == list(range(count))


@pytest.mark.parametrize("count", [255, 256, 257, 4095, 65_536, 1_000_003])
def test_permute_is_a_permutation_of_larger_ranges(count):
    where = permute(np.arange(count), count, 5)
    assert where.dtype == np.int64
    np.testing.assert_array_equal(np.sort(where), np.arange(count))


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(0, 2**60))
@settings(max_examples=100, deadline=None)
def test_permute_each_is_one_permutation_of_each_range(counts, key):
    counts = np.array(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    positions = np.concatenate([np.arange(count) for count in counts])
    keys = (key + owner).astype(np.uint64)
    where = permute_each(positions, counts[owner], keys)
    for number, count in enumerate(counts):
        assert sorted(where[owner == number].tolist()) == list(range(count))
    some = np.arange(len(owner))[::3]  # each is moved as if it were alone
    alone = permute_each(positions[some], counts[owner][some], keys[some])
    np.testing.assert_array_equal(alone, where[some])


def test_permute_each_finds_all_permutations_equally_often():
    number = {p: k for k, p in enumerate(itertools.permutations(range(4)))}
    rows = 12 * 24
    owner = np.repeat(np.arange(rows, dtype=np.uint64), 4)
    where = permute_each(np.tile(np.arange(4), rows), np.full(4 * rows, 4), owner)
    found = np.bincount([number[tuple(row)] for row in where.reshape(rows, 4).tolist()])
    chi = ((found - 12) ** 2 / 12).sum()
    assert (chi - 23) / np.sqrt(2 * 23) < 4


def test_a_batch_of_ten_million_is_computed_alone():
    full = FullShuffle(10**7, 1, 2)
    part = np.arange(9_999_000, 10**7)
    np.testing.assert_array_equal(full(part)[-10:], full(part[-10:]))
    assert len(full) == 10**7
    assert full(part).max() < 10**7


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_all_permutations_of_few_items_come_up_equally_often(count):
    total = math.factorial(count)
    number = {p: k for k, p in enumerate(itertools.permutations(range(count)))}
    counts = np.zeros(total)
    for seed in range(12 * total):
        counts[number[tuple(permute(np.arange(count), count, seed).tolist())]] += 1
    chi = ((counts - 12) ** 2 / 12).sum()
    assert (chi - (total - 1)) / np.sqrt(2 * (total - 1)) < 4  # standard deviations


def shuffle_statistics(order):
    """Position correlation, share of neighbours that stay neighbours, share of fixed points."""
    order = np.asarray(order)
    n = len(order)
    steps = np.abs(np.diff(order))
    return np.array(
        [
            np.sqrt(n) * np.corrcoef(np.arange(n), order)[0, 1],
            np.sqrt(n) * np.corrcoef(order[:-1], order[1:])[0, 1],
            (steps == 1).sum(),
            (order == np.arange(n)).sum(),
            np.sqrt(n) * (steps.mean() / n - 1 / 3),
            n / 8 * np.corrcoef(np.arange(n) // 8 % 2, order % 2)[0, 1] ** 2,
        ]
    )


@pytest.mark.parametrize("count", [100, 5_000])
def test_shuffles_as_well_as_randperm(count):
    """Means over 200 seeds differ by less than 4 standard errors (torch.randperm against ours)."""
    ours = [shuffle_statistics(everything(FullShuffle(count, seed, 0))) for seed in range(200)]
    generator = torch.Generator().manual_seed(0)
    theirs = [shuffle_statistics(torch.randperm(count, generator=generator)) for _ in range(200)]
    ours, theirs = np.array(ours), np.array(theirs)
    error = np.sqrt((ours.var(axis=0) + theirs.var(axis=0)) / 200)
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 4 * error).all()
    # and spread as much: a shuffle that is always alike would pass the means
    assert (np.abs(np.log(ours.std(axis=0) / theirs.std(axis=0))) < 0.35).all()


def test_each_item_visits_each_place_equally_often():
    count, seeds = 64, 4000
    table = np.zeros((count, count))
    for seed in range(seeds):
        table[np.arange(count), everything(FullShuffle(count, seed, 1))] += 1
    expected = seeds / count
    chi = ((table - expected) ** 2 / expected).sum()
    freedom = (count - 1) ** 2
    assert abs(chi - freedom) / np.sqrt(2 * freedom) < 4


def test_epochs_and_seeds_give_unlike_orders():
    orders = [everything(FullShuffle(5000, seed, epoch)) for seed in range(4) for epoch in range(4)]
    for a, b in itertools.combinations(orders, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(5000)
        assert (a == b).sum() < 9  # one is expected


@given(
    count=st.integers(1, 500),
    block=st.integers(1, 60),
    window=st.integers(1, 8),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_block_shuffle_sees_every_sample_once(count, block, window, seed):
    order = BlockShuffle(count, seed, 0, block=block, window=window)
    whole = everything(order)
    assert sorted(whole.tolist()) == list(range(count))
    part = np.arange(count)[count // 3 : count // 2]
    np.testing.assert_array_equal(order(part), whole[part])


def test_block_shuffle_reads_whole_blocks_within_a_window():
    order = BlockShuffle(1000, 3, 0, block=10, window=4)
    whole = everything(order)
    for begin in range(0, 1000, 40):
        blocks = np.unique(whole[begin : begin + 40] // 10, return_counts=True)
        assert blocks[1].tolist() == [10] * 4
        assert (np.abs(np.diff(whole[begin : begin + 40])) != 1).sum() > 25  # mixed, too


def test_block_shuffle_changes_blocks_and_their_items_with_the_epoch():
    one, two = (everything(BlockShuffle(1000, 3, e, block=10, window=4)) for e in (0, 1))
    assert set((one[:40] // 10).tolist()) != set((two[:40] // 10).tolist())


def test_block_shuffle_of_windows_is_not_the_same_in_each():
    whole = everything(BlockShuffle(400, 3, 0, block=10, window=4)).reshape(10, 40)
    inner = {tuple(np.argsort(row).tolist()) for row in whole}
    assert len(inner) == 10


# --- shards -------------------------------------------------------------------------------------

SHARDS = {
    "counts": st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any),
    "streams": st.integers(1, 20),
    "window": st.integers(1, 5),
    "seed": st.integers(0, 99),
}


@given(**SHARDS, data=st.data())
@settings(max_examples=300, deadline=None)
def test_shard_shuffle_sees_every_sample_once(counts, streams, window, seed, data):
    options = {"streams": streams, "window": window}
    order = ShardShuffle(np.array(counts), seed, 3, **options)
    assert len(order) == sum(counts)
    whole = everything(order)
    assert sorted(whole.tolist()) == list(range(len(order)))
    some = np.array(data.draw(st.lists(st.integers(0, len(order) - 1), max_size=9)), np.int64)
    np.testing.assert_array_equal(order(some), whole[some])
    # samples that lie in another order than that of the items
    items = np.random.default_rng(seed).permutation(len(order))
    mapped = ShardShuffle(np.array(counts), seed, 3, **options, items=items)
    np.testing.assert_array_equal(everything(mapped), items[whole])


def shard_of(order_counts, samples):
    return np.searchsorted(np.cumsum(order_counts), samples, side="right")


@given(**SHARDS)
@settings(max_examples=200, deadline=None)
def test_a_stream_has_window_shards_at_a_time_and_its_neighbour_shares_one(
    counts, streams, window, seed
):
    order = ShardShuffle(np.array(counts), seed, 3, streams=streams, window=window)
    shards = shard_of(counts, everything(order))
    total = 0
    for stream in range(streams):
        mine = shards[stream::streams]
        first, last = {}, {}
        for at, shard in enumerate(mine.tolist()):
            first.setdefault(shard, at)
            last[shard] = at
        total += len(first)
        for at in range(len(mine)):  # shards that have come and will come again
            assert sum(first[s] <= at <= last[s] for s in first) <= window
    assert total <= sum(c > 0 for c in counts) + streams - 1


@pytest.mark.parametrize("streams", [4, 6, 16])
def test_streams_come_to_the_shard_they_share_at_the_same_time(streams):
    """So a machine that has both reads it once, however small its cache."""
    counts = np.full(50, 100)
    order = ShardShuffle(counts, 1, 0, streams=streams, window=1)
    shards = shard_of(counts, everything(order))
    shared = 0
    for shard in range(50):
        at = np.flatnonzero(shards == shard)
        owners = np.unique(at % streams)
        if len(owners) == 1:
            continue
        shared += 1
        assert at.max() - at.min() < 2 * 100 * streams
    assert shared > 0


def test_windows_of_streams_do_not_all_begin_at_once():
    counts = np.full(640, 10)
    order = ShardShuffle(counts, 1, 0, streams=16, window=4)
    shards = shard_of(counts, everything(order))
    seen = set()
    fresh = []  # shards of which the first sample comes in each of many small steps
    for begin in range(0, len(shards), 160):
        now = set(shards[begin : begin + 160].tolist())
        fresh.append(len(now - seen))
        seen |= now
    assert max(fresh[1:-1]) <= 40, "16 streams that begin 4 shards each are 64"


def test_shard_shuffle_changes_with_the_epoch_and_the_seed():
    counts = np.full(40, 25)
    orders = [
        everything(ShardShuffle(counts, seed, epoch, streams=4, window=2))
        for seed in range(3)
        for epoch in range(3)
    ]
    for a, b in itertools.combinations(orders, 2):
        assert (a == b).sum() < 20  # one is expected
        assert len(set(shard_of(counts, a[:100])) & set(shard_of(counts, b[:100]))) < 8


def test_a_billion_items_cost_their_shards_alone():
    counts = np.full(1000, 10**6)
    order = ShardShuffle(counts, 1, 2, streams=64, window=4)
    part = np.arange(10**9 - 1000, 10**9)
    np.testing.assert_array_equal(order(part)[-10:], order(part[-10:]))
    assert len(np.unique(order(part))) == 1000


@pytest.mark.parametrize("streams", [1, 2, 7, 12, 48, 64, 100])
def test_streams_are_spread_over_the_epoch(streams):
    parts = spread_out(streams)
    assert sorted(parts.tolist()) == list(range(streams))
    first, count = 13, 5 * streams + 3
    has = np.bincount(np.arange(first, first + count) % streams, minlength=streams)[parts]
    fair = np.arange(1, streams + 1) * count / streams
    assert np.abs(np.cumsum(has) - fair).max() <= 1 + np.log2(streams)


def test_repeats_follow_one_another_in_their_stream():
    counts = np.full(8, 6)
    order = ShardShuffle(counts, 1, 0, streams=4, window=1)
    repeated = Repeated(order, 3, 4)
    positions = np.arange(len(repeated))
    samples, keys = repeated(positions), repeated.draw_keys(positions, repeated(positions))
    for stream in range(4):
        mine = samples[stream::4].reshape(-1, 3)
        assert (mine == mine[:, :1]).all()
        np.testing.assert_array_equal(mine[:, 0], order(np.arange(16))[stream::4])
    assert len(np.unique(keys)) == len(keys)


def test_sequential():
    assert everything(Sequential(5)).tolist() == [0, 1, 2, 3, 4]


def test_listed_repeats_what_it_was_given():
    order = Listed(np.array([5, 2, 5, 9]))
    assert len(order) == 4
    assert everything(order).tolist() == [5, 2, 5, 9]


def test_listed_tells_repeats_apart():
    order = Listed(np.array([5, 2, 5, 9, 5]))
    positions = np.arange(5)
    keys = order.draw_keys(positions, order(positions))
    assert keys.tolist() == [5, 2, 5 + (1 << 40), 9, 5 + (2 << 40)]
    assert order.draw_keys(positions[3:], order(positions[3:])).tolist() == [9, 5 + (2 << 40)]


def test_listed_without_repeats_keys_by_index():
    order = Listed(np.array([5, 2, 9]))
    positions = np.arange(3)
    assert order.draw_keys(positions, order(positions)).tolist() == [5, 2, 9]
    assert len(Listed(np.empty(0, np.int64))) == 0


def test_listed_can_be_shuffled():
    order = Listed(np.array([10, 20, 30, 40]), FullShuffle(4, 1, 0))
    assert sorted(everything(order).tolist()) == [10, 20, 30, 40]
    assert everything(order).tolist() == [10 * (k + 1) for k in everything(FullShuffle(4, 1, 0))]


def test_the_order_stays_what_it_is():
    """A checkpoint of today must go on with the same samples under the next version."""
    positions = np.arange(5)
    assert FullShuffle(1_281_167, 42, 7)(positions).tolist() == [
        1207484,
        3390,
        67732,
        546021,
        1017295,
    ]
    assert FullShuffle(100, 42, 7)(positions).tolist() == [1, 71, 32, 17, 28]
    assert BlockShuffle(10_000, 42, 7, block=43, window=16)(positions).tolist() == [
        4869,
        229,
        2392,
        2243,
        1841,
    ]
    counts = np.arange(1, 200)
    shards = ShardShuffle(counts, 42, 7, streams=64, window=4)
    assert shards(positions).tolist() == [11761, 4013, 16513, 5353, 12136]
