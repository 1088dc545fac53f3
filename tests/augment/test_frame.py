import cv2
import numpy as np
import pytest

from augment.draws import Given
from augment.judge import make_images, run
from h5feed.augment import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip, Resize
from h5feed.augment.frame import COLUMNS, Frame, Shapes


def shapes(stored, source, boxes=None):
    boxes = None if boxes is None else np.array([boxes])
    return Shapes.stored(np.array([stored]), np.array([source]), boxes)


@pytest.mark.parametrize(
    ("stored", "source", "true"),
    [
        ((256, 256), (375, 500), (256, 341)),  # squeezed: as Resize(256) of the source
        ((256, 256), (500, 375), (341, 256)),
        ((256, 256), (80, 80), (256, 256)),
        ((256, 256), (256, 257), (256, 256)),  # within a pixel: exactly itself
        ((256, 341), (375, 500), (256, 341)),  # kept proportions
        ((256, 342), (375, 500), (256, 342)),  # however they were rounded
        ((128, 256), (300, 300), (256, 256)),
        ((32, 32), (32, 32), (32, 32)),
    ],
)
def test_the_true_size_is_the_sources_proportions_at_the_stored_resolution(stored, source, true):
    assert tuple(shapes(stored, source).true[0]) == true


def columns(frame, *names, antialias=False):
    row = frame.finish(antialias)[0].tolist()
    return [row[COLUMNS.index(name)] for name in names]


BOX = ("y", "x", "h", "w")
SIZES = ("rh", "rw", "py", "px", "oh", "ow")


def test_a_crop_of_a_squeezed_image_is_squeezed_alike():
    frame = Frame(shapes((256, 256), (256, 512)))
    frame.crop(np.array([0]), np.array([128]), 256, 256)
    assert columns(frame, *BOX) == [0, 64, 256, 128]
    assert columns(frame, *SIZES) == [256, 256, 0, 0, 256, 256]


def test_a_crop_after_a_resize_is_cut_from_the_whole_resized_image():
    frame = Frame(shapes((256, 256), (256, 256)))
    frame.resize(232, 232)
    frame.crop(np.array([4]), np.array([6]), 224, 224)
    assert columns(frame, *BOX) == [0, 0, 256, 256]
    assert columns(frame, *SIZES) == [232, 232, -4, -6, 224, 224]


def test_a_resize_to_the_same_size_leaves_a_plain_copy():
    frame = Frame(shapes((256, 341), (375, 500)))
    frame.resize(256, 341)
    frame.crop(np.array([16]), np.array([58]), 224, 224)
    assert columns(frame, *BOX) == [16, 58, 224, 224]
    assert columns(frame, *SIZES) == [224, 224, 0, 0, 224, 224]


def test_a_resize_after_a_crop_reads_only_the_crop():
    frame = Frame(shapes((100, 100), (100, 100)))
    frame.crop(np.array([10]), np.array([20]), 40, 50)
    frame.resize(80, 80)
    assert columns(frame, *BOX) == [10, 20, 40, 50]
    assert columns(frame, *SIZES) == [80, 80, 0, 0, 80, 80]


def test_outside_the_image_nothing_is_read():
    frame = Frame(shapes((32, 32), (32, 32)))
    frame.crop(np.array([-4]), np.array([3]), 32, 32)
    assert columns(frame, *BOX) == [0, 3, 28, 29]
    assert columns(frame, *SIZES) == [28, 29, 4, 0, 32, 32]


def test_a_crop_is_drawn_within_the_letterbox():
    frame = Frame(shapes((256, 256), (375, 500), (32, 0, 192, 256)))
    frame.crop(np.array([0]), np.array([10]), 192, 100)
    assert columns(frame, *BOX) == [32, 10, 192, 100]


def test_flips_alone_take_the_image_as_it_is_stored():
    frame = Frame(shapes((256, 256), (375, 500), (32, 0, 192, 250)))
    frame.flip(np.array([True]), False)
    assert columns(frame, *BOX) == [0, 0, 256, 256]
    assert columns(frame, *SIZES, "flip") == [256, 256, 0, 0, 256, 256, 1]
    assert frame.shapes().boxes.tolist() == [[32, 6, 192, 250]]


def test_every_box_has_pixels_however_thin_the_image():
    frame = Frame(shapes((4, 256), (1000, 256)))
    frame.crop(np.array([999]), np.array([0]), 1, 256)
    y, _, h, w = columns(frame, *BOX)
    assert (h, w) == (1, 256)
    assert 0 <= y <= 3


@pytest.mark.parametrize(
    ("antialias", "shrinks"),
    [(True, [1, 1, 1, 0]), ("auto", [1, 1, 0, 0]), (False, [0, 0, 0, 0])],
)
def test_antialiasing_is_asked_for_where_a_crop_shrinks_enough(antialias, shrinks):
    sizes = np.array([[300, 300], [200, 151], [150, 150], [100, 100]])
    frame = Frame(Shapes.whole(sizes))
    frame.resize(100, 100)
    assert frame.finish(antialias)[:, -1].tolist() == shrinks


@pytest.mark.parametrize("u", [0.0, 0.3, 0.999])
def test_a_crop_after_a_flip_is_a_crop_of_the_flipped_image(u):
    image = make_images(3, 40, 50)[2]
    crop = RandomCrop((20, 30))
    at = int(u * 21)
    inside = np.s_[at : at + 20, at : at + 30]
    _, _, out = run([RandomHorizontalFlip(1), crop], [image], Given([[u, u]]))
    assert (out[0] == image[:, ::-1][inside]).all()
    _, _, out = run([RandomVerticalFlip(1), crop], [image], Given([[u, u]]))
    assert (out[0] == image[::-1][inside]).all()


def test_evaluation_of_a_squeezed_image_shows_true_proportions():
    """Resize(256) + CenterCrop(224) of a square file is the central square of the source."""
    source = make_images(3, 375, 500)[2]
    stored = cv2.resize(source, (256, 256), interpolation=cv2.INTER_AREA)
    ops = [Resize(256), CenterCrop(224)]
    _, _, ours = run(ops, [stored], Given([[0]]), source=np.array([[375, 500]]))
    _, _, theirs = run(ops, [source], Given([[0]]), antialias=True)
    off = np.abs(ours.astype(int) - theirs)
    assert off.mean() < 3
    _, _, squeezed = run(ops, [stored], Given([[0]]))
    assert np.abs(squeezed.astype(int) - theirs).mean() > 4 * off.mean()
