"""Boxes and keypoints go where the pixels go: held against masks that the same ops move."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from h5feed import UsageError
from h5feed.augment import (
    CenterCrop,
    ColorJitter,
    ImageOp,
    Pipeline,
    RandAugment,
    RandomAffine,
    RandomApply,
    RandomCrop,
    RandomHorizontalFlip,
    RandomPerspective,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    SanitizeBoundingBoxes,
)

H, W, COUNT = 96, 128, 40
BOXES = np.array([[20, 16, 60, 48], [70, 40, 110, 88], [2, 60, 30, 94], [90, 4, 126, 30]], float)
ALL = SanitizeBoundingBoxes(0, 0, 0)

LISTS = {
    "crop": [RandomResizedCrop(64)],
    "flips": [RandomHorizontalFlip(), RandomVerticalFlip(), CenterCrop(80)],
    "resize then crop": [Resize(110), RandomCrop(72), RandomHorizontalFlip()],
    "padded crop": [RandomCrop(100, padding=20), RandomHorizontalFlip()],
    "crop then pad": [CenterCrop(60), RandomCrop(80, padding=10)],
    "affine": [RandomAffine(30, translate=(0.2, 0.2), scale=(0.7, 1.3), shear=15), CenterCrop(90)],
    "affine of a crop": [RandomResizedCrop(70), RandomHorizontalFlip(), RandomAffine(20)],
    "affine: rotation": [RandomRotation(40), RandomHorizontalFlip()],
    "affine: perspective": [RandomPerspective(0.4, 0.8), CenterCrop(90)],
    "affine: policies": [RandomCrop(80), RandAugment(2, 9), RandomHorizontalFlip()],
    "affine: some": [RandomApply([RandomRotation(40)]), RandomApply([RandomPerspective(0.3, 1)])],
    "resize, some cropped": [RandomApply([Resize(110), RandomCrop((H, W))])],
    "colors do nothing": [ColorJitter(0.4), RandomResizedCrop(64)],
}


def drawn(ops, source=(H, W), views=1):
    pipeline = Pipeline(ops, views=views)
    pipeline.bind((H, W))
    sizes = np.tile([[H, W]], (COUNT, 1))
    params = pipeline.draw(FakeDraws(range(COUNT)), sizes, np.tile([source], (COUNT, 1)))
    return pipeline, params, sizes


def everywhere(boxes):
    """Return every box in every image, and the number of its image."""
    return np.tile(boxes, (COUNT, 1)), np.repeat(np.arange(COUNT), len(boxes))


@pytest.mark.parametrize("source", [(H, W), (H, 3 * W)], ids=["plain", "squeezed"])
@pytest.mark.parametrize("name", LISTS)
def test_boxes_are_where_their_pixels_are(name, source):
    """A filled box as a mask, moved; what is left of it fills the box that is left."""
    pipeline, params, sizes = drawn([*LISTS[name], ALL], source)
    boxes, item = everywhere(BOXES)
    moved, _ = pipeline.move_boxes(params, boxes, item, sizes)
    height, width, _ = pipeline.out_shape
    assert (moved[:, :2] >= 0).all()
    assert (moved[:, 2:] <= (width, height)).all()
    around = "affine" in name  # a turned box becomes the one around it
    compared = 0
    for k, box in enumerate(BOXES.astype(int)):
        mask = np.zeros((H, W, 1), np.uint8)
        mask[box[1] : box[3], box[0] : box[2]] = 1
        out = np.zeros((COUNT, height, width, 1), np.uint8)
        pipeline.run_mask(params, 0, [mask] * COUNT, out)
        for i in range(COUNT):
            left, top, right, bottom = moved[i * len(BOXES) + k]
            rows, columns = np.nonzero(out[i, ..., 0])
            if not len(rows):
                assert around or min(right - left, bottom - top) < 1.5
                continue
            found = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            off = found - (left, top, right, bottom)
            if around:
                assert (off[:2] > -1.5).all()
                assert (off[2:] < 1.5).all()
                continue
            scale = max(height, width) / 8  # one pixel of a small crop is many of the output
            assert np.abs(off).max() <= max(1.5, scale if "crop" in name else 1.5)
            compared += np.abs(off).max() <= 1.6
    assert around or compared > 0.7 * COUNT


@pytest.mark.parametrize("name", LISTS)
def test_keypoints_are_where_their_pixels_are(name):
    pipeline, params, sizes = drawn(LISTS[name])
    spots = np.array([[30, 30], [90, 60], [64, 48]])
    around = np.array([[0.5, 0.5], [-2, -2], [3, -2], [-2, 3], [3, 3]])
    seen = 0
    for x, y in spots:  # a white spot's middle, and its corners
        points = np.concatenate([around + np.array([x, y]), np.full((5, 1), 2)], axis=1)[None]
        moved = pipeline.move_keypoints(params, points.repeat(COUNT, 0), np.arange(COUNT), sizes)
        mask = np.zeros((H, W, 1), np.uint8)
        mask[y - 2 : y + 3, x - 2 : x + 3] = 1
        height, width, _ = pipeline.out_shape
        out = np.zeros((COUNT, height, width, 1), np.uint8)
        pipeline.run_mask(params, 0, [mask] * COUNT, out)
        for found, image in zip(moved, out[..., 0], strict=True):
            if not found[0, 2]:
                assert not found[0].any()
            elif found[:, 2].all():  # no part of the spot was cut off
                rows, columns = np.nonzero(image)
                middle = columns.mean() + 0.5, rows.mean() + 0.5
                np.testing.assert_allclose(found[0, :2], middle, atol=1.5)  # nearest, twice
                seen += 1
    assert seen > COUNT / 2


def test_mirrored_keypoints_change_places():
    pipeline, params, sizes = drawn([RandomHorizontalFlip(1.0)])
    points = np.array([[[10, 5, 2], [20, 6, 1], [30, 7, 0]]], float).repeat(COUNT, 0)
    moved = pipeline.move_keypoints(params, points, np.arange(COUNT), sizes, swap=(1, 0, 2))
    assert moved[0].tolist() == [[W - 20, 6, 1], [W - 10, 5, 2], [0, 0, 0]]
    both = [RandomHorizontalFlip(1.0), RandomVerticalFlip(1.0)]
    pipeline, params, sizes = drawn(both)  # turned half round, not mirrored
    moved = pipeline.move_keypoints(params, points, np.arange(COUNT), sizes, swap=(1, 0, 2))
    assert moved[0, 0].tolist() == [W - 10, H - 5, 2]


def test_views_are_moved_each_by_its_own_crop():
    pipeline, params, sizes = drawn([RandomResizedCrop(64), ALL], views=2)
    boxes, item = everywhere(BOXES)
    first, _ = pipeline.move_boxes(params, boxes, item, sizes, view=0)
    second, _ = pipeline.move_boxes(params, boxes, item, sizes, view=1)
    assert not np.allclose(first, second)


def test_what_is_too_small_is_left_out():
    crop = [CenterCrop((48, 64))]  # of rows 24 to 72, columns 32 to 96
    boxes = np.array([[40, 30, 60, 50], [0, 30, 42, 50], [0, 30, 32.5, 50], [0, 0, 10, 10]])
    item = np.zeros(4, int)

    def left(*ops):
        pipeline, params, sizes = drawn([*crop, *ops])
        return pipeline.move_boxes(params, boxes, item, sizes)

    moved, kept = left()
    assert moved[:2].tolist() == [[8, 6, 28, 26], [0, 6, 10, 26]]
    assert kept.tolist() == [True, True, False, False]
    assert left(SanitizeBoundingBoxes(min_visibility=0.5))[1].tolist() == [True, *[False] * 3]
    assert left(SanitizeBoundingBoxes(min_area=300))[1].tolist() == [True, *[False] * 3]
    assert left(SanitizeBoundingBoxes(min_size=0.25, min_area=0))[1].tolist() == [
        *[True] * 3,
        False,
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_size": -1}, "SanitizeBoundingBoxes: min_size=-1 must be a number from 0 to inf"),
        ({"min_visibility": 1.5}, "min_visibility=1.5 must be a number from 0 to 1"),
        ({"min_area": "x"}, "min_area='x' must be a number"),
    ],
)
def test_bad_limits_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        SanitizeBoundingBoxes(**options)


@dataclass(frozen=True)
class Turned(ImageOp):
    """An op of a user's own that moves masks and says where boxes go."""

    def mask(self, rows):
        return lambda i, src, out: src

    def moves(self, rows, size):
        return RandomAffine(0).moves(np.tile([1.0, 0, -5, 0, 1, 0], (len(rows), 1)), size)


def test_an_op_of_ones_own_says_where_boxes_go():
    pipeline, params, sizes = drawn([Turned(), ALL])
    boxes, item = everywhere(BOXES)
    moved, _ = pipeline.move_boxes(params, boxes, item, sizes)
    np.testing.assert_allclose(moved[0], BOXES[0] + [5, 0, 5, 0])
    pipeline.plan.check_moves("boxes")


def test_boxes_as_torchvision_moves_them():
    """The same parameters, drawn by torchvision's rules: its own functions on its own boxes."""
    v2 = pytest.importorskip("torchvision.transforms.v2.functional")
    tv_tensors = pytest.importorskip("torchvision.tv_tensors")
    pipeline, params, sizes = drawn([RandomResizedCrop(64), RandomHorizontalFlip(), ALL])
    boxes, item = everywhere(BOXES)
    moved, _ = pipeline.move_boxes(params, boxes, item, sizes)
    theirs = tv_tensors.BoundingBoxes(torch.tensor(BOXES), format="XYXY", canvas_size=(H, W))
    for k in range(COUNT):
        y, x, h, w, *_, flip, _ = params.views[0][0][k].tolist()
        made = v2.clamp_bounding_boxes(v2.resized_crop(theirs, y, x, h, w, [64, 64]))
        made = v2.horizontal_flip(made) if flip else made
        ours = moved[k * len(BOXES) : (k + 1) * len(BOXES)]
        there = (made[:, 2:] > made[:, :2]).all(dim=1).numpy()
        np.testing.assert_allclose(ours[there], made.numpy()[there], atol=1e-4)
        assert (np.prod(ours[~there, 2:] - ours[~there, :2], axis=1) == 0).all()


def test_turned_boxes_as_torchvision_turns_them():
    v2 = pytest.importorskip("torchvision.transforms.v2.functional")
    tv_tensors = pytest.importorskip("torchvision.tv_tensors")
    op = RandomAffine(30, scale=(0.7, 1.3))
    pipeline, params, sizes = drawn([op, ALL])
    boxes, item = everywhere(BOXES)
    moved, _ = pipeline.move_boxes(params, boxes, item, sizes)
    u = FakeDraws(range(COUNT)).uniform(0, op.uniforms)
    low, high = op.ranges.T
    drawn_values = low + (high - low) * u
    theirs = tv_tensors.BoundingBoxes(torch.tensor(BOXES), format="XYXY", canvas_size=(H, W))
    for k in range(COUNT):
        angle, scale = drawn_values[k, 0], drawn_values[k, 3]
        made = v2.affine(theirs, angle=angle, translate=[0, 0], scale=scale, shear=[0.0, 0.0])
        ours = moved[k * len(BOXES) : (k + 1) * len(BOXES)]
        np.testing.assert_allclose(ours, v2.clamp_bounding_boxes(made).numpy(), atol=0.02)
