"""DALI's operators as they are used here, against the CPU kernels, in the last pixel."""

import numpy as np
import pytest

pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
import torch

from h5feed import augment
from h5feed.feed.files import PackedFiles
from h5feed.feed.random import SeededDraws
from h5feed.interop.dali.graph import Nv12Planes
from h5feed.interop.dali.parts import Box, dali, make_steps, types
from h5feed.jpeg import nv12_to_rgb
from packed import image_spec, write_packed

COUNT = 24
SIZES = [(64, 64), (31, 48), (33, 1), (1, 40), (7, 90)]

FLIPS = (augment.RandomHorizontalFlip(), augment.RandomVerticalFlip())
CHAINS = {
    "shrunk": (augment.RandomResizedCrop(12, scale=(0.3, 1)), *FLIPS),
    "enlarged": (augment.RandomResizedCrop((70, 100)), *FLIPS),
    "both": (augment.RandomResizedCrop((20, 100)), *FLIPS),
    "padded": (augment.RandomCrop(40, padding=6, pad_if_needed=True, fill=(9, 99, 200)), *FLIPS),
    "resized and cut": (*FLIPS, augment.Resize(32), augment.CenterCrop(30)),
    "cut and resized": (augment.CenterCrop(40), *FLIPS, augment.Resize((10, 60))),
    "cut twice": (
        augment.RandomCrop((8, 9), pad_if_needed=True),
        augment.RandomCrop(9, padding=3),
        *FLIPS,
    ),
    "erased": (augment.Resize((24, 24)), augment.RandomErasing(1, value=(1, 2, 255)), *FLIPS),
    "as they are": (augment.RandomErasing(value=7),),
}


def noise(sizes=SIZES):
    """What shows every difference: no two pixels alike, at the borders least of all."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, (*sizes[i % len(sizes)], 3), np.uint8) for i in range(COUNT)]


def drawn(pipeline, images):
    """The parameters of a batch."""
    sizes = np.array([image.shape[:2] for image in images])
    return pipeline.draw(SeededDraws(0, 0, np.arange(len(images))), sizes, sizes)


def by_kernel(pipeline, params, images):
    out = np.empty((len(images), *pipeline.out_shape), pipeline.row_dtype)
    pipeline.run_cpu(params, 0, images, out)
    return out


@dali.pipeline_def(enable_conditionals=True)
def graph(steps, ports, feed):
    image, *nodes = dali.fn.external_source(
        feed,
        num_outputs=len(ports) + 1,
        layout=["HWC", *(port.layout for port in ports)],
        dtype=[types.UINT8, *(getattr(types, port.dtype) for port in ports)],
    )
    image = Box().build(image, nodes[:2])
    rest = nodes[2:]
    for step in steps:
        count = len(step.part.ports)
        image = step.part.build(image, rest[:count])
        rest = rest[count:]
    return image


def by_dali(pipeline, params, images):
    steps = make_steps(pipeline.ops, pipeline.plan)
    rows = params.views[0]
    arrays = Box().feed(rows[0])
    for step in steps:
        arrays += step.part.feed(rows[step.stage])
    ports = [*Box.ports, *(port for step in steps for port in step.part.ports)]
    pipeline = graph(
        steps,
        ports,
        lambda: (images, *arrays),
        batch_size=len(images),
        num_threads=2,
        device_id=None,
    )
    return np.asarray(pipeline.run()[0].as_tensor())


def assert_close(made, expected, scale=1.0):
    difference = np.abs(made.astype(np.float64) - expected.astype(np.float64)) / scale
    assert difference.max() <= 2
    assert difference.mean() <= 0.5


@pytest.mark.parametrize("antialias", [True, False, "auto"])
@pytest.mark.parametrize("chain", CHAINS)
def test_geometry_is_the_kernels_to_the_border(chain, antialias):
    ops = CHAINS[chain]
    pipeline = augment.Pipeline(ops, antialias=antialias)
    images = noise([(40, 60)] if chain == "as they are" else SIZES)
    pipeline.bind((40, 60) if chain == "as they are" else None)
    params = drawn(pipeline, images)
    expected = by_kernel(pipeline, params, images)
    assert_close(by_dali(pipeline, params, images), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_floats(dtype):
    ops = (
        augment.Resize((24, 20)),
        augment.ToDtype(dtype, scale=True),
        augment.Normalize([0.5], [0.5]),
        augment.Normalize(mean=(0.1, 0.2, -0.3), std=(0.5, 2, 1)),
        augment.RandomErasing(1, value=(0.5, -3, 9)),
    )
    pipeline = augment.Pipeline(ops)
    images = noise()
    pipeline.bind(None)
    params = drawn(pipeline, images)
    made = by_dali(pipeline, params, images)
    assert made.dtype == pipeline.row_dtype
    expected = by_kernel(pipeline, params, images)
    assert_close(made, expected, scale=2 / 255 / 0.5)
    erased = (expected == np.array((0.5, -3, 9), made.dtype)).all(-1)
    assert erased.any()
    assert (made[erased] == expected[erased]).all()


@pytest.mark.parametrize("side", [(32, 48), (2, 2)])
def test_planes_become_the_rgb_of_cv2(tmp_path, side):
    """What a GPU does with store=yuv420, on the CPU: odd boxes, colors out of range."""
    rng = np.random.default_rng(1)
    shape = (side[0] * 3 // 2, side[1])
    stored = [rng.integers(0, 256, shape, np.uint8) for _ in range(COUNT)]
    files = PackedFiles([write_packed(tmp_path / "a.h5", stored, spec=image_spec("yuv420", side))])
    pipeline = augment.Pipeline((augment.RandomResizedCrop(8, scale=(0.01, 1)),), views=2)
    pipeline.bind(side, encoding="yuv420")
    sizes = np.tile(side, (COUNT, 1))
    params = pipeline.draw(SeededDraws(0, 0, np.arange(COUNT)), sizes, sizes)
    source = Nv12Planes(files, views=2, on_gpu=False)
    arrays = source.feed(np.arange(COUNT), params, ())
    made = dali.Pipeline(batch_size=COUNT, num_threads=2, device_id=None)
    with made:
        nodes = dali.fn.external_source(
            lambda: arrays, num_outputs=len(arrays), layout=[port.layout for port in source.ports]
        )
        made.set_outputs(*source.build(nodes))
    for view, batch in enumerate(made.run()):
        for k, (y, x, h, w) in enumerate(params.views[view][0][:, :4].tolist()):
            expected = nv12_to_rgb(stored[k])[y : y + h, x : x + w]
            assert np.abs(np.asarray(batch.at(k)).astype(int) - expected).max() <= 1
