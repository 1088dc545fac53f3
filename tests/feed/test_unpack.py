"""A packed file as files again, and packed from these: the same items, and nothing elsewhere."""

import errno
import io
import json
import os
import shlex

import numpy as np
import pytest
from PIL import Image

from h5feed import UsageError, pack
from h5feed.cli import pack as pack_h5
from h5feed.cli import show as show_h5
from h5feed.errors import H5FormatError
from h5feed.feed import unpack as module
from h5feed.feed.files import PackedFiles
from h5feed.feed.unpack import unpack
from h5feed.packing.fields import parse_field
from h5feed.store import read_index
from h5feed.store.fields import FieldType, FieldValues
from loaders import KINDS, write_kind
from packed import random_images, split_into_set, write_packed
from packing.folders import make_folder, make_masks

BOXES = FieldType(kind="boxes", dtype="float32", shape=(4,))


def again(path, capsys):
    """Export, pack by the command that is printed, and return both as files."""
    folder = path.parent / "it's out"
    assert show_h5.main([str(path), "--export", str(folder)]) == 0
    name, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert name == "pack-h5"
    out = path.parent / "again.h5"
    words[words.index("again.h5")] = str(out)
    assert pack_h5.main([*words, "--workers", "0"]) == 0
    return PackedFiles([path]), PackedFiles([out])


def assert_same(one, other):
    """All but the pixels of images, and the extensions of keys."""
    keys, others = one.keys(), other.keys()
    assert [os.path.splitext(key)[0] for key in keys] == [os.path.splitext(k)[0] for k in others]
    assert one.classes == other.classes
    assert one.labels.dtype == other.labels.dtype
    assert np.array_equal(one.labels, other.labels)
    assert one.specs == other.specs
    assert one.field_types == other.field_types
    for index in range(len(one)):
        for name in one.field_types:
            assert one.field_bytes(name, index) == other.field_bytes(name, index)
        if "masks" in one.specs:
            assert np.array_equal(one.item("masks", index), other.item("masks", index))


def have_same_images(one, other):
    items = range(len(one))
    return all(np.array_equal(one.item("images", i), other.item("images", i)) for i in items)


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.startswith("keep")])
def test_every_store_comes_back(tmp_path, capsys, kind):
    one, other = again(write_kind(tmp_path / "one.h5", kind), capsys)
    assert_same(one, other)
    assert kind in ("yuv420", "jpeg") or have_same_images(one, other)


@pytest.mark.parametrize("store", ["raw", "jpeg"])
def test_images_of_their_own_sizes_and_masks_come_back(tmp_path, capsys, store):
    root = make_folder(tmp_path / "images", per_class=3)
    masks = make_masks(root, tmp_path / "masks")
    path = tmp_path / "one.h5"
    pack(root, path, size=24, any_size=True, fit="keep", store=store, masks=masks, num_workers=0)
    one, other = again(path, capsys)
    assert_same(one, other)
    assert np.array_equal(one.stored_shapes, other.stored_shapes)
    assert store == "jpeg" or have_same_images(one, other)


def test_a_set_comes_back_in_the_order_of_its_items(tmp_path, capsys):
    split_into_set(write_kind(tmp_path / "one.h5", "raw"), tmp_path / "set")
    one, other = again(tmp_path / "set", capsys)
    assert_same(one, other)
    assert have_same_images(one, other)


def test_jpeg_files_are_those_that_are_stored(tmp_path):
    for kind in ("jpeg", "original"):
        files = PackedFiles([write_kind(tmp_path / f"{kind}.h5", kind)])
        unpack(files, tmp_path / kind)
        for index in (0, 7):
            file = tmp_path / kind / "images" / files.key(index).replace(".png", ".jpg")
            assert file.read_bytes() == bytes(files.item("images", index))


def further(count):
    """Fields of every kind, some of them empty, with names that columns have as well."""
    joints = FieldType(
        kind="keypoints", dtype="float32", shape=(3, 3), rows_of="boxes", swap=(0, 2, 1)
    )
    of_boxes = FieldType(kind="array", dtype="int64", rows_of="boxes")
    spots = FieldType(kind="array", dtype="float64", shape=(2,))
    boxes = [np.float32([[0.1, 2.3, 4, 5], [5, 5, 31.7, 9 + k]])[: k % 3] for k in range(count)]
    points = np.float32([[[3, 4.1, 2], [0, 0, 0], [9, 9, 1]]])
    return {
        "boxes": FieldValues.of_arrays(boxes, BOXES),
        "kinds": FieldValues.of_arrays([np.arange(len(rows)) for rows in boxes], of_boxes),
        "joints": FieldValues.of_arrays([points.repeat(len(b), axis=0) for b in boxes], joints),
        "spots": FieldValues.of_arrays([np.full((k, 2), 0.1 * k) for k in range(count)], spots),
        "path": FieldValues.of_texts(["ü\n\u2028\"'", "", *["a, b"] * (count - 2)]),
        "class": FieldValues.of_json([None, {"b": [1.5], "a": "ü"}, *range(count - 2)]),
        "cls": FieldValues.of_fixed(np.arange(count, dtype=np.float32) / 3, "float32"),
        "big": FieldValues.of_fixed(np.full((count, 2), 2**62 + 1), "int64"),
        "code": FieldValues.of_fixed(np.arange(4 * count).reshape(count, 2, 2) % 256, "uint8"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (None, ("cat", "dög")),
        (np.int64([2, -1, 0, 2, -1]), ("wolf", "no item's", "ant", "nor this")),
        (np.int64([1, 0, 1, 0, 1]), ("crane", "crane")),
        (np.full(5, -1), ("a class", "of boxes")),
        (np.full(5, -1), ()),
        (np.float32([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]), ("z", "a", "none")),
        (np.float32([[0.1, -3e30], [1, 2], [3, 4], [5, 6], [7, 8]]), ()),
    ],
    ids=["classes", "some", "twins", "boxes", "none", "several", "targets"],
)
def test_labels_and_fields_of_every_kind_come_back(tmp_path, capsys, labels, classes):
    path = tmp_path / "one.h5"
    write_packed(path, random_images(5), labels=labels, classes=classes, further=further(5))
    one, other = again(path, capsys)
    assert_same(one, other)
    assert have_same_images(one, other)


def test_the_manifest_is_for_people_too(tmp_path, capsys):
    boxes = FieldValues.of_arrays([np.float32([[1, 2, 3.5, 4]]), np.zeros((0, 4))], BOXES)
    path = write_packed(tmp_path / "one.h5", random_images(2), further={"boxes": boxes})
    said = unpack(PackedFiles([path]), tmp_path / "out").in_words()
    assert said.startswith(f"{tmp_path / 'out'}: 2 images and manifest.jsonl; packed again by\n")
    lines = (tmp_path / "out/manifest.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"path": "0/ü0.png", "label": 0, "class": "cat", "boxes": [[1.0, 2.0, 3.5, 4.0]]},
        {"path": "1/ü1.png", "label": 1, "class": "dög", "boxes": []},
    ]
    assert (tmp_path / "out/classes.txt").read_text() == "cat\ndög\n"
    assert show_h5.main([str(path), "--export", str(tmp_path / "more"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["export"]["images"] == 2
    assert facts["export"]["command"][:2] == ["pack-h5", str(tmp_path / "more" / "images")]


def test_rows_about_one_image_and_keys_that_differ_in_their_ends(tmp_path, capsys):
    a, b = random_images(2)
    keys = ["x/a.jpg", "x/a.png", "x/a.jpg", "./x//b", "v1.5", "x/a.jpg"]
    images = [a, b, a, a, b, b]
    path = write_packed(tmp_path / "one.h5", images, keys=keys)
    unpack(PackedFiles([path]), tmp_path / "out")
    lines = (tmp_path / "out/manifest.jsonl").read_text().splitlines()
    names = [json.loads(line)["path"] for line in lines]
    assert names == ["x/a.png", "x/a.png.png", "x/a.png", "x/b.png", "v1.5.png", "x/a.jpg.png"]
    for name, pixels in zip(names, images, strict=True):
        assert np.array_equal(np.asarray(Image.open(tmp_path / "out/images" / name)), pixels)
    path = write_packed(tmp_path / "two.h5", random_images(3), keys=["a.png"] * 3)
    with pytest.raises(
        UsageError, match=r"item 2 of /images \(key 'a.png'\) would be written to t"
    ):
        unpack(PackedFiles([path]), tmp_path / "two")
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("key", ["../up.png", "a/../../up.png", "..", "/", "", "a\0b.png", "a/.."])
def test_keys_that_lead_elsewhere_are_refused(tmp_path, key):
    path = write_packed(tmp_path / "one.h5", random_images(2), keys=["ok.png", key or "/"])
    with pytest.raises(H5FormatError, match=r"item 1 of /images .* this key is not a path below a"):
        unpack(PackedFiles([path]), tmp_path / "deep" / ".." / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.h5"]


def test_absolute_keys_stay_below_the_folder(tmp_path):
    path = write_packed(tmp_path / "one.h5", random_images(1), keys=[f"{tmp_path}/elsewhere.png"])
    unpack(PackedFiles([path]), tmp_path / "out")
    assert (tmp_path / "out/images" / f"{tmp_path}/elsewhere.png".lstrip("/")).is_file()
    assert not (tmp_path / "elsewhere.png").exists()


@pytest.fixture
def packed(tmp_path):
    return write_packed(tmp_path / "one.h5", random_images(4))


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("full", "export=… is not empty: give a folder that is new, or empty"),
        ("one.h5", "export=… is a file: give a folder that is new, or empty"),
        ("no/such", "export=…: /.*/no is not a folder: make it first"),
        ("halves", "/.*/halves.partial is of an export that was interrupted, or still runs: remov"),
    ],
)
def test_a_folder_that_cannot_be_taken_is_named(tmp_path, packed, capsys, folder, said):
    for there in ("full/file", "halves.partial"):
        (tmp_path / there).mkdir(parents=True)
    target = tmp_path / folder
    assert show_h5.main([str(packed), "--export", str(target)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    with pytest.raises(UsageError, match=said.replace("…", str(target))):
        unpack(PackedFiles([packed]), target)
    assert (tmp_path / "halves.partial").is_dir()


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path, packed):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    unpack(PackedFiles([packed]), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty/manifest.jsonl").is_file()


def test_a_full_disk_leaves_nothing(tmp_path, packed, capsys, monkeypatch):
    write = module._write

    def full(path, data):
        if path.name == "ü2.png":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    monkeypatch.setattr(module, "_write", full)
    assert show_h5.main([str(packed), "--export", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.endswith("ü2.png cannot be used: No space left on device (errno 28)\n")
    assert [file.name for file in tmp_path.iterdir()] == ["one.h5"]


def test_a_damaged_item_is_named_and_nothing_is_left(tmp_path, packed, capsys):
    start, _ = read_index(packed).extents["images"].item_range(3)
    data = bytearray(packed.read_bytes())
    data[start] ^= 1
    packed.write_bytes(data)
    assert show_h5.main([str(packed), "--export", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "item 3 of /images (key '1/ü3.png') its bytes are not those that were packed" in error
    assert [file.name for file in tmp_path.iterdir()] == ["one.h5"]


@pytest.mark.parametrize(
    "text",
    [
        "float32", "uint8[2,3]", "float32[n,4]", "int64[n]", "int64[n]@boxes", "text", "json",
        "boxes", "keypoints[17]", "keypoints[0,2,1]@boxes",
    ],
)  # fmt: skip
def test_types_are_written_as_they_are_read(text):
    assert str(parse_field(f"x:{text}")[1]) == text


@pytest.mark.parametrize(
    "text",
    ["boxes[4]", "boxes@boxes", "text[2]", "keypoints", "keypoints[n]", "keypoints[0,0]",
     "keypoints[0]", "float32@boxes", "float32[2]@boxes", "int64[n]@", "float32[]", "x y"],
)  # fmt: skip
def test_types_that_are_none(text):
    with pytest.raises(UsageError, match=r"is not a type: give .* boxes or keypoints"):
        parse_field(f"x:{text}")


def png():
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        ({"b": [[1, 2, 3, 4]], "k": [1, 2]}, {"fields": ["b:boxes", "k:int64[n]@b"]},
         "list.jsonl, line 1, column 'k': 2 rows for 1 box of 'b'"),
        ({"b": [[1, 2, 3, 4]], "k": [1]}, {"fields": ["b:float32[n,4]", "k:int64[n]@b"]},
         "field=k:int64[n]@b: 'b' is not a field of boxes: give it as well, as --field b:boxes"),
        ({"b": [[1, 2, 1, 4]]}, {"fields": ["b:boxes"]}, "is not boxes (a box has no area: left"),
        ({"b": [[1, 2, float("nan"), 4]]}, {"fields": ["b:boxes"]}, "(a box has no area: left"),
        ({"b": [[1, 2, 3]]}, {"fields": ["b:boxes"]}, "is not boxes (its shape is (1, 3))"),
        ({"label": 3}, {"classes": "abc"}, "column 'label': 3 is none of the 3 classes"),
        ({"label": "d"}, {"classes": "abc"}, "'d' is none of the 3 classes of "),
        ({"label": "a"}, {"classes": "aba"}, "'a' is the name of two classes, and the labels are "),
        ({"label": "a"}, {"classes": ["a", "", "b"]}, "line 2 is empty: give a class name a line"),
        ({"label": "a"}, {"classes": ""}, "line 1 is empty: give a class name a line"),
        ({"target": 1}, {"classes": "a", "targets": ["target"]}, "names classes, and targets are"),
        ({"a": 1}, {"classes": "a", "class_columns": ["a"]}, "and class_columns name them: leave"),
        ({"label": "a"}, {"classes": "a", "class_order": "natural"}, "class_order=natural numbers"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(tmp_path, row, options, said):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(png())
    (tmp_path / "list.jsonl").write_text(json.dumps({"path": "a", **row}))
    if "classes" in options:
        (tmp_path / "names").write_text("\n".join(options["classes"]))
        options = {**options, "classes": tmp_path / "names"}
    with pytest.raises(UsageError) as caught:
        pack(tmp_path / "images", tmp_path / "x.h5", manifest=tmp_path / "list.jsonl", **options)
    assert said in str(caught.value)


def test_classes_are_numbered_by_their_file(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(png())
    (tmp_path / "names").write_bytes("\ufeffzebra\r\nant and bee\r\nnone\r\n".encode())
    for row, labels in ({"class": "ant and bee"}, [1]), ({"label": ["none", "zebra"]}, [[1, 0, 1]]):
        (tmp_path / "list.jsonl").write_text(json.dumps({"path": "a", **row}))
        pack(
            tmp_path / "images", tmp_path / "x.h5", manifest=tmp_path / "list.jsonl",
            classes=tmp_path / "names", size=32, num_workers=0, overwrite=True,
        )  # fmt: skip
        files = PackedFiles([tmp_path / "x.h5"])
        assert files.classes == ("zebra", "ant and bee", "none")
        assert files.labels.tolist() == labels
    with pytest.raises(
        UsageError, match=r"classes=.*names is about a manifest's columns: give one"
    ):
        pack(tmp_path / "images", tmp_path / "y.h5", classes=tmp_path / "names")
    with pytest.raises(UsageError, match="classes=nothing cannot be read: No such file"):
        pack(tmp_path / "images", "y.h5", manifest=tmp_path / "list.jsonl", classes="nothing")
