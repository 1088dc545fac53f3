"""RandAugment and its kin: torchvision's spaces, policies and changes, both ways, with masks."""

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import assert_close, assert_drawn_alike, make_images, on_device, planar, run
from h5feed import UsageError
from h5feed.augment import (
    AugMix,
    AutoAugment,
    Pipeline,
    RandAugment,
    RandomHorizontalFlip,
    Resize,
    TrivialAugmentWide,
)
from h5feed.augment.frame import Shapes

v2 = pytest.importorskip("torchvision.transforms.v2")

N, H, W = 40, 40, 50
SIGNED = [*("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"), "Brightness", "Color",
          "Contrast", "Sharpness"]  # fmt: skip


class FirstOp(FakeDraws):
    """The same numbers whatever the op's place."""

    def uniform(self, stream, count):
        return super().uniform(1, count)


@pytest.fixture(scope="module")
def images():
    return np.concatenate([make_images(8, H, W, seed) for seed in range(5)])


def chosen(u, count):
    return int(u * count)


def one_of(theirs, space, bins, which, bin_, sign, image, **options):
    """What torchvision makes of an image by the change and magnitude that our uniforms say."""
    name = list(space)[which]
    return by_name(theirs, space, name, bins, bin_, sign, image, **options)


def by_name(theirs, space, name, bins, bin_, sign, image, interpolation, fill):
    magnitudes, signed = space[name]
    assert signed == (name in SIGNED)
    values = magnitudes(bins, *image.shape[-2:])
    value = 0.0 if values is None else float(values[bin_])
    if signed and sign <= 0.5:
        value *= -1
    mode = v2.InterpolationMode(interpolation)
    return theirs._apply_image_or_video_transform(
        image, name, value, interpolation=mode, fill={torch.Tensor: fill}
    )


def rand_augment(op, u, image, **options):
    theirs = v2.RandAugment()
    space = theirs._AUGMENTATION_SPACE
    for which, sign in u.reshape(-1, 2):
        image = one_of(
            theirs, space, op.num_magnitude_bins, chosen(which, len(space)), op.magnitude, sign,
            image, **options
        )  # fmt: skip
    return image


def trivial(op, u, image, **options):
    theirs, bins = v2.TrivialAugmentWide(), op.num_magnitude_bins
    space = theirs._AUGMENTATION_SPACE
    which, bin_ = chosen(u[0], len(space)), chosen(u[1], bins)
    return one_of(theirs, space, bins, which, bin_, u[2], image, **options)


def auto_augment(op, u, image, **options):
    theirs = v2.AutoAugment(v2.AutoAugmentPolicy(op.policy))
    pair = theirs._policies[chosen(u[0], len(theirs._policies))]
    for (name, p, bin_), happens, sign in zip(pair, u[1::2], u[2::2], strict=True):
        if happens < p:
            space = theirs._AUGMENTATION_SPACE
            image = by_name(theirs, space, name, 10, bin_, sign, image, **options)
    return image


def drawn_shares(op, u):
    """What a blend takes of the image and of each chain; another test holds how it is drawn."""
    return op.draw(u, Shapes.whole(np.full((len(u), 2), (H, W))))[0][:, : 1 + op.mixture_width]


def chains(op, u):
    """The uniforms of each chain: one for its depth, three for each change."""
    depth = op.chain_depth if op.chain_depth > 0 else 3
    return u[-op.mixture_width * (1 + 3 * depth) :].reshape(op.mixture_width, -1)


def aug_mix(op, u, image, **options):
    theirs, space = v2.AugMix(), v2.AugMix._AUGMENTATION_SPACE
    if not op.all_ops:
        space = v2.AugMix._PARTIAL_AUGMENTATION_SPACE
    own, *shares = drawn_shares(op, u[None])[0]
    names = [name for name in v2.RandAugment._AUGMENTATION_SPACE if name in space]  # our order
    mixed = image * own
    for chain, share in zip(chains(op, u), shares, strict=True):
        depth = op.chain_depth if op.chain_depth > 0 else 1 + chosen(chain[0], 3)
        made = image
        for which, bin_, sign in chain[1:].reshape(-1, 3)[:depth]:
            name = names[chosen(which, len(names))]
            bin_ = chosen(bin_, op.severity)
            made = by_name(theirs, space, name, 10, bin_, sign, made, **options)
        mixed = mixed + made * share
    return mixed.to(torch.uint8)


def check(op, theirs, images, per_op=True):
    """Ours of the CPU and of the device against torchvision's; one change an image: within 2."""
    draws = FirstOp(range(len(images)))
    pipeline, params, out = run([op], images, draws)
    u = draws.uniform(0, op.uniforms)
    options = {"interpolation": op.interpolation, "fill": None}
    want = [theirs(op, one, planar(im), **options) for one, im in zip(u, images, strict=True)]
    want = np.stack([image.permute(1, 2, 0).numpy() for image in want])
    for made in (out, on_device(pipeline, params, images).numpy()):
        off = np.abs(made.astype(int) - want)
        if per_op and op.interpolation == "bilinear":
            assert_close(made, want)
        else:  # where a position falls between two pixels to the last bit, either is right
            assert (off > 2).mean() < (1e-3 if per_op else 1e-2)
            assert off.mean() < 0.5
    return out


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("magnitude", [0, 9, 30])
def test_each_change_of_randaugment_is_torchvisions(images, interpolation, magnitude):
    check(RandAugment(1, magnitude, interpolation=interpolation), rand_augment, images)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_trivial_augment_is_torchvisions(images, interpolation):
    check(TrivialAugmentWide(interpolation=interpolation), trivial, images)
    check(TrivialAugmentWide(5, interpolation), trivial, images)


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_pairs_of_changes_are_torchvisions(images, policy):
    """A difference of one level after the first change may be more after the second."""
    op = AutoAugment(policy, "bilinear")
    assert AutoAugment(v2.AutoAugmentPolicy(policy), v2.InterpolationMode.BILINEAR) == op
    check(op, auto_augment, images, per_op=False)
    check(RandAugment(2, 9, interpolation="bilinear"), rand_augment, images, per_op=False)


def test_every_pair_of_every_policy_is_torchvisions():
    """Each of the 25, at both signs, by name and number."""
    from h5feed.augment import policies

    for policy in ("imagenet", "cifar10", "svhn"):
        numbers, probabilities, bins = policies._POLICIES[policy]
        ours = [
            tuple((policies._NAMES[n], p, b) for n, p, b in zip(*pair, strict=True))
            for pair in zip(numbers, probabilities, bins, strict=True)
        ]
        theirs = v2.AutoAugment(v2.AutoAugmentPolicy(policy))._policies
        assert ours == [tuple((n, p, b or 0) for n, p, b in pair) for pair in theirs]


@pytest.mark.parametrize(
    "op", [AugMix(), AugMix(10, 2, 1, 0.3), AugMix(5, all_ops=False, interpolation="nearest")],
    ids=str,
)  # fmt: skip
def test_blends_of_chains_are_torchvisions(images, op):
    check(op, aug_mix, images[:32], per_op=False)


@pytest.mark.parametrize("alpha", [0.05, 0.4, 1.0, 7.0])
def test_shares_are_drawn_as_torchvision_draws_them(alpha):
    n, op, theirs = 3000, AugMix(alpha=alpha), v2.AugMix()
    ours = drawn_shares(op, FakeDraws(range(n)).uniform(1, op.uniforms))
    torch.manual_seed(0)
    own = theirs._sample_dirichlet(torch.full((n, 2), alpha))
    rest = theirs._sample_dirichlet(torch.full((n, 3), alpha)) * own[:, 1:]
    np.testing.assert_allclose(ours.sum(axis=1), 1)
    for k, column in enumerate((own[:, 0], *rest.T)):
        # float32 ends before float64 does: compared where a level could show it
        assert_drawn_alike(
            ours[:, k].clip(1e-4, 0.9999), column.double().numpy().clip(1e-4, 0.9999)
        )


def test_all_changes_come_about_equally_often_and_signs_too():
    n = 4000
    pipeline = Pipeline([RandAugment(2, 9)])
    pipeline.bind((H, W))
    size = np.full((n, 2), (H, W))
    rows = pipeline.draw(FakeDraws(range(n)), size, size).views[0][1]
    first, second = rows[:, 0], rows[:, 7]
    shares = np.bincount(first.astype(int), minlength=11) / n * 14
    assert np.allclose(shares[:10], [1, 5, *[1] * 8], atol=0.3)  # still, five warps, the others
    assert shares[10] == 0  # RandAugment does not invert
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.06
    factor = rows[first == 2, 1]
    assert np.allclose(np.unique(factor), [0.73, 1.27])
    assert 0.4 < (factor > 1).mean() < 0.6


@pytest.mark.parametrize("fill", [0, (10, 20, 30)], ids=str)
def test_masks_move_with_their_images(images, fill):
    op = RandAugment(3, 20, fill=fill, mask_fill=255)
    pipeline, params, out = run([op, RandomHorizontalFlip()], images, FakeDraws(range(N)))
    white = np.full((H, W, 1), 200, np.uint8)
    masks = np.zeros((N, H, W, 1), np.uint8)
    pipeline.run_mask(params, 0, [white] * N, masks)
    kinds = params.views[0][1][:, ::7]
    moved = (masks == 255).any(axis=(1, 2, 3))
    assert (moved <= (kinds == 1).any(axis=1)).all()
    assert 0.4 < moved.mean() < 1
    assert set(np.unique(masks)) == {200, 255}
    only = ((kinds == 1) | (kinds == 0)).all(axis=1) & moved
    assert only.sum() > 3
    for image, mask in zip(out[only], masks[only, ..., 0], strict=True):
        assert (image[mask == 255] == fill).all()


def test_a_blend_leaves_masks_and_boxes_where_they_are(images):
    pipeline, params, _ = run([AugMix()], images, FakeDraws(range(N)))
    masks = np.zeros((N, H, W, 1), np.uint8)
    pipeline.run_mask(params, 0, list(images[..., :1]), masks)
    assert (masks == images[..., :1]).all()
    boxes = np.tile([[3.0, 4, 20, 30]], (N, 1))
    moved, _ = pipeline.move_boxes(params, boxes, np.arange(N), np.full((N, 2), (H, W)))
    assert (moved == boxes).all()


def test_shifts_are_shares_of_an_image_in_its_true_proportions():
    """A squeezed image is moved by as much of its width as one that is not."""
    wide = np.zeros((1, 40, 120, 3), np.uint8) + np.arange(120, dtype=np.uint8)[:, None] * 2
    squeezed = wide[:, :, 1::3]
    source = np.array([[40, 120]])
    for index in range(40):
        op = RandAugment(1, 30)
        rows = run([op], wide, FirstOp([index]))[1].views[0][1][0]
        if rows[0] == 1 and rows[1] == rows[5] == 1:
            ours = run([op, Resize((40, 120))], squeezed, FirstOp([index]), source=source)[2]
            want = run([op], wide, FirstOp([index]))[2]
            assert np.abs(ours.astype(int) - want)[:, :, 5:-5].mean() < 6
            assert np.abs(want.astype(int) - wide).mean() > 12
            return
    raise AssertionError("no image was shifted")


def test_no_changes_leave_an_image_as_it_is(images):
    pipeline, params, out = run([RandAugment(0)], images, FakeDraws(range(N)))
    assert (out == images).all()
    assert (on_device(pipeline, params, images).numpy() == images).all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RandAugment(-1), "RandAugment: num_ops=-1 must be a whole number, not below 0"),
        (lambda: RandAugment(2, 31), "magnitude=31 must be a whole number from 0 to 30"),
        (lambda: RandAugment(2, 1, 1), "num_magnitude_bins=1 must be a whole number from 2 on"),
        (lambda: TrivialAugmentWide(0), "TrivialAugmentWide: num_magnitude_bins=0 must be a whol"),
        (lambda: AutoAugment("coco"), "policy='coco' is none of imagenet, cifar10, svhn"),
        (lambda: AutoAugment(fill=-1), "AutoAugment: fill=-1 must be one number or three"),
        (lambda: RandAugment(interpolation="bicubic"), "interpolation='bicubic' must be"),
        (lambda: AugMix(0), "AugMix: severity=0 must be a whole number from 1 to 10"),
        (lambda: AugMix(3, 0), "mixture_width=0 must be at least 1"),
        (lambda: AugMix(chain_depth=1.5), "chain_depth=1.5 must be a whole number"),
        (lambda: AugMix(alpha=0), "alpha=0 must be positive"),
    ],
)
def test_bad_arguments_are_refused(make, said):
    with pytest.raises(UsageError) as caught:
        make()
    assert said in str(caught.value)
