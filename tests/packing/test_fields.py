"""Columns of a manifest as further fields: their types, their cells, and what is refused."""

import json

import numpy as np
import pytest

from h5feed import H5Dataset, PackError, UsageError, pack
from h5feed.packing.fields import FieldBuilder, parse_field
from h5feed.packing.sources import open_source
from h5feed.store import check_file
from packing.folders import make_folder, sha256

NAMES = [f"cats/{number:03}.jpg" for number in range(4)]


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / "images", per_class=4)


def manifest(root, columns, rows, ending="csv"):
    path = root.parent / f"list.{ending}"
    named = [dict(zip(columns, row, strict=True)) for row in rows]
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in named))
    else:
        cells = [columns, *([f'"{str(c).replace(chr(34), chr(34) * 2)}"' for c in r] for r in rows)]
        path.write_text("".join(",".join(map(str, row)) + "\n" for row in cells))
    return path


def gathered(root, kind, cells, *, ending="csv"):
    """Return field `x` of a manifest with these cells."""
    path = manifest(root, ["path", "x"], list(zip(NAMES, cells, strict=False)), ending)
    fields = [f"x:{kind}" if kind else "x"]
    values = open_source(root, manifest=path, fields=fields).fields["x"]
    return values.type, [values.type.value(values.item(k)) for k in range(len(values))]


@pytest.mark.parametrize(
    ("cells", "kind", "dtype", "values"),
    [
        (["1", "-2"], "fixed", "int64", [1, -2]),
        (["1.5", "2"], "fixed", "float64", [1.5, 2.0]),
        (["a b", ""], "text", "uint8", ["a b", ""]),
    ],
)
def test_the_first_row_says_the_type(root, cells, kind, dtype, values):
    found, got = gathered(root, "", cells)
    assert (found.kind, found.dtype, got) == (kind, dtype, values)


def test_json_lines_say_more(root):
    cells = [{"b": 1, "a": [2]}, None]
    found, got = gathered(root, "", cells, ending="jsonl")
    assert (found.kind, got) == ("json", cells)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("kind", "cells", "values"),
    [
        ("float32", [0.5, 3], [0.5, 3.0]),
        ("uint8", [0, 255], [0, 255]),
        ("int64", [2**62, -1], [2**62, -1]),
        ("float32[2]", [[1, 2], [0.5, -1]], [[1, 2], [0.5, -1]]),
        ("float32[n,2]", [[[1, 2], [3, 4]], []], [[[1, 2], [3, 4]], []]),
        ("int64[n]", [[1, 2, 3], [7]], [[1, 2, 3], [7]]),
        ("text", ["ü", "7"], ["ü", "7"]),
    ],
)
def test_types_that_are_named(root, kind, cells, values, ending):
    _, got = gathered(root, kind, cells, ending=ending)
    assert [value.tolist() if isinstance(value, np.ndarray) else value for value in got] == values


def test_the_type_that_is_advised_takes_the_cell(root):
    with pytest.raises(UsageError, match=r"\['a'\] is not text: .* as in --field x:json$"):
        gathered(root, "text", ["a", ["a"]], ending="jsonl")
    assert list(gathered(root, "json", ["a", ["a"]], ending="jsonl")[1]) == ["a", ["a"]]


def test_numbers_in_words_and_json_in_cells(root):
    assert gathered(root, "float32[3]", ["1 2 3", "4,5,6"])[1][1].tolist() == [4, 5, 6]
    assert np.isnan(gathered(root, "float32", ["1", "nan"])[1][1])
    assert gathered(root, "json", ['{"a":1}', "[1, 2]"])[1] == [{"a": 1}, [1, 2]]


@pytest.mark.parametrize(
    ("kind", "cells", "said"),
    [
        ("", ["1", "x"], "line 3, column 'x': 'x' is not int64: mend it, or give the field"),
        ("uint8", ["1", "256"], r"'256' is not uint8 \(too large for uint8\)"),
        ("int64", ["1", "1.5"], "'1.5' is not int64: mend it"),
        ("float32", ["1", "1e300"], r"\(too large for float32\)"),
        ("float32[2]", ["1 2", "1 2 3"], r"is not float32\[2\] \(its shape is \(3,\)\)"),
        ("float32[n,2]", ["[[1,2]]", "[[1,2],[3]]"], r"is not float32\[n,2\]: mend it"),
        ("float32", ["1", ""], "'' is not float32"),
        ("json", ["1", "{"], "'{' is not json"),
    ],
)
def test_a_cell_of_another_type_is_named(root, kind, cells, said):
    with pytest.raises(UsageError, match=said):
        gathered(root, kind, cells)


def test_values_that_json_lines_may_hold(root):
    for cell in (True, {"a": 1}, "x", None, 1e400):
        with pytest.raises(UsageError, match=r"column 'x': .* is not int64"):
            gathered(root, "int64", [1, cell], ending="jsonl")
    with pytest.raises(UsageError, match="3 is not text"):
        gathered(root, "text", ["a", 3], ending="jsonl")
    deep = "[" * 900 + "]" * 900
    builder = FieldBuilder("x", parse_field("x:float32")[1], texts=True)
    with pytest.raises(UsageError, match="is not float32"):
        builder.add(deep, UsageError)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("size", "field='size': .*list.csv has no such column; its columns are 'path', 'x'"),
        ("x:int8", "field='x:int8': 'int8' is not a type: give float32, float64, int64 or uint8"),
        ("x:float32[0]", "is not a type"),
        ("x:float32[3,n]", "is not a type"),
        ("label:text", "'label' cannot be the name of a field"),
        ("a/b", "'a/b' cannot be the name of a field"),
    ],
)
def test_wrong_fields_are_refused(root, field, said):
    path = manifest(root, ["path", "x"], [(NAMES[0], 1)])
    with pytest.raises(UsageError, match=said):
        open_source(root, manifest=path, fields=[field])


def test_a_field_needs_a_manifest_and_is_given_once(root):
    with pytest.raises(UsageError, match="fields=x is about a manifest's columns: give one"):
        pack(root, root.parent / "a.h5", fields=["x"])
    path = manifest(root, ["path", "x"], [(NAMES[0], 1)])
    with pytest.raises(UsageError, match="field='x' is given twice"):
        open_source(root, manifest=path, fields=["x", "x:text"])


def packed(root, out, **options):
    names = sorted(str(p.relative_to(root)) for p in root.glob("*/*"))
    rows = [(name, name[:4], f"image {k}", k) for k, name in enumerate(names)]
    path = manifest(root, ["path", "class", "caption", "number"], rows)
    fields = ["caption", "number:float32"]
    pack(root, out, size=32, manifest=path, fields=fields, num_workers=0, **options)
    return out


def test_what_is_skipped_takes_its_values_with_it(tmp_path):
    root = make_folder(tmp_path / "images", per_class=4, broken=(1, 6))
    out = packed(root, tmp_path / "a.h5")
    ds = H5Dataset(out, target=("caption", "number", "label"), aspect="stored")
    assert [ds[k][1]["number"] for k in range(6)] == [0, 2, 3, 4, 5, 7]
    assert [ds[k][1]["caption"] for k in range(6)] == [f"image {k}" for k in (0, 2, 3, 4, 5, 7)]
    assert ds.classes == ["cats", "dogs"]
    assert check_file(out).is_sound


def test_an_interrupted_run_goes_on_to_the_same_bytes(root, tmp_path, monkeypatch):
    wanted = sha256(packed(root, tmp_path / "a.h5"))

    def fail(*_, **__):
        raise OSError(5, "Input/output error", "x")

    with monkeypatch.context() as patched:
        patched.setattr("h5feed.packing.output.finalize", fail)
        with pytest.raises(PackError, match="--resume goes on"):
            packed(root, tmp_path / "b.h5")
    assert sha256(packed(root, tmp_path / "b.h5", resume=True)) == wanted
    assert sha256(packed(root, tmp_path / "b.h5", overwrite=True)) == wanted


def test_other_values_are_another_source(root):
    first = gathered(root, "", ["1", "2"]), gathered(root, "", ["1", "3"])
    path = manifest(root, ["path", "x"], list(zip(NAMES, ["1", "2"], strict=False)))
    digests = [open_source(root, manifest=path, fields=["x"]).digest()]
    path = manifest(root, ["path", "x"], list(zip(NAMES, ["1", "3"], strict=False)))
    digests.append(open_source(root, manifest=path, fields=["x"]).digest())
    assert digests[0] != digests[1], first
