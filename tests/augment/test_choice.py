"""RandomApply and RandomChoice: some images, or one of several ops, whatever kind they are."""

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import assert_close, make_images, on_device, run
from h5feed import UsageError
from h5feed.augment import (
    CenterCrop,
    ColorJitter,
    CutMix,
    GaussianBlur,
    Grayscale,
    MixUp,
    Pipeline,
    RandAugment,
    RandomAffine,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomHorizontalFlip,
    RandomInvert,
    RandomResizedCrop,
    RandomSolarize,
    RandomVerticalFlip,
    Resize,
    SanitizeBoundingBoxes,
    ToDtype,
)
from h5feed.augment.plan import stream

N, H, W = 48, 30, 40
FLIP, UPSIDE_DOWN, INVERT = RandomHorizontalFlip(1), RandomVerticalFlip(1), RandomInvert(1)


@pytest.fixture(scope="module")
def images():
    return np.concatenate([make_images(8, H, W, seed) for seed in range(6)])


def chosen(position=0, n=N):
    return FakeDraws(range(n)).uniform(stream(position, 0), 1)[:, 0]


def masked(pipeline, params, images):
    height, width, _ = pipeline.out_shape
    masks = np.zeros((len(images), height, width, 1), np.uint8)
    pipeline.run_mask(params, 0, list(images[..., :1]), masks)
    return masks


def test_all_or_none_of_the_ops_are_done(images):
    op = RandomApply([FLIP, INVERT], p=0.3)
    pipeline, params, out = run([op], images, FakeDraws(range(N)))
    done = chosen() < 0.3
    assert 3 < done.sum() < 30
    want = np.where(done[:, None, None, None], 255 - images[:, :, ::-1], images)
    assert (out == want).all()
    assert (on_device(pipeline, params, images).numpy() == want).all()
    flipped = np.where(done[:, None, None, None], images[:, :, ::-1], images)
    assert (masked(pipeline, params, images) == flipped[..., :1]).all()


def test_one_of_the_ops_is_done_by_its_probability(images):
    ops = [FLIP, [UPSIDE_DOWN, INVERT], RandomInvert(0), ()]
    pipeline, params, out = run([RandomChoice(ops, p=[1, 2, 0, 1])], images, FakeDraws(range(N)))
    u = chosen()
    which = np.select([u < 0.25, u < 0.75], [0, 1], 3)
    made = np.stack([images[:, :, ::-1], 255 - images[:, ::-1], images, images])
    want = made[which, np.arange(N)]
    assert len(set(which)) == 3
    assert (out == want).all()
    assert (on_device(pipeline, params, images).numpy() == want).all()
    alike, _, _ = run([RandomChoice(ops[:3])], images, FakeDraws(range(N)))
    rows = alike.draw(FakeDraws(range(3000)), *[np.full((3000, 2), (H, W))] * 2).views[0][1]
    assert np.allclose(np.bincount(rows[:, 0].astype(int)) / 1000, 1, atol=0.1)


KINDS = {
    "jitter and blur": [RandomApply([ColorJitter(0.4, 0.4), GaussianBlur(5)], 0.5)],
    "warp or policy": [RandomChoice([RandomAffine(30, interpolation="bilinear"), RandAugment(2)])],
    "crops": [RandomChoice([RandomCrop(24), RandomResizedCrop(24), [Resize(26), RandomCrop(24)]])],
    "nested": [RandomApply([RandomChoice([FLIP, RandomApply([INVERT, Grayscale(3)])])], 0.8)],
    "in a row": [RandomHorizontalFlip(), RandomApply([FLIP]), RandomCrop(20), RandomApply([FLIP])],
    "then floats": [RandomChoice([GaussianBlur(3), RandAugment(1)]), ToDtype(torch.float32)],
}


@pytest.mark.parametrize("ops", KINDS.values(), ids=KINDS)
def test_the_device_makes_the_same(images, ops):
    pipeline, params, out = run(ops, images, FakeDraws(range(N)))
    other = on_device(pipeline, params, images).numpy()
    off = np.abs(out.astype(float) - other.astype(float))
    assert off.mean() < 0.5
    assert (off > 2).mean() < 1e-3
    assert (off.max() <= 2) or "RandAugment" in repr(ops)


def test_a_choices_ops_draw_each_for_itself():
    ops = [RandomApply([RandomInvert(), RandomInvert()], 1), RandomApply([RandomInvert()], 1)]
    pipeline = Pipeline(ops)
    pipeline.bind((H, W))
    sizes = np.full((500, 2), (H, W))
    rows = pipeline.draw(FakeDraws(range(500)), sizes, sizes).views[0]
    three = np.stack([rows[1][:, 1], rows[1][:, 2], rows[2][:, 1]])
    assert np.abs(np.corrcoef(three) - np.eye(3)).max() < 0.2
    streams = {stream((position + 1) << 48 | number << 32 | k, view)
               for position in range(4) for number in range(3) for k in range(3)
               for view in range(2)}  # fmt: skip
    assert len(streams) == 4 * 3 * 3 * 2


def test_small_images_go_through_it_many_at_a_time(images):
    for ops in ([RandomCrop(24), RandomApply([INVERT])], [RandomApply([FLIP]), RandomCrop(24)]):
        pipeline, params, out = run(ops, images, FakeDraws(range(N)))
        made = np.zeros_like(out)
        pipeline.run_fixed(params, 0, images, np.arange(N), made)
        assert (made == out).all()


def test_boxes_and_keypoints_go_the_way_their_image_went(images):
    crop = RandomChoice([FLIP, [CenterCrop((20, 30)), Resize((30, 40))], ()])
    every = [crop, SanitizeBoundingBoxes(0, 0, 0)]
    pipeline, params, _ = run(every, images, FakeDraws(range(N)))
    which = (chosen() * 3).astype(int)
    sizes = np.full((N, 2), (H, W))
    boxes = np.tile([[1.0, 10, 20, 20]], (N, 1))
    moved, _ = pipeline.move_boxes(params, boxes, np.arange(N), sizes)
    want = np.array([[20, 10, 39, 20], [0, 7.5, 20, 22.5], [1, 10, 20, 20]])
    np.testing.assert_allclose(moved, want[which], atol=1e-9)
    points = np.tile([[[20.0, 10, 2], [2, 10, 1]]], (N, 1, 1))
    found = pipeline.move_keypoints(params, points, np.arange(N), sizes, swap=(1, 0))
    ends = np.array([
        [[38, 10, 1], [20, 10, 2]], [[20, 7.5, 2], [0, 0, 0]], [[20, 10, 2], [2, 10, 1]],
    ])  # fmt: skip
    np.testing.assert_allclose(found, ends[which], atol=1e-9)


def test_letterboxes_of_images_left_alone_stay():
    """A crop after the choice is drawn in the content of those that were not turned."""
    boxes = np.tile([[8, 0, 16, 32]], (N, 1))
    sizes, source = np.full((N, 2), 32), np.tile([[16, 32]], (N, 1))
    images = np.full((N, 32, 32, 3), 9, np.uint8)
    images[:, 8:24] = 200
    ops = [RandomApply([RandomAffine((90, 90), interpolation="bilinear")]), CenterCrop(16)]
    _, _, out = run(ops, images, FakeDraws(range(N)), stored=sizes, source=source, boxes=boxes)
    turned = chosen() < 0.5
    assert (out[~turned] == 200).all()
    assert_close(out[turned], np.full_like(out[turned], 200))
    ops = [RandomApply([RandomAffine((90, 90), interpolation="bilinear")]), Resize((32, 32))]
    _, _, out = run(ops, images, FakeDraws(range(N)), stored=sizes, source=source, boxes=boxes)
    assert (out[~turned] == 200).all()
    assert (out[turned] == 9).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RandomApply([]), "RandomApply: transforms=[] must be a list of ops of h5feed.aug"),
        (lambda: RandomApply(FLIP), "must be a list of ops of h5feed.augment, of one on"),
        (lambda: RandomApply([INVERT], 2), "RandomApply: p=2 must be a probability between 0 and"),
        (
            lambda: RandomChoice([abs]),
            "holds <built-in function abs>, which is not an op that makes",
        ),
        (
            lambda: RandomChoice([Grayscale()]),
            "which is not an op that makes one image of bytes of an",
        ),
        (lambda: RandomChoice([MixUp(), CutMix()]), "mixes whole batches: use MixUpOrCutMix"),
        (lambda: RandomChoice([INVERT], [1, 2]), "RandomChoice: p=[1, 2] must be 1 numbers, none"),
        (lambda: RandomChoice([INVERT, FLIP], [0, 0]), "must be 2 numbers, none below 0, one for"),
    ],
)
def test_bad_arguments_are_refused(make, said):
    with pytest.raises(UsageError) as caught:
        make()
    assert said in str(caught.value)


def test_what_does_not_fit_together_is_refused(images):
    with pytest.raises(UsageError, match="leaves images of several sizes, which make no batch"):
        run([RandomApply([CenterCrop(20)])], images, FakeDraws(range(N)))
    with pytest.raises(UsageError, match=r"works on colors: put it before Grayscale"):
        run([Grayscale(), RandomApply([ColorJitter(0.4)])], images, FakeDraws(range(N)))
    with pytest.raises(UsageError, match=r"works on bytes: put it before ToDtype"):
        run([ToDtype(torch.float32), RandomApply([INVERT])], images, FakeDraws(range(N)))
    ops = RandomApply([INVERT]), RandomApply((INVERT,))
    assert len({*ops, RandomChoice([RandomSolarize(9), INVERT], [1, 2])}) == 2
