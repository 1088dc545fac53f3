import numpy as np
import pytest

from h5feed.packing.run import describe_fit
from packed import image_spec


def said(*shapes):
    return describe_fit([image_spec(size=(8, 8))], np.array(shapes)).partition("; ")[0]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(100, 100), (50, 50), (300, 300)], "stretch: 100x100 (median sides) → 8x8"),
        (
            [(100, 100), (50, 200), (200, 50)],
            "stretch: 100x100 (median sides) → 8x8: proportions of 2 of 3 images change",
        ),
        (
            [(50, 200), (200, 50)],
            "stretch: 125x125 (median sides) → 8x8: proportions change",
        ),
    ],
)
def test_the_summary_says_how_many_images_change_their_proportions(shapes, expected):
    assert said(*shapes) == expected
