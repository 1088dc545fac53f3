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
    RandomVerticalFlip,
    Resize,
)
from h5feed.augment.plan import run_batch

LISTS = {
    "larger": [RandomResizedCrop(80, scale=(0.05, 0.3)), RandomHorizontalFlip()],
    "smaller": [RandomResizedCrop((21, 34)), RandomHorizontalFlip(), RandomVerticalFlip()],
    "crop": [RandomCrop(40), RandomVerticalFlip()],
    "padded": [RandomCrop(64, 8, fill=(10, 20, 30)), RandomHorizontalFlip()],
    "far outside": [RandomCrop(12, 60, fill=7)],
    "evaluation": [Resize(57), CenterCrop(50)],
    "two passes": [CenterCrop(80), RandomHorizontalFlip(), Resize((33, 35))],
    "flips": [RandomHorizontalFlip(), RandomVerticalFlip()],
    "nothing": [],
}


@pytest.mark.parametrize("antialias", [True, False, "auto"])
@pytest.mark.parametrize("squeezed", [False, True])
@pytest.mark.parametrize("name", LISTS)
def test_the_device_makes_what_the_cpu_makes_borders_included(name, squeezed, antialias):
    images = make_images(10, 64, 64)
    source = np.full((10, 2), (90, 120) if squeezed else (64, 64))
    pipeline, params, out = run(
        LISTS[name], images, FakeDraws(range(10)), source=source, antialias=antialias
    )
    assert_close(on_device(pipeline, params, images), out)


def test_outside_the_box_nothing_is_read():
    """A resize of a box must not know of the pixels around it, on the CPU or a device."""
    images = make_images(10, 64, 64)
    ops = [RandomResizedCrop(32, scale=(0.2, 0.6))]
    pipeline, params, out = run(ops, images, FakeDraws(range(10)), antialias=True)
    for image, (y, x, h, w) in zip(images, params.views[0][0][:, :4], strict=True):
        kept = image[y : y + h, x : x + w].copy()
        image[...] = 255 - image
        image[y : y + h, x : x + w] = kept
    assert_close(on_device(pipeline, params, images), out)


def test_nothing_waits_for_the_device_or_depends_on_a_draw():
    """One graph for all batches: what torch.compile needs, and a host sync would break."""
    images = make_images(4, 32, 32)
    ops = [RandomResizedCrop(24), RandomHorizontalFlip()]
    pipeline, _, _ = run(ops, images, FakeDraws(range(4)))
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    step = torch.compile(run_batch, backend=count, fullgraph=True)
    size = np.full((4, 2), 32)
    for seed in range(3):
        params = pipeline.draw(FakeDraws(range(4), seed), size, size)
        batch = torch.from_numpy(images)
        made = step(pipeline._plan, params.packed(), batch, [(24, 24)])
        assert torch.equal(made, pipeline.run_device(params, batch))
    assert len(graphs) == 1
