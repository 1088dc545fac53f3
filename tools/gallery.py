"""Draw the images of docs/: each op on a sample image, and one image under each way of packing.

    python tools/gallery.py [--images data_samples/images] [--into docs/images]

Every column of an op is another epoch of a real H5Loader, every row of packing a real packed file.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from h5feed import H5Dataset, H5Loader, augment, pack
from h5feed.augment import Op

__all__ = ["draw_ops", "draw_packing", "main"]

ROOT = Path(__file__).resolve().parents[1]
PHOTO = "animals/chelsea.jpg"
SIDE, MARGIN, CAPTION, FONT = 160, 6, 200, 15  # pixels
GRAY = (170, 170, 170)
DRAWS = 5
"""Epochs, one a column."""
SEED = 4
"""One whose first coins do not all fall on the same side."""

OPS: Mapping[str, Sequence[Op]] = {
    "geometry": [
        augment.RandomCrop(SIDE, padding=24, padding_mode="reflect"),
        augment.RandomResizedCrop(SIDE),
        augment.RandomHorizontalFlip(),
        augment.RandomVerticalFlip(),
        augment.RandomAffine(degrees=30, translate=(0.1, 0.1), scale=(0.8, 1.2), shear=10),
        augment.RandomRotation(30),
        augment.RandomPerspective(0.5, p=1.0),
        augment.RandomErasing(p=1.0),
    ],
    "color": [
        augment.ColorJitter(0.4, 0.4, 0.4, 0.1),
        augment.Grayscale(num_output_channels=3),
        augment.RandomGrayscale(p=0.5),
        augment.GaussianBlur(9, sigma=(0.5, 4.0)),
        augment.RandomPosterize(2, p=1.0),
        augment.RandomSolarize(128, p=1.0),
        augment.RandomInvert(p=0.5),
        augment.RandomEqualize(p=0.5),
        augment.RandomAutocontrast(p=0.5),
        augment.RandomAdjustSharpness(6, p=0.5),
    ],
    "policies": [
        augment.RandAugment(2, 9, fill=127),
        augment.TrivialAugmentWide(fill=127),
        augment.AutoAugment("imagenet", fill=127),
        augment.AugMix(),
        augment.RandomApply([augment.ColorJitter(0.6, 0.6, 0.6)], p=0.5),
        augment.RandomChoice(
            [augment.Grayscale(3), augment.RandomSolarize(128, p=1.0), augment.GaussianBlur(9, 3)]
        ),
    ],
}
"""By file: the ops that are drawn in it."""

Row = tuple[str, Sequence[Image.Image]]


def draw_ops(photo: Path, ops: Sequence[Op], work: Path) -> Image.Image:
    """Draw one row an op, `DRAWS` epochs of it side by side."""
    folder = work / "one/class"
    folder.mkdir(parents=True)
    shutil.copy(photo, folder)
    pack(work / "one", work / "one.h5", size=str(SIDE), any_size=True, fit="crop", num_workers=0)
    ds = H5Dataset(work / "one.h5")
    rows = []
    for op in ops:
        with H5Loader(ds, 1, augment=[op], num_workers=1, seed=SEED) as loader:
            rows.append((type(op).__name__, [_first(loader) for _ in range(DRAWS)]))
    return _sheet(rows)


def draw_packing(photo: Path, work: Path) -> dict[str, Image.Image]:
    """Draw what each --fit stores of an image, and what each --store keeps of a detail."""
    folder = work / "two/class"
    folder.mkdir(parents=True)
    shutil.copy(photo, folder)
    with Image.open(photo) as source:
        source.load()
    fits: list[Row] = [("the image", [source.convert("RGB")])]
    stores: list[Row] = []
    for fit in ("stretch", "crop", "pad", "keep"):
        path = work / f"{fit}.h5"
        pack(work / "two", path, size="192", any_size=True, fit=fit, background=GRAY, num_workers=0)
        fits.append((f"--fit {fit}", [_stored(path)]))
    for store, quality in (("raw", 90), ("yuv420", 90), ("jpeg", 90), ("jpeg", 50)):
        name = f"--store {store}" + (f" --quality {quality}" if store == "jpeg" else "")
        path = work / f"{store}{quality}.h5"
        pack(work / "two", path, size="256", store=store, quality=quality, num_workers=0)
        image = _stored(path)
        detail = image.crop((96, 64, 160, 128)).resize((SIDE, SIDE), Image.Resampling.NEAREST)
        stores.append((f"{name}\n{H5Dataset(path).files.item_bytes([0])[0]:,} bytes", [detail]))
    return {"fit": _columns(fits), "store": _columns(stores)}


def _first(loader: H5Loader) -> Image.Image:
    [(images, _)] = list(loader)
    return Image.fromarray(np.ascontiguousarray(images[0].permute(1, 2, 0).numpy()))


def _stored(path: Path) -> Image.Image:
    return H5Dataset(path, output="pil", aspect="stored")[0][0]


def _sheet(rows: Sequence[Row]) -> Image.Image:
    """Draw rows of images of one size, each with its caption on the left."""
    step = SIDE + MARGIN
    wide, high = CAPTION + DRAWS * step + MARGIN, len(rows) * step + MARGIN
    sheet = Image.new("RGB", (wide, high), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT)
    for at, (caption, images) in enumerate(rows):
        top = MARGIN + at * step
        pen.text((MARGIN, top + SIDE // 2), caption, "black", font, anchor="lm")
        for column, image in enumerate(images):
            sheet.paste(image, (CAPTION + column * step, top))
    return sheet


def _columns(columns: Sequence[Row]) -> Image.Image:
    """Draw images of any size side by side, each with its caption below."""
    font = ImageFont.load_default(FONT)
    widths = [max(images[0].width, CAPTION) + MARGIN for _, images in columns]
    high = max(images[0].height for _, images in columns)
    sheet = Image.new("RGB", (sum(widths) + MARGIN, high + 4 * FONT + 2 * MARGIN), "white")
    pen, left = ImageDraw.Draw(sheet), MARGIN
    for (caption, [image]), width in zip(columns, widths, strict=True):
        sheet.paste(image, (left, MARGIN + high - image.height))
        pen.multiline_text((left, high + 2 * MARGIN), caption, "black", font)
        left += width
    return sheet


def main(given: Sequence[str] | None = None) -> None:
    """Draw all images into the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, default=ROOT / "data_samples/images")
    parser.add_argument("--into", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args(given)
    photo = options.images / PHOTO
    options.into.mkdir(parents=True, exist_ok=True)
    for name, ops in OPS.items():
        with tempfile.TemporaryDirectory() as work:
            draw_ops(photo, ops, Path(work)).save(options.into / f"{name}.jpg", quality=88)
    with tempfile.TemporaryDirectory() as work:
        for name, sheet in draw_packing(photo, Path(work)).items():
            sheet.save(options.into / f"{name}.jpg", quality=92)


if __name__ == "__main__":
    main()
