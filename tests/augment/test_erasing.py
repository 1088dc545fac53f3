"""Erasing, and the noise that it paints with."""

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import (
    assert_drawn_alike,
    assert_independent,
    make_images,
    on_device,
    planar,
    run,
)
from h5feed.augment import Normalize, Pipeline, RandomErasing, ToDtype
from h5feed.augment.erasing import normal_block, normal_grid
from h5feed.errors import UsageError

v2 = pytest.importorskip("torchvision.transforms.v2")

functional = pytest.importorskip("torchvision.transforms.v2.functional")

HALF = [ToDtype(torch.float32, scale=True), Normalize([0.5], [0.5])]


@pytest.mark.parametrize("value", [7, (1, 2, 3)])
def test_a_rectangle_of_bytes_is_torchvisions(value):
    images = make_images(8, 30, 40)
    pipeline, params, out = run([RandomErasing(1, value=value)], images, FakeDraws(range(8)))
    for image, made, row in zip(images, out, params.views[0][1].astype(int), strict=True):
        color = torch.tensor(np.atleast_1d(value))[:, None, None]
        want = functional.erase(planar(image), *row[:4].tolist(), color)
        assert (made == want.permute(1, 2, 0).numpy()).all()
    assert (on_device(pipeline, params, images).numpy() == out).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_after_normalize_the_value_is_one_of_the_floats(dtype):
    images = make_images(8, 30, 40)
    ops = [ToDtype(dtype, scale=True), Normalize([0.5], [0.5]), RandomErasing(1, value=-7.25)]
    pipeline, params, out = run(ops, images, FakeDraws(range(8)))
    made = torch.from_numpy(out.view(np.int16) if out.dtype == np.uint16 else out).view(dtype)
    erased = (made == -7.25).all(dim=3).sum(dim=(1, 2))
    assert erased.tolist() == params.views[0][1][:, 2:4].prod(axis=1).tolist()
    assert torch.equal(on_device(pipeline, params, images) == -7.25, made == -7.25)


def test_random_values_are_a_normal_draw_for_each_pixel_and_channel():
    images = make_images(8, 60, 60)
    ops = [*HALF, RandomErasing(1, scale=(0.2, 0.33), value="random")]
    pipeline, params, out = run(ops, images, FakeDraws(range(8)))
    noise = []
    for made, row in zip(out, params.views[0][1].astype(int), strict=True):
        top, left, h, w, _ = row
        noise.append(made[top : top + h, left : left + w].ravel())
    noise = np.concatenate(noise)
    assert len(np.unique(noise)) > 0.99 * len(noise)
    assert_drawn_alike(noise, np.random.default_rng(0).standard_normal(len(noise)))
    made = on_device(pipeline, params, images).numpy()
    assert np.abs(made - out).max() < 1e-3


def test_rectangles_are_drawn_as_torchvision_draws_them():
    n = 4000
    pipeline = Pipeline([RandomErasing(1)])
    pipeline.bind((60, 80))
    size = np.full((n, 2), (60, 80))
    rows = pipeline.draw(FakeDraws(range(n)), size, size).views[0][1]
    torch.manual_seed(0)
    image = planar(np.zeros((60, 80, 3), np.uint8))
    made = [v2.RandomErasing(1).make_params([image]) for _ in range(n)]
    for values, name in zip(rows.T[:4], "ijhw", strict=True):
        assert_drawn_alike(values, [one[name] for one in made])
    top, left, h, w = rows.T[:4]
    assert_independent(top / (60 - h), left / (80 - w), h * w, h / w)


def test_it_happens_with_probability_p_and_not_where_nothing_fits():
    n = 4000
    pipeline = Pipeline([RandomErasing(0.3), RandomErasing(1, scale=(1, 1), ratio=(1, 1))])
    pipeline.bind((8, 8))
    size = np.full((n, 2), 8)
    _, some, none = pipeline.draw(FakeDraws(range(n)), size, size).views[0]
    # within 4 standard deviations, left once in 16,000 times
    assert (some[:, 2] > 0).mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.3 * 0.7 / n))
    assert not none.any()


def test_values_that_make_no_sense_where_they_stand_are_refused():
    with pytest.raises(UsageError, match="draws from a normal distribution: put the op after"):
        Pipeline([RandomErasing(value="random")])
    with pytest.raises(UsageError, match=r"value=-1 must lie within 0\.\.255 before ToDtype"):
        Pipeline([RandomErasing(value=-1)])
    with pytest.raises(UsageError, match="must be one number, or one for each of 3 channels"):
        Pipeline([RandomErasing(value=(1, 2))])


SHAPE = (40, 50, 3)


def test_a_block_is_that_part_of_the_whole_and_the_grid_the_same():
    whole = normal_block(77, SHAPE, 0, 0, 40, 50)
    assert (normal_block(77, SHAPE, 5, 8, 20, 10) == whole[5:25, 8:18]).all()
    grid = normal_grid(torch.tensor([77.0, 78.0]).view(2, 1, 1, 1), torch.Size([2, 3, 40, 50]))
    np.testing.assert_allclose(grid[0].permute(1, 2, 0), whole, atol=1e-4)
    assert (grid[1] - grid[0]).abs().mean() > 0.5


def test_it_is_normal_and_without_pattern():
    normal = np.random.default_rng(0).standard_normal(20_000)
    images = np.stack([normal_block(seed, SHAPE, 0, 0, 40, 50) for seed in range(200)])
    assert_drawn_alike(images.ravel()[:: len(images) * 6000 // 20_000], normal)
    flat = images.reshape(200, -1)
    for a, b in [
        (flat[1:], flat[:-1]),
        (flat[:, 1:], flat[:, :-1]),
        (flat[:, 150:], flat[:, :-150]),
    ]:
        # uncorrelated: within 4 standard deviations of 0
        assert abs((a * b).mean()) < 4 / np.sqrt(a.size)
