"""What is believed of an HDF5 file: plain, fixed-size data inside this very file.

It accepts what h5feed writes and nothing else: a file is data, never code, and no address in it is
believed before it has been checked against the file's size.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5feed.errors import H5FormatError
from h5feed.store.fields import FIELDS, FieldExtent, FieldType, is_field_name
from h5feed.store.layout import (
    FORMAT,
    FORMAT_VERSION,
    IMAGES,
    MASKS,
    MAX_ITEM_PIXELS,
    MAX_PROVENANCE,
    MAX_SIDE,
    MAX_SOURCE_SIDE,
    SEGMENTS,
    Columns,
    Extent,
    FieldSpec,
    FileIndex,
    Int32,
    Int64,
    SegmentsExtent,
    fingerprint,
    images_spec,
    masks_spec,
    segment_offsets,
)
from h5feed.text import printable

__all__ = [
    "PACK_AGAIN",
    "Gate",
    "check_further",
    "check_head",
    "check_items",
    "check_offsets",
    "check_spec",
    "read_json",
    "validated_index",
]

PACK_AGAIN = "pack the images again with pack-h5"
_MEMBERS = {
    IMAGES, MASKS, FIELDS, "labels", "classes", "keys", "source_shapes", "crc32", "letterbox",
    "positions",
}  # fmt: skip
_USER = "user"  # what lies below it is the user's own, and never opened
_SPEC_TEXTS = ("encoding", "color_space", "layout", "fit", "interpolation")
_FIELD_TEXTS = ("kind", "dtype", "shape", "rows_of", "swap")
_SPEC_NUMBERS = ("height", "width", "channels")
_JPEG_HEADER = 1 << 16  # bytes that no item's headers reach; noise at quality 100 takes 4 a pixel
_DEPTH = 16  # of provenance: packing nests it three deep


@dataclass(frozen=True, slots=True)
class Gate:
    """Reads parts of an opened HDF5 file, or refuses with an H5FormatError that says why.

    Soft and external links, external storage, virtual datasets, filters, variable-length and
    reference types all let a file reach outside itself or run code; h5feed writes none of them.
    """

    path: Path
    size: int
    """Bytes of the file: what an address is checked against."""
    then: str = PACK_AGAIN
    """What to do about a file that is refused."""

    def refuse(self, what: str) -> H5FormatError:
        """Return the error to raise."""
        said = printable(what)  # names and values are the file's, and may hold anything
        return H5FormatError(f"{self.path}: {said}; {self.then}")

    def members(self, group: h5py.Group) -> list[str]:
        """Names in a group, all of them hard links."""
        names = list(group)
        for name in names:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise self.refuse(f"{_full(group, name)} is a soft or external link")
        return names

    def group(self, parent: h5py.Group, name: str, members: set[str] | None) -> h5py.Group:
        """Return the group `name` with exactly these members; None is any hard links."""
        group = self._member(parent, name)
        if not isinstance(group, h5py.Group):
            raise self.refuse(f"{_full(parent, name)} is not a group")
        if members not in (None, set(self.members(group))):
            raise self.refuse(
                f"{_full(parent, name)} is not a group of {', '.join(sorted(members or ()))}"
            )
        return group

    def dataset(self, parent: h5py.Group, name: str) -> h5py.Dataset:
        """Return a dataset that is contiguous plain bytes of this file."""
        data = self._member(parent, name)
        full = _full(parent, name)
        if not isinstance(data, h5py.Dataset):
            raise self.refuse(f"{full} is missing or not a dataset")
        plist = data.id.get_create_plist()
        if plist.get_external_count():
            raise self.refuse(f"{full} keeps its bytes in another file (external storage)")
        if plist.get_layout() == h5py.h5d.VIRTUAL:
            raise self.refuse(f"{full} is a virtual dataset")
        if plist.get_nfilters():
            raise self.refuse(f"{full} is compressed or filtered")
        if plist.get_layout() != h5py.h5d.CONTIGUOUS:
            raise self.refuse(f"{full} is not contiguous")
        if data.dtype.hasobject or data.dtype.kind not in "uifS":
            raise self.refuse(f"{full} has the type {data.dtype}, not a fixed-size native one")
        self.address(data)
        return data

    def address(self, data: h5py.Dataset) -> int:
        """Byte address of a contiguous dataset, checked to lie inside the file."""
        if data.size == 0:
            return 0
        if data.nbytes > self.size:
            raise self.refuse(f"{data.name} claims {data.nbytes} bytes in a file of {self.size}")
        start = data.id.get_offset()
        if start is None or data.id.get_storage_size() != data.nbytes:
            raise self.refuse(f"{data.name} has no storage of its size")
        if start + data.nbytes > self.size:
            raise self.refuse(f"{data.name} ends beyond the end of the file (truncated)")
        return int(start)

    def expect(self, data: h5py.Dataset, dtype: str, shape: Sequence[int | None]) -> None:
        """Refuse a dataset of another type or shape; None in `shape` is any length."""
        fits = data.ndim == len(shape) and all(
            want is None or have == want for have, want in zip(data.shape, shape, strict=True)
        )
        if data.dtype != np.dtype(dtype) or not fits:
            wanted = f"{dtype} {tuple(shape)}"
            raise self.refuse(f"{data.name} is {data.dtype} {data.shape}, not {wanted}")

    def array(self, parent: h5py.Group, name: str, dtype: str, shape: Sequence[int | None]) -> Any:
        """Copy out a dataset of this type and shape."""
        data = self.dataset(parent, name)
        self.expect(data, dtype, shape)
        return data[()]

    def text(self, holder: Any, name: str) -> str:
        """Return a fixed-length text attribute."""
        value = self._attribute(holder, name)
        if not isinstance(value, bytes):
            raise self.refuse(f"attribute {name} of {holder.name} is not a text")
        return value.decode("utf-8", "surrogateescape")

    def integer(self, holder: Any, name: str) -> int:
        """Return an integer attribute."""
        value = self._attribute(holder, name)
        if not isinstance(value, np.integer):
            raise self.refuse(f"attribute {name} of {holder.name} is not an integer")
        return int(value)

    def _member(self, parent: h5py.Group, name: str) -> Any:
        if name not in parent:  # not get(), which takes a failed read for a name that is not there
            return None
        return parent[name]

    def _attribute(self, holder: Any, name: str) -> Any:
        if name not in holder.attrs:
            raise self.refuse(f"{holder.name} lacks the attribute {name}")
        kind = holder.attrs.get_id(name)
        if kind.dtype.hasobject or kind.shape != () or kind.get_storage_size() > self.size:
            raise self.refuse(f"attribute {name} of {holder.name} is not a fixed-size scalar")
        return holder.attrs[name]


def validated_index(gate: Gate, file: h5py.File) -> FileIndex:
    """Return all of an opened file but its pixels; H5FormatError where another program made it.

    It also lets through what HDF5 and numpy raise for damaged metadata.
    """
    check_head(gate, file)
    if "kind" in file.attrs:
        raise H5FormatError(
            f"{gate.path}: the index of a set, without items of its own; give the folder it is in"
        )
    names = gate.members(file)
    for name in names:
        if name != _USER and name not in _MEMBERS:
            raise H5FormatError(
                f"{gate.path}: /{printable(name)} is not something h5feed writes; move it below "
                f"/{_USER}, which is free for your own data, or pack the images again with pack-h5"
            )
    if IMAGES not in names:
        raise gate.refuse("it has no /images")
    labels = _labels(gate, file)
    extents = {IMAGES: _extent(gate, file, IMAGES, len(labels))}
    if MASKS in names:
        extents[MASKS] = _extent(gate, file, MASKS, len(labels), extents[IMAGES].spec)
    columns = _columns(gate, file, labels, names)
    check_items(gate, columns, extents)
    if extents[IMAGES].spec.encoding == "jpeg":
        extents[IMAGES] = _with_segments(gate, file, extents[IMAGES])
    further = _further(gate, file, len(labels)) if FIELDS in names else {}
    provenance, seal = gate.text(file, "provenance"), gate.text(file, "fingerprint")
    specs = [extent.spec for extent in extents.values()]
    offsets = {name: extent.offsets for name, extent in extents.items()}
    shapes = {name: extent.shapes for name, extent in extents.items()}
    index = FileIndex(
        path=str(gate.path),
        size=gate.size,
        extents=extents,
        fields=further,
        **{column.name: getattr(columns, column.name) for column in fields(columns)},
        provenance=read_json(gate, "provenance", provenance),
        fingerprint=seal,
    )
    made = fingerprint(specs, index.starts, columns, provenance, offsets, shapes, further)
    if made != seal:
        raise gate.refuse("its fingerprint does not match its contents (altered or damaged)")
    return index


def check_head(gate: Gate, file: h5py.File) -> None:
    """Refuse what is not a finished file, or index, of this version."""
    if "format" not in file.attrs or gate.text(file, "format") != FORMAT:
        raise H5FormatError(
            f"{gate.path}: an HDF5 file, but not h5feed's (no attribute format={FORMAT!r}); "
            "make one with pack-h5"
        )
    version = gate.integer(file, "format_version")
    if version != FORMAT_VERSION:
        raise H5FormatError(
            f"{gate.path}: format_version={version}, and this h5feed reads {FORMAT_VERSION}; "
            f"update h5feed or {gate.then}"
        )
    if "complete" not in file.attrs or gate.integer(file, "complete") != 1:
        raise gate.refuse("it was never finished (attribute complete is not set)")
    if file.userblock_size:
        raise gate.refuse("it has a user block, which h5feed never writes")


def _labels(gate: Gate, file: h5py.File) -> Any:
    data = gate.dataset(file, "labels")
    if (data.dtype, data.ndim) not in ((np.dtype("<i8"), 1), (np.dtype("<f4"), 2)):
        raise gate.refuse(f"/labels is {data.dtype} {data.shape}, not int64 (N) or float32 (N,K)")
    if data.size < 1:
        raise gate.refuse("it has no items" if data.shape[0] < 1 else "/labels has no targets")
    return data[()]


def _columns(gate: Gate, file: h5py.File, labels: Any, names: Sequence[str]) -> Columns:
    def optional(name: str, dtype: str, *shape: int) -> Any:
        return gate.array(file, name, dtype, shape) if name in names else None

    count = len(labels)
    keys = gate.group(file, "keys", {"bytes", "offsets"})
    key_bytes = gate.array(keys, "bytes", "|u1", (None,))
    key_offsets = gate.array(keys, "offsets", "<i8", (count + 1,))
    check_offsets(gate, "/keys/offsets", key_offsets, len(key_bytes))
    return Columns(
        labels=labels,
        classes=_classes(gate, file),
        key_bytes=key_bytes,
        key_offsets=key_offsets,
        source_shapes=gate.array(file, "source_shapes", "<i4", (count, 2)),
        crc32=gate.array(file, "crc32", "<u4", (count,)),
        letterbox=optional("letterbox", "<i4", count, 4),
        positions=optional("positions", "<i8", count),
    )


def _classes(gate: Gate, file: h5py.File) -> tuple[str, ...]:
    data = gate.dataset(file, "classes")
    if data.dtype.kind != "S" or data.ndim != 1:
        raise gate.refuse(f"/classes is {data.dtype} {data.shape}, not fixed-length strings (K)")
    return tuple(name.decode("utf-8", "surrogateescape") for name in data[()].tolist())


def _extent(
    gate: Gate, file: h5py.File, name: str, count: int, images: FieldSpec | None = None
) -> Extent:
    spec = _spec(gate, file, name, images)
    if spec.is_fixed:
        data = gate.dataset(file, name)
        gate.expect(data, "|u1", spec.dataset_shape(count))
        start = gate.address(data)
        return Extent(spec=spec, start=start, count=count, offsets=None, shapes=None)
    members = {"bytes", "offsets", "shapes"}
    if spec.encoding == "jpeg":
        if isinstance(holder := file[name], h5py.Group) and SEGMENTS not in holder:
            raise gate.refuse(
                f"/{name} has no {SEGMENTS}, the lengths of restart segments that every file of "
                "store=jpeg must have (it is of an h5feed before 0.1.0)"
            )
        members.add(SEGMENTS)
    group = gate.group(file, name, members)
    data = gate.dataset(group, "bytes")
    gate.expect(data, "|u1", (None,))
    offsets = gate.array(group, "offsets", "<i8", (count + 1,))
    shapes = gate.array(group, "shapes", "<i4", (count, 2))
    check_offsets(gate, f"/{name}/offsets", offsets, data.shape[0])
    start = gate.address(data)
    return Extent(spec=spec, start=start, count=count, offsets=offsets, shapes=shapes)


def _with_segments(gate: Gate, file: h5py.File, extent: Extent) -> Extent:
    """Return a jpeg field's extent with that of its segments, whose numbers are not read here.

    They are many (256 bytes for 256x256 pixels): each item's are held against its own bytes
    before they are used.
    """
    assert extent.shapes is not None
    offsets = segment_offsets(extent.shapes)
    data = gate.dataset(file[extent.spec.name], SEGMENTS)
    gate.expect(data, "<u2", (int(offsets[-1]) // 2,))
    return replace(extent, segments=SegmentsExtent(start=gate.address(data), offsets=offsets))


def _further(gate: Gate, file: h5py.File, count: int) -> dict[str, FieldExtent]:
    """Return where the further fields lie, sorted by name; their bytes are not read."""
    parent = gate.group(file, FIELDS, None)
    found = {name: _further_one(gate, parent, name, count) for name in sorted(parent)}
    check_further(gate, found)
    return found


def check_further(gate: Gate, found: dict[str, FieldExtent]) -> None:
    """Refuse rows that are not whole, or not as many as those of the boxes they belong to."""
    for name, extent in found.items():
        if extent.offsets is not None and (extent.offsets % extent.type.row_bytes).any():
            raise gate.refuse(
                f"/fields/{name}/offsets does not agree with rows of {extent.type.row_bytes} bytes"
            )
    for name, extent in found.items():
        if not extent.type.rows_of:
            continue
        boxes = found.get(extent.type.rows_of)
        if boxes is None or boxes.type.kind != "boxes":
            raise gate.refuse(f"/fields/{name} has rows_of={extent.type.rows_of!r}, no boxes")
        if not np.array_equal(_rows(extent), _rows(boxes)):
            raise gate.refuse(f"/fields/{name} has other rows than /fields/{extent.type.rows_of}")


def _rows(extent: FieldExtent) -> Any:
    """Return where each item's rows begin."""
    assert extent.offsets is not None
    return extent.offsets // extent.type.row_bytes


def _further_one(gate: Gate, parent: h5py.Group, name: str, count: int) -> FieldExtent:
    full = _full(parent, name)
    if not is_field_name(name):
        raise gate.refuse(f"{full} cannot be the name of a field")
    attributes = {key: gate.text(parent[name], key) for key in _FIELD_TEXTS}
    try:
        kind = FieldType.from_attributes(attributes)
    except ValueError as ex:
        raise gate.refuse(f"{full}: {ex}") from ex
    if kind.attributes() != attributes:
        raise gate.refuse(f"{full} has attributes that h5feed does not write")
    if kind.is_fixed:
        data = gate.dataset(parent, name)
        gate.expect(data, kind.dtype, (count, *kind.shape))
        return FieldExtent(type=kind, start=gate.address(data), count=count, offsets=None)
    group = gate.group(parent, name, {"bytes", "offsets"})
    data = gate.dataset(group, "bytes")
    gate.expect(data, "|u1", (None,))
    offsets = gate.array(group, "offsets", "<i8", (count + 1,))
    check_offsets(gate, f"{full}/offsets", offsets, data.shape[0])
    return FieldExtent(type=kind, start=gate.address(data), count=count, offsets=offsets)


def _spec(gate: Gate, file: h5py.File, name: str, images: FieldSpec | None) -> FieldSpec:
    holder = file[name]
    values: dict[str, str | int] = {key: gate.text(holder, key) for key in _SPEC_TEXTS}
    values |= {key: gate.integer(holder, key) for key in _SPEC_NUMBERS}
    try:
        spec = FieldSpec.from_attributes(name, values)
    except ValueError as ex:
        raise gate.refuse(f"/{name}: {ex}") from ex
    wanted = images_spec(spec.encoding, spec.height, spec.width, spec.fit)
    return check_spec(gate, spec, wanted if images is None else masks_spec(images))


def _full(parent: h5py.Group, name: str) -> str:
    return f"{parent.name.rstrip('/')}/{name}"


def check_spec(gate: Gate, spec: FieldSpec, wanted: FieldSpec) -> FieldSpec:
    """Refuse a field that packing never writes."""
    for name, value in wanted.attributes().items():
        if (have := spec.attributes()[name]) != value:
            raise gate.refuse(f"/{spec.name} has {name}={have!r}, where h5feed writes {value!r}")
    if spec.fit == "keep" and spec.height != spec.width:
        raise gate.refuse(f"/{spec.name} has fit=keep and {spec.height}x{spec.width}, not one side")
    return spec


def check_offsets(gate: Gate, name: str, offsets: Int64, total: int) -> None:
    """Refuse offsets that do not rise from 0 to `total`.

    Compared, not subtracted: a difference of int64 may wrap around.
    """
    if offsets[0] != 0 or offsets[-1] != total or (offsets[1:] < offsets[:-1]).any():
        raise gate.refuse(f"{name} is not rising from 0 to {total}")


def check_items(gate: Gate, columns: Columns, extents: dict[str, Extent]) -> None:
    """Refuse numbers of items that later code would index, divide or ask for memory by."""
    _check_ranges(gate, columns, extents[IMAGES].spec)
    _check_sizes(gate, extents)


def _check_ranges(gate: Gate, columns: Columns, spec: FieldSpec) -> None:
    """Refuse numbers that later code would index or divide by."""
    labels, known = columns.labels, len(columns.classes)
    if labels.ndim == 1 and labels.min() < -1:
        raise gate.refuse("/labels has a number below −1")
    if known and labels.ndim == 2 and labels.shape[1] != known:
        raise gate.refuse(f"/labels has {labels.shape[1]} numbers an item for {known} classes")
    if known and labels.ndim == 1 and labels.max() >= known:
        raise gate.refuse(f"/labels has a class number outside 0 to {known - 1}")
    _check_sides(gate, "/source_shapes", columns.source_shapes, MAX_SOURCE_SIDE)
    if columns.positions is not None and columns.positions.min() < 0:
        raise gate.refuse("/positions has a number below 0")
    if columns.letterbox is None and spec.fit == "pad":
        raise gate.refuse("/letterbox belongs to fit=pad, and it has none")
    if columns.letterbox is not None and spec.fit != "pad":
        raise gate.refuse(f"/letterbox belongs to fit=pad, and /images has fit={spec.fit}")
    if columns.letterbox is not None:
        boxes = columns.letterbox.astype(np.int64)
        ends = boxes[:, :2] + boxes[:, 2:]
        if (
            boxes[:, :2].min() < 0
            or boxes[:, 2:].min() < 1
            or (ends > (spec.height, spec.width)).any()
        ):
            raise gate.refuse("/letterbox has a box outside the stored image")


def _check_sides(gate: Gate, name: str, shapes: Int32, most: int) -> None:
    if shapes.min() < 1:
        raise gate.refuse(f"{name} has a side below 1")
    if shapes.max() > most:
        raise gate.refuse(f"{name} has a side of {shapes.max()} pixels, and {most} is the most")


def _check_sizes(gate: Gate, extents: dict[str, Extent]) -> None:
    """Refuse items of sizes that their field, or their image, does not have."""
    images = extents[IMAGES]
    for name, extent in extents.items():
        if extent.shapes is None or extent.offsets is None:
            continue
        _check_sides(gate, f"/{name}/shapes", extent.shapes, MAX_SIDE)
        height, width = extent.shapes.astype(np.int64).T
        spec = extent.spec
        if spec.encoding != "original" and (height * width > MAX_ITEM_PIXELS).any():
            raise gate.refuse(f"/{name}/shapes has an item of over {MAX_ITEM_PIXELS} pixels")
        if spec.fit != "keep" and (extent.shapes != (spec.height, spec.width)).any():
            raise gate.refuse(f"/{name}/shapes has sizes other than {spec.height}x{spec.width}")
        if spec.encoding == "yuv420" and (extent.shapes % 2).any():
            raise gate.refuse(f"/{name}/shapes has an odd side in a yuv420 field")
        if images.shapes is None or not np.array_equal(extent.shapes, images.shapes):
            raise gate.refuse(f"/{name}/shapes are not those of /images")
        sizes = np.diff(extent.offsets)
        if spec.is_encoded:
            if sizes.min() < 1:
                raise gate.refuse(f"/{name}/offsets has an item of no bytes")
            if spec.encoding == "jpeg" and (sizes > _JPEG_HEADER + 8 * height * width).any():
                raise gate.refuse(f"/{name}/offsets has an item longer than its pixels")
        elif not np.array_equal(sizes, spec.pixel_bytes(height, width)):
            raise gate.refuse(f"/{name}/offsets does not agree with its shapes")


def read_json(gate: Gate, name: str, text: str) -> dict[str, Any]:
    """Read the attribute `name`; refuse what packing would not have written there."""
    if len(text) > MAX_PROVENANCE:
        raise gate.refuse(f"attribute {name} has {len(text)} characters, too many to be true")
    try:
        value = json.loads(
            text, parse_int=_whole_number, parse_float=_finite, parse_constant=_finite
        )
    except (ValueError, RecursionError) as ex:
        raise gate.refuse(f"attribute {name} is not JSON ({ex})") from ex
    if not isinstance(value, dict):
        raise gate.refuse(f"attribute {name} is not a JSON object")
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        level = [
            part
            for holder in level
            for part in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(part, dict | list)
        ]
    if level:
        raise gate.refuse(f"attribute {name} is nested more than {_DEPTH} deep")
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("a number of too many digits")
    return int(digits)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value
