"""What a device makes of a batch, as it is and compiled."""

import shutil
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import assert_close, make_images, on_device, run
from h5feed import H5Dataset, H5Loader, UsageError, augment
from h5feed.augment import (
    AugMix,
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Normalize,
    RandAugment,
    RandomAffine,
    RandomApply,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomPerspective,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToDtype,
    pipeline,
)
from h5feed.augment.device import CompiledBatch
from h5feed.augment.plan import run_batch
from h5feed.jpeg import rgb_to_nv12
from loaders import assert_same, by_index, write_kind

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


@pytest.mark.parametrize(
    "further",
    [
        [],
        [RandAugment(1), RandomPerspective()],
        [AugMix(3, 1, 1), RandomApply([RandomHorizontalFlip(), GaussianBlur(3)])],
    ],
    ids=["crop", "policy", "blend"],
)
def test_nothing_waits_for_the_device_or_depends_on_a_draw(further):
    """One graph for all batches: what torch.compile needs, and a host sync would break."""
    images = make_images(4, 32, 32)
    ops = [RandomResizedCrop(24), RandomHorizontalFlip(), *further]
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
        made = step(pipeline.plan, params.packed(), batch, [(24, 24)] * (1 + len(further)))
        assert torch.equal(made, pipeline.run_device(params, batch))
    assert len(graphs) == 1


CROP = (RandomResizedCrop(24), RandomHorizontalFlip())

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()


@needs_compiler
@pytest.mark.parametrize("nv12", [False, True])
def test_compiled_it_makes_what_the_cpu_kernels_make(nv12):
    images = make_images(12, 40, 40)
    if nv12:
        images = np.stack([rgb_to_nv12(image) for image in images])
    ops = [*CROP, ToDtype(torch.float32, scale=True), Normalize([0.4, 0.5, 0.6], [1, 1, 1])]
    made, params, out = run(ops, images, FakeDraws(range(12)), nv12=nv12, antialias=True)
    kernels = made.compile_device()
    floats = on_device(made, params, images).numpy()
    assert kernels.error is None
    assert_close(np.rint(255 * floats), np.rint(255 * out))


@needs_compiler
def test_a_long_pipeline_compiled():
    images = make_images(12, 40, 40)
    ops = [
        *CROP,
        RandomAffine(20, interpolation="bilinear"),
        ColorJitter(0.4, 0.4, 0.4, 0.1),
        GaussianBlur(3),
        RandomErasing(1, value=3),
    ]
    made, params, out = run(ops, images, FakeDraws(range(12)))
    kernels = made.compile_device()
    off = np.abs(on_device(made, params, images).numpy().astype(float) - out)
    assert kernels.error is None
    # ops in a row, each within 1 level: a strong jitter may stretch that
    assert off.mean() < 0.5
    assert (off > 2).mean() < 1e-3


def counting(graphs):
    """A backend that notes each graph that it is given, and runs it as it is."""

    def backend(graph, _):
        graphs.append(graph)
        return graph

    return backend


def test_batches_of_all_lengths_are_two_graphs_at_most_and_pipelines_are_not_counted_together():
    images = make_images(9, 40, 40)
    graphs = []
    for _ in range(9):
        made, _, _ = run(CROP, images, FakeDraws(range(9)))
        made._run_batch = kernels = CompiledBatch(run_batch, counting(graphs))
        for count in (9, 9, 5, 3):
            size = np.full((count, 2), 40)
            params = made.draw(FakeDraws(range(count), seed=count), size, size)
            made.run_device(params, torch.from_numpy(images[:count]))
        assert kernels.error is None
    assert len(graphs) <= 18


def broken(_graph, _inputs):
    raise RuntimeError("no compiler here\nand much more")


@pytest.fixture
def ds(tmp_path):
    return H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=40))


def load(ds, **options):
    options = {"augment": CROP, "augment_on": "device", "with_index": True, **options}
    with H5Loader(ds, 4, num_workers=3, prefetch=4, shuffle=True, **options) as loader:
        return by_index(loader), loader.stats()["compiled"]


@pytest.mark.parametrize("residency", ["stream", "device"])
def test_a_loader_compiles_its_ops(ds, monkeypatch, residency):
    graphs = []
    monkeypatch.setattr(pipeline, "CompiledBatch", partial(CompiledBatch, backend=counting(graphs)))
    found, compiled = load(ds, compile=True, residency=residency)
    assert compiled
    assert len(graphs) == 1
    expected, compiled = load(ds)
    assert not compiled
    assert_same(found, expected)


def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(ds, monkeypatch):
    monkeypatch.setattr(pipeline, "CompiledBatch", partial(CompiledBatch, backend=broken))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, compiled = load(ds, compile=True)
    assert not compiled
    said = [str(w.message) for w in caught if "torch.compile" in str(w.message)]
    assert len(said) == 1
    assert "no compiler here" in said[0]
    assert said[0].endswith("they run uncompiled")
    assert "\n" not in said[0]
    assert_same(found, load(ds)[0])


def test_only_ops_on_the_device_are_compiled(ds):
    with pytest.raises(UsageError) as caught:
        load(ds, compile=True, augment_on="cpu")
    assert str(caught.value) == (
        "compile=True is for ops that run on the device, and these run in the loader's threads: "
        'give augment_on="device", or leave compile out'
    )
    assert not load(ds, compile=True, augment=())[1]


def test_the_pipeline_offers_it():
    made = augment.Pipeline(CROP)
    assert isinstance(made.compile_device(), CompiledBatch)
