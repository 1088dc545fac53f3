import statistics
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from h5feed.errors import UsageError
from h5feed.packing.decode import DecodeError, decode_rgb
from h5feed.packing.resize import (
    auto_size,
    check_size,
    fit_image,
    fit_mask,
    plan_geometry,
    resize_mask,
    resize_rgb,
)
from images import encoded, smooth
from packed import image_spec, mask_spec

SAMPLES = sorted(
    path
    for path in (Path(__file__).parents[2] / "data_samples" / "images").rglob("*")
    if path.is_file()
)


def by_pillow(pixels, height, width):
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))


def furthest(a, b):
    assert a.shape == b.shape
    return int(np.abs(a.astype(int) - b.astype(int)).max())


@pytest.mark.parametrize(
    ("sides", "size"),
    [
        ([32] * 9, 32),
        ([375] * 5 + [500], 256),
        ([383], 256),
        ([384], 256),
        ([385], 512),
        ([96], 64),
        ([97], 128),
        ([2000, 3000], 512),
        ([1], 1),
        ([100, 200, 4000], 256),
    ],
)
def test_auto_size_is_the_nearest_power_of_two_and_the_smaller_of_two(sides, size):
    assert auto_size(sides) == size
    median = statistics.median(sides)
    assert size == min((2**k for k in range(10)), key=lambda power: abs(power - median))


@pytest.mark.parametrize(
    ("size", "result"),
    [
        (256, (256, 256)),
        ("64", (64, 64)),
        ("64x128", (64, 128)),
        ((8, 16), (8, 16)),
        ("2X4", (2, 4)),
    ],
)
def test_check_size_reads_what_people_type(size, result):
    assert check_size(size, any_size=True) == result


def test_check_size_names_the_powers_of_two_beside():
    with pytest.raises(UsageError) as caught:
        check_size("224")
    assert str(caught.value) == (
        "size='224' is not a power of two: take 128 or 256, or allow it with --any-size"
    )
    with pytest.raises(UsageError, match="take 128x64 or 256x64"):
        check_size((200, 64))
    assert check_size(224, any_size=True) == (224, 224)


@pytest.mark.parametrize("size", ["", "big", "64x", "1x2x3", "-5", 0, (0, 4), "٣", (1, 2, 3)])
def test_check_size_says_what_a_size_is(size):
    with pytest.raises(UsageError, match="is not a size: give auto, S or HxW, such as 256"):
        check_size(size, any_size=True)


def test_resize_is_pillows_bilinear_within_one():
    rng = np.random.default_rng(0)
    for number in range(200):
        old = np.exp(rng.uniform(0, np.log(700), 2)).astype(int)
        height, width = (int(n) for n in np.exp(rng.uniform(0, np.log(400), 2)))
        pixels = rng.integers(0, 256, (*old, 3), dtype=np.uint8)
        if number % 2:  # the hardest edges
            pixels = (pixels >> 7) * 255
        ours = resize_rgb(pixels, height, width)
        assert furthest(ours, by_pillow(pixels, height, width)) <= 1
        assert ours.flags.c_contiguous


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_every_sample_is_resized_within_two_of_pillow(path):
    pixels = decode_rgb(path.read_bytes())
    stored, box = fit_image(pixels, image_spec(size=(128, 128)))
    assert furthest(stored, by_pillow(pixels, 128, 128)) <= 2
    assert box == (0, 0, 128, 128)


def test_read_only_pixels_are_resized_without_a_word():
    pixels = smooth(40, 50)
    pixels.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resize_rgb(pixels, 16, 16)
    assert resize_rgb(pixels, 40, 50) is pixels


def test_masks_are_resized_exactly_as_pillows_nearest():
    rng = np.random.default_rng(0)
    for _ in range(300):
        old = np.exp(rng.uniform(0, np.log(500), 2)).astype(int)
        height, width = (int(n) for n in np.exp(rng.uniform(0, np.log(300), 2)))
        mask = rng.integers(0, 256, old, dtype=np.uint8)
        expected = Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST)
        np.testing.assert_array_equal(resize_mask(mask, height, width), np.asarray(expected))


SHAPES = [
    (300, 400),
    (64, 67),
    (401, 300),
    (64, 64),
    (63, 64),
    (20, 333),
    (333, 20),
    (1, 5),
    (65, 127),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_keep_is_torchvisions_resize_of_a_pillow_image(shape):
    transforms = pytest.importorskip("torchvision.transforms")
    image = Image.fromarray(smooth(*shape))
    expected = np.asarray(transforms.Resize(64, antialias=True)(image))
    stored, box = fit_image(np.asarray(image), image_spec(size=(64, 64), fit="keep"))
    assert furthest(stored, expected) <= 2
    assert box == (0, 0, *stored.shape[:2])


@pytest.mark.parametrize("shape", SHAPES)
def test_crop_is_torchvisions_resize_and_center_crop(shape):
    transforms = pytest.importorskip("torchvision.transforms")
    image = Image.fromarray(smooth(*shape))
    recipe = transforms.Compose([transforms.Resize(64), transforms.CenterCrop(64)])
    stored, box = fit_image(np.asarray(image), image_spec(size=(64, 64), fit="crop"))
    assert furthest(stored, np.asarray(recipe(image))) <= 2
    assert box == (0, 0, 64, 64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [(64, 32), (32, 64), (16, 48)])
def test_crop_to_an_oblong_covers_it_and_keeps_the_center(shape, size):
    plan = plan_geometry(*shape, image_spec(size=size, fit="crop"))
    top, left, height, width = plan.window
    assert (height, width) == size == plan.canvas
    assert any(r == t for r, t in zip(plan.resized, size, strict=True))
    for start, length, whole in zip((top, left), size, plan.resized, strict=True):
        assert 0 <= start <= whole - length
        assert abs((whole - length) - 2 * start) <= 1
    assert abs(plan.resized[1] / plan.resized[0] / (shape[1] / shape[0]) - 1) < 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_pad_lays_the_whole_image_on_the_background(shape):
    pixels = smooth(*shape)
    spec = image_spec(size=(64, 96), fit="pad")
    stored, (top, left, height, width) = fit_image(pixels, spec, background=(1, 2, 3))
    assert stored.shape == (64, 96, 3)
    inside = stored[top : top + height, left : left + width]
    assert furthest(inside, by_pillow(pixels, height, width)) <= 1
    outside = np.ones((64, 96), bool)
    outside[top : top + height, left : left + width] = False
    assert (stored[outside] == (1, 2, 3)).all()
    assert height == 64 or width == 96
    assert abs((64 - height) - 2 * top) <= 1
    assert abs((96 - width) - 2 * left) <= 1
    exact = min(64 / shape[0], 96 / shape[1])
    assert abs(height - shape[0] * exact) <= 0.5 or height == 1
    assert abs(width - shape[1] * exact) <= 0.5 or width == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fit", ["stretch", "crop", "pad", "keep"])
@pytest.mark.parametrize("encoding", ["raw", "yuv420"])
def test_a_mask_lies_on_its_image(shape, fit, encoding):
    """A mask that marks the image's right half marks the same stored pixels."""
    spec = image_spec(encoding, size=(32, 32), fit=fit)
    half = np.zeros(shape, np.uint8)
    half[:, shape[1] // 2 :] = 255
    mask = fit_mask(half, spec)
    image, box = fit_image(np.repeat(half[..., None], 3, -1), spec, background=(0, 0, 0))
    assert mask.shape == (*image.shape[:2], 1)
    certain = (image[..., 0] < 64) | (image[..., 0] > 191)
    np.testing.assert_array_equal(mask[certain][:, 0] > 0, image[certain][:, 0] > 127)
    if encoding == "yuv420":
        assert not any(number % 2 for number in (*image.shape[:2], *box))


def test_masks_fill_the_letterbox_as_told():
    spec = mask_spec(size=(8, 8), fit="pad")
    mask = fit_mask(np.ones((4, 8), np.uint8), spec, fill=255)
    assert mask[..., 0].tolist() == [[255] * 8] * 2 + [[1] * 8] * 4 + [[255] * 8] * 2


def test_a_strip_too_long_to_resize_is_a_decode_error():
    spec = image_spec(size=(256, 256), fit="keep")
    with pytest.raises(DecodeError) as caught:
        plan_geometry(1, 30_000, spec)
    assert str(caught.value) == "too many pixels (1x30000 would be resized to 256x7680000)"
    with pytest.raises(DecodeError, match="would be resized to 100000x256"):
        plan_geometry(100_000, 256, image_spec(size=(256, 256), fit="crop"))
    assert plan_geometry(1, 30_000, image_spec(size=(256, 256), fit="pad")).resized == (1, 256)
    assert plan_geometry(1, 30_000, image_spec(size=(256, 256))).resized == (256, 256)


def test_the_result_is_torchs_own_memory_not_a_copy_of_planes():
    tracemalloc.start()
    try:
        resize_rgb(smooth(40, 50), 2000, 2000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2000 * 2000 * 3  # numpy's copies are traced, torch's memory is not


def test_one_image_is_resized_the_same_on_any_number_of_threads():
    pixels, before = smooth(300, 400), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = resize_rgb(pixels, 64, 64)
        torch.set_num_threads(4)
        np.testing.assert_array_equal(resize_rgb(pixels, 64, 64), alone)
    finally:
        torch.set_num_threads(before)


def test_a_decoded_png_is_sized():
    pixels = decode_rgb(encoded(Image.fromarray(smooth(30, 50)), "PNG"))
    assert fit_image(pixels, image_spec(size=(16, 16)))[0].shape == (16, 16, 3)
