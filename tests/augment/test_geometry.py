"""Crops, resizes and flips: pixels and draws are torchvision's."""

import math
import warnings

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws, Given
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
    AlternatingFlip,
    CenterCrop,
    Grayscale,
    Pipeline,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from h5feed.augment.cpu import are_windows, readable
from h5feed.augment.frame import COLUMNS
from h5feed.errors import UsageError
from h5feed.feed.random import SeededDraws

v2 = pytest.importorskip("torchvision.transforms.v2")


def theirs(op, image):
    return op(planar(image)).permute(1, 2, 0).numpy()


SIZES = [
    ((40, 60), {"size": 30}),
    ((41, 60), {"size": 30}),
    ((60, 40), {"size": (30,)}),
    ((40, 60), {"size": 30, "max_size": 40}),
    ((45, 45), {"size": 100}),
    ((40, 60), {"size": (50, 33)}),
    ((61, 47), {"size": None, "max_size": 90}),
]


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize(("hw", "arguments"), SIZES)
def test_resize_is_torchvisions(hw, arguments, antialias):
    image = make_images(2, *hw)[:1]
    _, _, out = run([Resize(**arguments, antialias=antialias)], image, Given([[0]]))
    assert_close(out[0], theirs(v2.Resize(**arguments, antialias=antialias), image[0]))


@pytest.mark.parametrize("size", [(20, 31), (40, 60), 41, (70, 71), (30, 71), (39, 60)])
def test_center_crop_is_torchvisions_to_the_pixel(size):
    image = make_images(2, 40, 60)[:1]
    _, _, out = run([CenterCrop(size)], image, Given([[0]]))
    assert (out[0] == theirs(v2.CenterCrop(size), image[0])).all()


@pytest.mark.parametrize("antialias", [True, False])
def test_a_resize_and_a_center_crop_are_what_torchvision_makes_of_both(antialias):
    image = make_images(3, 100, 130)[2:]
    _, _, out = run([Resize(87), CenterCrop(64)], image, Given([[0]]), antialias=antialias)
    both = v2.Compose([v2.Resize(87, antialias=antialias), v2.CenterCrop(64)])
    assert_close(out[0], theirs(both, image[0]))


def test_ops_in_a_row_are_what_torchvision_makes_of_them_one_by_one():
    """An op after a padding one starts a pass of its own, so that the fill is resized too."""
    image = make_images(2, 40, 40)[:1]
    ours = [CenterCrop(48), Resize(96), CenterCrop(100), Resize(50)]
    both = v2.Compose(
        [v2.CenterCrop(48), v2.Resize(96), v2.CenterCrop(100), v2.Resize(50, antialias=True)]
    )
    _, _, out = run(ours, image, Given([[0]]), antialias=True)
    assert_close(out[0], theirs(both, image[0]))


CROPS = [
    {"size": 32, "padding": 4},
    {"size": (20, 30)},
    {"size": (30, 45), "padding": (3, 7), "fill": (10, 20, 30)},
    {"size": 36, "padding": (1, 2, 3, 4), "fill": 9},
    {"size": (48, 70), "pad_if_needed": True},
    {"size": (48, 70), "pad_if_needed": True, "padding": 1},
    {"size": 10, "padding": 20},
    {"size": (12, 9), "padding": (17, 13)},
]


@pytest.mark.parametrize("u", [(0, 0), (0.9, 0.93), (0.37, 0.81), (0.999, 0.5), (0.5, 0.999)])
@pytest.mark.parametrize("arguments", CROPS)
def test_a_random_crop_is_torchvisions_to_the_pixel(arguments, u):
    image = make_images(2, 32, 40)[:1]
    _, _, out = run([RandomCrop(**arguments)], image, Given([u]))
    op = v2.RandomCrop(**arguments)
    made = op.make_params([planar(image[0])])
    left, top, right, bottom = made["padding"]
    extent = [32 + top + bottom, 40 + left + right]
    top, left = (
        int(share * (n - m + 1)) for share, n, m in zip(u, extent, out.shape[1:3], strict=True)
    )
    made.update(top=top, left=left, needs_crop=True)
    want = op.transform(planar(image[0]), made).permute(1, 2, 0).numpy()
    assert (out[0] == want).all()


def test_random_crop_offsets_are_drawn_as_torchvision_draws_them():
    n = 4000
    ones = np.ones((n, 2), np.int64)
    pipeline = Pipeline([RandomCrop(32, padding=4)])
    pipeline.bind((36, 40))
    params = pipeline.draw(FakeDraws(range(n)), ones * (36, 40), ones * (36, 40))
    rows = params.views[0][0]
    op, shape = v2.RandomCrop(32, padding=4), planar(np.zeros((36, 40, 3), np.uint8))
    made = [op.make_params([shape]) for _ in range(n)]
    for axis, name in enumerate(("top", "left")):
        assert_drawn_alike(rows[:, axis] - rows[:, 6 + axis] + 4, [one[name] for one in made])
    assert_independent(*(rows[:, :2] - rows[:, 6:8]).T)


def test_an_image_too_small_for_its_crop_is_refused():
    with pytest.raises(UsageError, match=r"size=50 is larger than an image of 42 pixels, padding "):
        run([RandomCrop(50, padding=1)], make_images(2, 40, 60), FakeDraws([0, 1]))


def test_images_of_several_sizes_make_no_batch():
    images = [make_images(2, 40, 60)[0], make_images(2, 60, 60)[0]]
    with pytest.raises(UsageError, match="leaves images of several sizes, which make no batch"):
        run([Resize(30)], images, FakeDraws([0, 1]))
    source = np.array([[40, 60], [60, 60]])
    with pytest.raises(UsageError, match="makes images of several sizes, one of 30x45: end with"):
        run([Resize(30)], make_images(2, 40, 40), FakeDraws([0, 1]), source=source)


def test_torch_reads_read_only_pixels_in_place_without_a_warning():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    pixels.flags.writeable = False
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = readable(pixels)
    finally:
        torch.set_warn_always(False)
    assert tensor.data_ptr() == pixels.ctypes.data
    assert tensor.tolist() == pixels.tolist()


@pytest.mark.parametrize("op", [Resize(32, max_size=64), Resize(None, max_size=64)])
@pytest.mark.parametrize("size", [(1, 400), (400, 1)])
@pytest.mark.parametrize("antialias", [True, False])
def test_a_resize_leaves_a_pixel_of_the_thinnest_image(op, size, antialias):
    _, _, out = run([op, CenterCrop(8)], make_images(1, *size), Given([[0]]), antialias=antialias)
    assert out.shape == (1, 8, 8, 3)


@pytest.mark.parametrize("antialias", [True, False])
def test_one_channel_is_resized_and_surrounded(antialias):
    _, _, out = run(
        [Grayscale(1), Resize(3), CenterCrop(8)],
        make_images(2, 6, 6),
        Given([[0]] * 2),
        antialias=antialias,
    )
    assert out.shape == (2, 8, 8, 1)
    assert out[:, 2:5, 2:5].any()


functional = pytest.importorskip("torchvision.transforms.v2.functional")

MODES = ["reflect", "edge", "symmetric"]


@pytest.mark.parametrize("u", [(0, 0), (0.9, 0.93), (0.37, 0.81), (0.999, 0.5), (0.5, 0.999)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "arguments", [{"size": 32, "padding": 4}, {"size": (6, 9), "padding": 18}, {"size": (40, 44)}]
)
def test_padding_by_the_image_is_torchvisions_on_the_cpu_and_on_a_device(mode, arguments, u):
    """A small crop in wide padding sees of the image only what is mirrored."""
    arguments = {**arguments, "padding_mode": mode, "pad_if_needed": True}
    images = make_images(2, 32, 40)
    made, params, out = run([RandomCrop(**arguments)], images, Given([u, u]))
    padding = v2.RandomCrop(**arguments).make_params([planar(images[0])])["padding"]
    padded = [functional.pad(planar(i), padding, padding_mode=mode) for i in images]
    height, width = out.shape[1:3]
    top = int(u[0] * (padded[0].shape[1] - height + 1))
    left = int(u[1] * (padded[0].shape[2] - width + 1))
    want = torch.stack(padded)[:, :, top : top + height, left : left + width].permute(0, 2, 3, 1)
    assert (torch.from_numpy(out) == want).all()
    assert_close(on_device(made, params, images), want)
    masks = np.ascontiguousarray(images[:, :, :, :1])
    shown = np.zeros((2, height, width, 1), np.uint8)
    made.run_mask(params, 0, list(masks), shown)
    assert (torch.from_numpy(shown) == want[..., :1]).all()


@pytest.mark.parametrize("mode", MODES)
def test_many_small_images_are_padded_as_one_is(mode):
    """CIFAR's, by one copy for all, mirrored ones too."""
    images = make_images(40, 32, 32)
    ops = [RandomCrop(32, padding=4, padding_mode=mode), RandomHorizontalFlip()]
    pipeline, params, out = run(ops, images, FakeDraws(range(40)))
    assert are_windows(params.views[0][0], 32, 32)
    many = np.zeros_like(out)
    pipeline.run_fixed(params, 0, images, np.arange(40), many)
    assert (many == out).all()


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(40, 50), (130, 160)])
def test_bicubic_is_torchvisions_on_the_cpu_and_on_a_device(antialias, size):
    images = make_images(12, 90, 120)[2:]  # noise overshoots, and is cut twice there
    cubic = v2.InterpolationMode.BICUBIC
    op = RandomResizedCrop(size, interpolation=cubic)
    made, params, out = run([op], images, FakeDraws(range(10)), antialias=antialias)
    for image, one, row in zip(images, out, params.views[0][0].tolist(), strict=True):
        want = functional.resized_crop(
            planar(image), *row[:4], list(size), interpolation=cubic, antialias=antialias
        )
        assert_close(one, want.permute(1, 2, 0))
    assert_close(on_device(made, params, images), out)
    _, _, out = run([Resize(size, cubic, antialias=antialias)], images[:1], Given([[0]]))
    assert_close(out[0], theirs(v2.Resize(size, cubic, antialias=antialias), images[0]))


def test_flips_alternate_from_epoch_to_epoch_whatever_else_changes():
    n = 2000
    ones = np.ones((n, 2), np.int64)

    def flips(epoch, seed=0, indices=None):
        pipeline = Pipeline([RandomCrop(8), AlternatingFlip()])
        pipeline.bind((10, 10))
        draws = SeededDraws(seed, epoch, np.arange(n) if indices is None else indices)
        return pipeline.draw(draws, ones * 10, ones * 10).views[0][0][:, 10]

    first = flips(0)
    assert 0.45 < first.mean() < 0.55
    for epoch in range(1, 5):
        assert (flips(epoch) == (first ^ (epoch % 2))).all()
    assert (flips(2, indices=np.arange(n)[::-1]) == first[::-1]).all()
    assert 0.45 < (flips(0, seed=1) == first).mean() < 0.55


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


@pytest.mark.parametrize(
    ("op", "axis"), [(RandomHorizontalFlip, 1), (RandomVerticalFlip, 0)], ids=["x", "y"]
)
def test_images_whose_draw_lies_below_p_are_mirrored(op, axis):
    images = make_images(4, 20, 30)
    _, _, out = run([op(0.5)], images, Given([[0.0], [0.49], [0.5], [0.99]]))
    assert (out[:2] == np.flip(images[:2], axis + 1)).all()
    assert (out[2:] == images[2:]).all()


def test_two_flips_of_a_kind_undo_each_other():
    images = make_images(4, 20, 30)
    _, _, out = run([RandomHorizontalFlip(1), RandomHorizontalFlip(1)], images, Given([[0]] * 4))
    assert (out == images).all()


def test_a_flip_after_a_resize_mirrors_the_very_pixels():
    images = make_images(4, 40, 50)
    draws = FakeDraws(range(4))
    plain = run([RandomResizedCrop(24)], images, draws)[2]
    turned = run([RandomResizedCrop(24), RandomVerticalFlip(1)], images, draws)[2]
    assert (turned == plain[:, ::-1]).all()


def test_flips_happen_with_probability_p():
    n = 20_000
    pipeline = Pipeline([RandomHorizontalFlip(0.3)])
    pipeline.bind((8, 8))
    size = np.full((n, 2), 8)
    flipped = pipeline.draw(FakeDraws(range(n)), size, size).views[0][0][:, 10]
    # within 4 standard deviations, left once in 16,000 times
    assert flipped.mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.3 * 0.7 / n))
