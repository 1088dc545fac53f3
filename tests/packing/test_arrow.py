"""Parquet: as a manifest, as a source of images, and as what Hugging Face's datasets are."""

import datetime

import pytest

from h5feed import H5Dataset, pack
from h5feed.errors import UsageError
from h5feed.packing.sources import open_source
from h5feed.store.fields import FieldType
from packing.folders import png_bytes as image
from packing.folders import source_keys as keys

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


# --- images in parquet, and Hugging Face's datasets

SIZE = 16


def cells(first, stop):
    return [{"bytes": image(n), "path": f"{n}.png"} for n in range(first, stop)]


def stored(path):
    ds = H5Dataset(path, aspect="stored")
    return [image.tolist() for image, _ in ds], ds.targets, ds.classes


@pytest.fixture
def expected(tmp_path):
    for n in range(10):
        path = tmp_path / "images" / "ab"[n % 2] / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(n))
    rows = "".join(f"{'ab'[n % 2]}/{n},{'ab'[n % 2]}\n" for n in range(10))
    (tmp_path / "order.csv").write_text("id,class\n" + rows)
    out = tmp_path / "expected.h5"
    pack(tmp_path / "images", out, size=SIZE, manifest=tmp_path / "order.csv", num_workers=0)
    return stored(out)


def test_images_in_parquet_pack_as_those_in_files_do(tmp_path, expected):
    folder = tmp_path / "hub" / "data"  # as repositories on the hub have them
    folder.mkdir(parents=True)
    for k, (first, stop) in enumerate([(0, 7), (7, 10)]):
        columns = {"image": cells(first, stop), "label": ["ab"[n % 2] for n in range(first, stop)]}
        written(folder / f"train-{k:05}-of-00002.parquet", columns, row_group_size=3)
    out = tmp_path / "out.h5"
    summary = pack(tmp_path / "hub", out, size=SIZE, num_workers=2)
    assert summary.bytes_in == sum(len(image(n)) for n in range(10))
    assert stored(out) == expected
    paths = [path for path, _ in H5Dataset(out).samples]
    assert paths[6:8] == ["train-00000-of-00002.parquet/6", "train-00001-of-00002.parquet/0"]
    pack(f"{folder}/train-*.parquet", out, size="auto", num_workers=0, overwrite=True)
    assert stored(out)[1:] == expected[1:]
    source = open_source(folder)
    order = [9, 0, 1, 4, 4, 2, 8]  # forwards, backwards, in other files and groups
    assert [source.read(n, max_pixels=10**6) for n in order] == [image(n) for n in order]


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        (
            {"label": [0]},
            {},
            r"no column of image bytes among 'label'; a table of paths is",
        ),
        ({"a": [b""], "b": [b""]}, {}, "columns 'a', 'b' hold bytes: say which are the images, as"),
        ({"a": [b""], "n": [1]}, {"path_column": "n"}, "path_column='n': .*those of bytes are 'a'"),
        ({"a": [b""], "label": [None]}, {}, "a.parquet, row 1, column 'label': 'None|None is not"),
        ({"a": [b""]}, {"manifest": "m.csv"}, "manifest=m.csv is about a folder, and SRC is .parq"),
    ],
)
def test_a_mistake_about_images_in_parquet_is_named(tmp_path, columns, options, said):
    path = written(tmp_path / "a.parquet", columns)
    with pytest.raises(UsageError, match=said):
        open_source(path, **options)


def test_images_that_are_missing_or_damaged_in_parquet_are_counted_skips(tmp_path):
    (tmp_path / "2.png").write_bytes(image(2))
    images = [
        *cells(0, 2), {"bytes": None, "path": "2.png"}, {"bytes": None, "path": None}, None,
        {"bytes": b"\x89PNG", "path": None}, {"bytes": None, "path": "none.png"},
    ]  # fmt: skip
    kind = {"image": pa.struct([("bytes", pa.binary()), ("path", pa.string())])}
    path = written(tmp_path / "a.parquet", {"image": images}, kind)
    summary = pack(path, tmp_path / "out.h5", size=SIZE, num_workers=0)
    assert summary.items == 3
    assert [key for key, _ in summary.skipped] == [f"a.parquet/{n}" for n in (3, 4, 5, 6)]
    assert summary.skipped_by_reason["no image"] == 2
    written(tmp_path / "b.parquet", {"picture": [b""]})
    with pytest.raises(UsageError, match=r"b.parquet has columns picture, and .*a.parquet has im"):
        open_source([path, tmp_path / "b.parquet"])


def test_a_hugging_face_dataset_packs_as_it_is(tmp_path, expected):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "kind": datasets.ClassLabel(names=["a", "b"]),
            "caption": datasets.Value("string"),
            "point": datasets.Sequence(datasets.Value("float32"), length=2),
        }
    )
    rows = {
        "img": cells(0, 10),
        "kind": [n % 2 for n in range(10)],
        "caption": [f"number {n}" for n in range(10)],
        "point": [[n, 1] for n in range(10)],
    }
    dataset = datasets.Dataset.from_dict(rows, features=features)
    out = tmp_path / "out.h5"
    pack(dataset, out, size=SIZE, num_workers=2, fields=["caption", "point"])
    assert stored(out) == expected
    ds = H5Dataset(out)
    assert (ds.fields["caption"][3], ds.fields["point"][3].tolist()) == ("number 3", [3, 1])
    some = dataset.select([5, 2]).with_transform(lambda rows: 1 / 0)
    pack(some, out, size=SIZE, num_workers=0, overwrite=True, store="yuv420", resume=True)
    assert stored(out)[1:] == ([1, 0], ["a", "b"])
    for source, said in (
        (
            datasets.DatasetDict(train=dataset),
            r"DatasetDict of train: give one .*source\['train",
        ),
        (dataset.to_iterable_dataset(), "IterableDataset, which has no length: load it without"),
        (
            dataset.remove_columns("img"),
            "Dataset: no column of image bytes among 'kind'",
        ),
    ):
        with pytest.raises(UsageError, match=said):
            pack(source, out, overwrite=True)


def test_metadata_beside_images_is_their_manifest(tmp_path):
    (tmp_path / "1.png").write_bytes(image(1))
    (tmp_path / "2.png").write_bytes(image(2))
    assert open_source(tmp_path).labels.tolist() == [-1, -1]
    (tmp_path / "metadata.csv").write_text("name,label\nx,1\n")  # not Hugging Face's
    assert open_source(tmp_path).labels.tolist() == [-1, -1]
    (tmp_path / "metadata.csv").write_text("file_name,label\n2.png,cat\n1.png,dog\n")
    source = open_source(tmp_path)
    assert (keys(source), source.classes) == (["2.png", "1.png"], ("cat", "dog"))
    assert source.notes == (
        "read as the manifest: metadata.csv in SRC, which has a column file_name",
    )
    line = '{"file_name": "1.png", "text": "a dog"}\n'
    (tmp_path / "metadata.csv").unlink()
    (tmp_path / "metadata.jsonl").write_text(line)
    with pytest.raises(UsageError, match=r"columns 'text' are neither .* as --field text,"):
        open_source(tmp_path)
    source = open_source(tmp_path, fields=["text"])
    assert source.fields["text"].data.tobytes() == b"a dog"
    assert source.notes[1:] == ("left out, in SRC and not in its manifest: 1 image",)
    (tmp_path / "metadata.csv").write_text("file_name,label\n2.png,cat\n1.png,dog\n")
    said = r"holds metadata.jsonl and metadata.csv, .*: keep one, or say which, as --manifest"
    with pytest.raises(UsageError, match=said):
        open_source(tmp_path, fields=["text"])
