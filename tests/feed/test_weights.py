"""Samples drawn by weight, and repeated: pure functions of seed, epoch and position."""

import numpy as np
import pytest
import torch

from h5feed import H5Dataset, H5Loader, UsageError, augment
from packed import random_images, write_packed

CROP = [augment.RandomResizedCrop(16)]
LABELS = np.array([0] * 20 + [1] * 4)


@pytest.fixture
def ds(tmp_path):
    return H5Dataset(write_packed(tmp_path / "a.h5", random_images(24), labels=LABELS))


def drawn(ds, epochs=1, batch_size=6, **options):
    """Return the indices of whole epochs."""
    with H5Loader(ds, batch_size, with_index=True, **options) as loader:
        return np.concatenate([i.numpy() for _ in range(epochs) for *_, i in loader])


def test_balanced_classes_come_equally_often(ds):
    found = drawn(ds, epochs=200, batch_size=24, weights="balanced")
    assert len(found) == 200 * 24
    share = (LABELS[found] == 1).mean()
    assert abs(share - 0.5) < 0.03
    counts = np.bincount(found, minlength=24)
    assert counts[20:].min() > 3 * counts[:20].max()


def test_samples_come_as_often_as_their_weights_say(ds):
    weights = np.zeros(24)
    weights[[3, 7, 23]] = 1, 2, 5
    found = drawn(ds, epochs=200, batch_size=24, weights=weights)
    counts = np.bincount(found, minlength=24)
    assert counts.sum() == counts[[3, 7, 23]].sum()
    np.testing.assert_allclose(
        counts[[3, 7, 23]] / counts.sum(), np.array([1, 2, 5]) / 8, atol=0.03
    )


@pytest.mark.parametrize("batch_size", [4, 7])
@pytest.mark.parametrize("options", [{"weights": "balanced"}, {"shuffle": True, "repeats": 3}])
def test_resume_gives_the_very_samples_and_crops(ds, batch_size, options):
    with H5Loader(ds, 6, augment=CROP, with_index=True, **options) as loader:
        whole = [(images.clone(), index.tolist()) for images, _, index in loader]
    with H5Loader(ds, 6, augment=CROP, with_index=True, **options) as loader:
        for _, _ in zip(range(2), loader, strict=False):
            pass
        state = loader.state_dict()
    with H5Loader(ds, batch_size, augment=CROP, with_index=True, **options) as loader:
        loader.load_state_dict(state)
        rest = [(images.clone(), index.tolist()) for images, _, index in loader]
    images = torch.cat([part for part, _ in whole])[12:]
    assert [i for _, index in rest for i in index] == [i for _, x in whole for i in x][12:]
    assert torch.equal(torch.cat([part for part, _ in rest]), images)


def test_ranks_share_what_one_process_has(ds):
    one = drawn(ds, batch_size=8, weights="balanced").reshape(3, 8)
    two = [
        drawn(ds, batch_size=4, weights="balanced", rank=r, world_size=2).reshape(3, 4)
        for r in range(2)
    ]
    assert np.array_equal(np.concatenate(two, axis=1), one)


def test_a_sample_that_comes_again_is_augmented_anew(ds):
    weights = np.zeros(24)
    weights[5] = 1
    for options in ({"weights": weights}, {"weights": weights, "indices": range(3, 9)}):
        with H5Loader(ds, 6, augment=CROP, with_index=True, **options) as loader:
            images, _, index = next(iter(loader))
            assert index.tolist() == [5] * 6
            assert len({image.numpy().tobytes() for image in images}) == 6


def test_repeats_come_in_a_row_and_differ(ds):
    with H5Loader(ds, 6, augment=CROP, shuffle=True, repeats=3, with_index=True) as loader:
        assert len(loader) == 4
        seen = []
        for images, _, index in loader:
            rows = index.reshape(2, 3)
            assert (rows == rows[:, :1]).all()
            seen += rows[:, 0].tolist()
            assert len({image.numpy().tobytes() for image in images}) == 6
    assert len(set(seen)) == 8  # of 24: an epoch is as long as without


def test_a_part_of_the_samples_keeps_its_weights(ds):
    weights = np.arange(24.0)
    found = drawn(ds, epochs=300, weights=weights, indices=[0, 2, 4])
    counts = np.bincount(found, minlength=5)
    np.testing.assert_allclose(counts[[2, 4]] / counts.sum(), [1 / 3, 2 / 3], atol=0.05)
    part = torch.utils.data.Subset(ds, range(18, 24))
    found = drawn(part, epochs=50, weights="balanced")
    assert set(found.tolist()) <= set(range(18, 24))
    assert abs((LABELS[found] == 1).mean() - 0.5) < 0.12


def test_a_state_of_other_weights_is_refused(ds):
    with H5Loader(ds, 6, weights="balanced") as loader:
        next(iter(loader))
        state = loader.state_dict()
    for options in (
        {"weights": np.ones(24)},
        {"shuffle": True},
        {"weights": "balanced", "repeats": 2},
    ):
        loader = H5Loader(ds, 6, **options)
        with pytest.raises(UsageError, match="order"):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": "even"}, "weights='even' is neither \"balanced\" nor an array"),
        ({"weights": np.ones(3)}, r"weights have the shape \(3,\), and there are 24 samples"),
        ({"weights": -np.ones(24)}, "weights must be finite and at least 0"),
        ({"weights": [np.nan] * 24}, "weights must be finite"),
        ({"weights": np.zeros(24)}, "weights are 0 for all samples"),
        ({"weights": ["x"] * 24}, "weights=list is not an array of numbers"),
        (
            {"weights": "balanced", "shuffle": "block"},
            'weights draw the samples, and shuffle="block" orders them',
        ),
        (
            {"weights": "balanced", "shuffle": "shards"},
            'weights draw the samples, and shuffle="shards" orders them',
        ),
        ({"weights": "balanced", "sampler": [1, 2]}, "weights draw the samples, and sampler="),
        ({"repeats": 0}, "repeats=0 must be a whole number of at least 1"),
    ],
)
def test_wrong_weights_are_refused(ds, options, said):
    with pytest.raises(UsageError, match=said):
        H5Loader(ds, 6, **options)


def test_balanced_needs_classes(tmp_path):
    path = write_packed(tmp_path / "a.h5", random_images(4), labels=np.array([0, -1, 1, 0]))
    with pytest.raises(UsageError, match="needs a class of every sample, and here are samples w"):
        H5Loader(H5Dataset(path), 2, weights="balanced")
    targets = np.ones((4, 2), np.float32)
    path = write_packed(tmp_path / "b.h5", random_images(4), labels=targets)
    with pytest.raises(UsageError, match="and here are targets: give an array"):
        H5Loader(H5Dataset(path), 2, weights="balanced")
