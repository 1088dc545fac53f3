"""Further fields of a file: what is written is read, and nothing else is believed."""

import h5py
import numpy as np
import pytest

from h5feed import H5FormatError
from h5feed.store import check_file, read_index
from h5feed.store.fields import FieldType, FieldValues
from h5feed.store.read import MappedFile
from packed import random_images, write_packed

BOXES = FieldType(kind="boxes", dtype="float32", shape=(4,))
FURTHER = {
    "price": FieldValues.of_fixed([1.5, -2.0, 0.25], "float64"),
    "tags": FieldValues.of_fixed([[0, 1], [1, 1], [0, 0]], "uint8"),
    "boxes": FieldValues.of_arrays(
        [np.arange(8).reshape(2, 4), np.zeros((0, 4)), np.ones((1, 4))], BOXES
    ),
    "kinds": FieldValues.of_arrays(
        [[3, 1], [], [2]], FieldType(kind="array", dtype="int64", rows_of="boxes")
    ),
    "joints": FieldValues.of_arrays(
        [np.ones((2, 3, 3)), np.ones((0, 3, 3)), np.zeros((1, 3, 3))],
        FieldType(kind="keypoints", dtype="float32", shape=(3, 3), swap=(0, 2, 1)),
    ),
    "caption": FieldValues.of_texts(["a cat", "", "zwei Hünde 🐕"]),
    "meta": FieldValues.of_json([{"b": 1, "a": None}, [], "x"]),
}


@pytest.fixture
def packed(tmp_path):
    return write_packed(tmp_path / "a.h5", random_images(3), further=FURTHER)


def value(file, name, item):
    extent = file.index.fields[name]
    start, length = extent.item_range(item)
    return extent.type.value(file.data[start : start + length].data)


def test_every_kind_comes_back(packed):
    file = MappedFile(packed)
    assert list(file.index.fields) == sorted(FURTHER)
    assert [value(file, "price", k) for k in range(3)] == [1.5, -2.0, 0.25]
    assert [value(file, "tags", k).tolist() for k in range(3)] == [[0, 1], [1, 1], [0, 0]]
    boxes = [value(file, "boxes", k) for k in range(3)]
    assert [rows.shape for rows in boxes] == [(2, 4), (0, 4), (1, 4)]
    assert boxes[0].dtype == np.float32
    assert boxes[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not boxes[0].flags.writeable
    assert [value(file, "caption", k) for k in range(3)] == ["a cat", "", "zwei Hünde 🐕"]
    assert [value(file, "meta", k) for k in range(3)] == [{"a": None, "b": 1}, [], "x"]


def test_plain_hdf5_reads_them(packed):
    with h5py.File(packed) as file:
        assert file["fields/price"][:].tolist() == [1.5, -2.0, 0.25]
        a, b = file["fields/caption/offsets"][2:4]
        assert bytes(file["fields/caption/bytes"][a:b]).decode() == "zwei Hünde 🐕"
        assert file["fields/boxes"].attrs["shape"] == b"4"


def test_fields_begin_on_pages(packed):
    assert all(extent.start % 4096 == 0 for extent in read_index(packed).fields.values())


def test_the_same_values_give_the_same_bytes(packed, tmp_path):
    again = write_packed(
        tmp_path / "b.h5", random_images(3), further=dict(reversed(FURTHER.items()))
    )
    assert again.read_bytes() == packed.read_bytes()


@pytest.mark.parametrize("name", list(FURTHER))
def test_check_finds_every_flipped_byte(packed, name):
    extent = read_index(packed).fields[name]
    start, length = extent.item_range(2)
    data = bytearray(packed.read_bytes())
    data[start + length - 1] ^= 1
    packed.write_bytes(data)
    assert [damaged.index for damaged in check_file(packed).damaged] == [2]


def test_all_items_without_a_single_row(tmp_path):
    none = FieldValues.of_arrays([np.zeros((0, 4))] * 3, BOXES)
    file = MappedFile(write_packed(tmp_path / "b.h5", random_images(3), further={"boxes": none}))
    assert value(file, "boxes", 1).shape == (0, 4)
    assert check_file(tmp_path / "b.h5").is_sound


def test_take_keeps_the_items_asked_for():
    kept = {name: values.take(np.array([0, 2])) for name, values in FURTHER.items()}
    assert kept["price"].data.tolist() == [1.5, 0.25]
    assert [len(values) for values in kept.values()] == [2] * 7
    for name, values in kept.items():
        assert [bytes(values.item(k)) for k in (0, 1)] == [
            bytes(FURTHER[name].item(k)) for k in (0, 2)
        ]


def shorten_offsets(file):
    file["fields/caption/offsets"][2] = -1


def odd_offsets(file):
    file["fields/boxes/offsets"][1] -= 2


def other_rows(file):
    file["fields/boxes"].attrs["shape"] = np.bytes_(b"8")


def odd_kind(file):
    file["fields/meta"].attrs["kind"] = np.bytes_(b"pickle")


def huge_rows(file):
    file["fields/tags"].attrs["shape"] = np.bytes_(b"4,99999999999")


def spelled_otherwise(file):
    file["fields/tags"].attrs["shape"] = np.bytes_(b"02")


def bad_name(file):
    file["fields"].move("price", "label")


def other_type(file):
    data = file["fields/price"][:].astype("f4")
    attrs = dict(file["fields/price"].attrs)
    del file["fields/price"]
    file["fields/price"] = data
    file["fields/price"].attrs.update(attrs)


def text_as_json(file):
    file["fields/caption"].attrs["kind"] = np.bytes_(b"json")


def rows_of_nothing(file):
    file["fields/kinds"].attrs["rows_of"] = np.bytes_(b"price")


def other_row_counts(file):
    file["fields/kinds/offsets"][1] -= 8


def no_permutation(file):
    file["fields/joints"].attrs["swap"] = np.bytes_(b"0,1,1")


def a_link(file):
    file["fields/more"] = h5py.SoftLink("/labels")


def not_a_group(file):
    del file["fields"]
    file["fields"] = np.zeros(3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shorten_offsets, "/fields/caption/offsets is not rising from 0 to 21"),
        (odd_offsets, "/fields/boxes/offsets does not agree with rows of 16 bytes"),
        (other_rows, r"/fields/boxes: kind=boxes is float32 \(4,\), not float32 \(8,\)"),
        (
            odd_kind,
            "/fields/meta: kind='pickle' is none of fixed, array, boxes, keypoints, text, json",
        ),
        (huge_rows, r"/fields/tags: shape=\(4, 99999999999\) is not a shape of an item"),
        (spelled_otherwise, "/fields/tags has attributes that h5feed does not write"),
        (bad_name, "/fields/label cannot be the name of a field"),
        (other_type, r"/fields/price is float32 \(3,\), not float64 \(3,\)"),
        (text_as_json, "its fingerprint does not match"),
        (rows_of_nothing, "/fields/kinds has rows_of='price', no boxes"),
        (other_row_counts, "/fields/kinds has other rows than /fields/boxes"),
        (no_permutation, r"/fields/joints: swap=\(0, 1, 1\) is not a permutation of keypoints"),
        (a_link, "/fields/more is a soft or external link"),
        (not_a_group, "/fields is not a group"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_h5feed_never_writes_is_refused(packed, change, said):
    with h5py.File(packed, "r+") as file:
        change(file)
    with pytest.raises(H5FormatError, match=said):
        read_index(packed)


def test_fields_at_another_address_are_refused(packed):
    """Swapped with another of the same type: every byte is one that was packed."""
    with h5py.File(packed, "r+") as file:
        file["fields"].move("price", "cost")
    with pytest.raises(H5FormatError, match="its fingerprint does not match"):
        read_index(packed)


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        ("fixed", "int8", ()),
        ("text", "float32", ()),
        ("array", "float32", (0,)),
        ("keypoints", "float32", (3,)),
        ("set", "", ()),
    ],
)
def test_types_that_are_none(kind, dtype, shape):
    with pytest.raises(ValueError, match=r"is none of|is bytes|is not a shape|is float32"):
        FieldType(kind=kind, dtype=dtype, shape=shape)
