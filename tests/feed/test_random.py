import itertools

import numpy as np
import pytest

from h5feed.feed.random import SeededDraws, hash_ints, mix64

# Thresholds below are for fixed seeds, so a test passes or fails for good; each says how often
# true randomness would exceed it.


def kolmogorov_smirnov(values):
    """Return √n times the largest distance of the empirical distribution from the uniform one."""
    ordered = np.sort(values.ravel())
    n = len(ordered)
    steps = np.arange(n + 1) / n
    return np.sqrt(n) * max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())


def chi_square_z(counts):
    """Return how many standard deviations chi-square lies above its mean, for even counts."""
    counts = np.asarray(counts, float).ravel()
    expected = counts.mean()
    chi = ((counts - expected) ** 2 / expected).sum()
    return (chi - (len(counts) - 1)) / np.sqrt(2 * (len(counts) - 1))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**200])
def test_uniform_is_uniform(seed):
    u = SeededDraws(seed, 3, np.arange(100_000)).uniform(7, 4)
    assert u.shape == (100_000, 4)
    assert u.dtype == np.float64
    assert u.min() >= 0
    assert u.max() < 1
    for column in u.T:
        assert kolmogorov_smirnov(column) < 1.95  # exceeded once in 1,000
        assert abs(chi_square_z(np.histogram(column, 256, (0, 1))[0])) < 4


def test_every_bit_is_fair():
    u = SeededDraws(5, 0, np.arange(100_000)).uniform(0, 1)[:, 0]
    integers = (u * 2**53).astype(np.uint64)
    assert (integers == u * 2**53).all()
    ones = [int((integers >> np.uint64(bit) & np.uint64(1)).sum()) for bit in range(53)]
    assert np.abs(np.array(ones) - 50_000).max() < 4.5 * np.sqrt(25_000)


def neighbours():
    """Pairs of columns of numbers that differ in one argument by one."""
    index = np.arange(50_000)
    base = SeededDraws(0, 0, index).uniform(0, 2)
    yield "column", base[:, 0], base[:, 1]
    yield "index", base[:-1, 0], base[1:, 0]
    yield "epoch", base[:, 0], SeededDraws(0, 1, index).uniform(0, 1)[:, 0]
    yield "seed", base[:, 0], SeededDraws(1, 0, index).uniform(0, 1)[:, 0]
    yield "stream", base[:, 0], SeededDraws(0, 0, index).uniform(1, 1)[:, 0]
    yield "view", base[:, 0], SeededDraws(0, 0, index).uniform(1 << 16, 1)[:, 0]
    yield (
        "seed against epoch",
        SeededDraws(1, 0, index).uniform(0, 1),
        SeededDraws(0, 1, index).uniform(0, 1),
    )
    yield "repeat", base[:, 0], SeededDraws(0, 0, index + (1 << 40)).uniform(0, 1)[:, 0]


@pytest.mark.parametrize(("a", "b"), [(a, b) for _, a, b in neighbours()], ids=lambda _: "")
def test_neighbours_are_independent(a, b):
    a, b = a.ravel(), b.ravel()
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(len(a))
    assert abs(chi_square_z(np.histogram2d(a, b, 16, ((0, 1), (0, 1)))[0])) < 4


def test_numbers_belong_to_the_sample_not_to_the_batch():
    index = np.arange(1000)
    whole = SeededDraws(9, 2, index).uniform(3, 5)
    some = np.array([999, 0, 500])
    np.testing.assert_array_equal(SeededDraws(9, 2, some).uniform(3, 5), whole[some])
    np.testing.assert_array_equal(SeededDraws(9, 2, index).uniform(3, 2), whole[:, :2])
    np.testing.assert_array_equal(SeededDraws(9, 2, index, batch=77).uniform(3, 5), whole)


def test_batch_numbers_belong_to_the_batch():
    a = SeededDraws(9, 2, np.arange(4), batch=0).batch_uniform(3, 6)
    np.testing.assert_array_equal(SeededDraws(9, 2, np.arange(8), batch=0).batch_uniform(3, 6), a)
    others = [
        SeededDraws(9, 2, np.arange(4), batch=1).batch_uniform(3, 6),
        SeededDraws(9, 3, np.arange(4), batch=0).batch_uniform(3, 6),
        SeededDraws(8, 2, np.arange(4), batch=0).batch_uniform(3, 6),
        SeededDraws(9, 2, np.arange(4), batch=0).batch_uniform(4, 6),
        SeededDraws(9, 2, np.arange(4), batch=0).uniform(3, 6)[0],
    ]
    assert a.shape == (6,)
    assert not any(np.isin(a, other).any() for other in others)


def test_the_numbers_stay_what_they_are():
    """A checkpoint of today must go on with the same crops under the next version."""
    got = SeededDraws(42, 7, np.array([0, 1, 10**9])).uniform(2, 2)
    np.testing.assert_array_equal(
        got,
        [
            [0.06680476726443929, 0.8245686817783348],
            [0.1531763642085081, 0.7702412881856061],
            [0.7687176608551196, 0.9489754970783748],
        ],
    )


def test_hash_ints_tells_arguments_apart():
    values = [0, 1, -1, 2, 2**32, 2**64, -(2**64), 2**64 + 1]
    tuples = [t for n in range(4) for t in itertools.product(values, repeat=n)]
    hashes = {hash_ints(*t) for t in tuples}
    assert len(hashes) == len(tuples)
    assert all(0 <= h < 2**64 for h in hashes)


def test_mix64_is_one_to_one():
    x = np.arange(1 << 16, dtype=np.uint64) << np.uint64(20)
    assert len(np.unique(mix64(x.copy()))) == len(x)
