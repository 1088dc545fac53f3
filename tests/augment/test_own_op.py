"""Ops written outside the package: one class each, on the CPU, on a device and in a loader."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import assert_close, make_images, on_device, run
from h5feed import H5Dataset, H5Loader, UsageError
from h5feed.augment import (
    Grayscale,
    ImageOp,
    MixUp,
    Normalize,
    Op,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    ToDtype,
)
from loaders import by_index, write_kind


@dataclass(frozen=True)
class RandomSolarize(ImageOp):
    """Invert the pixels above a threshold, with a probability."""

    threshold: float
    p: float = 0.5
    uniforms: ClassVar[int] = 1
    columns: ClassVar[int] = 1
    needs_color: ClassVar[bool] = True

    def rows(self, u):
        return (u < self.p).astype(np.float64)

    def on_cpu(self, row, image):
        if row[0]:
            np.subtract(255, image, out=image, where=image >= self.threshold)

    def on_device(self, rows, images):
        bright = (rows[:, :, None, None] > 0) & (images >= self.threshold)
        return torch.where(bright, 255 - images, images)


@dataclass(frozen=True)
class Transpose(ImageOp):
    """Swap height and width: another size, another geometry, masks too."""

    resamples: ClassVar[bool] = True

    def size_after(self, size):
        return size and size[::-1]

    def draw(self, u, shapes):
        return u, type(shapes).whole(shapes.actual[:, ::-1])

    def cpu(self, rows):
        def step(i, src, out):
            out = (
                np.empty((src.shape[1], src.shape[0], *src.shape[2:]), src.dtype)
                if out is None
                else out
            )
            out[...] = src.swapaxes(0, 1)
            return out

        return step

    mask = cpu

    def device(self, rows, images, size):
        return images.transpose(2, 3)


def test_it_changes_what_its_draws_say_on_the_cpu_and_on_a_device():
    images = make_images(12, 20, 30)
    pipeline, params, out = run([RandomSolarize(100)], images, FakeDraws(range(12)))
    chosen = params.views[0][1][:, 0] > 0
    assert 0 < chosen.sum() < 12
    assert (out[~chosen] == images[~chosen]).all()
    assert (out[chosen] == np.where(images >= 100, 255 - images, images)[chosen]).all()
    assert (on_device(pipeline, params, images).numpy() == out).all()


def test_it_takes_its_place_among_the_others():
    images = make_images(12, 20, 30)
    ops = [
        RandomCrop(16, 2),
        RandomSolarize(128),
        Transpose(),
        RandomErasing(1, value=7),
        ToDtype(torch.float32, scale=True),
        Normalize([0.5], [0.5]),
        MixUp(num_classes=3),
    ]
    pipeline, params, out = run(ops, images, FakeDraws(range(12)))
    pipeline.mix_rows(params, out)
    np.testing.assert_allclose(on_device(pipeline, params, images), out, atol=2e-2)
    assert pipeline.out_shape == (16, 16, 3)


def test_one_that_changes_the_size_takes_masks_along():
    images = make_images(3, 20, 30)
    pipeline, params, out = run([Transpose(), RandomHorizontalFlip(1)], images, FakeDraws(range(3)))
    expected = images.swapaxes(1, 2)[:, :, ::-1]
    assert (out == expected).all()
    assert (on_device(pipeline, params, images).numpy() == expected).all()
    masks = np.zeros((3, 30, 20, 1), np.uint8)
    pipeline.run_mask(params, 0, list(images[..., :1]), masks)
    assert (masks == expected[..., :1]).all()


def test_a_loader_runs_it_in_threads_and_on_the_device(tmp_path):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw"))
    ops = [RandomCrop(24), RandomSolarize(100), Transpose()]
    made = []
    for where, workers in (("cpu", 1), ("cpu", 4), ("device", 2)):
        loader = H5Loader(
            ds, 4, num_workers=workers, augment=ops, augment_on=where, with_index=True, shuffle=True
        )
        with loader:
            made.append(by_index(loader))
    one, four, device = made
    plain = H5Loader(ds, 4, augment=[RandomCrop(24)], with_index=True, shuffle=True)
    with plain:
        untouched = by_index(plain)
    assert any(not torch.equal(one[k][0][0], untouched[k][0][0].mT) for k in one)
    for k in one:
        assert torch.equal(one[k][0][0], four[k][0][0])
        assert_close(one[k][0][0], device[k][0][0])


@dataclass(frozen=True)
class Nothing(Op):
    """An op without any code."""


@dataclass(frozen=True)
class NoKernel(ImageOp):
    """An op that does not say what it does."""


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        (
            [ToDtype(torch.float32), RandomSolarize(9)],
            "RandomSolarize(threshold=9, p=0.5) works on bytes: put it before ToDtype",
        ),
        (
            [Grayscale(), RandomSolarize(9)],
            "RandomSolarize(threshold=9, p=0.5) works on colors: put it before Grayscale",
        ),
    ],
    ids=["bytes", "colors"],
)
def test_out_of_place_it_is_refused_as_ours_are(ops, text):
    with pytest.raises(UsageError) as caught:
        run(ops, make_images(1, 8, 8), FakeDraws([0]))
    assert str(caught.value) == text


def test_what_is_missing_is_named():
    images = make_images(1, 8, 8)
    with pytest.raises(NotImplementedError, match="Nothing does not say how it joins a pipeline"):
        run([Nothing()], images, FakeDraws([0]))
    with pytest.raises(NotImplementedError, match="NoKernel has no on_cpu"):
        run([NoKernel()], images, FakeDraws([0]))
