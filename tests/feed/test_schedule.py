import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from h5feed.augment import Pipeline, RandomResizedCrop
from h5feed.feed.random import Draws
from h5feed.feed.schedule import Drawing

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
