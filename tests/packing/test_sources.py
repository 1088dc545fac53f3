import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from h5feed import progress
from h5feed.errors import PackError, UsageError
from h5feed.packing import sources
from h5feed.packing.items import EXTENSIONS
from h5feed.packing.sources import open_source
from packing.folders import refusal
from packing.folders import source_keys as keys

SAMPLES = Path(__file__).parents[2] / "data_samples"


def touch(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


# --- class folders ----------------------------------------------------------

TREE = [
    "b/2.jpg", "b/10.JPG", "b/1.jpeg", "b/notes.txt", "b/x.jpg.bak",
    "a/z/1.png", "a/z 2/1.png", "a/z/deep/9.webp", "a/0.tif", "a/Z.PNG", "a/é.ppm",
    "B/1.bmp", "B/.hidden.pgm", "ü/1.tiff", "10/1.jpg", "9/1.jpg",
]  # fmt: skip


def as_imagefolder(root):
    folder = pytest.importorskip("torchvision.datasets").ImageFolder(root)
    paths = [os.path.relpath(path, root) for path, _ in folder.samples]
    return folder.classes, paths, folder.targets


def test_class_folders_are_imagefolders_to_the_letter(tmp_path):
    touch(tmp_path, *TREE)
    (tmp_path / "b" / "linked").symlink_to(tmp_path / "a" / "z")
    (tmp_path / "c").symlink_to(tmp_path / "B")
    source = open_source(tmp_path)
    classes, paths, targets = as_imagefolder(tmp_path)
    assert list(source.classes) == classes
    assert keys(source) == paths
    assert source.labels.tolist() == targets
    assert source.labels.dtype == np.int64
    assert source.path(3) == os.fsencode(tmp_path / paths[3])
    assert source.mask_path(0) is None
    assert source.notes == ()


def test_the_samples_are_imagefolders_too():
    source = open_source(SAMPLES / "images")
    classes, paths, targets = as_imagefolder(SAMPLES / "images")
    assert (list(source.classes), keys(source)) == (classes, paths)
    assert source.labels.tolist() == targets


def test_extensions_are_torchvisions_unless_others_are_named(tmp_path):
    folder = pytest.importorskip("torchvision.datasets.folder")
    assert EXTENSIONS == folder.IMG_EXTENSIONS
    touch(tmp_path, "a/1.GIF", "a/2.gif", "a/3.jpg", "a/4.jpe", "b/5.jpg")
    source = open_source(tmp_path)
    assert keys(source) == as_imagefolder(tmp_path)[1] == ["a/3.jpg", "b/5.jpg"]
    ends = ".jpg .jpeg .png .ppm .bmp .pgm .tif .tiff .webp"
    assert source.notes == (
        "left out, as ImageFolder does: 2 .gif files, 1 .jpe file; --extensions "
        f"{ends} .gif .jpe takes them",
    )
    assert keys(open_source(tmp_path, extensions=[".gif", ".jpg"])) == [
        "a/1.GIF", "a/2.gif", "a/3.jpg", "b/5.jpg",
    ]  # fmt: skip
    (tmp_path / "b" / "5.jpg").unlink()
    touch(tmp_path, "b/6.gif")
    assert refusal(UsageError, tmp_path).startswith("no images (.jpg, .jpeg, ")
    assert refusal(UsageError, tmp_path / "b") == (
        f"SRC '{tmp_path}/b' holds no images ({ends.replace(' ', ', ')}); left out, as "
        f"ImageFolder does: 1 .gif file; --extensions {ends} .gif takes them"
    )


def test_names_that_are_no_utf8_keep_their_bytes(tmp_path):
    name = b"caf\xe9.jpg"
    touch(tmp_path, "a/1.jpg")
    with open(os.path.join(os.fsencode(tmp_path), b"a", name), "wb"):
        pass
    source = open_source(tmp_path)
    assert source.key(1) == b"a/" + name
    assert Path(os.fsdecode(source.path(1))).exists()


def test_empty_classes_are_named_or_kept(tmp_path):
    touch(tmp_path, "a/1.jpg", "b/readme.md", "c/1.jpg")
    (tmp_path / "d").mkdir()
    text = refusal(UsageError, tmp_path)
    assert text.startswith("no images (.jpg, .jpeg, ")
    assert f"in the class folders b, d of '{tmp_path}': remove them, or keep them" in text
    source = open_source(tmp_path, allow_empty=True)
    assert source.classes == ("a", "b", "c", "d")
    assert source.labels.tolist() == [0, 2]


def test_images_beside_the_classes_are_noted(tmp_path):
    source = open_source(touch(tmp_path, "a/1.jpg", "loose.jpg", "readme.md"))
    assert keys(source) == ["a/1.jpg"]
    assert source.notes == ("left out, of no class: 1 image beside the class folders",)


def test_a_link_to_a_folder_above_is_refused(tmp_path):
    touch(tmp_path, "a/sub/1.jpg")
    (tmp_path / "a" / "sub" / "up").symlink_to(tmp_path / "a")
    text = refusal(UsageError, tmp_path)
    assert text.endswith(f"up' links to a folder above itself ('{tmp_path}/a'): remove the link")
    (tmp_path / "a" / "sub" / "up").unlink()
    touch(tmp_path, "b/1.jpg")
    (tmp_path / "a" / "sub" / "other").symlink_to(tmp_path / "b")
    assert keys(open_source(tmp_path)) == ["a/sub/1.jpg", "a/sub/other/1.jpg", "b/1.jpg"]


# --- flat folders, and what is not a source ------------------------------------


def test_a_flat_folder_has_no_labels(tmp_path):
    source = open_source(touch(tmp_path, "b.jpg", "a.PNG", "10.webp", "notes.txt"))
    assert keys(source) == ["10.webp", "a.PNG", "b.jpg"]
    assert source.labels.tolist() == [-1, -1, -1]
    assert source.classes == ()


@pytest.mark.parametrize(
    "splits",
    [("train", "val"), ("train",), ("Test", "VALID"), ("training", "testing")],
)
def test_splits_are_refused_with_the_commands_to_type(tmp_path, splits):
    root = tmp_path / "my photos"
    touch(root, *(f"{split}/cat/1.jpg" for split in splits))
    text = refusal(UsageError, root)
    assert text.startswith(f"SRC '{root}' holds splits ({', '.join(sorted(splits))}), not classes")
    for split in splits:
        assert f"\n  pack-h5 '{root}/{split}' {split}.h5" in text
    assert keys(open_source(root / splits[0])) == ["cat/1.jpg"]


def test_a_class_that_is_called_train_is_a_class_beside_others(tmp_path):
    assert open_source(touch(tmp_path, "train/1.jpg", "bus/1.jpg")).classes == ("bus", "train")


def test_what_is_no_source_is_one_sentence(tmp_path):
    file = touch(tmp_path, "a.jpg") / "a.jpg"
    text = refusal(UsageError, file)
    assert text == f"SRC '{file}' is a file: give the folder it lies in"
    text = refusal(UsageError, tmp_path / "nowhere")
    assert text == f"SRC '{tmp_path}/nowhere' does not exist: give a folder"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refusal(UsageError, empty).startswith(f"SRC '{empty}' holds no images (.jpg, ")
    touch(tmp_path / "classes", "a/1.txt")
    assert refusal(UsageError, tmp_path / "classes", allow_empty=True).startswith("SRC ")


@pytest.mark.parametrize("blocked", ["", "a", "a/deep"])
def test_an_unreadable_folder_is_named(tmp_path, monkeypatch, blocked):
    touch(tmp_path, "a/deep/1.jpg", "b/1.jpg")
    blocked = tmp_path / blocked
    scandir = os.scandir

    def refusing(path="."):
        if Path(path) == blocked:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert refusal(PackError, tmp_path) == f"cannot read the folder '{blocked}': Permission denied"


# --- masks ------------------------------------------------------------------


def test_masks_are_found_by_their_stem(tmp_path):
    images = touch(tmp_path / "images", "a/1.jpg", "a/2.x.jpg", "b/3.png")
    masks = touch(tmp_path / "masks", "a/1.png", "a/2.x.TIF", "b/3.bmp", "b/4.png")
    source = open_source(images, masks=masks)
    names = [os.fsdecode(source.mask_path(index)) for index in range(3)]
    assert names == [f"{masks}/a/1.png", f"{masks}/a/2.x.TIF", f"{masks}/b/3.bmp"]


def test_a_missing_mask_is_named(tmp_path):
    images = touch(tmp_path / "images", "a/1.jpg", "a/2.jpg")
    masks = touch(tmp_path / "masks", "a/1.png")
    assert refusal(UsageError, images, masks=masks) == (
        f"masks '{masks}' has no mask for 'a/2.jpg': it would be 'a/2.png', "
        "or the same with another extension"
    )
    text = refusal(UsageError, images, masks=tmp_path / "none")
    assert text == f"masks '{tmp_path}/none' does not exist: give a folder"


def test_the_samples_have_their_masks():
    source = open_source(SAMPLES / "images" / "plants", masks=SAMPLES / "masks" / "plants")
    assert all(Path(os.fsdecode(source.mask_path(k))).exists() for k in range(len(source)))


# --- digest -----------------------------------------------------------------


def test_the_digest_changes_with_what_is_packed(tmp_path):
    images = touch(tmp_path / "images", "a/1.jpg", "b/2.jpg")
    masks = touch(tmp_path / "masks", "a/1.png", "b/2.png")
    seen = [open_source(images).digest(), open_source(images, masks=masks).digest()]
    assert open_source(images).digest() == seen[0]

    def note():
        seen.append(open_source(images, masks=masks).digest())

    os.utime(images / "a" / "1.jpg", ns=(0, 1))
    note()
    os.utime(masks / "a" / "1.png", ns=(0, 1))
    note()
    (images / "b" / "2.jpg").write_bytes(b"xy")
    os.utime(images / "b" / "2.jpg", ns=(0, 1))
    note()
    (images / "b" / "2.jpg").write_bytes(b"z")
    os.utime(images / "b" / "2.jpg", ns=(0, 1))
    note()
    (images / "b").rename(images / "c")
    (masks / "b").rename(masks / "c")
    note()
    assert len(set(seen)) == len(seen)
    manifest = tmp_path / "list.csv"
    for labels in ((0, 1), (1, 0)):
        manifest.write_text("path,label\na/1.jpg,{}\nc/2.jpg,{}\n".format(*labels))
        seen.append(open_source(images, manifest=manifest).digest())
    assert len(set(seen)) == len(seen)


def test_the_digest_survives_a_file_that_is_gone(tmp_path):
    source = open_source(touch(tmp_path, "a/1.jpg", "a/2.jpg"))
    before = source.digest()
    (tmp_path / "a" / "2.jpg").unlink()
    assert source.digest() != before


# --- on the way ---------------------------------------------------------------


def test_a_long_search_says_what_it_has_found(tmp_path, monkeypatch, capsys):
    """A folder on a slow disk: a line every few seconds, before there is any bar."""
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    touch(tmp_path / "images", "a/1.jpg", "b/2.jpg")
    touch(tmp_path / "masks", "a/1.png", "b/2.png")
    (tmp_path / "list.csv").write_text("path\na/1.jpg\n")
    open_source(tmp_path / "images", masks=tmp_path / "masks")
    assert capsys.readouterr().err == ""
    open_source(tmp_path / "images", masks=tmp_path / "masks", progress=True).digest(progress=True)
    open_source(tmp_path / "images", manifest=tmp_path / "list.csv", progress=True)
    open_source(tmp_path / "images" / "a", progress=True)
    said = [line.rpartition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line.partition(", ")[0] for line in said] == [
        "finding images: 1",
        "finding images: 2",
        "finding masks: 1 of 2",
        "finding masks: 2 of 2",
        "looking at files: 1 of 2",
        "looking at files: 2 of 2",
        "finding images: 1",
        "finding images: 1",
    ]


# --- memory -----------------------------------------------------------------


def test_class_folders_take_under_100_bytes_an_item(tmp_path, monkeypatch):
    classes = [f"n{number:08d}" for number in range(100)]
    for name in classes:
        (tmp_path / name).mkdir()

    def walk(top, **_):
        name = Path(top).name
        yield top, [], [f"{name}_{number:05d}.JPEG" for number in range(1000)]

    monkeypatch.setattr(sources.os, "walk", walk)
    assert bytes_per_item(lambda: open_source(tmp_path)) < 100


def test_a_flat_folder_takes_about_100_bytes_an_item(tmp_path, monkeypatch):
    class Entry:
        def __init__(self, number):
            self.name = f"ILSVRC2012_val_{number:08d}.JPEG"

        def is_dir(self):
            return False

    class Entries:
        def __enter__(self):
            return map(Entry, range(100_000))

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(sources.os, "scandir", lambda folder: Entries())
    assert bytes_per_item(lambda: open_source(tmp_path)) < 100 + len("ILSVRC2012_val_00000000.JPEG")


def bytes_per_item(build):
    tracemalloc.start()
    try:
        source = build()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(source) == 100_000
    return peak / len(source)
