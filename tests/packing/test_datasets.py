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
from h5feed.packing import PackOptions, pack, sources, workers
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
    facts = file_facts(ds.files)
    assert facts["class_counts"] == {"even": 3, "odd": 2, "(none)": 2}
    assert (facts["targets"], facts["targets_per_item"]) == ([], None)
    assert ds.select(lambda columns: [name == ("odd",) for name in columns["class"]]).tolist() == [
        3
    ]
    assert "2 classes" in facts_in_words(facts, classes=9)


@pytest.mark.parametrize("error", [SystemExit(3), MemoryError()])
def test_a_dataset_that_ends_the_program_leaves_what_was_done(out, error):
    """SystemExit goes through; a shortage of memory fails the run; any other error is a skip."""
    items = [(a, 0) for a in arrays()]
    said = {"SystemExit": "^3$", "MemoryError": "^out of memory at 3: fewer --workers or a smaller"}
    expected = SystemExit if isinstance(error, SystemExit) else PackError
    with pytest.raises(expected, match=said[type(error).__name__]):
        pack(Pairs([*items[:3], error, *items[4:]]), out, size=16, num_workers=0)
    assert not out.exists()
    assert pack(Pairs(items), out, size=16, num_workers=0, resume=True).items == 6


def test_a_dataset_that_ends_a_worker_is_one_sentence(out):
    items = [(a, 0) for a in arrays()]
    items[3] = SystemExit(3)
    with pytest.raises(PackError, match=r"^a worker process died \(exit status 3\) at 3; "):
        pack(Pairs(items), out, size=16, num_workers=1)
    assert not out.exists()


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
    items[2], items[4] = OSError("bad file"), ZeroDivisionError()
    summary = pack(Pairs(items), out, size=16)
    assert summary.skipped == (
        ("2", "cannot be loaded (OSError: bad file)"),
        ("4", "cannot be loaded (ZeroDivisionError: )"),
    )
    with h5py.File(out) as file:
        assert file["labels"][:].tolist() == [0, 1, 1, 1]


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
    with pytest.raises(UsageError, match="fields=x is about a table's columns, and source is a d"):
        pack(pairs, out, fields=["x"])
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


def labelled(kind, count=40):
    """Items with class numbers, or with two targets each."""
    label = (lambda i: i % 2) if kind is Pairs else (lambda i: [i / 3, -float(i)])
    return [(a, label(i)) for i, a in enumerate(arrays(count))]


@pytest.mark.parametrize("kind", [Pairs, Targets])
def test_a_dataset_packs_in_processes_as_in_one(out, kind):
    items = labelled(kind)
    items[7] = OSError("bad file")
    assert pack(kind(items), out, size=16, num_workers=0).items == 39
    expected = sha256(out)
    summary = pack(kind(items), out, size=16, num_workers=2, overwrite=True)
    assert [key for key, _ in summary.skipped] == ["7"]
    assert sha256(out) == expected
    with h5py.File(out) as file:
        wanted = [label for n, (_, label) in enumerate(labelled(kind)) if n != 7]
        assert np.array_equal(file["labels"][:], np.array(wanted, file["labels"].dtype))


@pytest.mark.parametrize("kind", [Pairs, Targets])
def test_an_interrupted_dataset_goes_on(out, monkeypatch, kind):
    monkeypatch.setattr(workers, "_MOST_IMAGES", 4)
    items = labelled(kind)
    pack(kind(items), out, size=16, num_workers=0)
    expected = sha256(out)
    out.unlink()
    pressed = kind([*items[:21], KeyboardInterrupt(), *items[22:]])
    with pytest.raises(KeyboardInterrupt, match="20 of 40 images are kept"):
        pack(pressed, out, size=16, num_workers=0)
    others = [(a[::-1], label) for a, label in items]
    with pytest.raises(PackError, match="resumed: item 19 of the dataset is another one than then"):
        pack(kind(others), out, size=16, num_workers=0, resume=True)
    with pytest.raises(PackError, match=r"the source has changed \(40 images then, 39 now\)"):
        pack(kind(items[1:]), out, size=16, num_workers=0, resume=True)
    assert pack(kind(items), out, size=16, num_workers=2, resume=True).resumed == 20
    assert sha256(out) == expected


def test_a_dataset_that_does_not_pickle_packs_in_one_process_and_says_so(out, capsys):
    pairs = Pairs([(a, 0) for a in arrays()])
    pairs.open = lambda: None
    assert pack(pairs, out, size=16, num_workers=2, progress=True).items == 6
    said = capsys.readouterr().err
    assert said.count("packed in one process: Pairs does not pickle (") == 1
    pack(pairs, out, size=16, num_workers=0, progress=True, overwrite=True)
    assert "pickle" not in capsys.readouterr().err


def test_a_large_dataset_is_not_pickled_whole_to_see_whether_it_pickles(monkeypatch):
    monkeypatch.setattr(sources, "_PICKLED", 100_000)
    after = [b"x" * 200_000, lambda: None]  # what comes behind enough is not looked at
    source = sources.DatasetSource(Pairs(after), background=(0, 0, 0))
    source.check_pickles()
    assert source.pickles
    source = sources.DatasetSource(Pairs(after[::-1]), background=(0, 0, 0))
    source.check_pickles()
    assert not source.pickles
