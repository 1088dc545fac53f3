"""Further fields of items (boxes, captions, numbers) by name, and what comes as the target."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h5feed.augment import Params, Pipeline
from h5feed.errors import UsageError
from h5feed.feed.files import PackedFiles
from h5feed.feed.image import Aspect, Output, image_place
from h5feed.optional import require
from h5feed.store import FieldType

__all__ = [
    "FieldColumn",
    "Fields",
    "ItemColumns",
    "Target",
    "field_batch",
    "field_value",
    "is_place",
    "moved_batch",
    "select_items",
    "target_names",
]

Target = str | Sequence[str] | None
"""None: the mask, where there are masks, or else the label; a name, several, or "all"."""
Indices = NDArray[np.int64]


class FieldColumn(Sequence[Any]):
    """One further field of all items: `column[i]` reads one item, and no other.

    It is a number; a read-only array of the field's shape, or (n, …) of each item's own length; a
    str; or what JSON can say. `numpy.asarray(column)` of a field whose items have one shape is
    (N, …), without a copy where it lies in one file.

    >>> from h5feed import H5Dataset
    >>> boxes = H5Dataset("fields.h5").fields["boxes"]
    >>> len(boxes), boxes[0].shape, boxes[0].dtype
    (12, (2, 4), dtype('float32'))
    >>> np.asarray(H5Dataset("fields.h5").fields["price"])[:3]
    array([0. , 0.5, 1. ])
    """

    def __init__(self, files: PackedFiles, name: str) -> None:
        self._files = files
        self.name = name
        self.type: FieldType = files.field_types[name]
        """What the items are: kind, dtype and shape."""

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        at, count = operator.index(index), len(self)
        if not -count <= at < count:
            raise IndexError(f"index {at} is out of range for {count} items")
        return self.read(at + count if at < 0 else at)

    def read(self, index: int) -> Any:
        """Return the value of item `index`, 0 ≤ index < N; DamagedItemError for wrong bytes."""
        try:
            return self.type.value(self._files.field_bytes(self.name, index))
        except (ValueError, RecursionError) as ex:
            raise self._files.damaged(f"fields/{self.name}", index, f"cannot be read: {ex}") from ex

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if not self.type.is_fixed:
            raise UsageError(
                f"field {self.name!r} of {self._files.name} is {self.type.kind}, not one array: "
                f"take fields[{self.name!r}][i]"
            )
        whole = self._files.fixed_field(self.name)
        return np.array(whole, dtype) if copy else np.asarray(whole, dtype)

    def __repr__(self) -> str:
        kind = self.type
        shape = (len(self), *kind.shape) if kind.is_fixed else f"{len(self)} of {kind.kind}"
        return f"FieldColumn({self.name!r}: {shape}, {kind.dtype})"


class Fields(Mapping[str, FieldColumn]):
    """The further fields of a dataset by name.

    >>> from h5feed import H5Dataset
    >>> sorted(H5Dataset("fields.h5").fields)
    ['boxes', 'caption', 'price']
    """

    def __init__(self, files: PackedFiles) -> None:
        self._columns = {name: FieldColumn(files, name) for name in files.field_types}
        self._name = files.name

    def __getitem__(self, name: str) -> FieldColumn:
        if name not in self._columns:
            has = ", ".join(self._columns) or "none: pack some with --field"
            raise KeyError(f"{self._name} has no field {name!r}; its fields are {has}")
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Fields({', '.join(map(repr, self._columns.values()))})"


class ItemColumns(Mapping[str, NDArray[Any]]):
    """What is known of every item, as arrays (N,) or (N, …), each made when it is asked for.

    `label` (numbers), `class` (their names; tuples of them where an item may have several),
    `key` (paths), `width` and `height` (of the source), and every further field: numbers as they
    are, others as arrays of objects.
    """

    def __init__(self, files: PackedFiles) -> None:
        self._files = files
        self._fields = Fields(files)
        self._own: dict[str, Callable[[], NDArray[Any]]] = {
            "label": lambda: files.labels,
            "class": self._class_names,
            "key": lambda: np.array(files.keys(), object),
            "width": lambda: files.source_shapes[:, 1],
            "height": lambda: files.source_shapes[:, 0],
        }

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name in self._own:
            return self._own[name]()
        if name not in self._fields:
            raise KeyError(f"{self._files.name} has no column {name!r}; it has {', '.join(self)}")
        column = self._fields[name]
        if column.type.is_fixed:
            return np.asarray(column)
        made = np.empty(len(column), object)
        made[:] = list(column)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter((*self._own, *self._fields))

    def __len__(self) -> int:
        return len(self._own) + len(self._fields)

    def _class_names(self) -> NDArray[Any]:
        labels = self._files.labels
        if labels.ndim == 2:  # of several classes, which targets have none of
            made = np.empty(len(labels), object)
            made[:] = [tuple(compress(self._files.classes, row)) for row in labels.tolist()]
            return made
        names = np.array([*self._files.classes, ""], object)  # −1 is the last: no class
        return np.asarray(names[labels])


def select_items(files: PackedFiles, condition: Callable[[ItemColumns], Any]) -> Indices:
    """Return the items for which `condition` of all columns is true, int64 (n,)."""
    try:
        kept = np.asarray(condition(ItemColumns(files)))
    except KeyError as ex:
        raise UsageError(f"condition: {ex.args[0]}") from ex
    if kept.dtype != np.bool_ or kept.shape != (len(files),):
        raise UsageError(
            f"condition gives {kept.dtype} {kept.shape}: an array of {len(files)} booleans is "
            'needed, such as columns["width"] >= 300'
        )
    return np.flatnonzero(kept)


def target_names(target: Target, files: PackedFiles) -> tuple[str, ...] | str | None:
    """Return the fields that `target` names; UsageError for one that the files do not have."""
    has = ["label", *(["mask"] if "masks" in files.specs else []), *files.field_types]
    if target is None:
        return None
    if target == "all":
        return tuple(has)
    names = (target,) if isinstance(target, str) else tuple(target)
    for name in names:
        if name not in has:
            raise UsageError(
                f"target={target!r}: {files.name} has no {name!r}; it has {', '.join(has)}"
            )
    if not names or len(set(names)) < len(names):
        raise UsageError(f'target={target!r}: give one name, several different ones, or "all"')
    return target if isinstance(target, str) else names


def is_place(files: PackedFiles, name: str) -> bool:
    """Whether a field says where in the image something is, or belongs to boxes that do."""
    kind = files.field_types.get(name)
    return kind is not None and (kind.kind in ("boxes", "keypoints") or bool(kind.rows_of))


def field_value(
    files: PackedFiles, name: str, output: Output, aspect: Aspect
) -> Callable[[int], Any]:
    """Return what reads one item's value: arrays as tensors of their own, but for "numpy".

    Boxes and keypoints lie in the image that `aspect` gives; with "tv_tensor" they are
    torchvision's BoundingBoxes (XYXY) and, where it has them, KeyPoints (n, K, 2).
    """
    kind = files.field_types[name]
    read = FieldColumn(files, name).read
    if kind.kind in ("boxes", "keypoints"):
        return _place_reader(files, read, kind, output, aspect)
    if output == "numpy" or kind.kind in ("text", "json"):
        return read

    def in_tensor(index: int) -> Any:
        value = read(index)
        return torch.tensor(value) if isinstance(value, np.ndarray) else value

    return in_tensor


def _place_reader(
    files: PackedFiles, read: Callable[[int], Any], kind: FieldType, output: Output, aspect: Aspect
) -> Callable[[int], Any]:
    axes = 2 if kind.kind == "boxes" else 1  # a box is two corners
    wrap = _tv_tensor(kind.kind) if output == "tv_tensor" else None

    def place(index: int) -> Any:
        (height, width), scale, shift = image_place(files, index, aspect)
        rows = read(index).copy()
        rows[..., :2] = rows[..., :2] * scale + shift
        if axes == 2:
            rows[..., 2:] = rows[..., 2:] * scale + shift
        if output == "numpy":
            return rows
        return torch.from_numpy(rows) if wrap is None else wrap(rows, (height, width))

    return place


def _tv_tensor(kind: str) -> Callable[[NDArray[Any], tuple[int, int]], Any] | None:
    tv_tensors = require("torchvision.tv_tensors", "train")
    if kind == "boxes":
        boxes = tv_tensors.BoundingBoxes
        return lambda rows, size: boxes(torch.from_numpy(rows), format="XYXY", canvas_size=size)
    points = getattr(tv_tensors, "KeyPoints", None)  # from torchvision 0.23 on
    if points is None:
        return None
    return lambda rows, size: points(torch.from_numpy(rows[..., :2].copy()), canvas_size=size)


def moved_batch(
    files: PackedFiles, names: Sequence[str], indices: Indices, pipeline: Pipeline, params: Params
) -> dict[str, Any]:
    """Return the fields `names` that are boxes, keypoints, or rows of boxes, as images moved them.

    Each a list of tensors, one per image; with several views a tuple of such lists.
    """
    views = [_moved_view(files, names, indices, pipeline, params, v) for v in range(pipeline.views)]
    if len(views) == 1:
        return views[0]
    return {name: tuple(view[name] for view in views) for name in names}


def _moved_view(
    files: PackedFiles,
    names: Sequence[str],
    indices: Indices,
    pipeline: Pipeline,
    params: Params,
    view: int,
) -> dict[str, list[Tensor]]:
    sizes = files.rows("shapes", indices).astype(np.int64)
    left: dict[str, NDArray[np.bool_]] = {}

    def together(name: str) -> tuple[NDArray[Any], Indices]:
        """Return the rows of all images, and which image each is of."""
        parts = [FieldColumn(files, name).read(index) for index in indices.tolist()]
        return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(p) for p in parts])

    def boxes(name: str) -> NDArray[Any]:
        rows, item = together(name)
        moved, left[name] = pipeline.move_boxes(params, rows, item, sizes, view=view)
        return moved

    made = {}
    for name in names:
        kind = files.field_types[name]
        rows, item = together(name)
        if kind.kind == "boxes":
            rows = boxes(name)
        elif kind.kind == "keypoints":
            rows = pipeline.move_keypoints(params, rows, item, sizes, swap=kind.swap, view=view)
        of = name if kind.kind == "boxes" else kind.rows_of
        if of:
            if of not in left:
                boxes(of)
            rows, item = rows[left[of]], item[left[of]]
        ends = np.searchsorted(item, np.arange(1, len(indices))).tolist()
        made[name] = list(torch.from_numpy(rows.astype(kind.dtype)).tensor_split(ends))
    return made


def field_batch(
    files: PackedFiles, name: str, indices: Indices
) -> Tensor | list[Tensor] | list[Any]:
    """Return a field of a batch's items: a tensor (B, …), or a list of tensors, of str or JSON.

    Numbers keep the field's dtype, except labels.
    """
    kind = files.field_types[name]
    if not kind.is_fixed:
        return [field_value(files, name, "tensor", "stored")(index) for index in indices.tolist()]
    return torch.from_numpy(files.fixed_field(name, indices))
