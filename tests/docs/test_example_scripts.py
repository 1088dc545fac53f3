"""Every script of examples/ runs on a few small images, and learns or at least gives a number."""

import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import h5feed
from docs.test_docs import COMMANDS, run_shell
from packed import random_images, write_packed

torchvision = pytest.importorskip("torchvision")
ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's and schedulers' advice


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`small.h5`: 32 images of 32 px, of 4 classes, each class of another color."""
    folder = tmp_path_factory.mktemp("examples")
    images = random_images(32, (32, 32))
    for number, image in enumerate(images):
        image[..., number % 4 % 3] //= 1 + number % 4
    write_packed(folder / "small.h5", images, labels=np.arange(32) % 4, classes=tuple("abcd"))
    return folder


@pytest.fixture
def example(monkeypatch, folder):
    """Return what imports and runs the `main` of an example, in the folder."""
    monkeypatch.chdir(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(name, *args):
        spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module.main([str(arg) for arg in args])

    yield run
    torch.set_num_threads(threads)


def test_cifar10_learns(example):
    args = ("small.h5", "small.h5", "--width", 0.1, "--batch-size", 8, "--device", "cpu")
    assert example("cifar10", *args, "--epochs", 6, "--lr", 0.05) > 0.5
    assert len((ROOT / "examples/cifar10.py").read_text().splitlines()) <= 200


def test_imagenet_ddp_goes_on_where_it_was(example, monkeypatch, capsys):
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }.items():
        monkeypatch.setenv(name, str(value))
    args = ["small.h5", "small.h5", "--model", "resnet18", "--size", 32, "--batch-size", 16]
    args += ["--lr", 0.01, "--warmup", 1]
    example("imagenet_ddp", *args, "--epochs", 1)
    example("imagenet_ddp", *args, "--epochs", 2, "--resume")
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["epoch 1", "epoch 2"]


def test_segmentation(example):
    samples = ROOT / "data_samples"
    if not os.path.exists("scenes.h5"):
        h5feed.pack(
            samples / "images/plants", "scenes.h5", masks=samples / "masks/plants",
            size="64", num_workers=0,
        )  # fmt: skip
    args = ("--epochs", 1, "--crop", 48, "--batch-size", 4, "--device", "cpu")
    assert 0 < example("segmentation", "scenes.h5", *args) < 5


def test_detection(example, folder):
    (folder / "animals").mkdir(exist_ok=True)
    images, boxes = [], []
    for number in range(4):
        Image.new("RGB", (64, 48), (50 * number, 99, 99)).save(folder / f"animals/{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 64, "height": 48})
        box = {"id": number, "image_id": number, "category_id": 3, "bbox": [8, 8, 40, 30]}
        boxes.append({**box, "area": 1200, "iscrowd": 0})
    made = {"images": images, "annotations": boxes, "categories": [{"id": 3, "name": "animal"}]}
    (folder / "boxes.json").write_text(json.dumps(made))
    h5feed.pack(
        folder / "animals", "animals.h5", annotations=folder / "boxes.json",
        size="64", fit="pad", overwrite=True, num_workers=0,
    )  # fmt: skip
    args = ("--steps", 2, "--size", 64, "--batch-size", 2, "--device", "cpu")
    assert math.isfinite(example("detection", "animals.h5", *args))


def test_contrastive(example):
    args = ("--epochs", 1, "--size", 32, "--batch-size", 16, "--device", "cpu")
    assert math.isfinite(example("contrastive", "small.h5", *args))
    more = ("--small-crops", 2, "--small-size", 16)
    assert math.isfinite(example("contrastive", "small.h5", *args, *more))


def test_lightning(example):
    pytest.importorskip("lightning")
    args = ("--epochs", 1, "--batch-size", 16)
    assert 0 <= example("lightning_cifar", "small.h5", "small.h5", *args) <= 1


def test_hugging_face(example):
    pytest.importorskip("transformers", reason="transformers is not installed: too large for CI")
    args = ("--steps", 2, "--batch-size", 8, "--size", 32, "--hidden", 12, "--layers", 1)
    assert math.isfinite(example("hf_trainer", "small.h5", *args, "--workers", 0))


def test_every_script_is_run_here():
    here = Path(__file__).read_text()
    assert [name for name in SCRIPTS if f'"{name}"' not in here] == []


def test_notebook_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").symlink_to(ROOT / "data_samples/images")
    notebook = json.loads((ROOT / "examples/quickstart.ipynb").read_text())
    names = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code" or "skip-test" in cell["metadata"].get("tags", []):
            continue  # installs and downloads; and the bench, which a page runs as well
        code = "".join(cell["source"])
        if code.startswith("!"):
            assert code[1:].split()[0] in COMMANDS
            run_shell(code[1:])
        else:
            exec(compile(code, "quickstart.ipynb", "exec"), names)


@pytest.mark.parametrize("page", ["timm_train", "torchvision_references"])
def test_the_diffs_are_those_of_the_clients_that_run(page, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    clients = importlib.import_module("clients.run")
    name = {"torchvision_references": "torchvision_train"}.get(page, page)
    (client,) = [client for client in clients.CLIENTS if client.name == name]
    text = (ROOT / f"examples/{page}.md").read_text()
    diffs = [block.split("```")[0].splitlines() for block in text.split("```diff\n")[1:]]
    assert diffs
    for line in [line for diff in diffs for line in diff]:
        if line.startswith("-"):
            assert line[1:] in client.original()
        elif line.startswith("+from h5feed.interop.timm"):
            exec(line[1:], {})  # the lines around it run in tests/interop/test_timm.py
        elif line.startswith("+"):
            assert line[1:] in client.swapped()
