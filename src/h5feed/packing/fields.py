"""Further fields of a manifest: which columns are packed, as what, and their cells as values."""

import json
import re
import reprlib
from array import array
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from h5feed.errors import UsageError
from h5feed.store.fields import FieldType, FieldValues, is_field_name

__all__ = ["FieldBuilder", "parse_field"]

_TYPES = (
    "float32, float64, int64 or uint8, alone or as in float32[17] or float32[n,4], text, json, "
    "boxes or keypoints[17]; with @boxes behind it the rows belong to those of field boxes"
)
_TYPE = re.compile(r"(\w+)(?:\[([\dn, ]+)\])?(?:@(.+))?")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def parse_field(text: str) -> tuple[str, FieldType | None]:
    """Return the column and the type that `NAME[:TYPE]` says; without TYPE the values say it.

    >>> parse_field("caption")
    ('caption', None)
    >>> parse_field("landmarks:float32[5,2]")[1].shape
    (5, 2)
    >>> parse_field("spots:float32[n,2]")[1].kind
    'array'
    >>> parse_field("joints:keypoints[0,2,1]@boxes")[1].swap
    (0, 2, 1)
    """
    name, _, kind = text.partition(":")
    if not is_field_name(name):
        raise UsageError(
            f"field={text!r}: {name!r} cannot be the name of a field: use letters, digits, "
            "_ . and -, a letter first, and not label, mask or image; rename the column"
        )
    if not kind:
        return name, None
    try:
        return name, _type(kind)
    except ValueError:
        raise UsageError(f"field={text!r}: {kind!r} is not a type: give {_TYPES}") from None


def _type(text: str) -> FieldType:
    """Return the type that is written so, as `str` writes it; ValueError for what is none."""
    found = _TYPE.fullmatch(text)
    if found is None:
        raise ValueError
    word, inside, rows_of = found[1], found[2], found[3] or ""
    sides = [] if inside is None else [side.strip() for side in inside.split(",")]
    any_rows = sides[:1] == ["n"]
    shape = tuple(map(int, sides[any_rows:]))
    if word == "keypoints" and shape and not any_rows:  # how many, or what each is mirrored
        count, swap = (shape[0], ()) if len(shape) == 1 else (len(shape), shape)
        return FieldType(
            kind="keypoints", dtype="float32", shape=(count, 3), rows_of=rows_of, swap=swap
        )
    if word in ("text", "json") and not sides and not rows_of:
        return FieldType(kind=word)  # type: ignore[arg-type]
    if word == "boxes" and not sides and not rows_of:
        return FieldType(kind="boxes", dtype="float32", shape=(4,))
    of_rows: Literal["array", "fixed"] = "array" if any_rows else "fixed"
    return FieldType(kind=of_rows, dtype=word, shape=shape, rows_of=rows_of)


class FieldBuilder:
    """Gathers one field's values as a manifest's rows come, compact from the start."""

    def __init__(self, name: str, kind: FieldType | None, *, texts: bool) -> None:
        """Gather cells of a table of `texts`, where JSON has to be read from them, or of values."""
        self.name = name
        self.kind = kind
        self._texts = texts
        self._data = bytearray()
        self._offsets = array("q", [0])

    def add(self, cell: Any, error: Callable[[str], UsageError]) -> None:
        """Take one row's cell; raises `error(what)` where it is not of the field's type."""
        if self.kind is None:
            self.kind = _kind_of(cell)
        try:
            if self._texts and self.kind.kind == "json":
                cell = json.loads(cell)
            self._data += _as_bytes(cell, self.kind)
        except (ValueError, TypeError, OverflowError, RecursionError) as ex:
            why = f" ({ex})" if isinstance(ex, _Misfit) else ""
            raise error(
                f"{_SHORT.repr(cell)} is not {self.kind}{why}: mend it, or give the "
                f"field another type, as in --field {self.name}:"
                + ("text" if isinstance(cell, str) else "json")
            ) from ex
        self._offsets.append(len(self._data))

    @property
    def rows(self) -> int:
        """How many rows the last cell has, of an array."""
        assert self.kind is not None
        return (self._offsets[-1] - self._offsets[-2]) // self.kind.row_bytes

    def values(self) -> FieldValues:
        """Return the values of all rows."""
        assert self.kind is not None
        if self.kind.is_fixed:
            rows = np.frombuffer(self._data, self.kind.dtype)
            return FieldValues(type=self.kind, data=rows.reshape(-1, *self.kind.shape))
        offsets = np.frombuffer(self._offsets, np.int64)
        return FieldValues.of_bytes(self.kind, self._data, offsets)


class _Misfit(ValueError):
    """Says what of a cell does not fit."""


def _kind_of(cell: Any) -> FieldType:
    """Return the type that a column's first cell shows: numbers, text, or JSON."""
    if isinstance(cell, dict | list | bool) or cell is None:
        return FieldType(kind="json")
    for number, dtype in ((int, "int64"), (float, "float64")):
        try:
            if not (isinstance(cell, float) and number is int):
                number(cell)
                return FieldType(kind="fixed", dtype=dtype)
        except (ValueError, TypeError):
            continue
    return FieldType(kind="text")


def _as_bytes(cell: Any, kind: FieldType) -> bytes:
    if kind.kind == "text":
        if not isinstance(cell, str):
            raise TypeError
        return cell.encode()
    if kind.kind == "json":
        return json.dumps(cell, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    whole = not kind.dtype.startswith("float")
    values = np.asarray(_numbers(cell, _whole if whole else float), None if whole else np.float64)
    if not kind.is_fixed and not values.size:
        return b""
    if values.shape[not kind.is_fixed :] != kind.shape:
        raise _Misfit(f"its shape is {values.shape}")
    if kind.kind == "boxes" and not (values[:, :2] < values[:, 2:]).all():
        raise _Misfit("a box has no area: left, top, right, bottom in pixels of the image")
    with np.errstate(over="ignore"):
        stored = values.astype(kind.dtype)
    lost = stored != values if whole else np.isinf(stored) != np.isinf(values)
    if lost.any():
        raise _Misfit(f"too large for {kind.dtype}")
    return stored.tobytes()


def _numbers(cell: Any, number: Callable[[Any], float]) -> Any:
    """Return numbers, in lists where the cell has lists: a text may be one, or words."""
    if isinstance(cell, str) and cell.strip()[:1] == "[":
        cell = json.loads(cell)
    elif isinstance(cell, str) and len(words := cell.replace(",", " ").split()) > 1:
        cell = words
    if isinstance(cell, list):
        return [_numbers(part, number) for part in cell]
    return number(cell)


def _whole(cell: Any) -> int:
    number = cell if isinstance(cell, int) else int(cell)
    if isinstance(cell, bool) or (isinstance(cell, float) and number != cell):
        raise _Misfit("no whole number")
    return number
