"""Kernels of the CPU: windows of small images, and NV12 (on a device, too)."""

import cv2
import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import assert_close, make_images, on_device, run
from h5feed.augment import (
    CenterCrop,
    Normalize,
    Pipeline,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToDtype,
)
from h5feed.augment.cpu import (
    Scratch,
    are_windows,
    copy_windows,
    crop_image,
    crop_images,
    nv12_box,
    raw_boxes,
)
from h5feed.augment.device import nv12_batch
from h5feed.jpeg import nv12_to_rgb, rgb_to_nv12

FIELD = np.concatenate([make_images(20, 32, 24), make_images(20, 32, 24, seed=50)])

WINDOWS = {
    "cifar": [RandomCrop((32, 24), padding=4), RandomHorizontalFlip()],
    "no padding": [RandomCrop(20), RandomHorizontalFlip(), RandomVerticalFlip()],
    "uneven": [RandomCrop((30, 28), padding=(1, 2, 6, 4), fill=(9, 8, 7)), RandomVerticalFlip()],
    "larger": [CenterCrop((41, 30)), RandomHorizontalFlip()],
    "whole": [],
    "flip": [RandomHorizontalFlip()],
    "floats": [
        RandomCrop((32, 24), 4),
        RandomErasing(1, value=(1, 2, 3)),
        ToDtype(torch.float32, scale=True),
    ],
    "after": [
        RandomCrop((32, 24), 4),
        ToDtype(torch.float32, scale=True),
        Normalize([0.5] * 3, [0.2] * 3),
        RandomErasing(1),
    ],
}


def made(ops, indices, chunk, images):
    """Run in chunks, from the whole field or from its images one by one."""
    pipeline = Pipeline(ops)
    pipeline.bind((32, 24))
    size = np.full((len(indices), 2), (32, 24))
    params = pipeline.draw(FakeDraws(indices), size, size)
    out = np.zeros((len(indices), *pipeline.out_shape), pipeline.row_dtype)
    for k in range(0, len(indices), chunk):
        some = indices[k : k + chunk]
        if images:
            pipeline.run_cpu(params, k, [FIELD[i] for i in some], out[k : k + chunk])
        else:
            pipeline.run_fixed(params, k, FIELD, some, out[k : k + chunk])
    return out


@pytest.mark.parametrize("chunk", [64, 7, 1])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_chunk_at_once_is_the_images_one_by_one(name, chunk, monkeypatch):
    used = []
    monkeypatch.setattr(
        "h5feed.augment.plan.copy_windows", lambda *a: (used.append(1), copy_windows(*a))
    )
    indices = np.random.default_rng(0).integers(0, len(FIELD), 64)
    at_once = made(WINDOWS[name], indices, chunk, images=False)
    assert used
    assert (at_once == made(WINDOWS[name], indices, 64, images=True)).all()


@pytest.mark.parametrize("ops", [[RandomResizedCrop(16)], [RandomCrop(8, padding=40)]])
def test_other_crops_go_one_by_one(ops):
    indices = np.arange(40)
    pipeline = Pipeline(ops)
    pipeline.bind((32, 24))
    size = np.full((40, 2), (32, 24))
    rows = pipeline.draw(FakeDraws(indices), size, size).views[0][0]
    assert not are_windows(rows, 32, 24)
    assert (made(ops, indices, 13, images=False) == made(ops, indices, 40, images=True)).all()


KINDS = {
    "upright": (4, 2, 20, 16, 30, 25, 0, 0, 30, 25, 0, 0),
    "mirrored": (1, 3, 31, 20, 30, 25, 0, 0, 30, 25, 1, 0),
    "upside down": (0, 0, 32, 24, 30, 25, 0, 0, 30, 25, 3, 0),
    "antialiased": (0, 0, 32, 24, 30, 25, 0, 0, 30, 25, 1, 1),
    "as it is": (1, 0, 30, 24, 30, 24, 0, 0, 30, 25, 1, 0),
    "outside": (0, 0, 32, 24, 28, 20, 1, -2, 30, 25, 1, 0),
}


@pytest.mark.parametrize(
    "kinds",
    [
        [*KINDS],
        ["mirrored", "upright", "mirrored", "mirrored", *KINDS, "mirrored"],
        ["mirrored"] * 4,
        ["mirrored"] * 9,
    ],
)
def test_images_cropped_in_a_row_are_those_cropped_one_by_one(kinds, monkeypatch):
    rows, images = [list(KINDS[kind]) for kind in kinds], FIELD[: len(kinds)]
    want = np.zeros((len(kinds), 30, 25, 3), np.uint8)
    for row, box, out in zip(rows, raw_boxes(rows, images), want, strict=True):
        crop_image(row, box, out, (7.0,))
    calls = []
    flip = cv2.flip
    monkeypatch.setattr(cv2, "flip", lambda *a: (calls.append(1), flip(*a)))
    made = np.zeros_like(want)
    crop_images(rows, raw_boxes(rows, images), made, (7.0,))
    assert (made == want).all()
    if set(kinds) == {"mirrored"}:  # every call hands the interpreter's lock over
        assert len(calls) == -(-len(kinds) // 4)


@pytest.mark.parametrize("box", [(4, 0, 24, 24), (0, 4, 32, 16)])
def test_a_letterbox_is_not_read_beyond_its_image(box):
    pipeline = Pipeline([RandomCrop(24, padding=4)])
    pipeline.bind((32, 24))
    size, inside = np.full((8, 2), (32, 24)), np.full((8, 2), box[2:])
    params = pipeline.draw(FakeDraws(range(8)), size, inside, np.full((8, 4), box))
    assert not are_windows(params.views[0][0], 32, 24)


def make_stored(count, height, width):
    return np.stack([rgb_to_nv12(image) for image in make_images(count, height, width)])


BOXES = [(0, 0, 100, 132), (3, 5, 20, 31), (98, 130, 2, 2), (99, 131, 1, 1), (7, 60, 51, 72)]


@pytest.mark.parametrize("width", [132, 450])  # more columns are converted, where there are more
@pytest.mark.parametrize("box", BOXES)
def test_a_box_is_that_part_of_the_whole_image(box, width):
    image = make_stored(1, 100, width)[0]
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
