"""Boxes and keypoints of source images in the pixels that are stored of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from h5feed.packing.resize import plan_geometry
from h5feed.store.fields import FieldValues
from h5feed.store.layout import FieldSpec

__all__ = ["stored_places"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_LEAST = 1.0
"""Pixels of width and height that a stored box has: what is less is left out."""


def stored_places(
    fields: Mapping[str, FieldValues], source_shapes: npt.NDArray[np.int32], spec: FieldSpec
) -> dict[str, FieldValues]:
    """Return the fields with boxes and keypoints in stored pixels, those of N packed images.

    source_shapes: (N, 2) height and width, upright. Boxes are clipped to the stored part
    of their image; one with less than a pixel left is dropped, with its rows in other fields.
    Keypoints outside become zeros, COCO's mark for "not labelled". What is stored decides, so that
    stored places which are packed again stay.
    """
    if not any(values.type.kind in ("boxes", "keypoints") for values in fields.values()):
        return dict(fields)
    scale, shift, low, high = _maps(source_shapes, spec)
    made, kept = dict(fields), dict[str, Bools]()
    for name, values in fields.items():
        if values.type.kind not in ("boxes", "keypoints"):
            continue
        rows, item = _rows(values)
        if values.type.kind == "boxes":
            points = rows.reshape(-1, 2, 2) * scale[item, None] + shift[item, None]
            points = np.clip(points, low[item, None], high[item, None]).astype(np.float32)
            sides = points[:, 1] - points[:, 0]
            kept[name] = np.all(sides >= _LEAST, axis=1)
            made[name] = _with_rows(values, points.reshape(-1, 4))
        else:
            points = (rows[..., :2] * scale[item, None] + shift[item, None]).astype(np.float32)
            inside = (points >= low[item, None]) & (points < high[item, None])
            seen = (rows[..., 2] > 0) & inside.all(axis=2)
            moved = np.concatenate([points, rows[..., 2:]], axis=2)
            made[name] = _with_rows(values, np.where(seen[..., None], moved, 0))
    return {
        name: _without(values, kept.get(values.type.rows_of or name))
        for name, values in made.items()
    }


def _maps(shapes: npt.NDArray[np.int32], spec: FieldSpec) -> tuple[Floats, Floats, Floats, Floats]:
    """Return scale and shift of (x, y) into the stored image, and where that has content."""
    if spec.encoding == "original":
        size = shapes[:, ::-1].astype(np.float64)
        return np.ones_like(size), np.zeros_like(size), np.zeros_like(size), size
    known: dict[tuple[int, int], list[float]] = {}

    def numbers(height: int, width: int) -> list[float]:
        if (height, width) not in known:
            plan = plan_geometry(height, width, spec)
            top, left, tall, wide = plan.box
            scale = plan.resized[1] / width, plan.resized[0] / height
            shift = left - plan.window[1], top - plan.window[0]
            known[height, width] = [*scale, *shift, left, top, left + wide, top + tall]
        return known[height, width]

    table = np.array([numbers(*shape) for shape in shapes.tolist()], np.float64).reshape(-1, 4, 2)
    scale, shift, low, high = (table[:, k] for k in range(4))
    return scale, shift, low, high


def _rows(values: FieldValues) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return all rows of a field of arrays, and which item each is of."""
    assert values.offsets is not None
    counts = np.diff(values.offsets) // values.type.row_bytes
    rows = values.data.view(values.type.dtype).reshape(-1, *values.type.shape)
    return rows, np.repeat(np.arange(len(counts)), counts)


def _with_rows(values: FieldValues, rows: Floats) -> FieldValues:
    data = np.ascontiguousarray(rows, values.type.dtype)
    return replace(values, data=data.reshape(-1).view(np.uint8))


def _without(values: FieldValues, kept: Bools | None) -> FieldValues:
    """Return the field's rows that are kept."""
    if kept is None or kept.all():
        return values
    assert values.offsets is not None
    rows, item = _rows(values)
    counts = np.bincount(item[kept], minlength=len(values))
    offsets = np.cumsum([0, *(counts * values.type.row_bytes)], dtype=np.int64)
    return replace(_with_rows(values, rows[kept]), offsets=offsets)
