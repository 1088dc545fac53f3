"""Manifests: a file that says which images, in which order, with which labels.

csv, tsv (with a header line), jsonl (one object a line) or parquet. One column holds the path,
which leads below the root and may lack its extension; `tables` says what the others are.
"""

import csv
import json
import os
import re
import reprlib
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from h5feed.errors import PackError, UsageError
from h5feed.packing.arrow import parquet_table
from h5feed.packing.items import EXTENSIONS, FURTHER_EXTENSIONS, Table
from h5feed.packing.tables import ColumnOptions, RowTable, TableRow, build_table
from h5feed.text import counted

__all__ = ["first_columns", "read_manifest"]

_LOWER = EXTENSIONS + FURTHER_EXTENSIONS
_ENDS = _LOWER + tuple(end.upper() for end in _LOWER)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_NEEDS_NORMALIZING = re.compile(r"^/|//|(?:^|/)\.{1,2}(?:/|$)|\\|^[A-Za-z]:")


def read_manifest(
    manifest: Path, root: Path, wanted: ColumnOptions, *, seen: Callable[[], None]
) -> Table:
    """Read a manifest whose relative paths start at the folder `root`; `seen` is called per row.

    Raises UsageError naming file, line and column; PackError where it cannot be read.
    """
    reader = _READERS.get(manifest.suffix.lower())
    if reader is None:
        raise UsageError(f"manifest {str(manifest)!r} is not a .csv, .tsv, .jsonl or .parquet file")
    try:
        kind = manifest.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # opening a pipe would wait for good
            raise UsageError(f"manifest {str(manifest)!r} is a pipe or a device: give a file")
        table = reader(manifest)
        table = replace(table, find=_Finder(root).key)
        return build_table(table, wanted, seen=seen)
    except FileNotFoundError as ex:
        raise UsageError(f"manifest {str(manifest)!r} does not exist") from ex
    except OSError as ex:
        raise PackError(f"cannot read the manifest {str(manifest)!r}: {ex.strerror}") from ex


def first_columns(manifest: Path) -> list[str]:
    """Return the columns of a manifest's first row."""
    row = next(_READERS[manifest.suffix](manifest).rows, None)
    return [] if row is None else list(row.cells)


class _Finder:
    """Finds the images of a folder by the paths that a manifest has of them."""

    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root)

    def key(self, path: Any) -> bytes:
        """Return the key of an image; LookupError where there is none."""
        if isinstance(path, int) and not isinstance(path, bool):
            path = str(path)  # an id
        if not isinstance(path, str) or not path:
            raise LookupError(f"{_SHORT.repr(path)} is not a path")
        if _NEEDS_NORMALIZING.search(path):
            path = self._below_root(path)
        full = os.path.join(self._root, path)
        if os.path.isfile(full):
            return os.fsencode(path)
        for end in _ENDS:  # an id, as Kaggle's tables have them
            if os.path.isfile(full + end):
                return os.fsencode(path + end)
        raise LookupError(f"there is no file {path!r} in {self._root!r}")

    def _below_root(self, path: str) -> str:
        """Return the plain path from the root to `path`, which must not lead out of it."""
        full = os.path.join(self._root, path)
        with suppress(ValueError):  # no file can have such a name
            for at in (os.path.abspath, os.path.realpath):  # either may be written through a link
                plain = os.path.relpath(at(full), at(self._root)).replace(os.sep, "/")
                if plain.partition("/")[0] != "..":
                    return plain
        raise LookupError(
            f"{path!r} lies outside SRC {self._root!r}: give a SRC that holds all images"
        )


def _csv_table(manifest: Path) -> RowTable:
    return RowTable(name=str(manifest), rows=_csv_rows(manifest), texts=True)


def _json_table(manifest: Path) -> RowTable:
    return RowTable(name=str(manifest), rows=_json_rows(manifest))


def _csv_rows(manifest: Path) -> Iterator[TableRow]:
    """Yield the rows of a csv or tsv file under its header.

    Raises UsageError where it is not such a table, and OSError.
    """
    delimiter = "\t" if manifest.suffix.lower() == ".tsv" else ","
    with manifest.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = [name.strip() for name in next(lines, [])]
            if len(set(header)) < len(header):
                raise UsageError(f"{manifest}: two columns have one name in {', '.join(header)}")
            _refuse_other_delimiter(manifest, header, delimiter)
            for cells in lines:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise UsageError(
                        f"{manifest}, line {lines.line_num}: {counted(len(cells), 'cell')} "
                        f"under a header of {len(header)}"
                    )
                yield TableRow(f"line {lines.line_num}", dict(zip(header, cells, strict=True)))
        except csv.Error as ex:
            raise UsageError(f"{manifest}, line {lines.line_num}: {ex}") from ex


def _refuse_other_delimiter(manifest: Path, header: Sequence[str], delimiter: str) -> None:
    if len(header) == 1 and (found := [sign for sign in ";,|\t" if sign in header[0]]):
        raise UsageError(
            f"{manifest}: the header {header[0]!r} is one column: in a {manifest.suffix.lower()} "
            f"file the delimiter is {delimiter!r}, not {found[0]!r}"
        )


def _json_rows(manifest: Path) -> Iterator[TableRow]:
    """Yield the objects of a file that has one per line; raises UsageError and OSError."""
    with manifest.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as ex:
                raise UsageError(f"{manifest}, line {number}: not JSON ({ex})") from ex
            except RecursionError as ex:
                raise UsageError(f"{manifest}, line {number}: nested too deep") from ex
            if not isinstance(row, dict):
                raise UsageError(f"{manifest}, line {number}: not a JSON object")
            yield TableRow(f"line {number}", row)


_READERS: dict[str, Callable[[Path], RowTable]] = {
    ".csv": _csv_table, ".tsv": _csv_table, ".jsonl": _json_table, ".ndjson": _json_table,
    ".parquet": parquet_table,
}  # fmt: skip
