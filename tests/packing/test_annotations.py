"""Boxes and keypoints from COCO's and Pascal VOC's files, in the pixels that are stored."""

import contextlib
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from h5feed import H5Dataset, H5Loader, UsageError, augment, pack
from h5feed.packing.places import stored_places
from h5feed.packing.sources import open_source
from h5feed.store import check_file
from h5feed.store.fields import FieldType, FieldValues
from h5feed.store.layout import images_spec

H, W = 60, 100
JOINTS = ["nose", "left_eye", "right_eye"]


@pytest.fixture
def root(tmp_path):
    """Black images, each with a white box; the one in deep/ lies upside down by its EXIF."""
    folder = tmp_path / "images"
    (folder / "deep").mkdir(parents=True)
    for k, name in enumerate(("a.png", "b.png", "deep/c.png")):
        pixels = np.zeros((H, W, 3), np.uint8)
        pixels[20 : 40 + k, 30:70] = 255
        Image.fromarray(pixels).save(folder / name)
    return folder


def coco(k=0, **changes):
    return {
        "images": [
            {"id": 7, "file_name": "b.png", "height": H, "width": W},
            {"id": 3, "file_name": "a.png", "height": H, "width": W},
            {"id": 9, "file_name": "deep/c.png", "height": H, "width": W},
        ],
        "categories": [
            {"id": 18, "name": "dog"},
            {"id": 1, "name": "person", "keypoints": JOINTS, "skeleton": [[1, 2]]},
        ],
        "annotations": [
            {
                "id": 1, "image_id": 3, "category_id": 1, "bbox": [30, 20, 40, 20], "area": 700.5,
                "iscrowd": 0, "keypoints": [50, 30, 2, 45, 28, 1, 0, 0, 0], "num_keypoints": 2,
            },
            {"id": 2, "image_id": 7, "category_id": 18, "bbox": [30, 20, 40, 21], "iscrowd": 1},
            {"id": 3, "image_id": 7, "category_id": 1, "bbox": [0, 0, 10, 10]},
            {"id": 4, "image_id": 7, "category_id": 1, "bbox": [5, 5, 0, 10]},
        ],
        **changes,
    }  # fmt: skip


def written(root, content):
    path = root.parent / "instances.json"
    path.write_text(json.dumps(content))
    return path


def packed(root, annotations, **options):
    out = root.parent / "out.h5"
    options = {"size": 64, "num_workers": 0, "overwrite": True, **options}
    pack(root, out, annotations=annotations, **options)
    assert check_file(out).is_sound
    return H5Dataset(out, target="all", aspect="stored")


def test_coco_comes_in_the_order_of_ids(root):
    source = open_source(root, annotations=written(root, coco()))
    assert [source.key(k) for k in range(3)] == [b"a.png", b"b.png", b"deep/c.png"]
    assert source.classes == ("person", "dog")
    assert source.labels.tolist() == [-1, -1, -1]
    assert source.notes == ("left out, without area: 1 box",)


def test_coco_becomes_fields_in_stored_pixels(root):
    ds = packed(root, written(root, coco()))
    assert list(ds.fields) == ["area", "box_labels", "boxes", "image_id", "iscrowd", "keypoints"]
    first, second, third = (ds[k][1] for k in range(3))
    x, y = 64 / W, 64 / H
    np.testing.assert_allclose(first["boxes"], [[30 * x, 20 * y, 70 * x, 40 * y]], rtol=1e-6)
    assert second["box_labels"].tolist() == [1, 0]
    assert second["iscrowd"].tolist() == [1, 0]
    assert second["area"].tolist() == [840, 100]
    assert first["area"].tolist() == [700.5]
    assert [t["image_id"] for t in (first, second, third)] == [3, 7, 9]
    assert third["boxes"].shape == (0, 4)
    assert third["keypoints"].shape == (0, 3, 3)
    points = [[50 * x, 30 * y, 2], [45 * x, 28 * y, 1], [0, 0, 0]]
    np.testing.assert_allclose(first["keypoints"][0], points, rtol=1e-6)
    assert ds.fields["keypoints"].type.swap == (0, 2, 1)


@pytest.mark.parametrize(
    ("fit", "store", "size"),
    [
        ("stretch", "raw", 64),
        ("stretch", "jpeg", 64),
        ("crop", "raw", 32),
        ("pad", "yuv420", 64),
        ("keep", "raw", 32),
        ("keep", "jpeg", 32),
    ],
)
def test_every_fit_moves_boxes_as_it_moves_pixels(root, fit, store, size):
    ds = packed(root, written(root, coco()), fit=fit, store=store, size=size, background=(0, 0, 0))
    for k in (0, 1):
        image, target = ds[k]
        rows, columns = np.nonzero(image[1].numpy() > 127)
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose(target["boxes"][0], found, atol=1.0)


def test_what_a_crop_cuts_off_is_left_out_with_its_rows(root):
    ds = packed(root, written(root, coco()), fit="crop", size=32)
    target = ds[1][1]  # of two boxes one lies left of the square that is kept
    assert target["box_labels"].tolist() == [1]
    assert target["boxes"].shape == (1, 4)
    assert target["keypoints"].shape == (1, 3, 3)
    assert target["area"].tolist() == [840]


@pytest.mark.parametrize("shards", [None, "2"])
def test_boxes_that_a_crop_or_the_image_leaves_out_are_counted(root, shards):
    boxes = [[-30, -30, 20, 20], [30, 20, 40, 20], [W + 1, 0, 9, 9]]  # two lie outside
    entries = [
        {"id": k, "image_id": 3, "category_id": 1, "bbox": box} for k, box in enumerate(boxes)
    ]
    path = written(root, coco(annotations=entries))
    summary = pack(root, root.parent / "out", annotations=path, size=64, shards=shards)
    assert summary.boxes_left_out == 2
    assert "left out, with less than a pixel in the stored images: 2 boxes" in str(summary)
    assert json.loads(summary.to_json())["boxes_left_out"] == 2


def test_the_loader_moves_them_on(root):
    ds = packed(root, written(root, coco()), background=(0, 0, 0))
    ops = [augment.RandomHorizontalFlip(1.0), augment.CenterCrop(64)]
    with H5Loader(ds, 3, augment=ops) as loader:
        images, target = next(iter(loader))
    for k in (0, 1):
        rows, columns = np.nonzero(images[k, 1].numpy() > 127)
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose(target["boxes"][k][0], found, atol=1.0)


def test_counts_are_those_of_pycocotools(root):
    tools = pytest.importorskip("pycocotools.coco")
    path = written(root, coco())
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = tools.COCO(str(path))
    ds = packed(root, path)
    assert ds.classes == [c["name"] for c in theirs.loadCats(sorted(theirs.getCatIds()))]
    for k, number in enumerate(np.asarray(ds.fields["image_id"]).tolist()):
        wanted = [e for e in theirs.loadAnns(theirs.getAnnIds([number])) if min(e["bbox"][2:]) > 0]
        assert len(ds[k][1]["boxes"]) == len(wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": []}, "instances.json: images is empty"),
        ({"categories": 3}, "categories is not a list of objects"),
        ({"images": [{"id": "x"}]}, "images have the id 'x', which is not a whole number"),
        (
            {"images": [{"id": 3, "file_name": "a.png"}] * 2},
            "id in images 3 appears twice",
        ),
        (
            {"categories": [{"id": 1, "name": "x"}, {"id": 2, "name": "x"}]},
            "category name 'x' appears twice",
        ),
        ({"images": [{"id": 3, "file_name": "z.png"}]}, "there is no image 7"),
        (
            {"images": [{"id": 3, "file_name": "z.png"}], "annotations": []},
            "image 3: there is no file 'z.png' in",
        ),
        (
            {"images": [{"id": 3, "file_name": "../z.png"}], "annotations": []},
            r"image 3: '../z.png' lies outside SRC",
        ),
        (
            {"annotations": [{"id": 5, "image_id": 3, "category_id": 4}]},
            "annotation 5: there is no category 4",
        ),
        (
            {"annotations": [{"id": 5, "image_id": 3, "category_id": 1, "bbox": [1, 2, 3]}]},
            r"annotation 5: bbox is not 4 numbers: \[1, 2, 3\]",
        ),
        (
            {"annotations": [{"id": 5, "image_id": 3, "category_id": 1, "bbox": [1, 2, 3, None]}]},
            "annotation 5: bbox is not 4 numbers",
        ),
        (
            {
                "annotations": [
                    {
                        "id": 5,
                        "image_id": 3,
                        "category_id": 1,
                        "bbox": [1, 2, 3, 4],
                        "keypoints": [1, 2],
                    }
                ]
            },
            "annotation 5: keypoints is not 9 numbers",
        ),
    ],
)
def test_wrong_coco_is_named(root, changes, said):
    with pytest.raises(UsageError, match=said):
        open_source(root, annotations=written(root, coco(**changes)))


def test_what_is_no_annotation_file(root):
    with pytest.raises(UsageError, match=r"annotations '.*none.json' does not exist"):
        open_source(root, annotations=root / "none.json")
    path = root.parent / "x.json"
    for text, said in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            open_source(root, annotations=path)
    with pytest.raises(UsageError, match=r"holds no .xml files of Pascal VOC"):
        open_source(root, annotations=root)
    with pytest.raises(UsageError, match=r"annotations=x.json and manifest=y.csv both list the im"):
        pack(root, root.parent / "out.h5", annotations="x.json", manifest="y.csv")


VOC = """<annotation><folder>x</folder><filename>{name}</filename>
<size><width>100</width><height>60</height><depth>3</depth></size>{objects}</annotation>"""
OBJECT = """<object><name>{name}</name><difficult>{hard}</difficult><bndbox><xmin>{box[0]}</xmin>
<ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"""


def voc(root, *, objects="", name="a.png"):
    folder = root.parent / "xml"
    folder.mkdir(exist_ok=True)
    boxes = [("dog", 0, (31, 21, 70, 40)), ("cat", 1, (1, 1, 10, 10))]
    made = "".join(OBJECT.format(name=n, hard=hard, box=box) for n, hard, box in boxes)
    (folder / "a.xml").write_text(VOC.format(name=name, objects=objects or made))
    (folder / "b.xml").write_text(VOC.format(name="b.png", objects=""))
    return folder


def test_voc_counts_pixels_from_one(root):
    ds = packed(root, voc(root), store="raw")
    assert ds.classes == ["cat", "dog"]
    assert len(ds) == 2
    image, target = ds[0]
    assert target["box_labels"].tolist() == [1, 0]
    assert target["difficult"].tolist() == [0, 1]
    rows, columns = np.nonzero(image[1].numpy() > 127)
    found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    np.testing.assert_allclose(target["boxes"][0], found, atol=0.7)
    assert ds[1][1]["boxes"].shape == (0, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "z.png"}, "a.xml, filename: there is no file 'z.png'"),
        ({"objects": "<object><name>x</name></object>"}, "no <bndbox/xmin> in <object>"),
        ({"objects": "<object></object>"}, "no <name> in <object>"),
        ({"objects": OBJECT.format(name="x", hard=0, box="abcd")}, "object 1: bndbox is not 4 num"),
        ({"objects": "<object>"}, "a.xml: not XML"),
    ],
)
def test_wrong_voc_is_named(root, options, said):
    with pytest.raises(UsageError, match=said):
        open_source(root, annotations=voc(root, **options))


def test_entities_that_grow_without_end_are_refused(root):
    """Expat stops them; nothing of ours may turn that into a traceback."""
    folder = voc(root)
    levels = "".join(f'<!ENTITY a{k} "{f"&a{k - 1};" * 10}">' for k in range(1, 12))
    bomb = f'<!DOCTYPE x [<!ENTITY a0 "x">{levels}]><x>&a11;</x>'
    (folder / "a.xml").write_text(bomb)
    with pytest.raises(UsageError, match=r"a.xml: not XML"):
        open_source(root, annotations=folder)


# --- datasets as they are published

XML = (
    "<annotation><filename>{0}.jpg</filename><object><name>{1}</name><bndbox><xmin>1</xmin>"
    "<ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox></object></annotation>"
)


@pytest.fixture
def devkit(tmp_path):
    """Pascal VOC's folders: three images with annotations, one without, and two lists."""
    voc = tmp_path / "data" / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (voc / name).mkdir(parents=True)
    for k, name in enumerate(("cat", "dog", "cat", "")):
        Image.new("RGB", (8, 8), (k, 0, 0)).save(voc / "JPEGImages" / f"2012_{k}.jpg")
        if name:
            (voc / "Annotations" / f"2012_{k}.xml").write_text(XML.format(f"2012_{k}", name))
    (voc / "ImageSets" / "Main" / "train.txt").write_text("2012_1\n2012_0\n\n")
    return voc


def test_a_voc_folder_and_its_lists_are_found(devkit):
    for src in (devkit, devkit.parent, devkit.parents[1]):
        source = open_source(src)
        assert [source.key(n) for n in range(3)] == [f"2012_{n}.jpg".encode() for n in range(3)]
        assert source.classes == ("cat", "dog")
        assert source.notes == (
            f"read with their annotations: {devkit}/Annotations",
            "left out, in SRC and not in the annotations: 1 image",
        )
    lists = devkit / "ImageSets" / "Main"
    source = open_source(lists / "train.txt")
    assert [source.key(n) for n in range(len(source))] == [b"2012_1.jpg", b"2012_0.jpg"]
    assert source.notes == (f"read with their annotations: {devkit}/Annotations",)
    (lists / "cat_val.txt").write_text("2012_2  1\n")
    assert open_source(lists / "cat_val.txt").classes == ("cat", "dog")  # as in the other list
    for text, said in (
        ("2012_3\n", "test.txt, line 1: there is no annotation '.*2012_3.xml'"),
        ("2012_2\n2012_2\n", "test.txt, line 2: '2012_2' appears twice"),
        ("\n", "test.txt lists no images"),
    ):
        (lists / "test.txt").write_text(text)
        with pytest.raises(UsageError, match=said):
            open_source(lists / "test.txt")
    pack(lists / "train.txt", devkit / "out.h5", size=8, num_workers=0)
    assert H5Dataset(devkit / "out.h5", target="boxes")[0][1].tolist() == [[0, 0, 5, 5]]
    for name in ("JPEGImages", "Annotations"):
        (devkit.parent / "VOC2007" / name).mkdir(parents=True)
    with pytest.raises(UsageError) as caught:
        open_source(devkit.parent)
    assert str(caught.value) == (
        f"SRC '{devkit.parent}' holds splits (VOC2007, VOC2012); pack each by itself:\n"
        f"  pack-h5 {devkit.parent}/VOC2007 VOC2007.h5\n"
        f"  pack-h5 {devkit.parent}/VOC2012 VOC2012.h5"
    )


def test_coco_folders_are_found(root):
    top = root.parent / "coco"
    (top / "annotations").mkdir(parents=True)
    for name in ("train2017", "val2017"):
        root.rename(top / name) if name == "train2017" else (top / name).mkdir()
        (top / "annotations" / f"instances_{name}.json").write_text(json.dumps(coco()))
    source = open_source(top / "train2017")
    assert source.notes[0].endswith("/coco/annotations/instances_train2017.json")
    assert {"boxes", "box_labels", "keypoints"} < set(source.fields)
    with pytest.raises(UsageError, match=r"holds splits \(train2017, val2017\); pack"):
        open_source(top)
    Image.new("RGB", (8, 8)).save(top / "train2017" / "deep" / "other.png")
    assert (
        "left out, in SRC and not in the annotations: 1 image"
        in open_source(top / "train2017").notes
    )
    (top / "train2017" / "_annotations.coco.json").write_text(json.dumps(coco()))
    note = open_source(top / "train2017").notes[0]
    assert note.endswith("/coco/train2017/_annotations.coco.json")  # as Roboflow exports it


# --- masks of COCO's segmentations


def segmented():
    """One image with a large polygon, a small one on it in two parts, and a crowd as RLE."""
    mask = pytest.importorskip("pycocotools.mask")
    crowd = np.zeros((H, W), np.uint8, order="F")
    crowd[:30, :50] = 1
    packed_rle = mask.encode(crowd)
    square = [10, 10, 80, 10, 80, 50, 10, 50]
    small = [[20, 20, 30, 20, 30, 30, 20, 30], [50, 20, 60, 20, 60, 30, 50, 30]]
    counts = [0, 30, *[30, 30] * 49, H * W - 50 * 60 + 30]
    common = {"image_id": 7, "bbox": [0, 0, 9, 9]}
    return [
        {"id": 1, "category_id": 1, "area": 200, "segmentation": small, **common},
        {"id": 2, "category_id": 18, "area": 2800, "segmentation": [square], **common},
        {
            "id": 3, "category_id": 1, "area": 9999, "iscrowd": 1, **common,
            "segmentation": {"size": [H, W], "counts": counts},
        },
        {
            "id": 4, "category_id": 18, "area": 1500, "image_id": 3, "bbox": [0, 0, 9, 9],
            "segmentation": {"size": [H, W], "counts": packed_rle["counts"].decode()},
        },
    ]  # fmt: skip


def test_masks_are_drawn_as_pycocotools_draws_them(root):
    tools = pytest.importorskip("pycocotools.coco")
    path = written(root, coco(annotations=segmented()))
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = tools.COCO(path)
    drawn = {number: theirs.annToMask(theirs.anns[number]) != 0 for number in (1, 2, 3, 4)}
    wanted = np.zeros((3, H, W), np.uint8)  # ids 3, 7, 9: one mask each
    wanted[0][drawn[4]] = 2  # classes by category id: 1 is person, 2 is dog
    wanted[1][drawn[3]] = 255
    wanted[1][drawn[2]] = 2
    wanted[1][drawn[1]] = 1
    out = root.parent / "out.h5"
    options = {"size": (H, W), "any_size": True, "num_workers": 0}
    pack(root, out, annotations=path, annotation_masks=True, **options)
    ds = H5Dataset(out)
    assert np.array_equal([ds[n][1] for n in range(3)], wanted)
    source = open_source(root, annotations=path, annotation_masks=True)
    assert source.digest() != open_source(root, annotations=path).digest()


@pytest.mark.parametrize(
    ("segmentation", "reason"),
    [
        ([[1, 2]], "segmentation that is none"),
        ([["a", "b", "c", "d", "e", "f"]], "segmentation that is none"),
        ({"size": [9, 9], "counts": [81]}, r"segmentation that is none \(size \[9, 9\]\)"),
        ({"size": [H, W]}, r"segmentation that is none \(neither polygons nor an RLE of"),
        ("x", r"segmentation that is none \(neither polygons nor an RLE of"),
        ({"size": [H, W], "counts": [10**9]}, r".* \(counts of 1000000000 pixels\)"),
    ],
)
def test_a_segmentation_that_is_none_is_a_counted_skip(root, segmentation, reason):
    pytest.importorskip("pycocotools")
    entry = {**segmented()[0], "segmentation": segmentation}
    path = written(root, coco(annotations=[entry]))
    out = root.parent / "out.h5"
    summary = pack(root, out, annotations=path, annotation_masks=True, size=64, num_workers=0)
    ((key, said),) = summary.skipped
    assert (key, summary.items) == ("b.png", 2)
    assert re.match(reason, said)


def test_masks_that_cannot_be_drawn_are_refused(root):
    path = written(root, coco())
    for options, said in (
        ({"annotations": path}, r"annotation_masks: no annotation in .* has a segmentation"),
        ({}, "annotation_masks draws COCO's segmentations: give its JSON file"),
        ({"masks": root}, "masks=.* and annotation_masks: an item has one mask"),
        ({"store": "original"}, "annotation_masks=True with store=original"),
    ):
        with pytest.raises(UsageError, match=said):
            pack(root, root.parent / "out.h5", annotation_masks=True, **options)


def test_places_that_are_stored_stay_when_they_are_packed_again():
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, 90, (500, 2)) * [1, 0.5]
    sides = np.array([W / 64, H / 64])  # a pixel when stored, but for what float32 rounds
    boxes = np.hstack([corners, corners + sides])
    edge = np.nextafter([[W, H]] * 500, 0)
    points = np.concatenate([np.stack([corners, edge], axis=1), np.ones((500, 2, 1))], axis=2)
    kinds = {
        "boxes": FieldType(kind="boxes", dtype="float32", shape=(4,)),
        "points": FieldType(kind="keypoints", dtype="float32", shape=(2, 3)),
    }
    fields = {
        name: FieldValues.of_arrays(rows[:, None], kinds[name])
        for name, rows in {"boxes": boxes, "points": points}.items()
    }
    spec = images_spec("raw", 64, 64, "stretch")
    once = stored_places(fields, np.tile(np.int32([H, W]), (500, 1)), spec)
    twice = stored_places(once, np.full((500, 2), 64, np.int32), spec)
    assert 0 < len(once["boxes"].data) < 500 * 16
    for name in fields:
        assert np.array_equal(once[name].data, twice[name].data)
