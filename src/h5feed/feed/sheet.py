"""A contact sheet: a look at what a packed file really holds."""

import colorsys
import os
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from h5feed.errors import UsageError
from h5feed.feed.fields import FieldColumn, field_value
from h5feed.feed.files import PackedFiles
from h5feed.feed.image import image_reader
from h5feed.jpeg import MAX_PIXELS
from h5feed.text import printable

__all__ = ["class_colors", "contact_sheet", "overlay_mask"]

_MARGIN, _CAPTION, _FONT = 6, 16, 12  # pixels
_PAPER, _INK = (255, 255, 255), (40, 40, 40)
_CLEAR, _VOID = 0, 255
"""Class numbers of masks: usually the background, left clear, and pixels that no class has."""
_OPACITY = 0.35
_FIRST_COLORS = (
    (230, 25, 75), (60, 180, 75), (0, 130, 200), (245, 130, 48), (145, 30, 180), (70, 240, 240),
    (240, 50, 230), (255, 225, 25), (170, 110, 40), (0, 128, 128), (188, 246, 12), (250, 190, 190),
    (128, 0, 0), (0, 0, 128), (128, 128, 0), (220, 190, 255), (170, 255, 195), (255, 215, 180),
)  # fmt: skip
"""Of classes 1 to 18: hues as far apart as can be, those of few classes the farthest."""


@dataclass(frozen=True, slots=True)
class _Cell:
    image: Image.Image
    caption: str
    classes: frozenset[int] = field(default_factory=frozenset)
    """Class numbers in its mask."""


def contact_sheet(
    path: str | os.PathLike[str],
    *,
    images: int = 48,
    height: int = 128,
    width: int = 1200,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Draw a sample of a packed file, with class names, in the images' true proportions.

    At most `images` of them, taken evenly from all classes in turn; each `height` pixels high,
    flowing in rows of `width` pixels. Masks are laid over their images, each class in a color
    of its own, which a legend below names. Boxes and keypoints are drawn in the colors of their
    classes, and a field `caption` stands where the class name would.

    Raises UsageError where one of the numbers is less than 1, or `width` holds no image, and
    H5FormatError where an image is stored at more than `max_pixels` pixels.
    """
    for name, given, least in (
        ("images", images, 1),
        ("height", height, 1),
        ("width", width, 2 * _MARGIN + 1),
    ):
        if given < least:
            raise UsageError(f"{name}={given} is too small: give {least} or more")
    files = PackedFiles([path], max_pixels=max_pixels).reading()
    cells = [_cell(files, index, height, width) for index in _choose(files, images)]
    rows = _rows(cells, width)
    step = height + _CAPTION + _MARGIN
    font = ImageFont.load_default(_FONT)
    legend = _legend(sorted(set().union(*(cell.classes for cell in cells))), width, font)
    end = len(rows) * step + _MARGIN
    sheet = Image.new("RGB", (width, end + legend.height), _PAPER)
    sheet.paste(legend, (0, end))
    draw = ImageDraw.Draw(sheet)
    for number, row in enumerate(rows):
        left, top = _MARGIN, _MARGIN + number * step
        for cell in row:
            sheet.paste(cell.image, (left, top))
            caption = _shortened(printable(cell.caption), draw, font, cell.image.width)
            draw.text((left, top + height), caption, fill=_INK, font=font)
            left += cell.image.width + _MARGIN
    return sheet


def _choose(files: PackedFiles, images: int) -> list[int]:
    """Pick items evenly from every class, in class order."""
    labels = files.labels
    if labels.ndim == 2 or len(np.unique(labels)) < 2:
        return _evenly(np.arange(len(files)), images)
    kinds = np.unique(labels)
    kinds = kinds[_evenly(np.arange(len(kinds)), images)]
    each = [images // len(kinds) + (i < images % len(kinds)) for i in range(len(kinds))]
    groups = (np.flatnonzero(labels == kind) for kind in kinds)
    return [i for group, n in zip(groups, each, strict=True) for i in _evenly(group, n)]


def _evenly(items: Any, count: int) -> list[int]:
    places = np.linspace(0, len(items) - 1, min(count, len(items))).astype(np.int64)
    chosen: list[int] = items[places].tolist()
    return chosen


def _cell(files: PackedFiles, index: int, height: int, width: int) -> _Cell:
    image: Image.Image = _image(files, "images", index)
    fitted = min(round(image.width * height / image.height), width - 2 * _MARGIN)
    size = (max(1, fitted), height)
    zoom = size[0] / image.width, size[1] / image.height
    image = image.resize(size, Image.Resampling.LANCZOS)
    _draw_places(image, files, index, zoom)
    if "masks" in files.specs:
        drawn = _image(files, "masks", index).resize(size, Image.Resampling.NEAREST)
        mask, caption = np.asarray(drawn), Path(files.key(index)).name
        return _Cell(overlay_mask(image, mask), caption, frozenset(np.unique(mask).tolist()))
    target = files.row("labels", index).tolist()
    if "caption" in files.field_types:
        caption = str(FieldColumn(files, "caption").read(index))
    elif target == -1 and files.field_types:
        caption = Path(files.key(index)).name
    elif isinstance(target, int):
        known = 0 <= target < len(files.classes)
        caption = files.classes[target] if known else f"label {target}"
    elif files.classes:
        caption = ", ".join(compress(files.classes, target))
    else:
        caption = ", ".join(f"{value:g}" for value in target)
    return _Cell(image, caption)


def _draw_places(
    image: Image.Image, files: PackedFiles, index: int, zoom: tuple[float, float]
) -> None:
    """Draw an item's boxes, with the names of their classes, and its keypoints into `image`."""
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(_FONT - 2)
    for name, kind in files.field_types.items():
        if kind.kind not in ("boxes", "keypoints"):
            continue
        rows = field_value(files, name, "numpy", "source")(index)
        labels = _labels_beside(files, kind.rows_of or name, index, len(rows))
        for row, label in zip(rows, labels, strict=True):
            color = tuple(class_colors()[label % (_VOID - 1) + 1].tolist())
            if kind.kind == "boxes":
                left, top, right, bottom = (row * (*zoom, *zoom)).tolist()
                draw.rectangle((left, top, right - 1, bottom - 1), outline=color, width=2)
                if label < len(files.classes):
                    text = printable(files.classes[label])
                    draw.rectangle(draw.textbbox((left + 2, top + 1), text, font), fill=color)
                    draw.text((left + 2, top + 1), text, fill=_PAPER, font=font)
                continue
            for x, y, seen in row.tolist():
                x, y = x * zoom[0], y * zoom[1]
                if seen:
                    draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=color)


def _labels_beside(files: PackedFiles, boxes: str, index: int, count: int) -> list[int]:
    """Return the class numbers of an item's boxes: those of the whole numbers beside them."""
    for name, kind in files.field_types.items():
        if kind.rows_of == boxes and (kind.dtype, kind.shape) == ("int64", ()):
            return [max(0, number) for number in FieldColumn(files, name).read(index).tolist()]
    return [0] * count


def _image(files: PackedFiles, field: str, index: int) -> Image.Image:
    image: Image.Image = image_reader(files, field, output="pil", aspect="source")(index)
    return image


def class_colors() -> npt.NDArray[np.uint8]:
    """Return the color of each class number in drawn masks: uint8 (256, 3), no two alike."""
    golden = 0.618034  # steps of the golden ratio never come near a hue that was taken before
    more = [
        colorsys.hsv_to_rgb(k * golden % 1, (0.55, 0.8, 1.0)[k % 3], (0.9, 0.7, 0.5)[k // 3 % 3])
        for k in range(_VOID - 1 - len(_FIRST_COLORS))
    ]
    colors = [_PAPER, *_FIRST_COLORS, *((round(255 * c) for c in rgb) for rgb in more), (0, 0, 0)]
    return np.array([tuple(color) for color in colors], np.uint8)


def overlay_mask(image: Image.Image, mask: npt.NDArray[np.uint8]) -> Image.Image:
    """Lay `mask` (H, W), of class numbers, over an RGB image of its size.

    Classes are thin washes of color with solid outlines, so that the image shows through;
    class 0, usually the background, is left clear.
    """
    pixels, colors = np.asarray(image).astype(np.float32), class_colors()[mask]
    strength = np.where(mask == _CLEAR, 0.0, _OPACITY)
    strength[_outline(mask)] = 1.0
    mixed = pixels + (colors - pixels) * strength[..., None]
    return Image.fromarray(mixed.round().astype(np.uint8))


def _outline(mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Pixels of a class, but not of the clear one, whose right or lower neighbour's differs."""
    edge = np.zeros(mask.shape, np.bool_)
    for here, there in (
        (np.s_[:, :-1], np.s_[:, 1:]),
        (np.s_[:-1], np.s_[1:]),
    ):
        differ = mask[here] != mask[there]
        edge[here] |= differ & (mask[here] != _CLEAR)
        edge[there] |= differ & (mask[here] == _CLEAR)
    return edge


def _legend(classes: list[int], width: int, font: Any) -> Image.Image:
    """Draw a swatch and a name for each class, flowing in rows of `width`; no rows for none."""
    names = {_CLEAR: "class 0 (clear)", _VOID: "class 255 (void)"}
    entries = [(number, names.get(number, f"class {number}")) for number in classes]
    places, left, row = [], _MARGIN, 0
    for _, name in entries:
        need = _FONT + _MARGIN + round(font.getlength(name)) + 2 * _MARGIN
        if left > _MARGIN and left + need > width:
            left, row = _MARGIN, row + 1
        places.append((left, row * (_FONT + _MARGIN)))
        left += need
    height = (row + 1) * (_FONT + _MARGIN) + _MARGIN if entries else 0
    legend = Image.new("RGB", (width, height), _PAPER)
    draw, colors = ImageDraw.Draw(legend), class_colors()
    for (number, name), (left, top) in zip(entries, places, strict=True):
        color = tuple(colors[number].tolist())
        draw.rectangle((left, top, left + _FONT, top + _FONT), fill=color, outline=_INK)
        draw.text((left + _FONT + _MARGIN, top - 1), name, fill=_INK, font=font)
    return legend


def _rows(cells: list[_Cell], width: int) -> list[list[_Cell]]:
    rows: list[list[_Cell]] = [[]]
    used = _MARGIN
    for cell in cells:
        need = cell.image.width + _MARGIN
        if rows[-1] and used + need > width:
            rows.append([])
            used = _MARGIN
        rows[-1].append(cell)
        used += need
    return rows


def _shortened(text: str, draw: ImageDraw.ImageDraw, font: Any, width: int) -> str:
    text = text[: width + 1]  # a character takes a pixel or more
    if draw.textlength(text, font) <= width:
        return text
    while text and draw.textlength(text + "…", font) > width:
        text = text[:-1]
    return text + "…"
