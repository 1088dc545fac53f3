import numpy as np
import pytest

from h5feed import H5Dataset
from h5feed.errors import UsageError
from h5feed.feed.sheet import class_colors, contact_sheet
from h5feed.store.fields import FieldType, FieldValues
from packed import random_images, write_packed

PAPER = np.array([255, 255, 255])


def flat(color, size=(32, 32)):
    return np.full((*size, 3), color, np.uint8)


def columns_of(sheet, color):
    """Columns of the sheet in which `color` is seen."""
    pixels = np.asarray(sheet).astype(int)
    return np.flatnonzero((abs(pixels - color).max(2) < 8).any(0))


def test_stretched_images_are_shown_in_their_true_proportions(tmp_path):
    red, blue = (200, 0, 0), (0, 0, 200)
    sources = np.int32([[100, 300], [300, 150]])
    path = write_packed(tmp_path / "a.h5", [flat(red), flat(blue)], source_shapes=sources)
    sheet = contact_sheet(path, height=120, width=600)
    assert len(columns_of(sheet, red)) == pytest.approx(360, abs=3)
    assert len(columns_of(sheet, blue)) == pytest.approx(60, abs=3)


def test_images_are_taken_evenly_from_the_classes(tmp_path):
    colors = [(200, 0, 0), (0, 0, 200), (0, 150, 0)]
    labels = np.array([0] * 40 + [1] * 5 + [2] * 5)
    colored = [flat(colors[label], (8, 8)) for label in labels]
    path = write_packed(tmp_path / "a.h5", colored, labels=labels, classes=("a", "b", "c"))
    sheet = contact_sheet(path, images=6, height=50, width=1000)
    for color in colors:
        assert len(columns_of(sheet, color)) == pytest.approx(100, abs=4)


def test_rows_wrap_and_captions_are_drawn(tmp_path):
    images = [flat((0, 0, 0)) for _ in range(4)]
    path = write_packed(tmp_path / "a.h5", images, classes=("a class name too long to fit", "b"))
    wide, narrow = (contact_sheet(path, height=64, width=w) for w in (400, 150))
    assert narrow.height > wide.height * 1.8
    below = np.asarray(wide)[6 + 64 : 6 + 64 + 16]
    assert (below < 128).any()


def test_a_class_name_of_two_lines_is_one_caption(tmp_path):
    images = [flat((0, 0, 0)) for _ in range(2)]
    path = write_packed(tmp_path / "a.h5", images, classes=("two\nlines", "caf\udce9"))
    assert (np.asarray(contact_sheet(path, height=64, width=400))[70:86] < 128).any()


def test_masks_are_laid_over(tmp_path):
    mask = np.zeros((32, 32, 1), np.uint8)
    mask[:, 16:] = 1
    images = [flat((0, 0, 0)) for _ in range(2)]
    path = write_packed(tmp_path / "a.h5", images, masks=[mask, mask])
    sheet = np.asarray(contact_sheet(path, height=64, width=300)).astype(int)
    assert (sheet[30, 12] == 0).all()
    wash = class_colors()[1] * 0.35
    assert (abs(sheet[30, 6 + 60] - wash) < 2).all()  # thin: the image shows through
    assert (sheet[30, 6 + 32] == class_colors()[1]).all()  # the outline


def test_no_two_classes_have_one_color_and_a_legend_names_those_that_are_shown(tmp_path):
    assert len({tuple(color) for color in class_colors().tolist()}) == 256
    images = [flat((0, 0, 0)) for _ in range(2)]
    plain = write_packed(tmp_path / "plain.h5", images)
    bare = contact_sheet(plain, height=64, width=300).height
    masks = [np.full((32, 32, 1), number, np.uint8) for number in (7, 255)]
    sheet = contact_sheet(
        write_packed(tmp_path / "a.h5", images, masks=masks), height=64, width=300
    )
    legend = np.asarray(sheet)[bare:]
    assert len(legend) > 12
    for number, seen in ((7, True), (255, True), (1, False)):
        assert (legend == class_colors()[number]).all(2).any() == seen
    many = [np.arange(32, dtype=np.uint8).repeat(32).reshape(32, 32, 1)] * 2
    tall = contact_sheet(write_packed(tmp_path / "b.h5", images, masks=many), height=64, width=300)
    assert tall.height > sheet.height + 5 * 12  # its entries flow in rows


def test_targets_and_a_very_wide_image(tmp_path):
    labels = np.float32([[0.5, 2], [1, 3]])
    sources = np.int32([[10, 9000], [10, 10]])
    images = random_images(2, (8, 8))
    path = write_packed(tmp_path / "a.h5", images, labels=labels, classes=(), source_shapes=sources)
    assert contact_sheet(path, height=32, width=200).width == 200


def test_images_of_thin_sources_take_no_more_than_others(tmp_path):
    """A source of 1x65,000 in its own proportions would be 32x2,080,000 as stored."""
    sources = np.int32([[1, 65_000], [65_000, 1], [1, 2**29], [32, 32]])
    path = write_packed(tmp_path / "a.h5", random_images(4), source_shapes=sources)
    assert contact_sheet(path, height=64, width=300).width == 300
    ds = H5Dataset(path, output="pil")
    assert all(np.prod(ds[i][0].size) <= 16 * 32 * 32 for i in range(4))


@pytest.mark.parametrize(
    ("given", "least"), [({"images": 0}, 1), ({"height": 0}, 1), ({"width": 12}, 13)]
)
def test_a_sheet_of_nothing_is_refused(tmp_path, given, least):
    path = write_packed(tmp_path / "a.h5", [flat((0, 0, 0))])
    ((name, value),) = given.items()
    with pytest.raises(UsageError, match=f"^{name}={value} is too small: give {least} or more$"):
        contact_sheet(path, **given)


def test_the_smallest_sheet_there_is(tmp_path):
    path = write_packed(tmp_path / "a.h5", [flat((0, 0, 0))])
    assert contact_sheet(path, images=1, height=1, width=13).width == 13


def test_boxes_and_keypoints_are_drawn_where_they_are(tmp_path):
    box = FieldType(kind="boxes", dtype="float32", shape=(4,))
    kinds = FieldType(kind="array", dtype="int64", rows_of="boxes")
    spot = FieldType(kind="keypoints", dtype="float32", shape=(1, 3))
    further = {
        "boxes": FieldValues.of_arrays([[[10, 12, 40, 44]]], box),
        "kinds": FieldValues.of_arrays([[1]], kinds),
        "spots": FieldValues.of_arrays([[[[52, 20, 2]]]], spot),
        "caption": FieldValues.of_texts(["a black square"]),
    }
    black = np.zeros((64, 64, 3), np.uint8)
    path = write_packed(tmp_path / "a.h5", [black], further=further)
    without = write_packed(tmp_path / "b.h5", [black])
    sheet = np.asarray(contact_sheet(path, height=64, width=200)).astype(int)
    plain = np.asarray(contact_sheet(without, height=64, width=200)).astype(int)
    left = top = 6  # the margin
    image = sheet[top : top + 64, left : left + 64]
    color = tuple(class_colors()[2].tolist())
    assert all(tuple(image[y, x]) == color for y, x in [(43, 20), (30, 10), (30, 39), (12, 38)])
    assert tuple(image[20, 52]) == tuple(class_colors()[1].tolist())
    assert not image[50:, :8].any()
    assert (sheet[top + 64 :] != plain[top + 64 :]).any()  # the caption, not the class
