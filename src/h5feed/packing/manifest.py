"""Manifests: a table that says which images, in which order, with which labels.

csv, tsv (with a header line) or jsonl (one object a line). One column holds the path, which leads
below the root and may lack its extension; a `label` column holds class numbers or names, a `class`
column class names; `path_column` and `label_column` name such columns. Numbers to predict are the
columns that `targets` names, or those called `target` or `target_…`. No other column is ever a
target: an index that pandas wrote is a number too. Beside these it is left out, and said; where
there is nothing else, it is asked for.

An item of several classes has a list in its label cell, a text with a delimiter between class
names or numbers where one is given, or a column of 0 and 1 for each class (`class_columns`).
"""

import csv
import fnmatch
import json
import os
import re
import reprlib
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from h5feed.errors import PackError, UsageError
from h5feed.packing.fields import FieldBuilder, parse_field
from h5feed.store.fields import FieldValues
from h5feed.text import counted

__all__ = [
    "EXTENSIONS",
    "ClassOrder",
    "ColumnOptions",
    "Table",
    "read_manifest",
    "sorted_classes",
]

EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif",
)  # fmt: skip
"""torchvision's IMG_EXTENSIONS and GIF; the case does not matter."""

ClassOrder = Literal["sorted", "natural"]
_ENDS = EXTENSIONS + tuple(end.upper() for end in EXTENSIONS)
_DIGITS = re.compile(r"(\d+)")

_SHORT = reprlib.Repr()  # a cell may hold megabytes, or lists in lists that repr gives up on
_SHORT.maxstring = _SHORT.maxother = 200

_PATHS = ("path", "file", "filename", "file_name", "filepath", "image")
_LABELS = ("label",)
_CLASSES = ("class", "class_name")
_TARGET = re.compile(r"targets?(?:[_ .-]?\w+)?", re.IGNORECASE)
_NUMBERING = re.compile(r"|unnamed: \d+|id|image_?id|index|idx", re.IGNORECASE)
"""What counts rows, and says nothing of an image."""
_MOST_CLASSES = 1_000_000
_LARGEST = float(np.finfo(np.float32).max)
_NEEDS_NORMALIZING = re.compile(r"^/|//|(?:^|/)\.{1,2}(?:/|$)|\\|^[A-Za-z]:")

Row = tuple[int, Mapping[str, Any]]
"""Line number from 1, and the line's cells by column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """N images below a folder, in the order they are packed in, with their labels.

    Columns, not objects: 1.28 million items stay under 100 bytes each.
    """

    classes: tuple[str, ...]
    labels: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    """int64 (N,), −1 where there is none; or float32 (N, K): targets, or with K classes 1 for those
    that an item has and 0 for the others."""
    key_bytes: npt.NDArray[np.uint8]
    """The paths below the folder, '/' between folders, back to back (file-system bytes)."""
    key_offsets: npt.NDArray[np.int64]
    """(N+1,) where each key begins in `key_bytes`."""
    targets: tuple[str, ...] = ()
    """The names of K targets."""
    fields: Mapping[str, FieldValues] = field(default_factory=dict)
    """Further fields by name."""
    notes: tuple[str, ...] = ()
    """What a user should be told, such as images that belong to no class."""

    def __len__(self) -> int:
        return len(self.key_offsets) - 1

    def key(self, index: int) -> bytes:
        """Return an item's path below the folder, in file-system bytes."""
        return self.key_bytes[self.key_offsets[index] : self.key_offsets[index + 1]].tobytes()


def sorted_classes(names: Iterable[str], order: ClassOrder = "sorted") -> list[str]:
    """Return class names in the order of their numbers.

    "sorted" is torchvision's, by code point; "natural" is timm's, without regard to case and with
    the numbers in names as numbers: class2 before class10.
    """
    if order == "sorted":
        return sorted(names)

    def natural(name: str) -> tuple[list[str | int], str]:
        parts = enumerate(_DIGITS.split(name.lower()))  # text, digits, text, …
        return [int(part) if at % 2 else part for at, part in parts], name

    return sorted(names, key=natural)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOptions:
    """What a user says of a table's columns; `PackOptions` describes each."""

    path_column: str | None = None
    label_column: str | None = None
    label_delimiter: str | None = None
    class_columns: Sequence[str] = ()
    targets: Sequence[str] = ()
    fields: Sequence[str] = ()
    class_order: ClassOrder = "sorted"


def read_manifest(
    manifest: Path, root: Path, wanted: ColumnOptions, *, seen: Callable[[], None]
) -> Table:
    """Read a manifest whose relative paths start at the folder `root`; `seen` is called per row.

    Raises UsageError naming file, line and column; PackError where it cannot be read.
    """
    readers = {".csv": _csv_rows, ".tsv": _csv_rows, ".jsonl": _json_rows, ".ndjson": _json_rows}
    reader = readers.get(manifest.suffix.lower())
    if reader is None:
        raise UsageError(f"manifest {str(manifest)!r} is not a .csv, .tsv or .jsonl file")
    try:
        kind = manifest.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # opening a pipe would wait for good
            raise UsageError(f"manifest {str(manifest)!r} is a pipe or a device: give a file")
        builder = _Builder(manifest, root, wanted, seen, texts=reader is _csv_rows)
        return builder.table(reader(manifest))
    except FileNotFoundError as ex:
        raise UsageError(f"manifest {str(manifest)!r} does not exist") from ex
    except OSError as ex:
        raise PackError(f"cannot read the manifest {str(manifest)!r}: {ex.strerror}") from ex


def _is_name(cell: Any) -> bool:
    return isinstance(cell, str) and cell != "" and not _is_number(cell)


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


class _Builder:
    """Gathers a manifest's rows into columns."""

    def __init__(
        self,
        manifest: Path,
        root: Path,
        wanted: ColumnOptions,
        seen: Callable[[], None],
        *,
        texts: bool,
    ) -> None:
        self.manifest = manifest
        self._wanted = wanted
        self._seen = seen
        self.root = os.fspath(root)
        self.blob = bytearray()
        self.offsets = array("q", [0])
        self.fields = [FieldBuilder(*parse_field(text), texts=texts) for text in wanted.fields]

    def table(self, rows: Iterator[Row]) -> Table:
        wanted = self._wanted
        first = next(rows, None)
        if first is None:
            raise UsageError(f"manifest {str(self.manifest)!r} lists no images")
        columns = list(first[1])
        path = self._given("path_column", columns) or self._column(columns, _PATHS)
        if path is None:
            raise UsageError(
                f"{self.manifest}: no column of paths among {', '.join(columns)}: say which it "
                f"is, as --path-column {columns[0]}, or name it {', '.join(_PATHS[:-1])} or "
                f"{_PATHS[-1]}"
            )
        label = self._given("label_column", columns) or self._column(columns, _LABELS)
        name = self._column(columns, _CLASSES)
        if name == label:
            name = None
        self._check_fields(columns)
        rows = self._keep_keys(first, rows, path)
        kept = {path, *(one.name for one in self.fields)}
        if wanted.class_columns:
            self._refuse_class_order("class columns, which come in the order they are named in")
            found = self._class_columns([c for c in columns if c not in kept])
            return self._finish_with(columns, (path, *found), self._with_columns(rows, found))
        if wanted.targets or (label is None and name is None):
            self._refuse_class_order("a manifest without classes")
            found = self._targets(columns, [c for c in columns if c not in kept], wanted.targets)
            return self._finish_with(columns, (path, *found), self._with_targets(rows, found))
        several = label or name or ""
        if wanted.label_delimiter is not None or isinstance(first[1].get(several), list):
            return self._finish_with(columns, (path, several), self._with_several(rows, several))
        if label is not None and _is_name(first[1].get(label)):
            return self._finish_with(columns, (path, label), self._with_names(rows, label))
        if label is not None:
            self._refuse_class_order(f"the class numbers of column {label!r}")
        taken = [column for column in (path, label, name) if column is not None]
        return self._finish_with(columns, taken, self._with_labels(rows, label, name))

    def _class_columns(self, others: Sequence[str]) -> tuple[str, ...]:
        """Return the columns of 0 and 1, by their names or by patterns such as "has_*"."""
        found: dict[str, None] = {}
        for pattern in self._wanted.class_columns:
            names = [pattern] if pattern in others else fnmatch.filter(others, pattern)
            if not names:
                raise UsageError(
                    f"class_columns={pattern}: {self.manifest} has no such column of 0 and 1; its "
                    f"other columns are {', '.join(map(repr, others))}"
                )
            found |= dict.fromkeys(names)
        return tuple(found)

    def _targets(
        self, columns: Sequence[str], others: Sequence[str], wanted: Sequence[str]
    ) -> tuple[str, ...]:
        """Return the columns of numbers to predict: those asked for, or those named so."""
        missing = [column for column in wanted if column not in others]
        if missing:
            raise UsageError(
                f"targets={' '.join(missing)}: {self.manifest} has no such column of numbers; its "
                f"columns are {', '.join(map(repr, columns))}"
            )
        found = wanted or [column for column in others if _TARGET.fullmatch(column)]
        unknown = [column for column in others if not _NUMBERING.fullmatch(column)]
        if unknown and not found:
            raise UsageError(
                f"{self.manifest}: columns {', '.join(map(repr, unknown))} are neither label, "
                f"class nor target: say which are numbers to predict, as --targets {unknown[-1]}, "
                f"or which are labels, as --label-column {unknown[-1]}, or leave them out"
            )
        return tuple(found)

    def _finish_with(self, columns: Sequence[str], taken: Sequence[str], table: Table) -> Table:
        kept = {*taken, *(one.name for one in self.fields)}
        left = [repr(column) for column in columns if column not in kept]
        if not left:
            return table
        note = f"left out of the manifest: {counted(len(left), 'column')} ({', '.join(left)})"
        return replace(table, notes=(note,))

    def _refuse_class_order(self, what: str) -> None:
        if self._wanted.class_order != "sorted":
            raise UsageError(
                f"class_order={self._wanted.class_order} numbers class names, and does nothing to "
                f"{what}: leave it out"
            )

    def _given(self, option: str, columns: Sequence[str]) -> str | None:
        column: str | None = getattr(self._wanted, option)
        if column is not None and column not in columns:
            raise UsageError(
                f"{option}={column!r}: {self.manifest} has no such column; its columns are "
                f"{', '.join(map(repr, columns))}"
            )
        return column

    def _check_fields(self, columns: Sequence[str]) -> None:
        names = [one.name for one in self.fields]
        for name in names:
            if name not in columns:
                raise UsageError(
                    f"field={name!r}: {self.manifest} has no such column; its columns are "
                    f"{', '.join(map(repr, columns))}"
                )
            if names.count(name) > 1:
                raise UsageError(f"field={name!r} is given twice: once is enough")

    def _column(self, columns: Sequence[str], names: Sequence[str]) -> str | None:
        found = [column for column in columns if column.lower() in names]
        if len(found) > 1:
            raise UsageError(f"{self.manifest}: columns {', '.join(found)} mean the same: keep one")
        return found[0] if found else None

    def _keep_keys(self, first: Row, rows: Iterator[Row], column: str) -> Iterator[Row]:
        row: Row | None = first
        while row is not None:
            self._refuse_late_columns(row, first)
            self.blob += self._key(row, column)
            self.offsets.append(len(self.blob))
            for one in self.fields:
                one.add(self._cell(row, one.name), partial(self._error, row, one.name))
            self._seen()
            yield row
            row = next(rows, None)

    def _refuse_late_columns(self, row: Row, first: Row) -> None:
        """Refuse a jsonl line's label where the first line, which decides, has none."""
        if row[1].keys() <= first[1].keys():
            return
        for column in row[1].keys() - first[1].keys():
            if column.lower() in _LABELS + _CLASSES or _TARGET.fullmatch(column):
                raise self._error(row, column, "the first line has none: give all lines the same")

    def _key(self, row: Row, column: str) -> bytes:
        path = self._cell(row, column)
        if isinstance(path, int) and not isinstance(path, bool):
            path = str(path)  # an id
        if not isinstance(path, str) or not path:
            raise self._error(row, column, f"{_SHORT.repr(path)} is not a path")
        if _NEEDS_NORMALIZING.search(path):
            path = self._below_root(row, column, path)
        full = os.path.join(self.root, path)
        if os.path.isfile(full):
            return os.fsencode(path)
        for end in _ENDS:  # an id, as Kaggle's tables have them
            if os.path.isfile(full + end):
                return os.fsencode(path + end)
        raise self._error(row, column, f"there is no file {path!r} in {self.root!r}")

    def _below_root(self, row: Row, column: str, path: str) -> str:
        """Return the plain path from the root to `path`, which must not lead out of it."""
        full = os.path.join(self.root, path)
        with suppress(ValueError):  # no file can have such a name
            for at in (os.path.abspath, os.path.realpath):  # either may be written through a link
                plain = os.path.relpath(at(full), at(self.root)).replace(os.sep, "/")
                if plain.partition("/")[0] != "..":
                    return plain
        what = f"{path!r} lies outside SRC {self.root!r}: give a SRC that holds all images"
        raise self._error(row, column, what)

    def _cell(self, row: Row, column: str) -> Any:
        if column not in row[1]:
            raise self._error(row, column, "missing")
        return row[1][column]

    def _error(self, row: Row, column: str, what: str) -> UsageError:
        return UsageError(f"{self.manifest}, line {row[0]}, column {column!r}: {what}")

    def _with_labels(self, rows: Iterator[Row], label: str | None, name: str | None) -> Table:
        if label is None:
            assert name is not None
            return self._with_names(rows, name)
        labels = array("q")
        names: dict[int, str] = {}
        for row in rows:
            number = self._label(row, label, self._cell(row, label))
            labels.append(number)
            if name is not None and number >= 0:
                given = self._class_name(row, name, str(self._cell(row, name)))
                if names.setdefault(number, given) != given:
                    what = f"class {number} is {names[number]!r} above and {given!r} here"
                    raise self._error(row, name, what)
        classes = self._numbered(names, max(labels) + 1)
        return self._finish(classes, np.frombuffer(labels, np.int64))

    def _numbered(self, names: Mapping[int, str], count: int) -> tuple[str, ...]:
        """Return the names of classes 0 to `count` − 1: the number where none is given."""
        numbers: dict[str, int] = {}
        for number in range(count):
            name = names.get(number, str(number))
            other = numbers.setdefault(name, number)
            if other != number:
                unnamed = [k for k in (other, number) if k not in names]
                why = f" (no row names class {unnamed[0]}: its number does)" if unnamed else ""
                raise UsageError(
                    f"{self.manifest}: classes {other} and {number} are both named "
                    f"{name!r}{why}: give each a name of its own"
                )
        return tuple(numbers)

    def _label(self, row: Row, column: str, cell: Any, *, least: int = -1) -> int:
        try:
            number = int(cell)
        except (TypeError, ValueError):
            number = None
        if number is None or isinstance(cell, bool | float):
            advice = "class names belong in a column 'class', or in all rows of this"
            if _is_number(cell):
                advice = "call a column to predict 'target'"
            raise self._error(row, column, f"{_SHORT.repr(cell)} is not a whole number; {advice}")
        if not least <= number < _MOST_CLASSES:
            none = "−1, or " if least else ""
            what = f"{number} is not a class number ({none}0 to {_MOST_CLASSES - 1})"
            raise self._error(row, column, what + "; call a column to predict 'target'")
        return number

    def _with_names(self, rows: Iterator[Row], column: str) -> Table:
        numbers: dict[str, int] = {}
        seen = array("q")
        for row in rows:
            cell = self._cell(row, column)
            seen.append(self._number_of(row, column, cell, numbers))
        classes, rank = self._ranked(numbers)
        return self._finish(classes, rank[np.frombuffer(seen, np.int64)])

    def _number_of(self, row: Row, column: str, cell: Any, numbers: dict[str, int]) -> int:
        """Return the number of a class name, in the order in which names appear."""
        if not isinstance(cell, str) or not cell:
            raise self._error(row, column, f"{_SHORT.repr(cell)} is not a class name")
        if _is_number(cell) and column.lower() not in _CLASSES:
            what = f"{_SHORT.repr(cell)} is a number among class names: call the column 'class'"
            raise self._error(row, column, f"{what} if it is a name")
        name = self._class_name(row, column, cell)
        return numbers.setdefault(name, len(numbers))

    def _ranked(self, numbers: Mapping[str, int]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
        """Return the classes in their order, and the place there of each number."""
        classes = sorted_classes(numbers, self._wanted.class_order)
        rank = np.empty(len(classes), np.int64)
        rank[[numbers[name] for name in classes]] = np.arange(len(classes))
        return tuple(classes), rank

    def _with_several(self, rows: Iterator[Row], column: str) -> Table:
        """Read any number of classes a row: all names, or all class numbers."""
        item, seen = array("q"), array("q")
        numbers: dict[str, int] = {}
        named: bool | None = None
        for at, row in enumerate(rows):
            for part in self._parts(row, column):
                if named is None:
                    named = _is_name(part) or column.lower() in _CLASSES
                item.append(at)
                if named:
                    seen.append(self._number_of(row, column, part, numbers))
                else:
                    seen.append(self._label(row, column, part, least=0))
        if not seen:
            raise UsageError(f"{self.manifest}: no row has a class in column {column!r}")
        if not named:
            self._refuse_class_order(f"the class numbers of column {column!r}")
        found = np.frombuffer(seen, np.int64)
        classes, rank = self._ranked(numbers)
        if not named:
            classes, rank = tuple(map(str, range(found.max() + 1))), np.arange(found.max() + 1)
        labels = np.zeros((len(self.offsets) - 1, len(classes)), np.float32)
        labels[np.frombuffer(item, np.int64), rank[found]] = 1
        return self._finish(classes, labels)

    def _parts(self, row: Row, column: str) -> list[Any]:
        cell = self._cell(row, column)
        if isinstance(cell, list):
            return cell
        if self._wanted.label_delimiter is None:
            raise self._error(row, column, f"{_SHORT.repr(cell)} is no list, as in the first row")
        parts = [part.strip() for part in str(cell).split(self._wanted.label_delimiter)]
        return [part for part in parts if part]

    def _with_columns(self, rows: Iterator[Row], columns: Sequence[str]) -> Table:
        values = bytearray()
        for row in rows:
            for column in columns:
                cell = self._cell(row, column)
                if not _is_number(cell) or float(cell) not in (0, 1):
                    raise self._error(row, column, f"{_SHORT.repr(cell)} is neither 0 nor 1")
                values.append(int(float(cell)))
        labels = np.frombuffer(values, np.uint8).astype(np.float32)
        return self._finish(tuple(columns), labels.reshape(-1, len(columns)))

    def _class_name(self, row: Row, column: str, name: str) -> str:
        try:
            name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise self._error(row, column, f"{name!r} is not Unicode text") from None
        if "\0" in name:
            raise self._error(row, column, f"{name!r} holds a NUL, which HDF5 cannot keep")
        return name

    def _with_targets(self, rows: Iterator[Row], columns: Sequence[str]) -> Table:
        values = array("f")
        for row in rows:
            for column in columns:
                values.append(self._target(row, column))
        count = len(self.offsets) - 1
        if not columns:
            return self._finish((), np.full(count, -1, np.int64))
        table = self._finish((), np.frombuffer(values, np.float32).reshape(count, -1))
        return replace(table, targets=tuple(columns))

    def _target(self, row: Row, column: str) -> float:
        cell = self._cell(row, column)
        if isinstance(cell, list):
            raise self._error(
                row, column, f"{_SHORT.repr(cell)} is a list: give one column per target"
            )
        if not _is_number(cell):
            raise self._error(row, column, f"{_SHORT.repr(cell)} is not a number to predict")
        number = float(cell)
        if not abs(number) <= _LARGEST:
            what = f"{cell!r} is no target to learn: give a finite number of 32 bits"
            raise self._error(row, column, what)
        return number

    def _finish(
        self, classes: tuple[str, ...], labels: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    ) -> Table:
        return Table(
            classes=classes,
            labels=labels,
            key_bytes=np.frombuffer(self.blob, np.uint8),
            key_offsets=np.frombuffer(self.offsets, np.int64),
            fields={one.name: one.values() for one in self.fields},
        )


def _csv_rows(manifest: Path) -> Iterator[Row]:
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
                yield lines.line_num, dict(zip(header, cells, strict=True))
        except csv.Error as ex:
            raise UsageError(f"{manifest}, line {lines.line_num}: {ex}") from ex


def _refuse_other_delimiter(manifest: Path, header: Sequence[str], delimiter: str) -> None:
    if len(header) == 1 and (found := [sign for sign in ";,|\t" if sign in header[0]]):
        raise UsageError(
            f"{manifest}: the header {header[0]!r} is one column: in a {manifest.suffix.lower()} "
            f"file the delimiter is {delimiter!r}, not {found[0]!r}"
        )


def _json_rows(manifest: Path) -> Iterator[Row]:
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
            yield number, row
