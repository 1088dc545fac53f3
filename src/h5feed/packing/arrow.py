"""Tables of Apache Arrow: parquet files, and what Hugging Face's datasets are made of."""

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from h5feed.errors import UsageError
from h5feed.optional import require
from h5feed.packing.decode import DAMAGED, DecodeError, read_file
from h5feed.packing.items import ImageSource, file_status
from h5feed.packing.tables import ColumnOptions, RowTable, TableRow, build_table
from h5feed.store.fields import FieldType

__all__ = [
    "HuggingFaceSource",
    "ParquetSource",
    "is_hugging_face",
    "open_hugging_face",
    "open_parquets",
    "parquet_table",
]

_ROWS = 1024  # of a table that are Python's objects at a time
_IMAGES = 64  # of a parquet file that are in memory at a time
_IMAGE_NAMES = ("image", "img", "jpg", "png")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSource(ImageSource):
    """Images whose bytes lie in a column of parquet files."""

    sampled: ClassVar[int] = 100  # rows are read from the beginning of their group

    paths: tuple[Path, ...]
    starts: npt.NDArray[np.int64]
    """(files,) the number of each file's first image."""
    column: str

    def read(self, index: int, *, max_pixels: int, most: int | None = None) -> bytes:
        """Return the bytes of an image, the first `most` of them."""
        number = int(np.searchsorted(self.starts, index, "right")) - 1
        path = self.paths[number]
        cell = _reader(path, self.column, os.getpid()).cell(index - int(self.starts[number]))
        return _image_bytes(cell, path.parent, max_pixels)[:most]

    def statuses(self) -> Iterator[bytes]:
        """Yield size and time of change of each file."""
        yield from map(file_status, self.paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceSource(ImageSource):
    """Images of a Hugging Face Dataset, in their encoded form."""

    sampled: ClassVar[int] = 100

    dataset: Any
    """With the column of images alone, not decoded."""
    column: str

    def read(self, index: int, *, max_pixels: int, most: int | None = None) -> bytes:
        """Return the bytes of an image, the first `most` of them."""
        cell = self.dataset[index][self.column]
        return _image_bytes(cell, Path(), max_pixels)[:most]

    def statuses(self) -> Iterator[bytes]:
        """Yield what Hugging Face tells datasets apart by."""
        yield str(getattr(self.dataset, "_fingerprint", "")).encode()


def _image_bytes(cell: Any, folder: Path, max_pixels: int) -> bytes:
    """Return the bytes of an image from its cell: bytes, or Hugging Face's bytes and path."""
    path = None
    if isinstance(cell, Mapping):
        path, cell = cell.get("path"), cell.get("bytes")
    if cell is None and path:
        return read_file(os.fsencode(folder / path), max_pixels=max_pixels)
    if not isinstance(cell, bytes):
        raise DecodeError("no image", "the cell is empty" if cell is None else "")
    return cell


class _ColumnReader:
    """Reads cells of one column, mostly forwards, a few rows in memory at a time."""

    def __init__(self, path: Path, column: str) -> None:
        self._file, self._column = open_parquet(path), column
        meta = self._file.metadata
        counts = [meta.row_group(n).num_rows for n in range(meta.num_row_groups)]
        self._starts = [0, *accumulate(counts)]
        self._group, self._at = -1, 0
        self._batches: Iterator[Any] = iter(())
        self._cells: Any = ()
        """Those of the rows from `_at` on."""

    def cell(self, row: int) -> Any:
        """Return the cell of one row; DecodeError where the file is damaged there."""
        group = bisect_right(self._starts, row) - 1
        if group != self._group or row < self._at:
            self._batches = self._file.iter_batches(
                _IMAGES, row_groups=[group], columns=[self._column], use_threads=False
            )
            self._group, self._at, self._cells = group, self._starts[group], ()
        try:
            while row >= self._at + len(self._cells):
                self._at += len(self._cells)
                self._cells = next(self._batches).column(0)
            return self._cells[row - self._at].as_py()
        except (OSError, ValueError, StopIteration) as ex:  # Arrow's errors are of these
            self._group = -1
            raise DecodeError(DAMAGED, f"its part of the parquet file: {ex}") from ex


@lru_cache(maxsize=1)
def _reader(path: Path, column: str, process: int) -> _ColumnReader:
    """Open a file's column, once in each process."""
    return _ColumnReader(path, column)


def open_parquets(
    paths: Sequence[Path],
    names: Sequence[str],
    wanted: ColumnOptions,
    *,
    seen: Callable[[], None],
) -> ParquetSource:
    """Open parquet files of images, which have the same columns, one after the other.

    `names` begin the files' keys. Raises UsageError where they are no such files.
    """
    files = [open_parquet(path) for path in paths]
    schema = files[0].schema_arrow
    for path, file in zip(paths, files, strict=True):
        if file.schema_arrow.names != schema.names:
            raise UsageError(
                f"{path} has columns {', '.join(file.schema_arrow.names)}, and {paths[0]} has "
                f"{', '.join(schema.names)}: pack them apart"
            )
    column = _image_column(str(paths[0]), schema, wanted.path_column)
    others = _table_columns(schema)

    def rows() -> Iterator[TableRow]:
        for path, name, file in zip(paths, names, files, strict=True):
            cells = table_rows(file.iter_batches(_ROWS, columns=others, use_threads=False))
            for n, row in enumerate(cells if others else repeat({}, file.metadata.num_rows)):
                yield TableRow(f"{path.name}, row {n + 1}", row, os.fsencode(f"{name}/{n}"))

    table = _build(rows(), str(paths[0].parent / "*.parquet"), schema, wanted, seen)
    counts = [file.metadata.num_rows for file in files]
    starts = np.cumsum([0, *counts[:-1]], dtype=np.int64)
    return ParquetSource(paths=tuple(paths), starts=starts, column=column, **table)


def is_hugging_face(source: Any) -> bool:
    """Whether an object is of Hugging Face's library; it is not imported to see."""
    return type(source).__module__.partition(".")[0] == "datasets"


def open_hugging_face(
    dataset: Any, wanted: ColumnOptions, *, seen: Callable[[], None]
) -> HuggingFaceSource:
    """Open a `datasets.Dataset`; UsageError for one of several splits, or without a length."""
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        first = next(iter(dataset), "train")
        raise UsageError(
            f"source is a {kind} of {', '.join(dataset)}: give one of them, as source[{first!r}]"
        )
    if not hasattr(dataset, "__len__"):
        raise UsageError(f"source is a {kind}, which has no length: load it without streaming")
    schema, features = dataset.features.arrow_schema, dataset.features
    column = _image_column(kind, schema, wanted.path_column)
    others = _table_columns(schema)
    images = dataset.select_columns([column]).with_format(None)
    if type(features[column]).__name__ == "Image":
        images = images.cast_column(column, type(features[column])(decode=False))
    batches = dataset.select_columns(others).with_format("arrow").iter(_ROWS) if others else ()
    cells = table_rows(batches) if others else repeat({}, len(dataset))
    rows = (TableRow(f"row {n}", row, b"%d" % n) for n, row in enumerate(cells))
    table = _build(rows, kind, schema, wanted, seen)
    return HuggingFaceSource(dataset=images, column=column, **table)


def _build(
    rows: Iterator[TableRow],
    name: str,
    schema: Any,
    wanted: ColumnOptions,
    seen: Callable[[], None],
) -> dict[str, Any]:
    types, classes = field_types(schema), class_names(schema)
    table = RowTable(name=name, rows=rows, types=types, classes=classes)
    return build_table(table, wanted, seen=seen).columns()


def _table_columns(schema: Any) -> list[str]:
    """Return the columns without bytes."""
    return [column.name for column in schema if not holds_bytes(column.type)]


def _image_column(name: str, schema: Any, wanted: str | None) -> str:
    """Return the column of image bytes: the one asked for, the only one, or that named so."""
    found: list[str] = [column.name for column in schema if holds_bytes(column.type)]
    if wanted is not None:
        if wanted not in found:
            raise UsageError(
                f"path_column={wanted!r}: {name} has no such column of image bytes; those of "
                f"bytes are {', '.join(map(repr, found)) or 'none'}"
            )
        return wanted
    named = [column for column in found if column.lower() in _IMAGE_NAMES]
    if len(found) == 1 or len(named) == 1:
        return (named or found)[0]
    if found:
        raise UsageError(
            f"{name}: columns {', '.join(map(repr, found))} hold bytes: say which are the images, "
            f"as --path-column {found[0]}"
        )
    raise UsageError(
        f"{name}: no column of image bytes among {', '.join(map(repr, schema.names))}; a table of "
        "paths is a --manifest of their folder"
    )


def parquet_table(path: Path) -> RowTable:
    """Return a parquet file about images that lie elsewhere, row by row."""
    file = open_parquet(path)
    schema = file.schema_arrow
    batches = file.iter_batches(_ROWS, columns=_table_columns(schema), use_threads=False)
    return RowTable(
        name=str(path),
        rows=(TableRow(f"row {n}", cells) for n, cells in enumerate(table_rows(batches), 1)),
        types=field_types(schema),
        classes=class_names(schema),
    )


def open_parquet(path: Path) -> Any:
    """Open a parquet file; UsageError where it is none."""
    pa, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    if path.is_dir():
        raise IsADirectoryError(21, "Is a directory", str(path))
    try:
        return parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
    except pa.ArrowInvalid as ex:
        raise UsageError(f"{path} is not a parquet file, or damaged ({ex})") from ex


def table_rows(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of Arrow's batches; times and dates are texts, booleans 0 and 1."""
    pa = require("pyarrow", "parquet")
    for batch in batches:
        columns = [_plain(pa, column) for column in batch.columns]
        names = batch.schema.names
        for cells in zip(*(column.to_pylist() for column in columns), strict=True):
            yield dict(zip(names, cells, strict=True))


def _plain(pa: Any, column: Any) -> Any:
    if pa.types.is_boolean(column.type):
        return column.cast(pa.uint8())
    return column.cast(pa.string()) if pa.types.is_temporal(column.type) else column


def field_types(schema: Any) -> dict[str, FieldType]:
    """Return the types of the columns that a field can hold as they are."""
    found = {column.name: _field_type(column.type) for column in schema}
    return {name: kind for name, kind in found.items() if kind is not None}


def _field_type(kind: Any) -> FieldType | None:
    """Return what a column becomes: numbers, arrays of them, text, or JSON; None for bytes."""
    types = require("pyarrow", "parquet").types
    if types.is_dictionary(kind):
        return _field_type(kind.value_type)
    if holds_bytes(kind):
        return None
    if types.is_string(kind) or types.is_large_string(kind) or types.is_temporal(kind):
        return FieldType(kind="text")
    if types.is_boolean(kind):
        return FieldType(kind="fixed", dtype="uint8")
    if (dtype := _dtype(kind)) is not None:
        return FieldType(kind="fixed", dtype=dtype)
    shape: tuple[int, ...] = ()
    while types.is_fixed_size_list(kind):
        shape, kind = (*shape, kind.list_size), kind.value_type
    if shape and (dtype := _dtype(kind)) is not None:
        return FieldType(kind="fixed", dtype=dtype, shape=shape)
    if not shape and (types.is_list(kind) or types.is_large_list(kind)):
        kind = kind.value_type
        while types.is_fixed_size_list(kind):
            shape, kind = (*shape, kind.list_size), kind.value_type
        if (dtype := _dtype(kind)) is not None:
            return FieldType(kind="array", dtype=dtype, shape=shape)
    return FieldType(kind="json")


def _dtype(kind: Any) -> str | None:
    types = require("pyarrow", "parquet").types
    if types.is_uint8(kind):
        return "uint8"
    if types.is_integer(kind):
        return "int64"
    if types.is_float32(kind) or types.is_float16(kind):
        return "float32"
    return "float64" if types.is_float64(kind) or types.is_decimal(kind) else None


def holds_bytes(kind: Any) -> bool:
    """Whether a column holds bytes, alone or as Hugging Face's images: bytes and a path."""
    types = require("pyarrow", "parquet").types
    if types.is_list(kind) or types.is_large_list(kind):
        return holds_bytes(kind.value_type)
    if types.is_struct(kind):
        return any(kind.field(n).name == "bytes" for n in range(kind.num_fields))
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def class_names(schema: Any) -> dict[str, Sequence[str]]:
    """Return the names of the class numbers of columns, as Hugging Face notes them in a file."""
    noted = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = json.loads(noted)["info"]["features"]
        return {name: names for name, feature in features.items() if (names := _names(feature))}
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}


def _names(feature: Any) -> Sequence[str]:
    """Return the names of a ClassLabel, alone or in a list."""
    if isinstance(feature, list) and len(feature) == 1:  # as older versions note a list
        feature = feature[0]
    if "feature" in feature:
        feature = feature["feature"]
    return list(feature["names"]) if feature.get("_type") == "ClassLabel" else []
