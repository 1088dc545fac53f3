"""Further fields of items, beside images, masks and labels: numbers, arrays, text and JSON.

A field whose items have one shape is one dataset `/fields/NAME`, (N, …). Any other is a group of
`bytes`, all items back to back, and `offsets`, where each begins.
"""

import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

__all__ = [
    "FIELDS",
    "FieldExtent",
    "FieldType",
    "FieldValues",
    "continue_checksums",
    "is_field_name",
    "take_ragged",
]

FIELDS = "fields"
"""The group of the file that holds them."""

Kind = Literal["fixed", "array", "boxes", "keypoints", "text", "json"]
Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]

_DTYPES = ("float32", "float64", "int64", "uint8")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_TAKEN = frozenset(("all", "image", "images", "label", "labels", "mask", "masks", "index"))
_TAKEN_TOGETHER = 4096  # items
_MOST_NUMBERS = 1 << 26
"""Numbers of an item, or of an array's row: far more than packing writes."""


def is_field_name(name: str) -> bool:
    """Whether a field may have this name: an identifier, and nothing that an item has anyway."""
    return _NAME.fullmatch(name) is not None and name.lower() not in _TAKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldType:
    """What a field's items are.

    >>> FieldType(kind="array", dtype="float32", shape=(4,)).row_bytes
    16
    """

    kind: Kind
    """"fixed": `dtype` of one shape; "array": any number of rows; "text"; "json".
    "boxes": an array of float32 (n, 4), left, top, right and bottom in stored pixels; "keypoints":
    one of float32 (n, K, 3), x and y in stored pixels and COCO's visibility, 0 to 2."""
    dtype: str = "uint8"
    """"float32", "float64", "int64" or "uint8"; of text and JSON it is uint8, their bytes."""
    shape: tuple[int, ...] = ()
    """Of an item of kind "fixed", () for a number; else of a row."""
    rows_of: str = ""
    """The field of boxes that these rows belong to, one by one: their classes, their keypoints."""
    swap: tuple[int, ...] = ()
    """Of keypoints: which one each becomes in a mirrored image, left for right; () where none."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r} is none of {', '.join(get_args(Kind))}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is none of {', '.join(_DTYPES)}")
        if self.kind in ("text", "json") and (self.dtype, self.shape) != ("uint8", ()):
            raise ValueError(f"kind={self.kind} is bytes, not {self.dtype} {self.shape}")
        keypoints, sides = self.kind == "keypoints", self.shape
        if self.kind == "boxes" and (self.dtype, sides) != ("float32", (4,)):
            raise ValueError(f"kind=boxes is float32 (4,), not {self.dtype} {sides}")
        if keypoints and (self.dtype != "float32" or len(sides) != 2 or sides[1] != 3):
            raise ValueError(f"kind=keypoints is float32 (K, 3), not {self.dtype} {sides}")
        if self.rows_of and not (keypoints or self.kind == "array"):
            raise ValueError(f"rows_of={self.rows_of!r} is for the rows of an array")
        if self.swap and not (keypoints and sorted(self.swap) == list(range(sides[0]))):
            raise ValueError(f"swap={self.swap} is not a permutation of keypoints")
        if min(sides, default=1) < 1 or len(sides) > 8 or math.prod(sides) > _MOST_NUMBERS:
            raise ValueError(f"shape={self.shape} is not a shape of an item")

    def __str__(self) -> str:
        """Return the type as `--field NAME:TYPE` has it.

        >>> str(FieldType(kind="array", dtype="int64", rows_of="boxes"))
        'int64[n]@boxes'
        """
        if self.kind in ("text", "json", "boxes"):
            return self.kind
        sides: tuple[int | str, ...] = self.shape if self.is_fixed else ("n", *self.shape)
        if self.kind == "keypoints":
            sides = self.swap or self.shape[:1]
        made = "keypoints" if self.kind == "keypoints" else self.dtype
        made += f"[{','.join(map(str, sides))}]" if sides else ""
        return made + (f"@{self.rows_of}" if self.rows_of else "")

    @property
    def is_fixed(self) -> bool:
        """Whether all items have one shape."""
        return self.kind == "fixed"

    @property
    def row_bytes(self) -> int:
        """Bytes of an item of kind "fixed", of a row of an array, 1 for text and JSON."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def attributes(self) -> dict[str, str]:
        """Return the attributes that `/fields/NAME` carries in the file."""
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": ",".join(map(str, self.shape)),
            "rows_of": self.rows_of,
            "swap": ",".join(map(str, self.swap)),
        }

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, str]) -> "FieldType":
        """Rebuild the type from a file's attributes; ValueError where they make no sense."""
        return cls(
            kind=attributes["kind"],  # type: ignore[arg-type]
            dtype=attributes["dtype"],
            shape=_whole_numbers(attributes["shape"]),
            rows_of=attributes["rows_of"],
            swap=_whole_numbers(attributes["swap"]),
        )

    def value(self, data: memoryview) -> Any:
        """Return what the bytes of one item say: a number, a read-only array, a text, or JSON.

        ValueError for bytes that are not: text that is not UTF-8, or invalid JSON.
        """
        if self.kind == "text":
            return str(data, "utf-8")
        if self.kind == "json":
            return json.loads(str(data, "utf-8"))
        rows = np.frombuffer(data, self.dtype)
        if self.is_fixed:
            return rows.reshape(self.shape) if self.shape else rows[0].item()
        return rows.reshape(-1, *self.shape)


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldValues:
    """The values of one field of N items, in memory: what packing writes.

    >>> kind = FieldType(kind="boxes", dtype="float32", shape=(4,))
    >>> boxes = FieldValues.of_arrays([np.ones((2, 4)), np.ones((0, 4))], kind)
    >>> len(boxes), boxes.offsets.tolist(), boxes.item(0).nbytes
    (2, [0, 32, 32], 32)
    """

    type: FieldType
    data: Array
    """(N, …) of the field's dtype; or uint8 (bytes,), all items back to back."""
    offsets: Int64 | None = None
    """(N+1,) where each item begins in `data`; None where all have one shape."""

    def __len__(self) -> int:
        return len(self.data) if self.offsets is None else len(self.offsets) - 1

    @classmethod
    def of_fixed(cls, values: Any, dtype: str) -> "FieldValues":
        """Return a field of one shape from an array (N, …)."""
        data = np.ascontiguousarray(values, dtype)
        return cls(type=FieldType(kind="fixed", dtype=dtype, shape=data.shape[1:]), data=data)

    @classmethod
    def of_arrays(cls, values: Sequence[Array], kind: FieldType) -> "FieldValues":
        """Return a field of arrays (n, *kind.shape), each with its own n."""
        items = [np.ascontiguousarray(rows, kind.dtype).tobytes() for rows in values]
        return cls._joined(kind, items)

    @classmethod
    def of_texts(cls, values: Sequence[str]) -> "FieldValues":
        """Return a field of texts."""
        return cls._joined(FieldType(kind="text"), [text.encode() for text in values])

    @classmethod
    def of_json(cls, values: Sequence[Any]) -> "FieldValues":
        """Return a field of what JSON can say: equal values give equal bytes."""
        texts = [json.dumps(value, sort_keys=True, separators=(",", ":")) for value in values]
        return cls._joined(FieldType(kind="json"), [text.encode() for text in texts])

    @classmethod
    def of_bytes(cls, kind: FieldType, data: Any, offsets: Int64) -> "FieldValues":
        """Return a field of items that lie back to back in `data`, uint8 or bytes."""
        return cls(type=kind, data=np.frombuffer(data, np.uint8), offsets=offsets)

    @classmethod
    def _joined(cls, kind: FieldType, items: Sequence[bytes]) -> "FieldValues":
        offsets = np.cumsum([0, *map(len, items)], dtype=np.int64)
        return cls.of_bytes(kind, b"".join(items), offsets)

    def item(self, index: int) -> memoryview:
        """Return the bytes of one item."""
        if self.offsets is None:
            return np.ascontiguousarray(self.data[index : index + 1]).data.cast("B")
        first, last = self.offsets[index : index + 2].tolist()
        return self.data[first:last].data

    def take(self, index: Int64) -> "FieldValues":
        """Return the values of the items `index`, in that order."""
        if self.offsets is None:
            return FieldValues(type=self.type, data=self.data[index])
        data, offsets = take_ragged(self.data, self.offsets, index)
        return FieldValues(type=self.type, data=data, offsets=offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldExtent:
    """Where one further field of one file lies."""

    type: FieldType
    start: int
    """Byte address in the file of the first item."""
    count: int
    offsets: Int64 | None
    """(N+1,) bytes from `start`; None where all items have one shape."""

    def item_range(self, index: int) -> tuple[int, int]:
        """Return (byte address in the file, length) of item `index`."""
        if self.offsets is None:
            size = self.type.row_bytes
            return self.start + index * size, size
        first, last = self.offsets[index : index + 2].tolist()
        return self.start + first, last - first

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        if self.offsets is None:
            return self.count * self.type.row_bytes
        return int(self.offsets[-1])

    def described(self) -> list[Any]:
        """Return what the fingerprint says of it beside its offsets."""
        return [self.type.attributes(), self.start if self.nbytes else 0]


def take_ragged(data: Array, offsets: Int64, index: Int64) -> tuple[Array, Int64]:
    """Return the items `index`, back to back in that order, and where each begins.

    Item i is data[offsets[i] : offsets[i + 1]].

    >>> take_ragged(np.array([1, 2, 2, 3]), np.array([0, 1, 3, 4]), np.array([2, 1]))
    (array([3, 2, 2]), array([0, 1, 3]))
    """
    if np.array_equal(index, np.arange(len(offsets) - 1)):
        return data, offsets
    firsts, lengths = offsets[index], offsets[index + 1] - offsets[index]
    ends = np.concatenate([[0], lengths.cumsum()])
    made = np.empty(ends[-1], data.dtype)
    for start in range(0, len(index), _TAKEN_TOGETHER):  # eight bytes of address for each byte
        some = slice(start, start + _TAKEN_TOGETHER)
        to = ends[start : start + _TAKEN_TOGETHER + 1]
        at = np.repeat(firsts[some] - to[:-1], lengths[some]) + np.arange(to[0], to[-1])
        made[to[0] : to[-1]] = data[at]
    return made, ends


def continue_checksums(
    crc32: npt.NDArray[np.uint32], values: Mapping[str, FieldValues]
) -> npt.NDArray[np.uint32]:
    """Return the items' checksums, continued over these fields in the order of their names."""
    if not values:
        return crc32
    items: list[Callable[[int], memoryview]] = [values[name].item for name in sorted(values)]

    def checksums() -> Iterator[int]:
        for index, value in enumerate(crc32.tolist()):
            for item in items:
                value = zlib.crc32(item(index), value)
            yield value

    return np.fromiter(checksums(), np.uint32, len(crc32))
