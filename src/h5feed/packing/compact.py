"""Packed items written again, into other files: their bytes as they are, never decoded."""

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5feed.disk import rename_file
from h5feed.errors import UsageError
from h5feed.store.fields import FieldValues, take_ragged
from h5feed.store.index import check_alike, listed_index
from h5feed.store.layout import Columns, FieldSpec, FileIndex, payload_names
from h5feed.store.read import MappedFile, read_index
from h5feed.store.write import write_file

__all__ = ["StoredItems", "joint_classes", "relabelled"]

Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


def joint_classes(indexes: Sequence[FileIndex]) -> tuple[str, ...]:
    """Return the classes of several files: those of the first, then what each other one adds.

    Raises UsageError, naming two files, where they were not packed alike.
    """
    union: dict[str, int] = {}
    for index in indexes:
        for name in index.classes:
            union.setdefault(name, len(union))
    classes = tuple(union)
    check_alike([replace(listed_index([index]), classes=classes) for index in indexes])
    for index in indexes:
        relabelled(index, classes)
    return classes


def relabelled(index: FileIndex, classes: tuple[str, ...]) -> Array:
    """Return a file's labels by the numbers of `classes`, which has all of its names.

    Raises UsageError where they cannot be told apart by name.
    """
    labels = index.labels
    if index.classes == classes[: len(index.classes)] and (index.classes or not classes):
        if labels.ndim == 1 or index.classes == classes:
            return labels
    elif labels.ndim == 1 and not any(kind.type.kind == "boxes" for kind in index.fields.values()):
        if index.classes:
            numbers = np.array([*map(classes.index, index.classes), -1])
            return numbers[labels]
        if labels.max() < 0:  # images of no class
            return labels
    what = "numbers without names" if not index.classes else "classes"
    raise UsageError(
        f"{index.path} has other {what} than the files before it ({_few(index.classes)}; they have "
        f"{_few(classes)}): only labels of one class an image, without boxes, are numbered anew"
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "") if names else "none"


@dataclass(frozen=True)
class StoredItems:
    """The items of several packed files as one row: stored positions count them file by file."""

    files: tuple[MappedFile, ...]
    classes: tuple[str, ...]
    order: Int64
    """(N,) the stored position of each item, in the order of the source."""

    @classmethod
    def of(cls, paths: Sequence[Path], bases: Sequence[int]) -> "StoredItems":
        """Open files; `bases` is added to the positions of each one's items."""
        files = tuple(MappedFile(path) for path in paths)
        indexes = [file.index for file in files]
        places = [
            base + (np.arange(len(index)) if index.positions is None else index.positions)
            for base, index in zip(bases, indexes, strict=True)
        ]
        order = np.argsort(np.concatenate(places), kind="stable")
        return cls(files, joint_classes(indexes), order)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def specs(self) -> tuple[FieldSpec, ...]:
        """The pixel fields."""
        return tuple(extent.spec for extent in self.files[0].index.extents.values())

    @property
    def indexes(self) -> list[FileIndex]:
        """What is known of each file."""
        return [file.index for file in self.files]

    @cached_property
    def starts(self) -> Int64:
        """(S+1,) the stored position of each file's first item."""
        return np.cumsum([0, *map(len, self.indexes)])

    @cached_property
    def columns(self) -> Columns:
        """The small columns of all items, as stored."""
        first, indexes = self.indexes[0], self.indexes
        lengths = np.concatenate([np.diff(index.key_offsets) for index in indexes])
        return Columns(
            labels=np.concatenate([relabelled(index, self.classes) for index in indexes]),
            classes=self.classes,
            key_bytes=np.concatenate([index.key_bytes for index in indexes]),
            key_offsets=np.concatenate([[0], lengths.cumsum()]),
            source_shapes=np.concatenate([index.source_shapes for index in indexes]),
            crc32=np.concatenate([index.crc32 for index in indexes]),
            letterbox=None
            if first.letterbox is None
            else np.concatenate([_present(index.letterbox) for index in indexes]),
        )

    @cached_property
    def further(self) -> dict[str, FieldValues]:
        """The further fields of all items, as stored."""
        return {
            name: _joined([_values(file, name) for file in self.files])
            for name in self.indexes[0].fields
        }

    def mean_bytes(self) -> float:
        """Return how many bytes of pixels an item has."""
        parts = [part for index in self.indexes for part in index.pixel_parts.values()]
        return max(1.0, sum(part.nbytes for part in parts) / len(self))

    def write(
        self, out: Path, stored: Int64, provenance: Mapping[str, Any], positions: Int64 | None
    ) -> None:
        """Write the items at these stored positions into a file of their own, whole or not at all.

        positions: (n,) where each stands in the source; None where they come in its order.
        """
        columns, specs = self.columns, self.specs
        key_bytes, key_offsets = take_ragged(columns.key_bytes, columns.key_offsets, stored)
        chosen = Columns(
            labels=columns.labels[stored],
            classes=columns.classes,
            key_bytes=key_bytes,
            key_offsets=key_offsets,
            source_shapes=columns.source_shapes[stored],
            crc32=columns.crc32[stored],
            letterbox=None if columns.letterbox is None else columns.letterbox[stored],
            positions=positions,
        )
        shapes: dict[str, Array | None] = {}
        for spec in specs:
            if not spec.is_fixed:
                found = [_present(index.extents[spec.name].shapes) for index in self.indexes]
                shapes[spec.name] = np.concatenate(found)[stored]
        partial = out.with_name(f"{out.name}.{secrets.token_hex(6)}.partial")
        try:
            write_file(
                partial,
                specs,
                chosen,
                {name: self._payload(name, stored) for name in payload_names(specs)},
                dict(provenance),
                shapes=shapes,
                further={name: values.take(stored) for name, values in self.further.items()},
            )
            read_index(partial)
            rename_file(partial, out)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _payload(self, name: str, stored: Int64) -> Iterator[Array]:
        parts = [index.pixel_parts[name] for index in self.indexes]
        numbers = np.searchsorted(self.starts, stored, side="right") - 1
        items = stored - self.starts[numbers]
        for number, item in zip(numbers.tolist(), items.tolist(), strict=True):
            start, length = parts[number].item_range(item)
            yield self.files[number].data[start : start + length]

    def provenance(self) -> dict[str, Any]:
        """Return what made these items: what their files say, in one."""
        said = [index.provenance for index in self.indexes]
        counts = [one.get("counts", {}) for one in said]
        reasons: Counter[str] = Counter()
        for one in counts:
            reasons.update(one.get("skipped", {}))
        made = {name: value for name, value in said[0].items() if name != "set"}
        skipped = [entry for one in said for entry in one.get("skipped", [])]
        return made | {
            "counts": {
                "found": sum(int(one.get("found", 0)) for one in counts),
                "packed": len(self),
                "skipped": dict(reasons),
            },
            "skipped": sorted(skipped, key=lambda entry: str(entry[0]).split("/")),
        }


def _present(array: Array | None) -> Array:
    assert array is not None
    return array


def _values(file: MappedFile, name: str) -> FieldValues:
    extent = file.index.fields[name]
    data = file.data[extent.start : extent.start + extent.nbytes]
    if extent.offsets is not None:
        return FieldValues(type=extent.type, data=data, offsets=extent.offsets)
    rows = data.view(extent.type.dtype).reshape(extent.count, *extent.type.shape)
    return FieldValues(type=extent.type, data=rows)


def _joined(values: Sequence[FieldValues]) -> FieldValues:
    data = np.concatenate([one.data for one in values])
    if values[0].offsets is None:
        return FieldValues(type=values[0].type, data=data)
    lengths = [np.diff(_present(one.offsets)) for one in values]
    offsets = np.concatenate([[0], np.concatenate(lengths).cumsum()])
    return FieldValues(type=values[0].type, data=data, offsets=offsets)
