"""Parquet: as a manifest, as a source of images, and as what Hugging Face's datasets are."""

import datetime
import os

import pytest

from h5feed.errors import UsageError
from h5feed.packing.sources import open_source
from h5feed.store.fields import FieldType

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def root(tmp_path):
    for name in ("1.jpg", "2.jpg", "3.png"):
        (tmp_path / "src").mkdir(exist_ok=True)
        (tmp_path / "src" / name).write_bytes(b"x")
    return tmp_path / "src"


def written(path, columns, types=None, **options):
    fields = None if types is None else pa.schema(list(types.items()))
    parquet.write_table(pa.table(columns, schema=fields), path, **options)
    return path


def opened(root, columns, types=None, **options):
    path = written(root.parent / "list.parquet", {"id": ["1", "2", "3"], **columns}, types)
    return open_source(root, manifest=path, **options)


def keys(source):
    return [os.fsdecode(source.key(index)) for index in range(len(source))]


# --- a manifest


def test_a_parquet_manifest_says_what_a_csv_says(root):
    source = opened(root, {"label": ["dog", "cat", "dog"], "n": [1, 2, 3]})
    assert keys(source) == ["1.jpg", "2.jpg", "3.png"]  # Kaggle's ids, without extension
    assert (source.classes, source.labels.tolist()) == (("cat", "dog"), [1, 0, 1])
    assert source.notes == ("left out of the manifest: 1 column ('n')",)
    several = opened(root, {"label": [["b", "a"], [], ["b"]]})
    assert (several.classes, several.labels.tolist()) == (("a", "b"), [[1, 1], [0, 0], [0, 1]])
    hot = opened(root, {"x": [True, False, True], "y": [0, 1, 1]}, class_columns=["?"])
    assert (hot.classes, hot.labels.tolist()) == (("x", "y"), [[1, 0], [0, 1], [1, 1]])


def test_types_are_carried_over(root):
    day = datetime.datetime(2026, 1, 2, 3, 4)
    columns = {
        "label": (pa.int32(), [1, 0, 1], None),
        "byte": (pa.uint8(), [1, 2, 255], FieldType(kind="fixed", dtype="uint8")),
        "yes": (pa.bool_(), [True, False, True], FieldType(kind="fixed", dtype="uint8")),
        "whole": (pa.int16(), [-1, 2, 3], FieldType(kind="fixed", dtype="int64")),
        "half": (pa.float32(), [0.5, 1, 2], FieldType(kind="fixed", dtype="float32")),
        "real": (pa.float64(), [1, 2, 3], FieldType(kind="fixed", dtype="float64")),
        "text": (pa.string(), ["1", "b", ""], FieldType(kind="text")),
        "when": (pa.timestamp("s"), [day] * 3, FieldType(kind="text")),
        "three": (
            pa.list_(pa.float32(), 3),
            [[1, 2, 3]] * 3,
            FieldType(kind="fixed", dtype="float32", shape=(3,)),
        ),
        "any": (pa.list_(pa.int64()), [[1], [], [2, 3]], FieldType(kind="array", dtype="int64")),
        "boxes": (
            pa.list_(pa.list_(pa.float64(), 4)),
            [[[0, 1, 2, 3]], [], []],
            FieldType(kind="array", dtype="float64", shape=(4,)),
        ),
        "what": (pa.struct([("a", pa.int64())]), [{"a": 1}, None, {}], FieldType(kind="json")),
    }
    types = {"id": pa.string(), **{name: kind for name, (kind, _, _) in columns.items()}}
    kept = [name for name, (_, _, kind) in columns.items() if kind is not None]
    values = {name: values for name, (_, values, _) in columns.items()}
    source = opened(root, values, types, fields=kept)
    assert {name: source.fields[name].type for name in kept} == {
        name: columns[name][2] for name in kept
    }
    assert source.labels.tolist() == [1, 0, 1]
    read = {n: v.type.value(v.item(0)) for n, v in source.fields.items()}
    assert (read["text"], read["when"], read["what"]) == ("1", "2026-01-02 03:04:00.000", {"a": 1})
    assert read["boxes"].tolist() == [[0, 1, 2, 3]]
    other = opened(root, values, types, fields=["whole:float32", "text"])
    assert other.fields["whole"].type == FieldType(kind="fixed", dtype="float32")


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ({"label": ["a", None, "b"]}, {}, "list.parquet, row 2, column 'label': missing"),
        ({"label": [0.5, 1, 2]}, {}, "row 1, column 'label': 0.5 is not a whole number"),
        ({"label": [0, 1, 2]}, {"label_column": "x"}, "label_column='x': .*has no such column"),
        (
            {"label": [0, 1, 2], "x": ["1", "b", "c"]},
            {"fields": ["x:int64"]},
            "row 2, column 'x': 'b' is not int64",
        ),
        ({"label": [0, 1, 2], "x": [1, None, 2]}, {"fields": ["x"]}, "row 2, column 'x': missing"),
        (
            {"label": [0, 1, 2], "x": [b"1", b"", b""]},
            {"fields": ["x"]},
            "field='x': .*no such",
        ),
    ],
)
def test_a_mistake_in_a_parquet_manifest_is_named(root, columns, options, said):
    with pytest.raises(UsageError, match=said):
        opened(root, columns, **options)


def test_what_is_no_parquet_is_one_sentence(root):
    path = root.parent / "x.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UsageError, match=r"x.parquet is not a parquet file, or damaged \("):
        open_source(root, manifest=path)


def test_class_names_that_hugging_face_noted_are_kept(root):
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["cat", "dog", "owl"])
    features = datasets.Features(
        {"file_name": datasets.Value("string"), "kind": names, "all": [names]}
    )
    rows = {"file_name": ["1.jpg", "2.jpg"], "kind": [1, -1], "all": [[0, 2], []]}
    path = root.parent / "list.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    source = open_source(root, manifest=path, label_column="kind")
    assert (source.classes, source.labels.tolist()) == (("cat", "dog", "owl"), [1, -1])
    source = open_source(root, manifest=path, label_column="all")
    assert (source.classes, source.labels.tolist()) == (
        ("cat", "dog", "owl"), [[1, 0, 1], [0, 0, 0]],
    )  # fmt: skip
    table = parquet.read_table(path).set_column(1, "kind", [[1, 3]])
    parquet.write_table(table, path)
    with pytest.raises(UsageError, match="row 2, column 'kind': 3 is none of the 3 classes"):
        open_source(root, manifest=path, label_column="kind")
