"""Any map-style dataset of (image, label) as the source."""

import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from h5feed import H5Dataset
from h5feed.errors import PackError, UsageError
from h5feed.feed.facts import facts_in_words, file_facts
from h5feed.packing import PackOptions, pack
from h5feed.packing.options import field_specs
from h5feed.packing.resize import fit_image
from h5feed.store.check import check_file
from packing.folders import keys, names, sha256

SIZE = 32


class Pairs:
    classes = ("even", "odd")

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if isinstance(self.items[index], BaseException):
            raise self.items[index]
        return self.items[index]


def arrays(count=6):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (20 + i, 30, 3), np.uint8) for i in range(count)]


@pytest.mark.parametrize(
    "convert",
    [Image.fromarray, lambda a: a, lambda a: torch.from_numpy(a).permute(2, 0, 1)],
    ids=["pil", "numpy", "tensor"],
)
def test_a_dataset_of_any_image_type(out, convert):
    images = arrays()
    pack(Pairs([(convert(a), i % 2) for i, a in enumerate(images)]), out, size=16)
    (spec,) = field_specs(PackOptions(), (16, 16))
    with h5py.File(out) as file:
        assert np.array_equal(file["images"][:], [fit_image(a, spec)[0] for a in images])
        assert file["labels"][:].tolist() == [0, 1, 0, 1, 0, 1]
        assert file["classes"].asstr()[:].tolist() == ["even", "odd"]
    assert keys(out) == list("012345")
    assert check_file(out).is_sound


class Targets(Pairs):
    classes = ()


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_a_dataset_of_targets(out, make):
    targets = [[0.5, float(i)] for i in range(6)]
    pack(Targets([(a, make(t)) for a, t in zip(arrays(), targets, strict=True)]), out, size=16)
    with h5py.File(out) as file:
        assert file["labels"].dtype == np.float32
        assert file["labels"][:].tolist() == targets


def test_a_dataset_of_several_classes_an_item(out):
    hot = [[1, 0], [1, 1], [0, 0], [0, 1], [0, 0], [1, 0]]
    pack(Pairs([(a, np.array(t)) for a, t in zip(arrays(), hot, strict=True)]), out, size=16)
    ds = H5Dataset(out)
    assert (ds.classes, ds.targets.dtype, ds.targets.tolist()) == (["even", "odd"], "f4", hot)
    facts = file_facts(ds.files.indexes[0])
    assert facts["class_counts"] == {"even": 3, "odd": 2, "(none)": 2}
    assert (facts["targets"], facts["targets_per_item"]) == ([], None)
    assert ds.select(lambda columns: [name == ("odd",) for name in columns["class"]]).tolist() == [
        3
    ]
    assert "2 classes" in facts_in_words(facts, classes=9)


@pytest.mark.parametrize("error", [SystemExit(3), ZeroDivisionError(), MemoryError()])
def test_a_dataset_that_ends_the_program_leaves_nothing_behind(out, monkeypatch, error):
    """SystemExit goes through; a shortage of memory fails the run; any other error is a skip."""
    items = [(a, 0) for a in arrays()]
    items[3] = error
    if isinstance(error, ZeroDivisionError):
        assert pack(Pairs(items), out, size=16).items == 5
        return
    said = {"SystemExit": "^3$", "MemoryError": "^out of memory at 3: fewer --workers or a smaller"}
    expected = SystemExit if isinstance(error, SystemExit) else PackError
    with pytest.raises(expected, match=said[type(error).__name__]):
        pack(Pairs(items), out, size=16)
    assert names(out.parent) == []


@pytest.mark.parametrize(
    "mask", [Image.new("L", (8, 8)), np.zeros((8, 8), np.uint8), torch.zeros(1, 8, 8)]
)
def test_a_dataset_of_masks_is_refused(out, mask):
    said = (
        r"the label of Pairs\[0\] is .*\(.*8.*8\), a mask by its shape: a class number or a row of"
    )
    with pytest.raises(UsageError, match=said):
        pack(Pairs([(arrays(1)[0], mask)]), out, size=16)
    assert names(out.parent) == []


def test_a_dataset_item_that_raises_is_skipped(out):
    items = [(a, np.int64(i % 2)) for i, a in enumerate(arrays())]
    items[2] = OSError("bad file")
    summary = pack(Pairs(items), out, size=16)
    assert summary.skipped == (("2", "cannot be loaded (OSError: bad file)"),)
    with h5py.File(out) as file:
        assert file["labels"][:].tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ((torch.rand(3, 8, 8), 0), r"image of Pairs\[0\] is Tensor of torch.float32 \(3, 8, 8\)"),
        ((np.zeros((8, 8, 4), np.uint8), 0), r"is ndarray of uint8 \(8, 8, 4\)"),
        ((np.zeros((8, 8), np.uint8), "cat"), r"the label of Pairs\[0\] is a str"),
        ((np.zeros((8, 8), np.uint8), []), r"the label of Pairs\[0\] is a list"),
        ((np.zeros((8, 8), np.uint8), 2), r"Pairs\[0\] is 2: −1 or a class number, 0 to 1 of its"),
        (
            (np.zeros((8, 8), np.uint8), [1, 0, 0]),
            r"Pairs\[0\] has 3 numbers for the 2 classes",
        ),
        ((np.zeros((8, 8), np.uint8), -2), r"the label of Pairs\[0\] is -2: −1 or a class number"),
        (np.zeros((8, 8), np.uint8), r"Pairs\[0\] is ndarray .*: \(image, label\) is needed"),
    ],
)
def test_a_dataset_of_something_else_is_refused(out, item, said):
    with pytest.raises(UsageError, match=said):
        pack(Pairs([item]), out, size=16)
    assert names(out.parent) == []


def test_a_dataset_item_without_pixels_is_skipped(out):
    items = [(a, 0) for a in arrays(2)] + [(np.zeros((0, 8, 3), np.uint8), 0)]
    assert pack(Pairs(items), out, size=16).skipped == (("2", "damaged (0x8 pixels)"),)


def test_a_dataset_without_items_is_refused(out):
    with pytest.raises(UsageError, match="source=Pairs holds no images"):
        pack(Pairs([]), out)
    assert names(out.parent) == []


def test_what_a_dataset_cannot_do(out):
    pairs = Pairs([(a, 0) for a in arrays()])
    with pytest.raises(UsageError, match="resume=True needs a folder, and source is a dataset"):
        pack(pairs, out, resume=True)
    with pytest.raises(UsageError, match="store=original needs a folder of files"):
        pack(pairs, out, store="original")
    with pytest.raises(UsageError, match="source=int is neither a folder's path nor a dataset"):
        pack(3, out)


def test_torchvision_imagefolder_packs_as_the_folder_does(folder, out):
    datasets = pytest.importorskip("torchvision.datasets")
    pack(folder, out, size=SIZE, num_workers=0)
    with h5py.File(out) as file:
        images, labels = file["images"][:], file["labels"][:]
    pack(datasets.ImageFolder(folder), out, size=SIZE, overwrite=True)
    with h5py.File(out) as file:
        # Two JPEG decoders, up to rounding; PNG is exact.
        assert np.abs(file["images"][:].astype(int) - images).max() <= 2
        assert np.array_equal(file["labels"][:], labels)


def test_spawned_workers_give_the_same_bytes(folder, out):
    """What macOS and Windows do; in a script of its own, for spawn imports the main module."""
    pack(folder, out, size=SIZE, num_workers=0)
    expected = sha256(out)
    script = (
        "import sys, h5feed.packing as p, h5feed.packing.workers as w\n"
        "if __name__ == '__main__':\n"
        "    w._START_METHOD = 'spawn'\n"
        f"    p.pack(sys.argv[1], sys.argv[2], size={SIZE}, num_workers=2, overwrite=True)\n"
    )
    path = out.with_name("script.py")
    path.write_text(script)
    subprocess.run([sys.executable, str(path), str(folder), str(out)], check=True)
    assert sha256(out) == expected
