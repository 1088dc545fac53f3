"""The sample images are what their README says they are."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

ROOT = Path(__file__).parents[1] / "data_samples"
IMAGES = sorted(path for path in (ROOT / "images").rglob("*") if path.is_file())
MASKS = sorted((ROOT / "masks").rglob("*.png"))
TURNED = {"animals/osprey.JPG": 6, "buildings/colosseum-1.jpg": 8}
FREE = {"CC0-1.0", "public domain"}


def name_of(path):
    return path.relative_to(ROOT / "images").as_posix()


def orientation(path):
    with Image.open(path) as image:
        return image.getexif().get(0x0112, 1)


def table(heading):
    page = (ROOT / "README.md").read_text("utf-8")
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_there_are_enough_images_in_enough_classes():
    folders = sorted((ROOT / "images").iterdir())
    classes = [folder.name for folder in folders]
    assert classes == [
        "air-and-space",
        "animals",
        "buildings",
        "landscapes",
        "plants",
        "textures",
    ]
    per_class = [sum(p.is_relative_to(folder) for p in IMAGES) for folder in folders]
    assert len(IMAGES) >= 60
    assert min(per_class) >= 8


def test_the_folder_stays_small():
    assert sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file()) < 5_000_000


def test_every_image_decodes_to_something_to_see():
    for path in IMAGES:
        with Image.open(path) as image:
            assert np.asarray(image.convert("RGB")).std() > 8, path


def test_sizes_and_orientations_are_mixed():
    sizes = [Image.open(path).size for path in IMAGES]
    short = sorted(min(size) for size in sizes)
    assert short[0] <= 64
    assert short[-1] >= 480
    assert len(set(short)) >= 20
    portrait = sum(height > width for width, height in sizes)
    landscape = sum(width > height for width, height in sizes)
    assert portrait >= 15
    assert landscape >= 15
    assert any(width == height for width, height in sizes)


def test_formats_and_modes_are_mixed():
    kinds = {(Image.open(p).format, Image.open(p).mode) for p in IMAGES}
    assert kinds == {
        ("JPEG", "RGB"),
        ("JPEG", "L"),
        ("JPEG", "CMYK"),
        ("PNG", "RGB"),
        ("PNG", "L"),
        ("PNG", "P"),
        ("PNG", "RGBA"),
    }
    progressive = {bool(Image.open(p).info.get("progressive")) for p in IMAGES}
    assert progressive == {False, True}
    assert {path.suffix for path in IMAGES} == {".jpg", ".jpeg", ".JPG", ".png"}


@pytest.mark.parametrize(("name", "value"), TURNED.items())
def test_the_two_turned_images_stand_upright_once_exif_is_applied(name, value):
    assert {name_of(p) for p in IMAGES if orientation(p) != 1} == set(TURNED)
    path = ROOT / "images" / name
    assert orientation(path) == value
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image)
        assert image.width > image.height
        assert upright.height > upright.width


def test_the_cut_out_plant_is_partly_transparent():
    alpha = np.asarray(Image.open(ROOT / "images/plants/acanthus.png").getchannel("A"))
    assert 0.1 < (alpha > 127).mean() < 0.9
    assert (alpha == 0).any()


def test_one_name_goes_beyond_ascii_and_one_class_is_nested():
    assert [p.name for p in IMAGES if not p.name.isascii()] == ["Löwenzahn 🌼.jpg"]
    assert any(len(p.relative_to(ROOT / "images").parts) == 3 for p in IMAGES)


def test_each_plant_has_a_mask_of_its_size_with_class_numbers():
    plants = [p for p in IMAGES if p.parent.name == "plants"]
    assert len(plants) >= 8
    expected = sorted((ROOT / "masks/plants" / p.name).with_suffix(".png") for p in plants)
    assert expected == MASKS
    seen = set()
    for path in plants:
        with Image.open((ROOT / "masks/plants" / path.name).with_suffix(".png")) as mask:
            assert mask.size == Image.open(path).size, path
            values = set(np.unique(np.asarray(mask)).tolist())
        assert len(values) > 1, path
        seen |= values
    assert seen == {0, 1, 2, 3}


def test_the_readme_names_every_image_with_a_free_licence_and_a_source():
    listed = {row[0].strip("`"): row for row in table("Images")}
    assert set(listed) == {name_of(p) for p in IMAGES}
    sources = {row[0]: row for row in table("Sources")}
    for name, (_, _, size, source, licence) in listed.items():
        assert size == "×".join(map(str, Image.open(ROOT / "images" / name).size))
        assert licence in FREE
        assert sources[source][3] == licence
        assert sources[source][4], "where the licence is stated"
    assert {row[3] for row in listed.values()} == set(sources)
