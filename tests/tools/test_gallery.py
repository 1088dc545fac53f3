"""gallery.py draws every op and every way of packing that the pages show."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from h5feed import augment

ROOT = Path(__file__).parents[2]
NOT_DRAWN = {
    *("AlternatingFlip", "CenterCrop", "Resize"),  # as other ops, but not at random
    *("CutMix", "MixUp", "MixUpOrCutMix"),  # mix a batch
    *("Normalize", "ToDtype"),  # make floats
    *("Draws", "ImageOp", "Kernel", "Moves", "Op", "Params", "Pipeline"),  # no ops
    *("SanitizeBoundingBoxes", "from_torchvision"),
}


@pytest.fixture(scope="module")
def gallery():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import gallery

        yield gallery
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_every_op_is_drawn(gallery):
    drawn = {type(op).__name__ for ops in gallery.OPS.values() for op in ops}
    assert drawn | NOT_DRAWN == set(augment.__all__)


def test_the_images_of_the_pages_are_those_it_draws(gallery, tmp_path):
    gallery.main(["--into", str(tmp_path)])
    shown = sorted((ROOT / "docs/images").glob("*.jpg"))
    assert [path.name for path in shown] == sorted(path.name for path in tmp_path.iterdir())
    for path in shown:
        with Image.open(path) as there, Image.open(tmp_path / path.name) as now:
            assert there.size == now.size, f"{path.name}: run python tools/gallery.py"
