import cv2
import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import assert_close, make_images, on_device, run
from h5feed.augment import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from h5feed.augment.cpu import Scratch, nv12_box
from h5feed.augment.device import nv12_batch
from h5feed.jpeg import nv12_to_rgb, rgb_to_nv12


def make_stored(count, height, width):
    return np.stack([rgb_to_nv12(image) for image in make_images(count, height, width)])


BOXES = [(0, 0, 100, 132), (3, 5, 20, 31), (98, 130, 2, 2), (99, 131, 1, 1), (7, 60, 51, 72)]


@pytest.mark.parametrize("box", BOXES)
def test_a_box_is_that_part_of_the_whole_image(box):
    image = make_stored(1, 100, 132)[0]
    y, x, h, w = box
    assert (nv12_box(image, *box, Scratch()) == nv12_to_rgb(image)[y : y + h, x : x + w]).all()


def test_a_batch_is_converted_as_cv2_converts_it():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (3, 96, 64), dtype=np.uint8)
    made = nv12_batch(torch.from_numpy(noise), torch.float32).permute(0, 2, 3, 1)
    assert_close(made, np.stack([nv12_to_rgb(image) for image in noise]), most=1, mean=0.1)


LISTS = [
    [RandomResizedCrop(48), RandomHorizontalFlip()],
    [RandomResizedCrop((25, 31))],
    [RandomCrop(64, 8, fill=(10, 20, 30)), RandomHorizontalFlip()],
    [RandomCrop(33)],
    [Resize(57), CenterCrop(50)],
    [],
]


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("ops", LISTS, ids=str)
def test_the_crops_are_those_of_the_rgb_image_on_the_cpu_and_on_a_device(ops, antialias):
    stored = make_stored(6, 64, 64)
    draws = FakeDraws(range(6))
    pipeline, params, out = run(ops, stored, draws, nv12=True, antialias=antialias)
    rgb = np.stack([nv12_to_rgb(image) for image in stored])
    assert (out == run(ops, rgb, draws, antialias=antialias)[2]).all()
    assert_close(on_device(pipeline, params, stored), out)


def test_conversion_is_cv2s_bt601():
    stored = rgb_to_nv12(make_images(1, 8, 8)[0])
    want = cv2.cvtColor(stored, cv2.COLOR_YUV2RGB_NV12)
    assert (nv12_box(stored, 0, 0, 8, 8, Scratch()) == want).all()
