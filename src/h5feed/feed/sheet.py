"""A contact sheet: a look at what a packed file really holds."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.printable import printable

__all__ = ["contact_sheet"]

_MARGIN, _CAPTION, _FONT = 6, 16, 12  # pixels
_PAPER, _INK = (255, 255, 255), (40, 40, 40)
# Mask overlay: well-told-apart colors, repeated; class 0 is left clear as the usual background.
_COLORS = np.array(
    [(230, 25, 75), (60, 180, 75), (0, 130, 200), (245, 130, 48), (145, 30, 180), (70, 240, 240)]
)


@dataclass(frozen=True, slots=True)
class _Cell:
    picture: Image.Image
    caption: str


def contact_sheet(
    path: str | os.PathLike[str], *, pictures: int = 48, height: int = 128, width: int = 1200
) -> Image.Image:
    """Draw a sample of a packed file, with class names, in the pictures' true proportions.

    At most `pictures` of them, taken evenly from all classes in turn; each `height` pixels high,
    flowing in rows of `width` pixels. Masks are laid over their pictures.

    Raises UsageError where one of the numbers is less than 1, or `width` holds no picture.
    """
    for name, given, least in (
        ("pictures", pictures, 1),
        ("height", height, 1),
        ("width", width, 2 * _MARGIN + 1),
    ):
        if given < least:
            raise UsageError(f"{name}={given} is too small: give {least} or more")
    ds = H5Dataset(path, output="pil", aspect="source")
    cells = [_cell(ds, index, height, width) for index in _choose(ds, pictures)]
    rows = _rows(cells, width)
    step = height + _CAPTION + _MARGIN
    sheet = Image.new("RGB", (width, len(rows) * step + _MARGIN), _PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_FONT)
    for number, row in enumerate(rows):
        left, top = _MARGIN, _MARGIN + number * step
        for cell in row:
            sheet.paste(cell.picture, (left, top))
            caption = _shortened(printable(cell.caption), draw, font, cell.picture.width)
            draw.text((left, top + height), caption, fill=_INK, font=font)
            left += cell.picture.width + _MARGIN
    return sheet


def _choose(ds: H5Dataset, pictures: int) -> list[int]:
    """Pick items evenly from every class, in class order."""
    labels = ds.pixels.labels
    if labels.ndim == 2 or len(np.unique(labels)) < 2:
        return _evenly(np.arange(len(ds)), pictures)
    kinds = np.unique(labels)
    kinds = kinds[_evenly(np.arange(len(kinds)), pictures)]
    each = [pictures // len(kinds) + (i < pictures % len(kinds)) for i in range(len(kinds))]
    groups = (np.flatnonzero(labels == kind) for kind in kinds)
    return [i for group, n in zip(groups, each, strict=True) for i in _evenly(group, n)]


def _evenly(items: Any, count: int) -> list[int]:
    places = np.linspace(0, len(items) - 1, min(count, len(items))).astype(np.int64)
    chosen: list[int] = items[places].tolist()
    return chosen


def _cell(ds: H5Dataset, index: int, height: int, width: int) -> _Cell:
    picture, target = ds[index]
    if isinstance(target, Image.Image):
        picture, caption = _overlaid(picture, target), Path(ds.pixels.key(index)).name
    elif isinstance(target, int):
        caption = ds.classes[target] if 0 <= target < len(ds.classes) else f"label {target}"
    else:
        caption = ", ".join(f"{value:g}" for value in target.tolist())
    fitted = min(round(picture.width * height / picture.height), width - 2 * _MARGIN)
    return _Cell(picture.resize((max(1, fitted), height), Image.Resampling.LANCZOS), caption)


def _overlaid(picture: Image.Image, mask: Image.Image) -> Image.Image:
    classes, pixels = np.asarray(mask), np.asarray(picture)
    tint = _COLORS[(classes.astype(np.int64) - 1) % len(_COLORS)]
    mixed = np.where(classes[..., None] > 0, (pixels + tint) // 2, pixels)
    return Image.fromarray(mixed.astype(np.uint8))


def _rows(cells: list[_Cell], width: int) -> list[list[_Cell]]:
    rows: list[list[_Cell]] = [[]]
    used = _MARGIN
    for cell in cells:
        need = cell.picture.width + _MARGIN
        if rows[-1] and used + need > width:
            rows.append([])
            used = _MARGIN
        rows[-1].append(cell)
        used += need
    return rows


def _shortened(text: str, draw: ImageDraw.ImageDraw, font: Any, width: int) -> str:
    if draw.textlength(text, font) <= width:
        return text
    while text and draw.textlength(text + "…", font) > width:
        text = text[:-1]
    return text + "…"
