import numpy as np
import torch

from augment.judge import assert_drawn_alike
from h5feed.augment.erasing import normal_block, normal_grid

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
