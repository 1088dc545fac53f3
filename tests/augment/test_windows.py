import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import make_images
from h5feed.augment import (
    CenterCrop,
    Normalize,
    Pipeline,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    ToDtype,
)
from h5feed.augment.cpu import are_windows, copy_windows

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


@pytest.mark.parametrize("box", [(4, 0, 24, 24), (0, 4, 32, 16)])
def test_a_letterbox_is_not_read_beyond_its_image(box):
    pipeline = Pipeline([RandomCrop(24, padding=4)])
    pipeline.bind((32, 24))
    size, inside = np.full((8, 2), (32, 24)), np.full((8, 2), box[2:])
    params = pipeline.draw(FakeDraws(range(8)), size, inside, np.full((8, 4), box))
    assert not are_windows(params.views[0][0], 32, 24)
