"""What a packed file is made of: names, versions and shapes. No input or output here.

The format is described in the README; `write` makes it, `read` accepts it, `check` proves it.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from h5feed.jpeg import segment_grid
from h5feed.store.fields import FieldExtent

__all__ = [
    "ALIGNMENT",
    "FORMAT",
    "FORMAT_VERSION",
    "IMAGES",
    "LIBVER",
    "MASKS",
    "MAX_ITEM_PIXELS",
    "MAX_PROVENANCE",
    "MAX_SIDE",
    "MAX_SOURCE_SIDE",
    "SEGMENTS",
    "Columns",
    "Encoding",
    "Extent",
    "FieldSpec",
    "FileIndex",
    "Fit",
    "SegmentsExtent",
    "canonical_json",
    "fingerprint",
    "images_spec",
    "masks_spec",
    "payload_names",
    "segment_offsets",
]

FORMAT = "h5feed"
FORMAT_VERSION = 1
ALIGNMENT = 4096
"""Bytes: every pixel field begins on a page, so that whole pages are announced and dropped."""
LIBVER = ("v110", "v110")
"""HDF5 1.10's own metadata: checksummed, and read by every HDF5 since 2016."""
IMAGES, MASKS = "images", "masks"
SEGMENTS = "segments"
"""Beside the bytes of a jpeg field: uint16 lengths of each item's restart segments, in order."""
MAX_SIDE = 65_500
"""Pixels of a stored side: what JPEG can hold."""
MAX_ITEM_PIXELS = 1 << 26
"""Pixels of an item that packing has resized: 192 MiB of RGB."""
MAX_SOURCE_SIDE = 1 << 29
"""Pixels of a source's side: Pillow holds none so long."""
MAX_PROVENANCE = 16 << 20
"""Characters of the provenance: a second to read at the worst."""

Encoding = Literal["raw", "yuv420", "jpeg", "original"]
Fit = Literal["stretch", "crop", "pad", "keep"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
UInt8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """One pixel field of a packed file, `/images` or a further one such as `/masks`.

    `height` and `width` are pixels. With `fit="keep"` both name the short side S, and each
    item has its own size; with `encoding="original"` both are 0.
    """

    name: str
    encoding: Encoding
    height: int
    width: int
    channels: int
    """3 for RGB images, 1 for masks."""
    fit: Fit
    interpolation: str
    """"bilinear" (antialiased, Pillow's BILINEAR), "nearest" (Pillow's NEAREST), or "none"."""
    color_space: str
    """"RGB", "YUV BT.601 limited", "JPEG" or "classes" (a mask's class numbers)."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("encoding", self.encoding, get_args(Encoding)),
            ("fit", self.fit, get_args(Fit)),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is none of {', '.join(known)}")
        if self.encoding == "original":
            return
        if not (
            1 <= self.height <= MAX_SIDE
            and 1 <= self.width <= MAX_SIDE
            and self.height * self.width <= MAX_ITEM_PIXELS
            and self.channels in (1, 3)
        ):
            raise ValueError(
                f"height={self.height}, width={self.width} or channels={self.channels} is out of "
                f"range: at most {MAX_SIDE} a side and {MAX_ITEM_PIXELS} in all, of 1 or 3"
            )
        if self.encoding == "yuv420" and (self.height % 2 or self.width % 2 or self.channels != 3):
            raise ValueError(f"yuv420 needs even sides, not {self.height}x{self.width}")

    @property
    def is_encoded(self) -> bool:
        """Whether an item is a JPEG file's bytes rather than pixels."""
        return self.encoding in ("jpeg", "original")

    @property
    def payloads(self) -> tuple[str, ...]:
        """Names of what an item has, in the order that its checksum goes over them."""
        return (self.name, f"{self.name}/{SEGMENTS}") if self.encoding == "jpeg" else (self.name,)

    @property
    def is_fixed(self) -> bool:
        """Whether all items have one size, so that `/name` is a single (N, ...) dataset."""
        return not self.is_encoded and self.fit != "keep"

    @property
    def common_size(self) -> tuple[int, int] | None:
        """(height, width) of all items; None where each has its own."""
        if self.fit == "keep" or self.encoding == "original":
            return None
        return self.height, self.width

    @property
    def layout(self) -> str:
        """Order of the stored bytes of an item, as recorded in the file."""
        if self.is_encoded:
            return "JFIF"
        return "NV12" if self.encoding == "yuv420" else "HWC"

    @property
    def item_bytes(self) -> int:
        """Bytes of one item of a fixed field."""
        return int(self.pixel_bytes(self.height, self.width))

    def pixel_bytes(self, height: Any, width: Any) -> Any:
        """Bytes of `height` × `width` pixels (ints or int64 arrays); not for encoded fields."""
        if self.encoding == "yuv420":
            return height * width * 3 // 2
        return height * width * self.channels

    def item_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one item's uint8 array: (H, W, C), or (H·3/2, W) for NV12."""
        if self.encoding == "yuv420":
            return (height * 3 // 2, width)
        return (height, width, self.channels)

    def dataset_shape(self, count: int) -> tuple[int, ...]:
        """Shape of the `/name` dataset of a fixed field of `count` items, as the file has it."""
        if self.encoding == "yuv420":
            return (count, self.item_bytes)
        return (count, self.height, self.width, self.channels)

    def attributes(self) -> dict[str, str | int]:
        """Return the attributes that `/name` carries in the file."""
        return {
            "encoding": self.encoding,
            "color_space": self.color_space,
            "layout": self.layout,
            "height": self.height,
            "width": self.width,
            "channels": self.channels,
            "fit": self.fit,
            "interpolation": self.interpolation,
        }

    @classmethod
    def from_attributes(cls, name: str, attributes: Mapping[str, Any]) -> "FieldSpec":
        """Rebuild the spec from a file's attributes; ValueError where they make no sense."""
        spec = cls(
            name=name,
            encoding=attributes["encoding"],
            height=int(attributes["height"]),
            width=int(attributes["width"]),
            channels=int(attributes["channels"]),
            fit=attributes["fit"],
            interpolation=attributes["interpolation"],
            color_space=attributes["color_space"],
        )
        if spec.layout != attributes["layout"]:
            raise ValueError(f"layout={attributes['layout']!r} is not {spec.layout!r}")
        return spec


def images_spec(encoding: Encoding, height: int, width: int, fit: Fit) -> FieldSpec:
    """Return the spec of `/images` of these options; sizes and fit are not those of "original"."""
    original = encoding == "original"
    colors = {"raw": "RGB", "yuv420": "YUV BT.601 limited"}
    return FieldSpec(
        name=IMAGES,
        encoding=encoding,
        height=0 if original else height,
        width=0 if original else width,
        channels=3,
        fit="keep" if original else fit,
        interpolation="none" if original else "bilinear",
        color_space=colors.get(encoding, "JPEG"),
    )


def masks_spec(images: FieldSpec) -> FieldSpec:
    """Return the spec of `/masks` beside these images.

    >>> masks_spec(images_spec("jpeg", 224, 224, "stretch")).dataset_shape(1000)
    (1000, 224, 224, 1)
    """
    return FieldSpec(
        name=MASKS,
        encoding="raw",
        height=images.height,
        width=images.width,
        channels=1,
        fit=images.fit,
        interpolation="nearest",
        color_space="classes",
    )


def payload_names(fields: Sequence[FieldSpec]) -> tuple[str, ...]:
    """Return the names of what an item of these fields has, in the order of its checksum.

    >>> payload_names([images_spec("jpeg", 64, 64, "stretch")])
    ('images', 'images/segments')
    """
    return tuple(name for spec in fields for name in spec.payloads)


def segment_offsets(shapes: Int32) -> Int64:
    """Return where each item's segments begin, int64 (N+1) bytes, by stored sizes (N, 2)."""
    height, width = shapes.astype(np.int64).T
    down, across = segment_grid(height, width)
    return np.concatenate([[0], 2 * (down * across).cumsum()])


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentsExtent:
    """Where the lengths of the items' restart segments lie: uint16, as sizes say how many."""

    start: int
    """Byte address in the file of the first item's."""
    offsets: Int64
    """(N+1,) bytes from `start`; see `segment_offsets`."""

    def item_range(self, index: int) -> tuple[int, int]:
        """Return (byte address in the file, bytes) of the segments of item `index`."""
        first, last = self.offsets[index : index + 2].tolist()
        return self.start + first, last - first

    @property
    def nbytes(self) -> int:
        """Bytes of all items' segments."""
        return int(self.offsets[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where one pixel field of one file lies."""

    spec: FieldSpec
    start: int
    """Byte address in the file of the first item."""
    count: int
    offsets: Int64 | None
    """(N+1,) bytes from `start`; None when every item has `spec.item_bytes`."""
    shapes: Int32 | None
    """(N, 2) stored height and width; None when all are `spec.height` × `spec.width`."""
    segments: SegmentsExtent | None = None
    """Of store=jpeg."""

    def item_range(self, index: int) -> tuple[int, int]:
        """Return (byte address in the file, length) of item `index`."""
        if self.offsets is None:
            size = self.spec.item_bytes
            return self.start + index * size, size
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.start + first, last - first

    def item_shape(self, index: int) -> tuple[int, ...]:
        """Shape of the uint8 array of item `index`: pixels, or encoded bytes (length,)."""
        if self.spec.is_encoded:
            return (self.item_range(index)[1],)
        if self.shapes is None:
            return self.spec.item_shape(self.spec.height, self.spec.width)
        height, width = self.shapes[index].tolist()
        return self.spec.item_shape(height, width)

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return (
            int(self.offsets[-1]) if self.offsets is not None else self.count * self.spec.item_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The small arrays of N packed items."""

    labels: Int64 | npt.NDArray[np.float32]
    """int64 (N,), −1 where there is none; or float32 (N, K): targets where there are no classes,
    else 1 for each of the K classes that an item has, and 0 for the others."""
    classes: tuple[str, ...]
    key_bytes: UInt8
    """The source paths, relative to SRC, back to back (file-system bytes)."""
    key_offsets: Int64
    """(N+1,) where each key begins in `key_bytes`."""
    source_shapes: Int32
    """(N, 2) height and width of the source after EXIF rotation."""
    crc32: UInt32
    """(N,) zlib.crc32 of an item's image, continued over the lengths of its segments
    (store=jpeg), its mask, and then its further fields, sorted by name."""
    letterbox: Int32 | None = None
    """(N, 4) top, left, height, width of the image inside the letterbox (fit="pad")."""
    positions: Int64 | None = None
    """(N,) of a shard: where each item stood in the source, 0 to the source's images − 1."""

    def __len__(self) -> int:
        return len(self.source_shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIndex(Columns):
    """All of a packed file but its pixels, validated and copied out."""

    path: str
    """Absolute path."""
    size: int
    """Bytes of the file."""
    extents: dict[str, Extent]
    """By field name; "images" is always there and first."""
    fields: dict[str, FieldExtent]
    """Further fields by name, sorted: numbers, arrays, text, JSON."""
    provenance: dict[str, Any]
    fingerprint: str
    """SHA-256 (hex) of everything here and, through crc32, of the pixels."""

    @property
    def pixel_parts(self) -> dict[str, Extent | SegmentsExtent]:
        """Where what items have of each of `payload_names` lies."""
        found: dict[str, Extent | SegmentsExtent] = {}
        for name, extent in self.extents.items():
            found[name] = extent
            if extent.segments is not None:
                found[f"{name}/{SEGMENTS}"] = extent.segments
        return found

    @property
    def parts(self) -> list[Extent | SegmentsExtent | FieldExtent]:
        """Where all that an item has lies, in the order of its checksum."""
        return [*self.pixel_parts.values(), *self.fields.values()]

    @property
    def starts(self) -> list[int]:
        """Byte addresses of `pixel_parts`."""
        return [part.start for part in self.pixel_parts.values()]

    def key(self, index: int) -> str:
        """Source path of item `index`, relative to the packed folder."""
        first, last = self.key_offsets[index : index + 2].tolist()
        return os.fsdecode(self.key_bytes[first:last].tobytes())


def canonical_json(value: Any) -> str:
    """Serialize `value` so that equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(
    fields: Sequence[FieldSpec],
    starts: Sequence[int],
    columns: Columns,
    provenance: str,
    offsets: Mapping[str, np.ndarray[Any, Any] | None],
    shapes: Mapping[str, np.ndarray[Any, Any] | None],
    further: Mapping[str, FieldExtent] | None = None,
) -> str:
    """SHA-256 (hex) over geometry, every small array and the provenance.

    The pixels, and the bytes of `further` fields, are covered through `columns.crc32`, and where
    they lie by `starts`, the byte address of each of `payload_names`, and the extents: at another
    address sound bytes would be read as other ones.
    """
    digest = hashlib.sha256()
    addresses = dict(zip(payload_names(fields), map(int, starts), strict=True))
    geometry = [[[spec.name, spec.attributes()] for spec in fields], addresses]
    others = sorted((further or {}).items())
    described = [[name, *extent.described()] for name, extent in others]
    digest.update(canonical_json([FORMAT_VERSION, geometry, described, columns.classes]).encode())
    digest.update(provenance.encode())
    arrays = [
        columns.labels,
        columns.key_bytes,
        columns.key_offsets,
        columns.source_shapes,
        columns.crc32,
        columns.letterbox,
    ]
    for spec in fields:
        if not spec.is_fixed:
            arrays += [offsets[spec.name], shapes[spec.name]]
    arrays += [extent.offsets for _, extent in others]
    if columns.positions is not None:
        arrays.append(columns.positions)
    for array in arrays:
        if array is None:
            digest.update(b"-")
            continue
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return digest.hexdigest()
