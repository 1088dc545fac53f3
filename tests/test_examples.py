"""The examples in docstrings run, and say what is printed."""

import doctest
import pkgutil
from importlib import import_module

import pytest

import h5feed.train
from packed import further_fields, random_images, write_packed, write_set
from packing.folders import make_folder

AUGMENT = [
    "choice", "color", "erasing", "floats", "geometry", "mixing", "ops", "pipeline", "places",
    "policies", "tone", "warp",
]  # fmt: skip
TRAIN = [module.name for module in pkgutil.iter_modules(h5feed.train.__path__)]
FEED = ["dataloader", "dataset", "fields", "loader", "order", "sampling", "tune"]
BENCH = ("measure", "report", "rounds", "training")
MODULES = [
    *(f"h5feed.augment.{name}" for name in AUGMENT),
    *(f"h5feed.bench.{name}" for name in BENCH),
    "h5feed.disk",
    *(f"h5feed.feed.{name}" for name in FEED),
    "h5feed.errors",
    "h5feed.jpeg",
    "h5feed.packing.fields",
    "h5feed.packing.merge",
    "h5feed.packing.options",
    "h5feed.packing.shard_plan",
    "h5feed.packing.run",
    "h5feed.packing.summary",
    "h5feed.progress",
    "h5feed.store.check",
    "h5feed.store.fields",
    "h5feed.store.layout",
    "h5feed.store.index",
    "h5feed.store.read",
    "h5feed.system",
    "h5feed.text",
    *(f"h5feed.train.{name}" for name in TRAIN),
]


@pytest.fixture
def _examples_folder(tmp_path, monkeypatch):
    """The working folder of examples: `images` has two classes of twelve images each.

    `photos.h5` has twelve images of two classes, 64x64, `more.h5` as many again; `fields.h5` the
    same with further fields, `set` the same as a set of three shards.
    """
    make_folder(tmp_path / "images")
    images = random_images(12, (64, 64))
    write_packed(tmp_path / "photos.h5", images)
    write_packed(tmp_path / "more.h5", images)
    write_packed(tmp_path / "fields.h5", images, further=further_fields(12))
    write_set(tmp_path / "set", images)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_examples_folder")
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    result = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
