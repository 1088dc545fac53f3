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
    planar,
    run,
)
from h5feed.augment import CenterCrop, Grayscale, Pipeline, RandomCrop, Resize
from h5feed.augment.cpu import readable
from h5feed.errors import UsageError

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
