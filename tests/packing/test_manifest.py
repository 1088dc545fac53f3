import json
import os

import numpy as np
import pytest

from h5feed.errors import PackError, UsageError
from h5feed.packing.sources import open_source
from packing.folders import source_keys as keys


@pytest.fixture
def root(tmp_path):
    for name in ("a/1.jpg", "a/2.jpg", "b/3.jpg", "ü ,x.png"):
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return tmp_path / "src"


def written(root, name, text):
    path = root.parent / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def opened(root, text, name="list.csv", **options):
    return open_source(root, manifest=written(root, name, text), **options)


def refusal(root, text, name="list.csv", kind=UsageError):
    with pytest.raises(kind) as caught:
        opened(root, text, name)
    return str(caught.value).replace(str(root.parent), "…")


def test_class_names_are_numbered_in_sorted_order(root):
    source = opened(root, "path,class\nb/3.jpg,dog\na/1.jpg,cat\na/2.jpg,dog\n")
    assert keys(source) == ["b/3.jpg", "a/1.jpg", "a/2.jpg"]
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [1, 0, 1]
    assert source.labels.dtype == np.int64
    assert source.path(1) == os.fsencode(root / "a/1.jpg")


@pytest.mark.parametrize("column", ["path", "file", "filename", "file_name", "image", "Path"])
def test_labels_are_class_numbers(root, column):
    source = opened(root, f"id,{column},label\n7,a/1.jpg,2\n8,a/2.jpg,-1\n\n9,b/3.jpg,0\n")
    assert source.labels.tolist() == [2, -1, 0]
    assert source.classes == ("0", "1", "2")


def test_labels_and_class_names_go_together(root):
    source = opened(root, "path,label,class\na/1.jpg,1,dog\na/2.jpg,0,cat\nb/3.jpg,1,dog\n")
    assert source.classes == ("cat", "dog")
    text = refusal(root, "path,label,class\na/1.jpg,1,dog\na/2.jpg,1,cat\n")
    assert text == "…/list.csv, line 3, column 'class': class 1 is 'dog' above and 'cat' here"


def test_a_label_column_may_hold_class_names(root):
    source = opened(root, "path,label\nb/3.jpg,dog\na/1.jpg,cat\na/2.jpg,dog\n")
    assert (source.classes, source.labels.tolist()) == (("cat", "dog"), [1, 0, 1])
    lines = '{"file_name": "a/1.jpg", "label": "dog"}\n{"file_name": "a/2.jpg", "label": "cat"}\n'
    source = opened(root, lines, "metadata.jsonl")  # as Hugging Face's ImageFolder has it
    assert (source.classes, source.labels.tolist()) == (("cat", "dog"), [1, 0])


def test_columns_are_named_and_ids_need_no_extension(root):
    for name in ("000bec.jpg", "17.PNG"):
        (root / name).write_bytes(b"x")
    text = "id,breed\n000bec,boston_bull\n17,beagle\na/1,beagle\n"  # as Kaggle's tables are
    columns = {"path_column": "id", "label_column": "breed"}
    source = opened(root, text, **columns)
    assert keys(source) == ["000bec.jpg", "17.PNG", "a/1.jpg"]
    assert (source.classes, source.labels.tolist()) == (("beagle", "boston_bull"), [1, 0, 0])
    assert source.notes == ()
    assert opened(root, '{"id": 17, "breed": 2}\n', "l.jsonl", **columns).labels.tolist() == [2]
    both = opened(root, "file,path,class\na/1.jpg,17,2\n", path_column="path", label_column="class")
    assert (keys(both), both.labels.tolist(), both.classes) == (["17.PNG"], [2], ("0", "1", "2"))
    for option in ("path_column", "label_column"):
        with pytest.raises(UsageError) as caught:
            opened(root, "path,label\na/1.jpg,0\n", **{option: "Breed"})
        assert str(caught.value) == (
            f"{option}='Breed': {root.parent}/list.csv has no such column; its columns are 'path', "
            "'label'"
        )


def test_natural_order_numbers_classes_as_timm_does(root):
    names = ["class10", "Class2", "class1", "class10b", "10", "9"]
    for name in names:
        (root / name).mkdir()
        (root / name / "x.jpg").write_bytes(b"x")
    natural = ("9", "10", "a", "b", "class1", "Class2", "class10", "class10b")
    source = open_source(root, class_order="natural")
    assert source.classes == natural
    assert keys(source)[:3] == ["9/x.jpg", "10/x.jpg", "a/1.jpg"]
    assert source.labels.tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 7]
    assert open_source(root).classes == tuple(sorted(natural))
    text = "path,class\na/1.jpg,class10\na/2.jpg,class2\n"
    assert opened(root, text, class_order="natural").classes == ("class2", "class10")
    for text, what in (
        ("path,label\na/1.jpg,3\n", "the class numbers of column 'label'"),
        ("path,target\na/1.jpg,3\n", "a table without classes"),
    ):
        with pytest.raises(UsageError, match=f"class_order=natural numbers class names, .* {what}"):
            opened(root, text, class_order="natural")
    with pytest.raises(
        UsageError, match=r"class_order=natural numbers class folders, and SRC .*10"
    ):
        open_source(root / "10", class_order="natural")


def test_targets_are_columns_called_so(root):
    source = opened(root, "target_x,path,Target\n0.5,a/1.jpg,-2\n1e3,a/2.jpg,-0\n")
    np.testing.assert_array_equal(source.labels, np.float32([[0.5, -2], [1000, 0]]))
    assert source.labels.dtype == np.float32
    assert source.classes == ()
    assert source.targets == ("target_x", "Target")
    assert source.notes == ()


def test_targets_are_the_columns_that_are_named_in_their_order(root):
    text = "id,path,y,age,label\n1,a/1.jpg,0.5,7,0\n2,a/2.jpg,1,8,1\n"
    source = opened(root, text, targets=["age", "y"])
    np.testing.assert_array_equal(source.labels, np.float32([[7, 0.5], [8, 1]]))
    assert source.targets == ("age", "y")
    assert source.notes == ("left out of the manifest: 2 columns ('id', 'label')",)
    with pytest.raises(UsageError) as caught:
        opened(root, text, targets=["y", "size", "path"])
    assert str(caught.value).replace(str(root.parent), "…") == (
        "targets=size path: …/list.csv has no such column of numbers; its columns are 'id', "
        "'path', 'y', 'age', 'label'"
    )


@pytest.mark.parametrize("column", ["", "Unnamed: 0", "id", "ID", "image_id", "index", "idx"])
def test_a_column_that_counts_rows_is_never_a_target(root, column):
    source = opened(root, f"{column},path\n0,a/1.jpg\n1,a/2.jpg\n")
    assert source.labels.tolist() == [-1, -1]
    assert source.targets == ()
    assert source.notes == (f"left out of the manifest: 1 column ({column!r})",)
    assert opened(root, f"{column},path,target\n0,a/1.jpg,5\n").labels.tolist() == [[5]]
    assert opened(root, f"{column},path\n9,a/1.jpg\n", targets=[column]).labels.tolist() == [[9]]


HOT = [[0, 1, 1], [1, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        (
            "l.csv",
            "path,class\na/1.jpg,cat dog\na/2.jpg,bird\nb/3.jpg,\n",
            {"label_delimiter": " "},
        ),
        (
            "l.csv",
            "path,tags\na/1.jpg,dog; cat;\na/2.jpg,bird\nb/3.jpg,\n",
            {"label_delimiter": ";", "label_column": "tags"},
        ),
        (
            "l.jsonl",
            '{"path": "a/1.jpg", "label": ["dog", "cat", "dog"]}\n'
            '{"path": "a/2.jpg", "label": ["bird"]}\n{"path": "b/3.jpg", "label": []}\n',
            {},
        ),
        (
            "l.csv",
            "path,bird,cat,dog,n\na/1.jpg,0,1,1,5\na/2.jpg,1.0,0,0,6\nb/3.jpg,0,0,0,7\n",
            {"class_columns": ["bird", "[cd]*"]},
        ),
    ],
)
def test_several_classes_are_stored_multi_hot(root, name, text, options):
    source = opened(root, text, name, **options)
    assert source.classes == ("bird", "cat", "dog")
    assert (source.labels.dtype, source.labels.tolist()) == (np.float32, HOT)
    assert source.targets == ()
    left = ("left out of the manifest: 1 column ('n')",) if ",n\n" in text else ()
    assert source.notes == left


def test_several_class_numbers_and_their_order(root):
    source = opened(root, "path,label\na/1.jpg,2 0\na/2.jpg,\n", label_delimiter=" ")
    assert (source.classes, source.labels.tolist()) == (("0", "1", "2"), [[1, 0, 1], [0, 0, 0]])
    text = "path,class\na/1.jpg,c10 c2\na/2.jpg,c2\n"
    source = opened(root, text, label_delimiter=" ", class_order="natural")
    assert (source.classes, source.labels.tolist()) == (("c2", "c10"), [[1, 1], [1, 0]])


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "a/1.jpg,1 cat\n",
            {"label_delimiter": " "},
            "line 2, column 'label': 'cat' is not a",
        ),
        ("a/1.jpg,cat 1\n", {"label_delimiter": " "}, "line 2, column 'label': '1' is a number am"),
        ("a/1.jpg,-1\n", {"label_delimiter": " "}, "-1 is not a class number (0 to 999999)"),
        ("a/1.jpg,\n", {"label_delimiter": " "}, "list.csv: no row has a class in column 'label'"),
        ("a/1.jpg,2\n", {"class_columns": ["label"]}, "column 'label': '2' is neither 0 nor 1"),
        ("a/1.jpg,\n", {"class_columns": ["label"]}, "column 'label': '' is neither 0 nor 1"),
        (
            "a/1.jpg,2\n",
            {"class_columns": ["has_*"]},
            "class_columns=has_*: …/list.csv has no such column of 0 and 1; its other columns are "
            "'label'",
        ),
        (
            "a/1.jpg,1\n",
            {"class_columns": ["label"], "class_order": "natural"},
            "class_order=natural numbers class names, and does nothing to class columns, which ",
        ),
    ],
)
def test_a_mistake_among_several_classes_is_named(root, text, options, said):
    with pytest.raises(UsageError) as caught:
        opened(root, "path,label\n" + text, **options)
    assert said in str(caught.value).replace(str(root.parent), "…")


def test_a_list_beside_single_labels_is_named(root):
    lines = '{"path": "a/1.jpg", "label": ["cat"]}\n{"path": "a/2.jpg", "label": "cat"}\n'
    assert refusal(root, lines, "l.jsonl") == (
        "…/l.jsonl, line 2, column 'label': 'cat' is not a list, as in the first row"
    )


def test_what_stands_beside_labels_is_left_out_and_said(root):
    source = opened(root, "path,age,class\na/1.jpg,3,dog\n")
    assert (source.classes, source.labels.tolist()) == (("dog",), [0])
    assert source.notes == ("left out of the manifest: 1 column ('age')",)


def test_a_jsonl_line_s_label_is_not_lost_because_the_first_has_none(root):
    lines = '{"path": "a/1.jpg", "target": 1}\n{"path": "a/2.jpg", "target": 1, "label": 2}\n'
    assert refusal(root, lines, "l.jsonl") == (
        "…/l.jsonl, line 2, column 'label': the first line has none: give all lines the same"
    )
    lines = '{"path": "a/1.jpg", "target": 1}\n{"path": "a/2.jpg", "target": 1, "note": 2}\n'
    assert opened(root, lines, "l.jsonl").labels.tolist() == [[1], [1]]


def test_paths_alone_have_no_labels(root):
    assert opened(root, "path\na/1.jpg\n").labels.tolist() == [-1]


def test_tsv_and_jsonl_say_the_same_as_csv(root):
    rows = [("ü ,x.png", 0.25), ("a/1.jpg", 1.0)]
    csv = opened(root, 'path,target\n"ü ,x.png",0.25\na/1.jpg,1\n')
    tsv = opened(root, "path\ttarget\nü ,x.png\t0.25\na/1.jpg\t1\n", "list.TSV")
    lines = "\n\n".join(json.dumps({"path": path, "target": y}) for path, y in rows)
    jsonl = opened(root, lines, "list.jsonl")
    for source in (csv, tsv, jsonl):
        assert keys(source) == [path for path, _ in rows]
        np.testing.assert_array_equal(source.labels, [[0.25], [1.0]])


@pytest.mark.parametrize("column", ["id", "Id", "image_id", "img", "file_id"])
def test_ids_are_paths_where_they_name_files(root, column):
    source = opened(root, f"{column},label\na/1,cat\nb/3,dog\n")
    assert (keys(source), source.classes) == (["a/1.jpg", "b/3.jpg"], ("cat", "dog"))
    assert refusal(root, f"{column},label\n1,0\n").startswith("…/list.csv: no column of paths")


def test_images_that_are_listed_twice_are_items_twice_and_said(root):
    source = opened(root, "path,label\na/1.jpg,0\na/2.jpg,1\na/1.jpg,1\n./a/1.jpg,0\n")
    assert keys(source) == ["a/1.jpg", "a/2.jpg", "a/1.jpg", "a/1.jpg"]
    assert source.notes == ("listed more than once: 1 image",)


def test_a_byte_order_mark_and_windows_lines_do_not_matter(root):
    assert keys(opened(root, b"\xef\xbb\xbfpath,label\r\na/1.jpg,0\r\n")) == ["a/1.jpg"]


def test_names_that_are_no_utf8_keep_their_bytes(root):
    with open(os.path.join(os.fsencode(root), b"caf\xe9.jpg"), "wb"):
        pass
    assert opened(root, b"path\ncaf\xe9.jpg\n").key(0) == b"caf\xe9.jpg"


@pytest.mark.parametrize("path", ["./a/1.jpg", "a//1.jpg", "b/../a/1.jpg", "{root}/a/1.jpg"])
def test_a_key_is_relative_and_plain_however_the_path_is_written(root, path):
    assert keys(opened(root, f"path\n{path.format(root=root)}\n")) == ["a/1.jpg"]


@pytest.mark.parametrize(
    "path", ["../elsewhere.jpg", "a/../../elsewhere.jpg", "{root}/../elsewhere.jpg", ".."]
)
def test_a_path_that_leaves_the_source_is_refused(root, path):
    (root.parent / "elsewhere.jpg").write_bytes(b"x")
    path = path.format(root=root)
    said = repr(path).replace(str(root.parent), "…")
    assert refusal(root, f"path\n{path}\n") == (
        f"…/list.csv, line 2, column 'path': {said} lies outside SRC '…/src': "
        "give a SRC that holds all images"
    )


def test_a_source_reached_through_a_link_holds_its_images(root):
    link = root.parent / "link"
    link.symlink_to(root)
    (root / "out.jpg").symlink_to(root.parent / "elsewhere.jpg")
    (root.parent / "elsewhere.jpg").write_bytes(b"x")
    text = f"path\n{root}/a/1.jpg\n{link}/b/3.jpg\n./out.jpg\n"
    assert keys(opened(link, text)) == ["a/1.jpg", "b/3.jpg", "out.jpg"]


def test_two_classes_of_one_name_are_refused(root):
    text = refusal(root, "path,label,class\na/1.jpg,0,cat\na/2.jpg,1,cat\n")
    assert text == ("…/list.csv: classes 0 and 1 are both named 'cat': give each a name of its own")
    text = refusal(root, "path,label,class\na/1.jpg,1,dog\na/2.jpg,2,0\n")
    assert text == (
        "…/list.csv: classes 0 and 2 are both named '0' (no row names class 0: its number does): "
        "give each a name of its own"
    )
    gap = opened(root, "path,label,class\na/1.jpg,1,dog\na/2.jpg,2,cat\n")
    assert gap.classes == ("0", "dog", "cat")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "…/list.csv lists no images"),
        ("path,label\n", "…/list.csv lists no images"),
        (
            "name,label\nx,0\n",
            "…/list.csv: no column of paths among name, label: say which it is, as --path-column "
            "name, or name it path, file, filename, file_name, filepath or image",
        ),
        (
            "path,file\na/1.jpg,a/1.jpg\n",
            "…/list.csv: columns path, file mean the same: keep one",
        ),
        ("path,label\na/1.jpg\n", "…/list.csv, line 2: 1 cell under a header of 2"),
        (
            "Path;Label\na/1.jpg;0\n",
            "…/list.csv: the header 'Path;Label' is one column: in a .csv file the delimiter is "
            "',', not ';'",
        ),
        (
            "path,label\na/1.jpg,0.5\n",
            "…/list.csv, line 2, column 'label': '0.5' is not a whole number; "
            "call a column to predict 'target'",
        ),
        *(
            (
                f"path,target,target_y\na/1.jpg,1,2\na/2.jpg,0,{cell}\n",
                f"…/list.csv, line 3, column 'target_y': '{cell}' is not a target to learn: "
                "give a finite number of 32 bits",
            )
            for cell in ("nan", "inf", "-Infinity", "1e39")
        ),
        (
            "path,label\na/1.jpg,0\na/2.jpg,cat\n",
            "…/list.csv, line 3, column 'label': 'cat' is not a whole number; "
            "class names belong in a column 'class', or in all rows of this",
        ),
        (
            "path,label\na/1.jpg,cat\na/2.jpg,1\n",
            "…/list.csv, line 3, column 'label': '1' is a number among class names: call the "
            "column 'class' if it is a name",
        ),
        (
            "path,label\na/1.jpg,-2\n",
            "…/list.csv, line 2, column 'label': -2 is not a class number (−1, or 0 to 999999); "
            "call a column to predict 'target'",
        ),
        ("path,class\na/1.jpg,\n", "…/list.csv, line 2, column 'class': '' is not a class name"),
        ("path,x,x\na/1.jpg,1,2\n", "…/list.csv: two columns have one name in path, x, x"),
        (
            "path,target\na/1.jpg,1\na/2.jpg,tall\n",
            "…/list.csv, line 3, column 'target': 'tall' is not a number to predict",
        ),
        (
            "id,path,age,y\n0,a/1.jpg,1,2\n",
            "…/list.csv: columns 'age', 'y' are neither label, class nor target: say which are "
            "numbers to predict, as --targets y, which are labels, as --label-column y, or which "
            "to keep as fields, as --field y, or leave them out",
        ),
        (
            "path\na/9.jpg\n",
            "…/list.csv, line 2, column 'path': there is no file 'a/9.jpg' in '…/src'",
        ),
        ("path\na\n", "…/list.csv, line 2, column 'path': there is no file 'a' in '…/src'"),
        ('path\n""\n', "…/list.csv, line 2, column 'path': '' is not a path"),
    ],
)
def test_a_mistake_is_named_by_line_and_column(root, text, error):
    assert refusal(root, text) == error


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[1]\n", "…/l.jsonl, line 1: not a JSON object"),
        (
            '{"path": "a/1.jpg", "label": 1.5}',
            "…/l.jsonl, line 1, column 'label': 1.5 is not a whole number; "
            "call a column to predict 'target'",
        ),
        (
            '{"path": "a/1.jpg", "label": 1}\n{"path": "a/2.jpg"}',
            "…/l.jsonl, line 2, column 'label': missing",
        ),
        (
            '{"path": "a/1.jpg", "targets": [0.5, 1]}',
            "…/l.jsonl, line 1, column 'targets': [0.5, 1] is a list: give one column per target",
        ),
        (
            '{"path": "a/1.jpg", "target_y": NaN}',
            "…/l.jsonl, line 1, column 'target_y': nan is not a target to learn: "
            "give a finite number of 32 bits",
        ),
        (
            '{"path": "../a\\u0000"}',
            "…/l.jsonl, line 1, column 'path': '../a\\x00' lies outside SRC '…/src': "
            "give a SRC that holds all images",
        ),
        ('{"path": 5.5}', "…/l.jsonl, line 1, column 'path': 5.5 is not a path"),
        ("[" * 1_000_000, "…/l.jsonl, line 1: nested too deep"),
        (
            '{"path": "a/1.jpg", "target": ' + "[" * 500 + "]" * 500 + "}",
            "…/l.jsonl, line 1, column 'target': [[[[[[[...]]]]]]] is a list: "
            "give one column per target",
        ),
        (
            '{"path": "a\\u0000"}',
            "…/l.jsonl, line 1, column 'path': there is no file 'a\\x00' in '…/src'",
        ),
        (
            '{"path": "\\ud900"}',
            "…/l.jsonl, line 1, column 'path': there is no file '\\ud900' in '…/src'",
        ),
        (
            '{"path": "a/1.jpg", "class": 3}',
            "…/l.jsonl, line 1, column 'class': 3 is not a class name",
        ),
        (
            '{"path": "a/1.jpg", "class": "a\\u0000"}',
            "…/l.jsonl, line 1, column 'class': 'a\\x00' holds a NUL, which HDF5 cannot keep",
        ),
        (
            '{"path": "a/1.jpg", "class": "\\ud800"}',
            "…/l.jsonl, line 1, column 'class': '\\ud800' is not Unicode text",
        ),
    ],
)
def test_a_mistake_in_jsonl_is_named_by_line_and_key(root, text, error):
    assert refusal(root, text, "l.jsonl") == error


def test_what_is_no_json_is_named_by_line(root):
    assert refusal(root, '{"path": "a/1.jpg"}\noops', "l.jsonl").startswith(
        "…/l.jsonl, line 2: not JSON (Expecting value"
    )


def test_what_is_no_manifest_is_one_sentence(root):
    text = refusal(root, "x", "list.txt")
    assert text == "manifest '…/list.txt' is not a .csv, .tsv, .jsonl or .parquet file"
    with pytest.raises(UsageError, match=r"manifest '.*gone.csv' does not exist"):
        open_source(root, manifest=root / "gone.csv")
    os.mkfifo(root.parent / "pipe.csv")
    with pytest.raises(UsageError, match=r"'.*pipe.csv' is a pipe or a device: give a file$"):
        open_source(root, manifest=root.parent / "pipe.csv")
    (root.parent / "folder.csv").mkdir()
    with pytest.raises(PackError, match=r"cannot read the manifest '.*folder.csv': Is a directory"):
        open_source(root, manifest=root.parent / "folder.csv")
