"""Annotation files of object detection: COCO's JSON (instances, keypoints) and Pascal VOC's XML."""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from h5feed.errors import PackError, UsageError
from h5feed.optional import require
from h5feed.packing.decode import TOO_LARGE, DecodeError
from h5feed.packing.items import EXTENSIONS, Table
from h5feed.store.fields import FieldType, FieldValues
from h5feed.text import counted

__all__ = [
    "Layout",
    "coco_outlines",
    "count_others",
    "draw_mask",
    "find_layout",
    "read_annotations",
]

_CROWD = 255  # of a mask: what losses ignore
_SIDES = (("left", "right"), ("right", "left"))
_VOC_SIDES = ("xmin", "ymin", "xmax", "ymax")


class Layout(NamedTuple):
    """Where a dataset of detection, unpacked as it is published, has what."""

    images: Path
    annotations: Path
    listed: Path | None = None
    """VOC's list of the images of a split; None for all."""


def find_layout(src: Path) -> Layout | None:
    """Return what lies where, if SRC is a folder or a list of COCO's or Pascal VOC's.

    COCO: train2017/ with annotations/instances_train2017.json beside it, or a folder that holds
    _annotations.coco.json. VOC: a folder with JPEGImages/ and Annotations/, alone or in
    VOCdevkit/; or one of its lists, such as VOC2012/ImageSets/Main/train.txt. Raises UsageError
    with the commands to type where there are several of them.
    """
    if src.suffix == ".txt" and src.parent.parent.name == "ImageSets" and src.is_file():
        found = src.parents[2]
        return Layout(found / "JPEGImages", found / "Annotations", src)
    if (src / "VOCdevkit").is_dir():
        return find_layout(src / "VOCdevkit")
    if all((src / name).is_dir() for name in ("JPEGImages", "Annotations")):
        return Layout(src / "JPEGImages", src / "Annotations")
    for path in (
        src / "_annotations.coco.json",
        src.parent / "annotations" / f"instances_{src.name}.json",
    ):
        if path.is_file():
            return Layout(src, path)
    years = [src / f"VOC{year}" for year in range(2005, 2013)]
    years = [path for path in years if (path / "JPEGImages").is_dir()]
    if len(years) == 1:
        return find_layout(years[0])
    named = sorted((src / "annotations").glob("instances_*.json"))
    splits = [src / path.stem.removeprefix("instances_") for path in named]
    if several := years or [path for path in splits if path.is_dir()]:
        commands = [
            f"  pack-h5 {shlex.quote(str(each))} {shlex.quote(each.name + '.h5')}"
            for each in several
        ]
        names = ", ".join(each.name for each in several)
        raise UsageError(
            f"SRC {str(src)!r} holds splits ({names}); pack each by itself:",
            details="\n".join(commands),
        )
    return None


def read_annotations(
    path: Path, root: Path, *, listed: Path | None = None, seen: Callable[[], None]
) -> Table:
    """Read COCO's JSON file, or a folder of VOC's XML files, about the images below `root`.

    Fields: `boxes` (float32 (n, 4), left, top, right, bottom in the source's pixels) and, row by
    row beside them, `box_labels` (int64, numbers in `classes`); from COCO also `iscrowd`, `area`
    (square pixels of the source), `keypoints` where there are any, and `image_id`; from VOC also
    `difficult`. Images come in the order of their ids, as torchvision's CocoDetection has them, or
    of their XML files' names; images without boxes are kept. `listed` is a file of names to which
    VOC's are confined. `seen` is called for each.

    Raises UsageError naming file and entry, and PackError where it cannot be read.
    """
    if not path.exists():
        raise UsageError(
            f"annotations {str(path)!r} does not exist: give COCO's JSON file or a "
            "folder of VOC's XML files"
        )
    try:
        if path.is_dir():
            return _read_voc(path, root, listed, seen)
        return _read_coco(path, root, seen)
    except OSError as ex:
        raise PackError(f"cannot read the annotations {ex.filename!r}: {ex.strerror}") from ex


def _read_coco(path: Path, root: Path, seen: Callable[[], None]) -> Table:
    found = _json(path)
    categories, images = (_listed(path, found, name) for name in ("categories", "images"))
    made = _Boxes(path, root, tuple(str(c.get("name", c["id"])) for c in categories))
    _refuse_twins(path, "category name", made.classes)
    of_image = _grouped(made, found, {c["id"] for c in categories}, {i["id"] for i in images})
    numbers = {category["id"]: k for k, category in enumerate(categories)}
    count, swap = _joints(path, categories)
    crowds, areas, points = [], [], []
    for image in images:
        made.add_image(image.get("file_name"), f"image {image['id']}")
        for entry in of_image[image["id"]]:
            what = f"annotation {entry.get('id')!r}"
            left, top, width, height = made.numbers(what, "bbox", entry.get("bbox"), 4)
            box = (left, top, left + width, top + height)
            if made.add_box(box, numbers[entry["category_id"]]):
                crowds.append(bool(entry.get("iscrowd")))
                areas += made.numbers(what, "area", [entry.get("area", width * height)], 1)
                joints = entry.get("keypoints") or [0] * 3 * count
                points.append(made.numbers(what, "keypoints", joints, 3 * count) if count else [])
        seen()
    fields = {
        "image_id": FieldValues.of_fixed([image["id"] for image in images], "int64"),
        "iscrowd": made.beside(crowds, "uint8"),
        "area": made.beside(areas, "float32"),
    }
    if count:
        kind = FieldType(
            kind="keypoints", dtype="float32", shape=(count, 3), rows_of="boxes", swap=swap
        )
        fields["keypoints"] = made.values(points, kind)
    return made.table(fields)


def coco_outlines(path: Path) -> FieldValues:
    """Return what `draw_mask` draws of each image in COCO's JSON file, in the order of their ids.

    Raises UsageError where there is nothing to draw, or more classes than a mask can hold.
    """
    found = _json(path)
    categories, images = (_listed(path, found, name) for name in ("categories", "images"))
    if len(categories) >= _CROWD:
        raise UsageError(f"{path}: {len(categories)} categories, and a mask holds {_CROWD - 1}")
    numbers = {category["id"]: k for k, category in enumerate(categories, 1)}
    parts: dict[int, list[tuple[bool, float, int, Any]]] = {image["id"]: [] for image in images}
    for entry in _objects_of(path, found, "annotations"):
        outline, number = entry.get("segmentation"), numbers.get(entry.get("category_id"), 0)
        if outline and number and entry.get("image_id") in parts:
            area = entry.get("area", 0)
            area = float(area) if isinstance(area, int | float) else 0.0
            parts[entry["image_id"]].append((bool(entry.get("iscrowd")), area, number, outline))
    if not any(parts.values()):
        raise UsageError(f"annotation_masks: no annotation in {path} has a segmentation")
    for each in parts.values():  # what is small lies on what is large, and all on crowds
        each.sort(key=lambda part: (not part[0], -part[1]))
    values = [
        [image.get("height"), image.get("width"), [(p[2], p[0], p[3]) for p in parts[image["id"]]]]
        for image in images
    ]
    return FieldValues.of_json(values)


def draw_mask(outlines: memoryview, *, max_pixels: int) -> npt.NDArray[np.uint8]:
    """Draw one image's mask: 0, or the number of its class and 1; 255 for crowds, uint8 (H, W).

    Raises DecodeError for outlines that make no sense.
    """
    coco = require("pycocotools.mask", "coco")
    height, width, parts = json.loads(bytes(outlines))
    if not (isinstance(height, int) and isinstance(width, int) and height > 0 < width):
        raise DecodeError("no size in the annotations", f"{height}x{width}")
    if height * width > max_pixels:
        raise DecodeError(TOO_LARGE, f"{height}x{width} in the annotations")
    mask = np.zeros((height, width), np.uint8)
    for number, is_crowd, outline in parts:
        try:
            is_rle = isinstance(outline, dict) and {"size", "counts"} <= outline.keys()
            if not (is_rle or isinstance(outline, list)):
                raise ValueError("neither polygons nor an RLE of size and counts")
            if is_rle and outline["size"] != [height, width]:
                raise ValueError(f"size {outline['size']}")
            drawn = outline
            if isinstance(outline, list):
                drawn = coco.merge(coco.frPyObjects(outline, height, width))
            elif isinstance(outline["counts"], list):
                if sum(outline["counts"]) != height * width:
                    raise ValueError(f"counts of {sum(outline['counts'])} pixels")
                drawn = coco.frPyObjects(outline, height, width)
            mask[coco.decode(drawn) != 0] = _CROWD if is_crowd else number
        except Exception as ex:  # pycocotools raises plain ones
            raise DecodeError("segmentation that is none", str(ex)) from ex
    return mask


def _grouped(
    made: "_Boxes", found: Mapping[str, Any], categories: set[int], images: set[int]
) -> dict[int, list[Mapping[str, Any]]]:
    """Return the annotations of each image, all of them of known images and categories."""
    groups: dict[int, list[Mapping[str, Any]]] = {image: [] for image in images}
    for entry in _objects_of(made.source, found, "annotations"):
        for name, known in (("image", images), ("category", categories)):
            if entry.get(f"{name}_id") not in known:
                what = f"there is no {name} {entry.get(f'{name}_id')!r}"
                raise made.error(f"annotation {entry.get('id')!r}", what)
        groups[entry["image_id"]].append(entry)
    return groups


def _read_voc(path: Path, root: Path, listed: Path | None, seen: Callable[[], None]) -> Table:
    files = {file: _xml(file) for file in sorted(path.glob("*.xml"))}
    if not files:
        raise UsageError(f"annotations {str(path)!r} holds no .xml files of Pascal VOC")
    # Classes are those of all files: the lists of a dataset number them alike.
    names = {_text(f, entry, "name") for f, tree in files.items() for entry in tree.iter("object")}
    made, difficult = _Boxes(path, root, tuple(sorted(names))), []
    if listed is not None:
        files = _listed_files(path, listed, files)
    for made.source, tree in files.items():
        made.add_image(_text(made.source, tree, "filename"), "filename")
        for k, entry in enumerate(tree.iter("object"), 1):
            sides = [_text(made.source, entry, f"bndbox/{side}") for side in _VOC_SIDES]
            left, top, right, bottom = made.numbers(f"object {k}", "bndbox", sides, 4)
            label = made.classes.index(_text(made.source, entry, "name"))
            # VOC counts pixels from 1, and both ends of a box belong to it.
            if made.add_box((left - 1, top - 1, right, bottom), label):
                difficult.append(entry.findtext("difficult", "0").strip() == "1")
        seen()
    return made.table({"difficult": made.beside(difficult, "uint8")}, whole=listed is None)


def _listed_files(path: Path, listed: Path, files: Mapping[Path, Any]) -> dict[Path, Any]:
    """Return the files of the images that a list names, in its order."""
    found = {}
    for number, line in enumerate(listed.read_text().splitlines(), 1):
        if not line.strip():
            continue
        file = path / f"{line.split()[0]}.xml"
        if file not in files:
            raise UsageError(f"{listed}, line {number}: there is no annotation {str(file)!r}")
        if file in found:
            raise UsageError(f"{listed}, line {number}: {line.split()[0]!r} appears twice")
        found[file] = files[file]
    if not found:
        raise UsageError(f"{listed} lists no images")
    return found


@dataclass(slots=True)
class _Boxes:
    """Images and their boxes as they are read."""

    source: Path
    """The file that is read."""
    root: Path
    classes: tuple[str, ...]
    keys: list[bytes] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    boxes: list[Sequence[float]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    without_area: int = 0

    def error(self, entry: str, what: str) -> UsageError:
        return UsageError(f"{self.source}, {entry}: {what}")

    def add_image(self, name: Any, entry: str) -> None:
        if not isinstance(name, str) or not name:
            raise self.error(entry, f"{name!r} is not a file name")
        full = os.path.normpath(os.path.join(self.root, name))
        plain = os.path.relpath(full, self.root).replace(os.sep, "/")
        if plain.startswith("../"):
            raise self.error(entry, f"{name!r} lies outside SRC {str(self.root)!r}")
        if not os.path.isfile(full):
            raise self.error(entry, f"there is no file {name!r} in {str(self.root)!r}")
        self.keys.append(os.fsencode(plain))
        self.counts.append(0)

    def numbers(self, entry: str, name: str, values: Any, count: int) -> list[float]:
        """Return so many finite numbers."""
        try:
            found = [float(value) for value in values]
        except (TypeError, ValueError):
            found = []
        if len(found) != count or not np.isfinite(found).all():
            raise self.error(entry, f"{name} is not {count} numbers: {str(values)[:100]}")
        return found

    def add_box(self, box: Sequence[float], label: int) -> bool:
        """Take a box of the last image; False for one that has no area."""
        if box[2] <= box[0] or box[3] <= box[1]:
            self.without_area += 1
            return False
        self.boxes.append(box)
        self.labels.append(label)
        self.counts[-1] += 1
        return True

    def beside(self, rows: Sequence[float], dtype: str) -> FieldValues:
        """Return numbers, one for each box."""
        return self.values(rows, FieldType(kind="array", dtype=dtype, rows_of="boxes"))

    def values(self, rows: Sequence[Any], kind: FieldType) -> FieldValues:
        data = np.array(rows, kind.dtype).reshape(-1, *kind.shape)
        offsets = np.cumsum([0, *self.counts], dtype=np.int64) * kind.row_bytes
        return FieldValues.of_bytes(kind, data.tobytes(), offsets)

    def table(self, fields: Mapping[str, FieldValues], *, whole: bool = True) -> Table:
        """Return all as columns; `whole` says that no image below the root should be missing."""
        boxes = FieldType(kind="boxes", dtype="float32", shape=(4,))
        notes = []
        if self.without_area:
            said = counted(self.without_area, "box", "boxes")
            notes.append(f"left out, without area: {said}")
        if whole and (missing := count_others(self.root, self.keys)):
            said = counted(missing, "image")
            notes.append(f"left out, in SRC and not in the annotations: {said}")
        return Table(
            classes=self.classes,
            labels=np.full(len(self.keys), -1, np.int64),
            key_bytes=np.frombuffer(b"".join(self.keys), np.uint8),
            key_offsets=np.cumsum([0, *map(len, self.keys)], dtype=np.int64),
            fields={
                "boxes": self.values(self.boxes, boxes),
                "box_labels": self.beside(self.labels, "int64"),
                **fields,
            },
            notes=tuple(notes),
        )


def count_others(root: Path, keys: Iterable[bytes]) -> int:
    """Return how many images below `root` have a path that is not among `keys`."""
    known, others = set(keys), 0
    for folder, _, names in os.walk(root):
        below = os.path.relpath(folder, root)
        for name in names:
            key = os.fsencode(name if below == "." else f"{below}/{name}".replace(os.sep, "/"))
            others += name.lower().endswith(EXTENSIONS) and key not in known
    return others


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as ex:
        raise UsageError(f"annotations {str(path)!r} is not JSON ({ex})") from ex
    if not isinstance(found, dict):
        raise UsageError(f"annotations {str(path)!r} is not a JSON object, as COCO's files are")
    return found


def _objects_of(path: Path, found: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    entries = found.get(name)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path}: {name} is not a list of objects, as in COCO's JSON")
    return entries


def _listed(path: Path, found: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the categories or images in the order of their ids, of which none appears twice."""
    entries = _objects_of(path, found, name)
    if not entries:
        raise UsageError(f"{path}: {name} is empty")
    for entry in entries:
        number = entry.get("id")
        if not isinstance(number, int) or isinstance(number, bool) or not abs(number) < 1 << 63:
            raise UsageError(f"{path}: {name} have the id {number!r}, which is not a whole number")
    _refuse_twins(path, f"id in {name}", [entry["id"] for entry in entries])
    return sorted(entries, key=lambda entry: entry["id"])


def _refuse_twins(path: Path, what: str, values: Sequence[Any]) -> None:
    known = set()
    for value in values:
        if value in known:
            raise UsageError(f"{path}: {what} {value!r} appears twice")
        known.add(value)


def _joints(path: Path, categories: Iterable[Mapping[str, Any]]) -> tuple[int, tuple[int, ...]]:
    """Return how many keypoints an object has, and what each becomes in a mirrored image."""
    lists = [c["keypoints"] for c in categories if c.get("keypoints")]
    if not lists:
        return 0, ()
    names = [str(name) for name in lists[0]]
    if any(other != lists[0] for other in lists[1:]):
        raise UsageError(f"{path}: categories with different keypoints; pack each by itself")
    swap = []
    for k, name in enumerate(names):
        mirrored = [re.sub(a, b, name, flags=re.I) for a, b in _SIDES if re.search(a, name, re.I)]
        others = [other.lower() for other in names]
        found = [others.index(m.lower()) for m in mirrored if m.lower() in others]
        swap.append(found[0] if found else k)
    return len(names), tuple(swap) if swap != list(range(len(names))) else ()


def _xml(file: Path) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(file.read_bytes())
    except (ElementTree.ParseError, ValueError) as ex:
        raise UsageError(f"{file}: not XML ({ex})") from ex


def _text(file: Path, element: ElementTree.Element, name: str) -> str:
    found = element.findtext(name)
    if found is None:
        raise UsageError(f"{file}: no <{name}> in <{element.tag}>, which Pascal VOC's XML has")
    return found.strip()
