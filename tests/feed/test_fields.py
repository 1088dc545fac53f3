"""Further fields through H5Dataset and H5Loader: by name, as targets, in every order."""

import pickle

import h5py
import numpy as np
import pytest
import torch

from h5feed import DamagedItemError, H5Dataset, H5Loader, UsageError, augment
from h5feed.store.fields import FieldType, FieldValues
from packed import further_fields, image_spec, random_images, write_packed


class Shifted(augment.ImageOp):
    """An op that moves masks, and nothing else."""

    def mask(self, rows):
        return None

    def __repr__(self):
        return "Shifted()"


CROP = (augment.RandomResizedCrop(16), augment.RandomHorizontalFlip())


@pytest.fixture
def path(tmp_path):
    further = {**further_fields(12), "meta": FieldValues.of_json([{"k": k} for k in range(12)])}
    masks = [np.full((32, 32, 1), k, np.uint8) for k in range(12)]
    return write_packed(tmp_path / "a.h5", random_images(12), masks=masks, further=further)


def dataset(path, **options):
    return H5Dataset(path, aspect="stored", **options)


def test_a_column_reads_single_items(path):
    fields = dataset(path).fields
    assert list(fields) == ["boxes", "caption", "meta", "price"]
    assert fields["caption"][3] == "image 3"
    assert fields["caption"][-1] == "image 11"
    assert fields["meta"][5] == {"k": 5}
    assert fields["price"][4] == 2.0
    assert fields["boxes"][7].tolist() == [[1, 2, 3, 4], [7, 7, 12, 16]]
    assert len(fields["boxes"]) == 12
    assert np.asarray(fields["price"]).tolist() == [k / 2 for k in range(12)]
    assert "FieldColumn('price': (12,), float64)" in repr(fields)


def test_a_whole_column_of_numbers_is_no_copy(path):
    ds = dataset(path)
    column = np.asarray(ds.fields["price"])
    assert np.shares_memory(column, ds.files.fixed_field("price"))
    assert not column.flags.writeable


def test_errors_name_what_there_is(path):
    fields = dataset(path).fields
    with pytest.raises(
        KeyError, match="has no field 'size'; its fields are boxes, caption, meta, "
    ):
        fields["size"]
    with pytest.raises(IndexError, match="index 12 is out of range for 12 items"):
        fields["price"][12]
    with pytest.raises(UsageError, match=r"field 'caption' of .* is text, not one array: take"):
        np.asarray(fields["caption"])
    text = r"target='size': .*a.h5 has no 'size'; it has label, mask, boxes, caption, meta, price"
    with pytest.raises(UsageError, match=text):
        dataset(path, target="size")
    with pytest.raises(UsageError, match=r"target=\(\): give one name, several"):
        dataset(path, target=())


def test_target_says_what_comes_beside_the_image(path):
    assert dataset(path)[3][1].shape == (32, 32)
    assert dataset(path, target="label")[3][1] == 1
    assert dataset(path, target="caption")[3][1] == "image 3"
    assert dataset(path, target="price")[3][1] == 1.5
    boxes = dataset(path, target="boxes")[3][1]
    assert boxes.dtype == torch.float32
    assert boxes.tolist() == [[1, 2, 3, 4], [3, 3, 8, 12]]
    several = dataset(path, target=("label", "boxes"))[3][1]
    assert list(several) == ["label", "boxes"]
    everything = dataset(path, target="all", output="numpy")[3][1]
    assert list(everything) == ["label", "mask", "boxes", "caption", "meta", "price"]
    assert isinstance(everything["boxes"], np.ndarray)


def test_what_is_changed_is_changed_for_nobody_else(path):
    ds = dataset(path, target="boxes")
    ds[0][1].zero_()
    assert ds[0][1][0].tolist() == [1, 2, 3, 4]


def test_target_transform_gets_the_target(path):
    ds = dataset(path, target=("label", "price"), target_transform=lambda t: t["price"] * 2)
    assert ds[4][1] == 4.0


def test_it_pickles(path):
    ds = pickle.loads(pickle.dumps(dataset(path, target=("caption", "price"))))
    assert ds[2][1] == {"caption": "image 2", "price": 1.0}


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_have_the_fields_of_their_images(path, shuffle):
    ds = dataset(path, target=("label", "caption", "price", "meta"))
    with H5Loader(ds, 5, shuffle=shuffle, augment=CROP, with_index=True) as loader:
        seen = []
        for _, target, index in loader:
            where = index.tolist()
            seen += where
            assert target["label"].tolist() == [k % 2 for k in where]
            assert target["caption"] == [f"image {k}" for k in where]
            assert target["price"].tolist() == [k / 2 for k in where]
            assert target["price"].dtype == torch.float64
            assert target["meta"] == [{"k": k} for k in where]
    assert sorted(seen) == list(range(12))


def test_boxes_come_as_a_list_of_tensors(path):
    ds = dataset(path, target="boxes")
    with H5Loader(ds, 4) as loader:
        _, boxes = next(iter(loader))
    assert [rows.shape for rows in boxes] == [(2, 4)] * 4
    assert boxes[2].tolist() == [[1, 2, 3, 4], [2, 2, 7, 11]]


def test_one_field_alone_is_the_target(path):
    ds = dataset(path, target="price", target_transform=lambda price: price + 1)
    with H5Loader(ds, 4) as loader:
        assert next(iter(loader))[1].tolist() == [1.0, 1.5, 2.0, 2.5]


def test_masks_that_nobody_wants_are_not_read(path):
    with H5Loader(dataset(path, target=("label",)), 4) as loader:
        assert next(iter(loader))[1]["label"].tolist() == [0, 1, 0, 1]
        assert [field.name for field in loader._builder.fields] == ["images"]
    with H5Loader(dataset(path, target=("mask", "label"), target_dtype=torch.int64), 4) as loader:
        target = next(iter(loader))[1]
        assert target["mask"].shape == (4, 32, 32)
        assert target["mask"].dtype == torch.int64


def test_several_files_are_one_column(tmp_path, path):
    other = write_packed(tmp_path / "b.h5", random_images(5), further=further_fields(5))
    first = write_packed(tmp_path / "c.h5", random_images(3), further=further_fields(3))
    ds = H5Dataset([first, other], target=("price", "caption"))
    assert ds[4][1] == {"price": 0.5, "caption": "image 1"}
    assert np.asarray(ds.fields["price"]).tolist() == [0, 0.5, 1, 0, 0.5, 1, 1.5, 2]
    with H5Loader(ds, 8) as loader:
        assert next(iter(loader))[1]["price"].tolist() == [0, 0.5, 1, 0, 0.5, 1, 1.5, 2]
    with pytest.raises(UsageError, match="differ in their"):
        H5Dataset([first, write_packed(tmp_path / "d.h5", random_images(3))])


@pytest.mark.parametrize(
    ("target", "ops", "said"),
    [
        ("boxes", (Shifted(),), r"Shifted\(\) moves masks and does not say where boxes go"),
        (("label", "boxes"), (Shifted(), *CROP), "does not say where boxes go: give it a method m"),
        (("label", "price"), (*CROP, augment.MixUp()), "labels are mixed alone"),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(tmp_path, target, ops, said):
    path = write_packed(tmp_path / "a.h5", random_images(12), further=further_fields(12))
    with pytest.raises(UsageError, match=said):
        H5Loader(dataset(path, target=target), 4, augment=ops)


def test_a_target_transform_of_what_is_no_tensor_is_refused(path):
    ds = dataset(path, target="caption", target_transform=len)
    with pytest.raises(UsageError, match="target_transform with target='caption'"):
        H5Loader(ds, 4)


def test_bytes_that_are_no_text_name_their_item(path):
    with h5py.File(path, "r+") as file:
        first = file["fields/caption/offsets"][3]
        file["fields/caption/bytes"][first] = 0xFF
    with pytest.raises(
        DamagedItemError, match=r"item 3 of /fields/caption \(key .*\) cannot be re"
    ):
        dataset(path).fields["caption"][3]
    assert dataset(path).fields["caption"][2] == "image 2"
    assert not dataset(path).files.is_intact(3)
    assert dataset(path).files.is_intact(2)


@pytest.mark.parametrize("views", [1, 2])
def test_boxes_and_what_belongs_to_them_go_with_their_images(tmp_path, views):
    """Each box is white in a black image: it is where the batch's image is white."""
    kind = FieldType(kind="boxes", dtype="float32", shape=(4,))
    both = {"kinds": FieldType(kind="array", dtype="int64", rows_of="boxes")}
    points = FieldType(kind="keypoints", dtype="float32", shape=(1, 3))
    images, boxes, kinds, spots = [], [], [], []
    for k in range(8):
        image = np.zeros((64, 64, 3), np.uint8)
        image[10 + k : 40, 8 : 30 + k] = 255
        images.append(image)
        boxes.append([[8, 10 + k, 30 + k, 40], [60, 60, 61, 61]])
        kinds.append([k, 99])
        spots.append([[[20, 25, 2]]])
    further = {
        "boxes": FieldValues.of_arrays(boxes, kind),
        "kinds": FieldValues.of_arrays(kinds, both["kinds"]),
        "spots": FieldValues.of_arrays(spots, points),
    }
    path = write_packed(tmp_path / "a.h5", images, further=further)
    ds = H5Dataset(path, target=("boxes", "kinds", "spots", "label"))
    ops = (augment.RandomResizedCrop(48, scale=(0.5, 1.0)), augment.RandomHorizontalFlip())
    ops += (augment.SanitizeBoundingBoxes(min_size=4),)
    with H5Loader(ds, 4, augment=ops, shuffle=True, views=views, with_index=True) as loader:
        for batch, target, index in loader:
            for view in range(views):
                pixels = batch[view] if views > 1 else batch
                moved = [target[n][view] if views > 1 else target[n] for n in ("boxes", "kinds")]
                for i, (one, of) in enumerate(zip(*moved, strict=True)):
                    assert of.tolist() == [index[i]]  # the small one is left out, with its class
                    rows, columns = np.nonzero(pixels[i, 0].numpy() > 127)
                    found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                    np.testing.assert_allclose(one[0], found, atol=1.5)
            assert len(target["label"]) == 4
            seen = target["spots"][0] if views > 1 else target["spots"]
            assert all(spot.shape == (1, 1, 3) for spot in seen)


def test_fields_of_boxes_alone_are_filtered_as_their_boxes_are(tmp_path):
    kind = FieldType(kind="boxes", dtype="float32", shape=(4,))
    further = {
        "boxes": FieldValues.of_arrays([[[0, 0, 4, 4], [10, 10, 20, 20]]] * 4, kind),
        "kinds": FieldValues.of_arrays(
            [[1, 2]] * 4, FieldType(kind="array", dtype="int64", rows_of="boxes")
        ),
    }
    path = write_packed(tmp_path / "a.h5", random_images(4), further=further)
    with H5Loader(H5Dataset(path, target="kinds"), 4, augment=[augment.CenterCrop(16)]) as loader:
        assert [kinds.tolist() for kinds in next(iter(loader))[1]] == [[2]] * 4


@pytest.mark.parametrize("output", ["tensor", "numpy", "tv_tensor"])
@pytest.mark.parametrize("aspect", ["stored", "source"])
@pytest.mark.parametrize("fit", ["stretch", "pad"])
def test_boxes_lie_in_the_image_that_is_handed_out(tmp_path, output, aspect, fit):
    """White boxes in black images of 40x80, stored as 32x32: stretched, or in a letterbox."""
    if output == "tv_tensor":
        tv_tensors = pytest.importorskip("torchvision.tv_tensors")
    image = np.zeros((32, 32, 3), np.uint8)
    box, kind = [8, 10, 20, 22], FieldType(kind="boxes", dtype="float32", shape=(4,))
    image[box[1] : box[3], box[0] : box[2]] = 255
    further = {
        "boxes": FieldValues.of_arrays([[box]], kind),
        "spots": FieldValues.of_arrays(
            [[[[14, 16, 2]]]], FieldType(kind="keypoints", dtype="float32", shape=(1, 3))
        ),
    }
    path = write_packed(
        tmp_path / "a.h5",
        [image],
        spec=image_spec(fit=fit),
        letterbox=np.int32([[8, 0, 16, 32]]) if fit == "pad" else None,
        source_shapes=np.int32([[40, 80]]),
        further=further,
    )
    ds = H5Dataset(path, target=("boxes", "spots"), output=output, aspect=aspect)
    pixels, target = ds[0]
    plane = np.asarray(pixels)[..., 0] if output == "numpy" else np.asarray(pixels)[0]
    rows, columns = np.nonzero(plane > 127)
    found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    np.testing.assert_allclose(np.asarray(target["boxes"])[0], found, atol=0.6)
    middle = [columns.mean() + 0.5, rows.mean() + 0.5]
    np.testing.assert_allclose(np.asarray(target["spots"])[0, 0, :2], middle, atol=0.6)
    if output == "tv_tensor":
        assert isinstance(target["boxes"], tv_tensors.BoundingBoxes)
        assert tuple(target["boxes"].canvas_size) == plane.shape
        assert target["boxes"].format == tv_tensors.BoundingBoxFormat.XYXY


def test_items_are_selected_by_their_columns(path):
    ds = dataset(path)
    assert ds.select(lambda c: c["class"] == "dög").tolist() == [1, 3, 5, 7, 9, 11]
    assert ds.select(lambda c: (c["price"] > 4) & (c["label"] == 0)).tolist() == [10]
    assert ds.select(lambda c: c["caption"] == "image 7").tolist() == [7]
    assert ds.select(lambda c: np.array([len(b) for b in c["boxes"]]) == 3).tolist() == []
    assert ds.select(lambda c: c["key"] == "1/ü3.png").tolist() == [3]
    wide = ds.select(lambda c: c["width"] >= 32)
    with H5Loader(ds, 4, indices=wide[:4], with_index=True) as loader:
        assert next(iter(loader))[-1].tolist() == [0, 1, 2, 3]


def test_conditions_that_select_nothing_sensible(path):
    ds = dataset(path)
    with pytest.raises(UsageError, match="has no column 'size'; it has label, class, key, width"):
        ds.select(lambda c: c["size"] > 3)
    with pytest.raises(UsageError, match=r"condition gives int64 \(12,\): an array of 12 booleans"):
        ds.select(lambda c: c["label"])
    with pytest.raises(UsageError, match=r"condition gives bool \(\)"):
        ds.select(lambda c: True)


def test_an_item_without_a_class_has_no_name(tmp_path):
    path = write_packed(tmp_path / "a.h5", random_images(3), labels=np.array([0, -1, 1]))
    assert H5Dataset(path).select(lambda c: c["class"] == "").tolist() == [1]
