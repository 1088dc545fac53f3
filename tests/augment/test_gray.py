import numpy as np
import pytest

from augment.draws import FakeDraws
from augment.judge import assert_close, make_images, on_device, planar, run
from h5feed.augment import (
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Pipeline,
    RandomAffine,
    RandomGrayscale,
    RandomHorizontalFlip,
    Resize,
)
from h5feed.errors import UsageError

v2 = pytest.importorskip("torchvision.transforms.v2")


@pytest.mark.parametrize("channels", [1, 3])
def test_gray_is_torchvisions(channels):
    images = make_images(4, 30, 40)
    pipeline, params, out = run([Grayscale(channels)], images, FakeDraws(range(4)))
    op = v2.Grayscale(channels)
    want = np.stack([op(planar(image)).permute(1, 2, 0).numpy() for image in images])
    assert pipeline.out_shape == (30, 40, channels)
    assert_close(out, want, most=1, mean=0.01)
    assert_close(on_device(pipeline, params, images), out, most=1, mean=0.01)


def test_random_grayscale_takes_the_images_below_p():
    images = make_images(60, 8, 8)
    pipeline, params, out = run([RandomGrayscale(0.4)], images, FakeDraws(range(60)))
    gray = run([Grayscale(3)], images, FakeDraws(range(60)))[2]
    chosen = FakeDraws(range(60)).uniform(0, 1)[:, 0] < 0.4
    assert 10 < chosen.sum() < 40
    assert (out == np.where(chosen[:, None, None, None], gray, images)).all()
    assert_close(on_device(pipeline, params, images), out, most=1, mean=0.01)


def test_one_channel_goes_on_through_geometry_and_blur():
    images = make_images(4, 30, 40)
    before = [Resize((40, 40)), CenterCrop(44), RandomHorizontalFlip(1)]
    after = [RandomAffine(20, interpolation="bilinear"), GaussianBlur(3), Resize((20, 22))]
    ops = [*before, Grayscale(), *after]
    pipeline, params, out = run(ops, images, FakeDraws(range(4)))
    assert pipeline.out_shape == (20, 22, 1)
    three = run([*before, Grayscale(3), *after], images, FakeDraws(range(4)))[2]
    assert_close(out, three[..., :1], most=1)
    assert_close(on_device(pipeline, params, images), out)


@pytest.mark.parametrize("op", [ColorJitter(0.4), RandomGrayscale(), Grayscale()])
def test_without_colors_color_ops_are_refused(op):
    with pytest.raises(UsageError, match=r"works on colors: put it before Grayscale"):
        Pipeline([Grayscale(), op])
