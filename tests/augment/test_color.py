"""Jitter, grayscale, hue and blur: torchvision's, on the CPU and on a device."""

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import (
    assert_close,
    assert_drawn_alike,
    assert_independent,
    make_images,
    on_device,
    planar,
    run,
)
from h5feed.augment import (
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Pipeline,
    RandomAffine,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from h5feed.augment.color import shift_hue, shift_hue_batch
from h5feed.errors import UsageError

v2 = pytest.importorskip("torchvision.transforms.v2")

NAMES = ("brightness", "contrast", "saturation", "hue")

ONE = [
    ColorJitter(brightness=0.8),
    ColorJitter(contrast=(0.3, 1.9)),
    ColorJitter(saturation=(0, 2)),
    ColorJitter(hue=0.5),
]

ALL = ColorJitter(0.4, 0.4, 0.4, 0.1)


def theirs(op, row, image):
    """torchvision's transform, given the parameters of a row."""
    made = {"fn_idx": torch.tensor(row[:4]).long()}
    for name, factor in zip(NAMES, row[4:], strict=True):
        made[f"{name}_factor"] = None if getattr(op, name) is None else factor
    other = v2.ColorJitter(op.brightness, op.contrast, op.saturation, op.hue)
    return other.transform(planar(image), made).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("op", [*ONE, ALL, ColorJitter(0.4, None, 0.4, 0.5)], ids=str)
def test_colors_are_torchvisions_in_the_same_random_order(op):
    images = make_images(12, 40, 50)
    _, params, out = run([op], images, FakeDraws(range(12)))
    rows = params.views[0][1].tolist()
    want = np.stack([theirs(op, row, image) for row, image in zip(rows, images, strict=True)])
    assert_close(out, want)


@pytest.mark.parametrize("op", [*ONE, ALL], ids=str)
def test_the_device_makes_what_the_cpu_makes(op):
    images = make_images(12, 40, 50)
    pipeline, params, out = run([op], images, FakeDraws(range(12)))
    assert_close(on_device(pipeline, params, images), out)


def test_what_a_crops_rounding_becomes_is_no_more_than_in_torchvision():
    images = make_images(48, 96, 96)
    pipeline, params, out = run([RandomResizedCrop(64), ALL], images, FakeDraws(range(48)))
    apart = np.abs(on_device(pipeline, params, images).numpy().astype(int) - out)
    assert apart.max() <= 10
    assert apart.mean() <= 0.5
    assert (apart > 2).mean() < 0.005

    _, _, cropped = run([RandomResizedCrop(64)], images, FakeDraws(range(48)))
    moved = cropped ^ 1  # every level by one, up or down
    _, params, _ = run([ALL], cropped, FakeDraws(range(48)))
    rows = params.views[0][1].tolist()
    one, other = (
        np.stack([theirs(ALL, *both) for both in zip(rows, taken, strict=True)]).astype(int)
        for taken in (cropped, moved)
    )
    assert np.abs(one - other).max() >= apart.max()


def test_the_order_matters_and_is_kept():
    images = make_images(12, 40, 50)
    _, params, out = run([ColorJitter(0.8, 0.8)], images, FakeDraws(range(12)))
    reversed_rows = [row[3::-1] + row[4:] for row in params.views[0][1].tolist()]
    op = ColorJitter(0.8, 0.8)
    other = [theirs(op, row, image) for row, image in zip(reversed_rows, images, strict=True)]
    assert np.abs(out.astype(int) - np.stack(other)).max() > 10


def test_factors_and_orders_are_drawn_as_torchvision_draws_them():
    n = 4000
    rows = ALL.rows(FakeDraws(range(n)).uniform(0, ALL.uniforms))
    torch.manual_seed(0)
    made = [v2.ColorJitter(0.4, 0.4, 0.4, 0.1).make_params([]) for _ in range(n)]
    for column, name in enumerate(NAMES, 4):
        assert_drawn_alike(rows[:, column], [one[f"{name}_factor"] for one in made])
    assert_independent(*rows[:, 4:].T)
    orders, counts = np.unique(rows[:, :4], axis=0, return_counts=True)
    assert len(orders) == 24
    # chi-square of 23 degrees of freedom lies above 58.6 once in 16,000 times
    assert ((counts - n / 24) ** 2 / (n / 24)).sum() < 58.6


def test_what_is_not_asked_for_stays():
    images = make_images(4, 20, 20)
    assert (run([ColorJitter()], images, FakeDraws(range(4)))[2] == images).all()
    assert (run([ColorJitter(0, (1, 1), 0, 0)], images, FakeDraws(range(4)))[2] == images).all()


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


functional = pytest.importorskip("torchvision.transforms.v2.functional")

# every level of every channel in every order, grays among them
COLORS = (
    np.stack(np.meshgrid(*[np.r_[0:256:15, 1, 254]] * 3, indexing="ij"), axis=-1)
    .reshape(-1, 20, 3)
    .astype(np.uint8)
)


@pytest.mark.parametrize("factor", [-0.5, -0.31, -1e-3, 0.0, 0.2, 1 / 3, 0.5])
def test_hues_turn_as_torchvision_turns_them(factor):
    want = functional.adjust_hue(planar(COLORS), factor).permute(1, 2, 0)
    ours = COLORS.copy()
    shift_hue(ours, factor)
    assert_close(ours, want, most=1, mean=0.05)
    images = planar(COLORS)[None].float()
    made = shift_hue_batch(images, torch.full((1, 1, 1, 1), factor))
    assert_close(made[0].permute(1, 2, 0).numpy().astype(np.uint8), want, most=1, mean=0.05)


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
