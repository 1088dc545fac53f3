import math

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import (
    assert_close,
    assert_drawn_alike,
    assert_independent,
    make_images,
    planar,
    run,
)
from h5feed.augment import Pipeline, RandomResizedCrop
from h5feed.augment.frame import COLUMNS

v2 = pytest.importorskip("torchvision.transforms.v2")
functional = pytest.importorskip("torchvision.transforms.v2.functional")


@pytest.mark.parametrize("antialias", [True, False])
def test_given_the_same_boxes_the_pixels_are_torchvisions(antialias):
    images = make_images(12, 90, 120)
    op = RandomResizedCrop((40, 50))
    _, params, out = run([op], images, FakeDraws(range(12)), antialias=antialias)
    for image, made, row in zip(images, out, params.views[0][0].tolist(), strict=True):
        want = functional.resized_crop(
            planar(image), *row[:4], [40, 50], antialias=antialias
        ).permute(1, 2, 0)
        assert_close(made, want)


def test_auto_is_one_of_the_two_for_each_image():
    images = make_images(12, 90, 120)
    draws = FakeDraws(range(12))
    op = RandomResizedCrop((40, 50))
    smooth, plain, auto = (
        run([op], images, draws, antialias=antialias)[2] for antialias in (True, False, "auto")
    )
    _, params, _ = run([op], images, draws)
    h, w, antialiased = params.views[0][0][:, [2, 3, 11]].T
    assert (antialiased == ((h > 60) | (w > 75))).all()
    assert 2 < antialiased.sum() < 12
    for k in range(12):
        assert (auto[k] == (smooth if antialiased[k] else plain)[k]).all()


def reference_box(height, width, u, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)):
    """torchvision's make_params, fed with uniforms: two for the place, ten areas, ten ratios."""
    for k in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * u[2 + k])
        low, high = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(low + (high - low) * u[12 + k])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(u[0] * (height - h + 1)), int(u[1] * (width - w + 1)), h, w
    if width / height < min(ratio):
        h, w = round(width / min(ratio)), width
    elif width / height > max(ratio):
        h, w = height, round(height * max(ratio))
    else:
        h, w = height, width
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("hw", [(256, 256), (375, 500), (100, 1000), (1000, 90), (7, 5)])
def test_boxes_are_torchvisions_draw_for_draw(hw):
    n = 300
    draws = FakeDraws(range(n))
    size = np.full((n, 2), hw)
    pipeline = Pipeline([RandomResizedCrop(32)])
    pipeline.bind(None)
    rows = pipeline.draw(draws, size, size).views[0][0]
    uniforms = draws.uniform(0, 22)
    assert rows[:, :4].tolist() == [list(reference_box(*hw, u)) for u in uniforms]


def test_boxes_are_drawn_as_torchvision_draws_them():
    n = 4000
    torch.manual_seed(0)
    image = planar(np.zeros((375, 500, 3), np.uint8))
    made = [v2.RandomResizedCrop(224).make_params([image]) for _ in range(n)]
    size = np.full((n, 2), (375, 500))
    rows = RandomResizedCrop(224).boxes(size[:, 0], size[:, 1], FakeDraws(range(n)).uniform(0, 22))
    for values, name in zip(rows, ("top", "left", "height", "width"), strict=True):
        assert_drawn_alike(values, [one[name] for one in made])
    top, left, h, w = rows
    inside = (h < 375) & (w < 500)
    place = top[inside] / (375 - h[inside]), left[inside] / (500 - w[inside])
    assert_independent(*place, (h * w)[inside])


def test_in_a_squeezed_image_the_shares_and_ratios_are_the_sources():
    n = 4000
    pipeline = Pipeline([RandomResizedCrop(224)])
    pipeline.bind((256, 256))
    source = np.full((n, 2), (300, 900))
    rows = pipeline.draw(FakeDraws(range(n)), np.full((n, 2), 256), source).views[0][0]
    h, w = (rows[:, COLUMNS.index(name)] for name in "hw")
    share, ratio = h * w / 256**2, 3 * w / h
    assert share.min() > 0.07
    assert np.median(share) == pytest.approx(0.19, abs=0.03)  # a third, a square at most
    assert ratio.min() > 0.74
    assert ratio.max() < 1.36
    unsqueezed = Pipeline([RandomResizedCrop(224)])
    unsqueezed.bind((256, 768))
    same = np.full((n, 2), (256, 768))
    true = unsqueezed.draw(FakeDraws(range(n)), same, same).views[0][0]
    assert np.abs(rows[:, [0, 2]] - true[:, [0, 2]]).max() == 0
    assert np.abs(rows[:, [1, 3]] - true[:, [1, 3]] / 3).max() <= 1
