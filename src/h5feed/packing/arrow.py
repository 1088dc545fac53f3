"""Tables of Apache Arrow: parquet files, and what Hugging Face's datasets are made of."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from h5feed.errors import UsageError
from h5feed.optional import require
from h5feed.packing.tables import RowTable, TableRow
from h5feed.store.fields import FieldType

__all__ = ["class_names", "field_types", "parquet_table", "table_rows"]

_ROWS = 1024  # of a table that are Python's objects at a time


def parquet_table(path: Path) -> RowTable:
    """Return a parquet file about images that lie elsewhere, row by row."""
    file = open_parquet(path)
    schema = file.schema_arrow
    columns = [name for name in schema.names if not holds_bytes(schema.field(name).type)]
    batches = file.iter_batches(_ROWS, columns=columns, use_threads=False)
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
