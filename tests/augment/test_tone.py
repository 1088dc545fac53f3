"""Posterize, solarize, invert, equalize, autocontrast and sharpness: torchvision's, both ways."""

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import assert_close, make_images, on_device, planar, run
from h5feed.augment import (
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from h5feed.errors import UsageError

v2 = pytest.importorskip("torchvision.transforms.v2")

EVERY = [
    *(RandomPosterize(bits, 1.0) for bits in (0, 1, 3, 8)),
    *(RandomSolarize(threshold, 1.0) for threshold in (0, 100.5, 128, 255)),
    RandomInvert(1.0),
    RandomAutocontrast(1.0),
    RandomEqualize(1.0),
    *(RandomAdjustSharpness(factor, 1.0) for factor in (0, 0.3, 1, 2, 5.5)),
]


def odd_images():
    """Soft images, noise, edges, and those whose histograms are thin."""
    images = make_images(8, 40, 50)
    images[2] = 77
    images[3][..., 1] = images[3][..., 1] // 64 * 20 + 30
    images[4] = images[4] // 2 + 60
    images[5, :, :, 0] = 0
    images[5, 0, 0, 0] = 255
    return images


@pytest.mark.parametrize("op", EVERY, ids=str)
def test_changes_are_torchvisions(op):
    images = odd_images()
    pipeline, params, out = run([op], images, FakeDraws(range(8)))
    fields = {name: getattr(op, name) for name in type(op).__dataclass_fields__}
    theirs = getattr(v2, type(op).__name__)(**fields)
    want = np.stack([theirs(planar(image)).permute(1, 2, 0).numpy() for image in images])
    assert_close(out, want, most=1)
    assert_close(on_device(pipeline, params, images), out, most=1)


@pytest.mark.parametrize("op", [RandomEqualize, RandomInvert, RandomAutocontrast])
def test_it_happens_with_its_probability(op):
    images = np.stack([make_images(1, 32, 32)[0] // 2 + 30] * 400)
    _, params, out = run([op(0.3)], images, FakeDraws(range(400)))
    changed = (out != images).any(axis=(1, 2, 3))
    assert np.array_equal(changed, params.views[0][1][:, 0] > 0)
    assert 0.2 < changed.mean() < 0.4


def test_tiny_images_are_not_sharpened():
    images = make_images(3, 2, 9)
    pipeline, params, out = run([RandomAdjustSharpness(3, 1.0)], images, FakeDraws(range(3)))
    assert np.array_equal(out, images)
    assert torch.equal(on_device(pipeline, params, images), torch.from_numpy(images))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RandomPosterize(9), "RandomPosterize: bits=9 must be a whole number from 0 to 8"),
        (lambda: RandomSolarize(256), "threshold=256 must be a number from 0 to 255"),
        (lambda: RandomAdjustSharpness(-1), "sharpness_factor=-1 must be a number not below 0"),
        (lambda: RandomInvert(2), "p=2 must be a probability between 0 and 1"),
    ],
)
def test_bad_arguments_are_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()
