"""Images appended to a set: shards and classes go on, and what clashes is refused by name."""

import json

import numpy as np
import pytest

from h5feed.errors import UsageError
from h5feed.packing import pack
from h5feed.packing.merge import merge_set
from h5feed.store import open_index
from packing.folders import (
    bytes_of,
    labelled,
    make_birds,
    make_image,
    make_masks,
    names,
    pack_set,
    packed_labels,
)

SIZE = 32


@pytest.fixture
def out(folder, tmp_path):
    """A set of two shards."""
    pack_set(folder, tmp_path / "set", shards=2)
    return tmp_path / "set"


@pytest.fixture
def birds(tmp_path):
    return make_birds(tmp_path / "more")


def append(source, out, **options):
    given = {"append": True, "num_workers": 0, "shards": 3}
    return pack(source, out, **(given | options))


def test_shards_are_added_and_classes_go_on(folder, birds, out, tmp_path, capfd):
    before, reader = bytes_of(out), open_index(out)
    was = labelled(out)
    summary = append(birds, out, progress=True)
    assert (summary.items, summary.shards, summary.classes) == (6, 3, 3)
    assert "1 new class: birds" in capfd.readouterr().err
    after = bytes_of(out)
    assert after.pop("index.h5") != before.pop("index.h5")
    assert before.items() <= after.items()
    assert sorted(after.keys() - before.keys()) == [
        f"shard-g001-0000{k}-of-00003.h5" for k in range(3)
    ]
    assert open_index(out).classes == ("cats", "dogs", "birds")
    assert open_index(out).generation == 1
    pack(birds, tmp_path / "x.h5", size=SIZE, num_workers=0)
    assert labelled(out) == was + packed_labels(tmp_path / "x.h5")
    assert len(reader) == 24  # who has the old index open goes on with it
    reader.check_rows(0)
    assert merge_set(out).generations == 2
    make_image(tmp_path / "third" / "ants" / "0.jpg", 20, 20, 7)
    append(tmp_path / "third", out, shards=None)
    index = open_index(out)
    assert (index.classes, len(index), index.generation) == (
        ("cats", "dogs", "birds", "ants"), 31, 2,
    )  # fmt: skip
    assert names(out)[-1] == "shard-g002-00000-of-00001.h5"


def test_parts_append_anywhere_and_twice(birds, out, tmp_path):
    append(birds, out, part="1/2")
    assert open_index(out).generation == 0
    with pytest.raises(UsageError, match="holds shards of an append that was not finished: --"):
        append(birds, out)
    append(birds, out, part="2/2")
    expected = bytes_of(out)
    assert open_index(out).generation == 1
    append(birds, out, part="1/2")  # late, or again
    assert bytes_of(out) == expected


def test_what_is_in_the_set_is_not_packed_twice(folder, birds, out):
    with pytest.raises(UsageError, match=r"set holds 24 of these images already, such as 'cats/0"):
        append(folder, out)
    append(birds, out)
    with pytest.raises(UsageError, match="set holds these very images already: nothing to append"):
        append(birds, out)
    make_image(birds / "dogs" / "new.jpg", 20, 20, 3)
    with pytest.raises(UsageError, match=r"set holds 6 of these images already, such as 'birds/b0"):
        append(birds, out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 16}, "size=16, and the set has 32x32: append the same"),
        ({"size": "16x32"}, "size=16x32, and the set has 32x32: append the same"),
        ({"store": "jpeg"}, "store=jpeg, and the set has raw: append the same"),
        ({"fit": "crop"}, "fit=crop, and the set has stretch: append the same"),
        ({"overwrite": True}, "overwrite with append: what is there is kept; give one of them"),
    ],
)
def test_what_differs_from_the_set_is_named(birds, out, options, said):
    before = bytes_of(out)
    with pytest.raises(UsageError, match=said):
        append(birds, out, **options)
    assert bytes_of(out) == before


def test_other_labels_fields_and_masks_are_named(folder, birds, out, tmp_path):
    flat = make_birds(tmp_path / "flat") / "dogs"
    assert append(flat, out).items == 3  # of no class
    masks = make_masks(birds, tmp_path / "masks")
    with pytest.raises(UsageError, match=r"masks=.*masks, and the set has none: append the same"):
        append(birds, out, masks=masks)
    table = tmp_path / "t.csv"

    def manifest(*lines):
        table.write_text("\n".join(lines))
        return table

    one = "birds/b0.jpg"
    rows = manifest("path,class,note", f"{one},cats,x")
    with pytest.raises(UsageError, match="field='note' is not one of the set's, or of another"):
        append(birds, out, manifest=rows, fields=["note"])
    rows = manifest("path,target", f"{one},0.5")
    with pytest.raises(UsageError, match="targets=target, and the set has none: append the same"):
        append(birds, out, manifest=rows)
    rows = manifest("path,label", f"{one},cats dogs")
    with pytest.raises(UsageError, match="these images have one class each and the set's several"):
        append(birds, out, manifest=rows, label_delimiter=" ")


def test_several_classes_an_image(folder, birds, tmp_path):
    def table(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    old = table("a.jsonl", [
        {"path": "cats/000.jpg", "label": ["red", "wild"]},
        {"path": "cats/001.jpg", "label": ["tame"]},
    ])  # fmt: skip
    out = tmp_path / "multi"
    pack_set(folder, out, shards=2, manifest=old, order="source")
    append(birds, out, shards=1, manifest=table("b.jsonl", [
        {"path": "dogs/b4.jpg", "label": ["wild", "tame"]},
    ]))  # fmt: skip
    index = open_index(out)
    assert index.classes == ("red", "tame", "wild")
    assert np.array_equal(index.columns["labels"], [[1, 0, 1], [0, 1, 0], [0, 1, 1]])
    blue = table("c.jsonl", [{"path": "dogs/b5.jpg", "label": ["blue", "wild"]}])
    with pytest.raises(
        UsageError, match=r"have new classes \(blue\), and the set has a column for"
    ):
        append(birds, out, shards=1, manifest=blue)


def test_a_folder_that_is_no_whole_set(folder, birds, out, tmp_path):
    (out / "index.h5").unlink()
    for place in (out, tmp_path / "nowhere"):
        with pytest.raises(
            UsageError, match=r"is not a whole set that could be appended to: it has"
        ):
            append(birds, place)
    file = tmp_path / "x.h5"
    file.touch()
    with pytest.raises(UsageError, match=r"x\.h5 is a file, and append adds shards to a set: make"):
        append(birds, file)
