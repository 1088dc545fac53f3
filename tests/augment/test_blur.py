import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import assert_close, assert_drawn_alike, make_images, on_device, planar, run
from h5feed.augment import GaussianBlur

v2 = pytest.importorskip("torchvision.transforms.v2")
functional = pytest.importorskip("torchvision.transforms.v2.functional")


@pytest.mark.parametrize("size", [1, 3, (5, 9), 23])
@pytest.mark.parametrize("sigma", [0.3, 1.7, (0.1, 2.0)])
def test_blurred_is_torchvisions_borders_included(size, sigma):
    images = make_images(4, 26, 30)
    op = GaussianBlur(size, sigma)
    pipeline, params, out = run([op], images, FakeDraws(range(4)))
    taps = [size, size] if isinstance(size, int) else list(size)
    want = [
        functional.gaussian_blur(planar(image), taps, [s, s]).permute(1, 2, 0).numpy()
        for image, (s,) in zip(images, params.views[0][1].tolist(), strict=True)
    ]
    assert_close(out, np.stack(want), most=1, mean=0.05)
    assert_close(on_device(pipeline, params, images), out, most=1, mean=0.05)


def test_deviations_are_drawn_as_torchvision_draws_them():
    n = 4000
    torch.manual_seed(0)
    made = [v2.GaussianBlur(3).make_params([])["sigma"][0] for _ in range(n)]
    assert_drawn_alike(GaussianBlur(3).rows(FakeDraws(range(n)).uniform(0, 1))[:, 0], made)
