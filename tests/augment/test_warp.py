import cv2
import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import (
    assert_close,
    assert_drawn_alike,
    assert_independent,
    make_images,
    on_device,
    planar,
    run,
)
from h5feed import UsageError
from h5feed.augment import Pipeline, RandomAffine, RandomPerspective, RandomRotation, Resize
from h5feed.augment.frame import Shapes

v2 = pytest.importorskip("torchvision.transforms.v2")
functional = pytest.importorskip("torchvision.transforms.v2.functional")

EVERYTHING = {"degrees": 40, "translate": (0.2, 0.1), "scale": (0.6, 1.5), "shear": (-9, 9, -5, 5)}
OPS = [
    {"degrees": 180},
    {"degrees": (30, 30), "center": (5, 31)},
    {"degrees": 0, "translate": (0.3, 0.2)},
    {"degrees": 0, "scale": (0.5, 2)},
    {"degrees": 0, "shear": 20},
    EVERYTHING,
]
N = 10


def parameters(op, draws, hw):
    """What torchvision calls the parameters that our op draws."""
    low, high = op.ranges.T
    drawn = low + (high - low) * draws.uniform(1 << 0, 6)
    for angle, x, y, scale, along, down in drawn.tolist():
        shift = [round(x * hw[1]), round(y * hw[0])]
        yield {"angle": angle, "translate": shift, "scale": scale, "shear": [along, down]}


class FirstOp(FakeDraws):
    """The same numbers whatever the op's place."""

    def uniform(self, stream, count):
        return super().uniform(1, count)


@pytest.mark.parametrize("arguments", OPS, ids=str)
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_warped_is_torchvisions(arguments, interpolation):
    images = make_images(N, 40, 50)
    op = RandomAffine(**arguments, interpolation=interpolation)
    draws = FirstOp(range(N))
    pipeline, params, out = run([op], images, draws)
    mode = functional.InterpolationMode(interpolation)
    want = [
        functional.affine(
            planar(image), **drawn, interpolation=mode, center=arguments.get("center")
        ).permute(1, 2, 0)
        for image, drawn in zip(images, parameters(op, draws, (40, 50)), strict=True)
    ]
    other = on_device(pipeline, params, images).numpy()
    for made in (out, other):
        if interpolation == "bilinear":
            assert_close(made, np.stack(want))
        else:  # where a position falls between two pixels to the last bit, either is right
            assert (made != np.stack(want)).mean() < 1e-3


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_the_fill_shows_outside(interpolation):
    images = make_images(N, 40, 50)
    op = RandomAffine(**EVERYTHING, interpolation=interpolation, fill=(10, 20, 30))
    pipeline, params, out = run([op], images, FakeDraws(range(N)))
    # what lies outside is where a white image turns dark under a black fill
    bare = RandomAffine(**EVERYTHING, interpolation=interpolation)
    white = run([bare], np.full_like(images, 255), FakeDraws(range(N)))[2]
    outside = (white == 0).all(axis=3)
    assert 0.05 < outside.mean() < 0.9
    assert (out[outside] == (10, 20, 30)).all()
    # on the border it is blended in, once (torchvision weighs it twice there)
    inside = run([bare], images, FakeDraws(range(N)))[2]
    blended = inside + (1 - white / 255.0) * (10, 20, 30)
    assert np.abs(out - blended).max() <= 1.1
    if interpolation == "bilinear":
        assert_close(on_device(pipeline, params, images), out)


def test_a_squeezed_image_turns_in_its_true_proportions():
    true = cv2.GaussianBlur(make_images(3, 64, 128)[2], (0, 0), 2)
    squeezed = cv2.resize(true, (64, 64), interpolation=cv2.INTER_AREA)
    op = RandomAffine((30, 30), interpolation="bilinear")
    source = np.array([[64, 128]])
    ours = run([op, Resize((64, 128))], [squeezed], FakeDraws([0]), source=source)[2]
    want = run([op], [true], FakeDraws([0]))[2]
    assert np.abs(ours.astype(int) - want)[:, 8:-8, 16:-16].mean() < 3


def test_parameters_are_drawn_as_torchvision_draws_them():
    n = 3000
    op, theirs = RandomAffine(**EVERYTHING), v2.RandomAffine(**EVERYTHING)
    torch.manual_seed(0)
    image = planar(np.zeros((60, 80, 3), np.uint8))
    made = [theirs.make_params([image]) for _ in range(n)]
    ours = list(parameters(op, FakeDraws(range(n)), (60, 80)))
    for name in ("angle", "scale"):
        assert_drawn_alike([one[name] for one in ours], [one[name] for one in made])
    for name in ("translate", "shear"):
        for k in range(2):
            assert_drawn_alike([one[name][k] for one in ours], [one[name][k] for one in made])
    flat = [[one["angle"], *one["translate"], one["scale"], *one["shear"]] for one in ours]
    assert_independent(*np.transpose(flat))


def test_a_letterbox_turns_as_it_is():
    boxes = np.array([[8, 0, 48, 64]])
    size = np.array([[64, 64]])
    shapes = Shapes.stored(size, np.array([[75, 100]]), boxes)
    op = RandomAffine((30, 30))
    rows, after = op.draw(FakeDraws([0]).uniform(0, 6), shapes)
    plain, _ = op.draw(FakeDraws([0]).uniform(0, 6), Shapes.whole(size))
    assert (rows == plain).all()
    assert after.boxes.tolist() == [[0, 0, 64, 64]]


def test_masks_are_warped_with_their_images_to_the_nearest():
    images = make_images(N, 40, 50)
    op = RandomAffine(**EVERYTHING, interpolation="nearest", fill=9)
    pipeline, params, out = run([op], images, FakeDraws(range(N)))
    masks = np.zeros((N, 40, 50, 1), np.uint8)
    pipeline.run_mask(params, 0, list(images[..., :1] | 1), masks)
    outside = masks == 0
    assert outside.any()
    assert (np.where(outside, 9, masks) == np.where(outside, 9, out[..., :1] | 1)).all()
    assert (out[np.repeat(outside, 3, axis=3)] == 9).all()
    assert Pipeline([op]).bind((40, 50)) == (40, 50)


def stacked(images, change):
    return np.stack([change(k, planar(image)).permute(1, 2, 0) for k, image in enumerate(images)])


def check_warped(pipeline, params, images, out, want, interpolation):
    for made in (out, on_device(pipeline, params, images).numpy()):
        if interpolation == "bilinear":
            assert_close(made, want)
        else:  # as above
            assert (made != want).mean() < 1e-3


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("center", [None, (5, 31)], ids=str)
def test_rotated_is_torchvisions(interpolation, center):
    images = make_images(N, 40, 50)
    op = RandomRotation((-20, 70), interpolation, center=center)
    draws = FirstOp(range(N))
    pipeline, params, out = run([op], images, draws)
    angles = (-20 + 90 * draws.uniform(0, 1)[:, 0]).tolist()
    mode = functional.InterpolationMode(interpolation)
    want = stacked(images, lambda k, t: functional.rotate(t, angles[k], mode, center=center))
    check_warped(pipeline, params, images, out, want, interpolation)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("scale", [0, 0.3, 0.6])
def test_tilted_is_torchvisions(interpolation, scale):
    images = make_images(N, 41, 50)
    op = RandomPerspective(scale, 0.7, interpolation)
    draws = FirstOp(range(N))
    pipeline, params, out = run([op], images, draws)
    u = draws.uniform(0, 9)
    ends = op.corners(u[:, 1:], np.tile([[41, 50]], (N, 1))).tolist()
    starts = [[0, 0], [49, 0], [49, 40], [0, 40]]
    mode = functional.InterpolationMode(interpolation)

    def tilted(k, t):
        return functional.perspective(t, starts, ends[k], mode) if u[k, 0] < 0.7 else t

    want = stacked(images, tilted)
    assert (out == images).all() == (scale == 0)
    check_warped(pipeline, params, images, out, want, interpolation)


def test_corners_are_drawn_as_torchvision_draws_them(monkeypatch):
    n = 2000
    op, theirs = RandomPerspective(0.4), v2.RandomPerspective(0.4)
    kept = []
    monkeypatch.setattr(
        "torchvision.transforms.v2._geometry._get_perspective_coeffs",
        lambda starts, ends: kept.append((starts, ends)),
    )
    torch.manual_seed(0)
    image = planar(np.zeros((60, 81, 3), np.uint8))
    for _ in range(n):
        theirs.make_params([image])
    ours = op.corners(FakeDraws(range(n)).uniform(1, 8), np.tile([[60, 81]], (n, 1)))
    ends = np.array([ends for _, ends in kept])
    assert kept[0][0] == [[0, 0], [80, 0], [80, 59], [0, 59]]
    for corner in range(4):
        for axis in range(2):
            assert_drawn_alike(ours[:, corner, axis], ends[:, corner, axis])
            assert set(ours[:, corner, axis]) == set(ends[:, corner, axis])
    assert_independent(*ours.reshape(n, 8).T)


def test_an_image_tilted_onto_a_line_stays_as_it_is():
    op = RandomPerspective(1, 1)
    onto = np.array([[0, 0.99, 0.99, 0.99, 0.99, 0, 0, 0, 0]])  # both upper corners to the middle
    shapes = Shapes.whole(np.array([[41, 41]]))
    corners = op.corners(onto[:, 1:], shapes.actual)[0].tolist()
    assert corners[0] == corners[1] == [20, 20]
    rows, _ = op.draw(onto, shapes)
    assert (rows == np.eye(3).ravel()).all()


def test_a_squeezed_image_tilts_in_its_true_proportions():
    true = cv2.GaussianBlur(make_images(3, 64, 128)[2], (0, 0), 2)
    squeezed = cv2.resize(true, (64, 64), interpolation=cv2.INTER_AREA)
    op = RandomPerspective(0.4, 1)
    source = np.array([[64, 128]])
    ours = run([op, Resize((64, 128))], [squeezed], FakeDraws([0]), source=source)[2]
    want = run([op], [true], FakeDraws([0]))[2]
    assert np.abs(ours.astype(int) - want)[:, 8:-8, 16:-16].mean() < 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: RandomRotation(9, expand=True),
            "RandomRotation: expand=True makes images of several sizes, which fit no batch: leave",
        ),
        (lambda: RandomRotation(-1), "RandomRotation: degrees=-1 must not be negative"),
        (lambda: RandomPerspective(1.5), "distortion_scale=1.5 must be a number from 0 to 1"),
        (
            lambda: RandomPerspective(interpolation="bicubic"),
            'RandomPerspective: interpolation=\'bicubic\' must be "nearest" or "bilinear"',
        ),
        (lambda: RandomRotation(5, center=(1, 2, 3)), "center=(1, 2, 3) must be a pair (x, y)"),
    ],
)
def test_bad_arguments_are_refused(make, said):
    with pytest.raises(UsageError) as caught:
        make()
    assert said in str(caught.value)
