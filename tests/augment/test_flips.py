import numpy as np
import pytest

from augment.draws import FakeDraws, Given
from augment.judge import make_images, run
from h5feed.augment import Pipeline, RandomHorizontalFlip, RandomResizedCrop, RandomVerticalFlip


@pytest.mark.parametrize(
    ("op", "axis"), [(RandomHorizontalFlip, 1), (RandomVerticalFlip, 0)], ids=["x", "y"]
)
def test_images_whose_draw_lies_below_p_are_mirrored(op, axis):
    images = make_images(4, 20, 30)
    _, _, out = run([op(0.5)], images, Given([[0.0], [0.49], [0.5], [0.99]]))
    assert (out[:2] == np.flip(images[:2], axis + 1)).all()
    assert (out[2:] == images[2:]).all()


def test_two_flips_of_a_kind_undo_each_other():
    images = make_images(4, 20, 30)
    _, _, out = run([RandomHorizontalFlip(1), RandomHorizontalFlip(1)], images, Given([[0]] * 4))
    assert (out == images).all()


def test_a_flip_after_a_resize_mirrors_the_very_pixels():
    images = make_images(4, 40, 50)
    draws = FakeDraws(range(4))
    plain = run([RandomResizedCrop(24)], images, draws)[2]
    turned = run([RandomResizedCrop(24), RandomVerticalFlip(1)], images, draws)[2]
    assert (turned == plain[:, ::-1]).all()


def test_flips_happen_with_probability_p():
    n = 20_000
    pipeline = Pipeline([RandomHorizontalFlip(0.3)])
    pipeline.bind((8, 8))
    size = np.full((n, 2), 8)
    flipped = pipeline.draw(FakeDraws(range(n)), size, size).views[0][0][:, 10]
    # within 4 standard deviations, left once in 16,000 times
    assert flipped.mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.3 * 0.7 / n))
