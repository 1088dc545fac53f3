"""Tables about images: which columns are labels, targets and further fields, and their cells.

A `label` column holds class numbers or names, a `class` column class names; `label_column` names
such a column. Numbers to predict are the columns that `targets` names, or those called `target` or
`target_…`. No other column is ever a target: an index that pandas wrote is a number too. Beside
these it is left out, and said; where there is nothing else, it is asked for.

An item of several classes has a list in its label cell, a text with a delimiter between class
names or numbers where one is given, or a column of 0 and 1 for each class (`class_columns`).

The order and number of classes follow from the cells, where no file of `classes` says them.
"""

import fnmatch
import os
import re
import reprlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from h5feed.errors import UsageError
from h5feed.packing.fields import FieldBuilder, parse_field
from h5feed.packing.items import ClassOrder, Table, sorted_classes
from h5feed.store.fields import FieldType
from h5feed.text import counted

__all__ = [
    "ColumnOptions",
    "RowTable",
    "TableRow",
    "build_table",
]

_SHORT = reprlib.Repr()  # a cell may hold megabytes, or lists in lists that repr gives up on
_SHORT.maxstring = _SHORT.maxother = 200

_PATHS = ("path", "file", "filename", "file_name", "filepath", "image")
_ID = re.compile(r"id|(?:image|img|file)_?(?:id|name)?", re.IGNORECASE)
"""What tables of competitions call a path, as a rule without its extension."""
_LABELS = ("label", "labels", "cls")
_CLASSES = ("class", "class_name")
_TARGET = re.compile(r"targets?(?:[_ .-]?\w+)?", re.IGNORECASE)
_NUMBERING = re.compile(r"|unnamed: \d+|id|image_?id|index|idx", re.IGNORECASE)
"""What counts rows, and says nothing of an image."""
_MOST_CLASSES = 1_000_000
_LARGEST = float(np.finfo(np.float32).max)


class TableRow(NamedTuple):
    """One row of a table."""

    where: str
    """For errors, such as "line 3"."""
    cells: Mapping[str, Any]
    key: bytes = b""
    """The key of the image, where the table has images and no paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """A table that is read row by row."""

    name: str
    """For errors, such as the path of a file."""
    rows: Iterator[TableRow]
    texts: bool = False
    """Whether all cells are texts, which numbers and JSON are read from."""
    find: Callable[[Any], bytes] | None = None
    """Return the key of an image from the cell of its path; LookupError says what is wrong. None
    where rows have keys."""
    types: Mapping[str, FieldType] = field(default_factory=dict)
    """Of columns whose type is known before their cells are."""
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The names of class numbers, of columns where they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOptions:
    """What a user says of a table's columns; `PackOptions` describes each."""

    path_column: str | None = None
    label_column: str | None = None
    label_delimiter: str | None = None
    class_columns: Sequence[str] = ()
    targets: Sequence[str] = ()
    fields: Sequence[str] = ()
    classes: str | os.PathLike[str] | None = None
    class_order: ClassOrder = "sorted"

    def refuse(self, what: str) -> None:
        """Raise UsageError for the first that is given, where there is no table."""
        for option in dataclass_fields(self):
            value = getattr(self, option.name)
            if value and option.name != "class_order":
                said = value if isinstance(value, str | os.PathLike) else " ".join(value)
                raise UsageError(f"{option.name}={said} is about {what}")


def build_table(table: RowTable, wanted: ColumnOptions, *, seen: Callable[[], None]) -> Table:
    """Read a table's rows into columns; `seen` is called for each.

    Raises UsageError naming table, row and column.
    """
    return _Builder(table, wanted, seen).table()


def read_classes(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the class names of a text file, one a line; UsageError where there are none."""
    try:
        text = Path(path).read_bytes().decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    except OSError as ex:
        raise UsageError(f"classes={path} cannot be read: {ex.strerror}") from ex
    names = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    for number, name in enumerate(names, 1):
        if not name or "\0" in name:
            what = "is empty" if not name else "holds a NUL, which HDF5 cannot keep"
            raise UsageError(f"classes={path}: line {number} {what}: give a class name a line")
    return tuple(names)


def _is_name(cell: Any) -> bool:
    return isinstance(cell, str) and cell != "" and not _is_number(cell)


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


class _Builder:
    """Gathers a table's rows into columns."""

    def __init__(self, table: RowTable, wanted: ColumnOptions, seen: Callable[[], None]) -> None:
        self._table = table
        self._name = table.name
        self._wanted = wanted
        self._seen = seen
        self.blob = bytearray()
        self.offsets = array("q", [0])
        self.fields = [self._field(*parse_field(text)) for text in wanted.fields]
        self.classes = () if wanted.classes is None else read_classes(wanted.classes)
        if self.classes:
            self._refuse_class_order(f"classes={wanted.classes}, which has an order")

    def _field(self, name: str, kind: FieldType | None) -> FieldBuilder:
        kind = self._table.types.get(name) if kind is None else kind
        return FieldBuilder(name, kind, texts=self._table.texts)

    def table(self) -> Table:
        wanted = self._wanted
        first = next(self._table.rows, None)
        if first is None:
            raise UsageError(f"{self._name} lists no images")
        columns = list(first.cells)
        path = self._path_column(first)
        label = self._label_column(columns)
        name = self._column(columns, _CLASSES)
        if name == label:
            name = None
        self._check_fields(columns)
        rows = self._keep_keys(first, path)
        kept = {path, *(one.name for one in self.fields)}
        if self.classes and (wanted.class_columns or wanted.targets):
            what = "targets are numbers" if wanted.targets else "class_columns name them"
            raise UsageError(f"classes={wanted.classes} names classes, and {what}: leave it out")
        if wanted.class_columns:
            self._refuse_class_order("class columns, which come in the order they are named in")
            found = self._class_columns([c for c in columns if c not in kept])
            return self._finish_with(columns, (path, *found), self._with_columns(rows, found))
        if wanted.targets or (label is None and name is None):
            self._refuse_class_order("a table without classes")
            found = self._targets(columns, [c for c in columns if c not in kept], wanted.targets)
            return self._finish_with(columns, (path, *found), self._with_targets(rows, found))
        several = label or name or ""
        if wanted.label_delimiter is not None or isinstance(first.cells.get(several), list):
            return self._finish_with(columns, (path, several), self._with_several(rows, several))
        if label is not None and _is_name(first.cells.get(label)):
            return self._finish_with(columns, (path, label), self._with_names(rows, label))
        if label is not None:
            self._refuse_class_order(f"the class numbers of column {label!r}")
        taken = [column for column in (path, label, name) if column is not None]
        return self._finish_with(columns, taken, self._with_labels(rows, label, name))

    def _path_column(self, first: TableRow) -> str:
        """Return the column of paths; "" where rows have keys."""
        columns = list(first.cells)
        if self._table.find is None:
            return ""
        path = self._given("path_column", columns) or self._column(columns, _PATHS)
        if path is not None:
            return path
        for column in filter(_ID.fullmatch, columns):  # as Kaggle's tables have them
            with suppress(LookupError):
                self._table.find(first.cells[column])
                return column
        raise UsageError(
            f"{self._name}: no column of paths among {', '.join(columns)}: say which it "
            f"is, as --path-column {columns[0]}, or name it {', '.join(_PATHS[:-1])} or "
            f"{_PATHS[-1]}"
        )

    def _label_column(self, columns: Sequence[str]) -> str | None:
        """Return the column of labels: the one asked for, named so, or known to be of classes."""
        label = self._given("label_column", columns) or self._column(columns, _LABELS)
        known = [column for column in columns if column in self._table.classes]
        return known[0] if label is None and len(known) == 1 else label

    def _class_columns(self, others: Sequence[str]) -> tuple[str, ...]:
        """Return the columns of 0 and 1, by their names or by patterns such as "has_*"."""
        found: dict[str, None] = {}
        for pattern in self._wanted.class_columns:
            names = [pattern] if pattern in others else fnmatch.filter(others, pattern)
            if not names:
                raise UsageError(
                    f"class_columns={pattern}: {self._name} has no such column of 0 and 1; its "
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
                f"targets={' '.join(missing)}: {self._name} has no such column of numbers; its "
                f"columns are {', '.join(map(repr, columns))}"
            )
        found = wanted or [column for column in others if _TARGET.fullmatch(column)]
        unknown = [column for column in others if not _NUMBERING.fullmatch(column)]
        if unknown and not found and self._table.find is not None and not self.fields:
            raise UsageError(
                f"{self._name}: columns {', '.join(map(repr, unknown))} are neither label, "
                f"class nor target: say which are numbers to predict, as --targets {unknown[-1]}, "
                f"which are labels, as --label-column {unknown[-1]}, or which to keep as fields, "
                f"as --field {unknown[-1]}, or leave them out"
            )
        return tuple(found)

    def _finish_with(self, columns: Sequence[str], taken: Sequence[str], table: Table) -> Table:
        kept = {*taken, *(one.name for one in self.fields)}
        left = [repr(column) for column in columns if column not in kept]
        if not left:
            return table
        what = "manifest" if self._table.find is not None else "table"
        note = f"left out of the {what}: {counted(len(left), 'column')} ({', '.join(left)})"
        return replace(table, notes=(*table.notes, note))

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
                f"{option}={column!r}: {self._name} has no such column; its columns are "
                f"{', '.join(map(repr, columns))}"
            )
        return column

    def _check_fields(self, columns: Sequence[str]) -> None:
        names = [one.name for one in self.fields]
        for name in names:
            if name not in columns:
                raise UsageError(
                    f"field={name!r}: {self._name} has no such column; its columns are "
                    f"{', '.join(map(repr, columns))}"
                )
            if names.count(name) > 1:
                raise UsageError(f"field={name!r} is given twice: once is enough")

    def _column(self, columns: Sequence[str], names: Sequence[str]) -> str | None:
        found = [column for column in columns if column.lower() in names]
        if len(found) > 1:
            raise UsageError(f"{self._name}: columns {', '.join(found)} mean the same: keep one")
        return found[0] if found else None

    def _keep_keys(self, first: TableRow, column: str) -> Iterator[TableRow]:
        for row in chain([first], self._table.rows):
            self._refuse_late_columns(row, first)
            self.blob += self._key(row, column)
            self.offsets.append(len(self.blob))
            for one in self.fields:
                one.add(self._cell(row, one.name), partial(self._error, row, one.name))
            self._check_rows(row)
            self._seen()
            yield row

    def _check_rows(self, row: TableRow) -> None:
        """Refuse rows of boxes' classes, or keypoints, that are not as many as the boxes."""
        counts = {one.name: one for one in self.fields if one.kind and one.kind.kind == "boxes"}
        for one in self.fields:
            if one.kind is None or not (of := one.kind.rows_of):
                continue
            if of not in counts:
                raise UsageError(
                    f"field={one.name}:{one.kind}: {of!r} is not a field of boxes: give it as "
                    f"well, as --field {of}:boxes"
                )
            if one.rows != counts[of].rows:
                said = counted(counts[of].rows, "box", "boxes")
                raise self._error(row, one.name, f"{counted(one.rows, 'row')} for {said} of {of!r}")

    def _refuse_late_columns(self, row: TableRow, first: TableRow) -> None:
        """Refuse a jsonl line's label where the first line, which decides, has none."""
        if row.cells.keys() <= first.cells.keys():
            return
        for column in row.cells.keys() - first.cells.keys():
            if column.lower() in _LABELS + _CLASSES or _TARGET.fullmatch(column):
                raise self._error(row, column, "the first line has none: give all lines the same")

    def _key(self, row: TableRow, column: str) -> bytes:
        if self._table.find is None:
            return row.key
        try:
            return self._table.find(self._cell(row, column))
        except LookupError as ex:
            raise self._error(row, column, ex.args[0]) from ex

    def _cell(self, row: TableRow, column: str) -> Any:
        cell = row.cells.get(column)
        if cell is None:
            known = self._table.types.get(column)
            if column not in row.cells or (known is not None and known.kind != "json"):
                raise self._error(row, column, "missing")
        return cell

    def _error(self, row: TableRow, column: str, what: str) -> UsageError:
        return UsageError(f"{self._name}, {row.where}, column {column!r}: {what}")

    def _with_labels(self, rows: Iterator[TableRow], label: str | None, name: str | None) -> Table:
        if label is None:
            assert name is not None
            return self._with_names(rows, name)
        labels = array("q")
        names: dict[int, str] = {}
        for row in rows:
            number = self._label(row, label, self._cell(row, label))
            labels.append(number)
            if name is not None and number >= 0 and not self._known(label):
                given = self._class_name(row, name, str(self._cell(row, name)))
                if names.setdefault(number, given) != given:
                    what = f"class {number} is {names[number]!r} above and {given!r} here"
                    raise self._error(row, name, what)
        classes = self._known(label) or self._numbered(names, max(labels) + 1)
        return self._finish(classes, np.frombuffer(labels, np.int64))

    def _known(self, column: str) -> tuple[str, ...]:
        return self.classes or tuple(self._table.classes.get(column, ()))

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
                    f"{self._name}: classes {other} and {number} are both named "
                    f"{name!r}{why}: give each a name of its own"
                )
        return tuple(numbers)

    def _label(self, row: TableRow, column: str, cell: Any, *, least: int = -1) -> int:
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
        if (known := self._known(column)) and number >= len(known):
            raise self._error(row, column, f"{number} is none of the {len(known)} classes")
        return number

    def _with_names(self, rows: Iterator[TableRow], column: str) -> Table:
        numbers = self._class_numbers()
        seen = array("q")
        for row in rows:
            cell = self._cell(row, column)
            seen.append(self._number_of(row, column, cell, numbers))
        classes, rank = self._ranked(numbers)
        return self._finish(classes, rank[np.frombuffer(seen, np.int64)])

    def _number_of(self, row: TableRow, column: str, cell: Any, numbers: dict[str, int]) -> int:
        """Return the number of a class name, in the order in which names appear."""
        if not isinstance(cell, str) or not cell:
            raise self._error(row, column, f"{_SHORT.repr(cell)} is not a class name")
        if _is_number(cell) and column.lower() not in _CLASSES:
            what = f"{_SHORT.repr(cell)} is a number among class names: call the column 'class'"
            raise self._error(row, column, f"{what} if it is a name")
        name = self._class_name(row, column, cell)
        if self.classes and name not in numbers:
            what = f"{_SHORT.repr(name)} is none of the {len(numbers)} classes"
            raise self._error(row, column, f"{what} of {os.fspath(self._wanted.classes or '')}")
        return numbers.setdefault(name, len(numbers))

    def _class_numbers(self) -> dict[str, int]:
        """Return the number of each class name that is known before a row is."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        if len(numbers) < len(self.classes):
            twice = next(n for k, n in enumerate(self.classes) if numbers[n] != k)
            raise UsageError(
                f"classes={self._wanted.classes}: {twice!r} is the name of two classes, and the "
                "labels are names: give numbers"
            )
        return numbers

    def _ranked(self, numbers: Mapping[str, int]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
        """Return the classes in their order, and the place there of each number."""
        classes = self.classes or sorted_classes(numbers, self._wanted.class_order)
        rank = np.empty(len(classes), np.int64)
        rank[[numbers[name] for name in classes]] = np.arange(len(classes))
        return tuple(classes), rank

    def _with_several(self, rows: Iterator[TableRow], column: str) -> Table:
        """Read any number of classes a row: all names, or all class numbers."""
        item, seen = array("q"), array("q")
        numbers = self._class_numbers()
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
            raise UsageError(f"{self._name}: no row has a class in column {column!r}")
        if not named:
            self._refuse_class_order(f"the class numbers of column {column!r}")
        found = np.frombuffer(seen, np.int64)
        classes, rank = self._ranked(numbers)
        if not named:
            classes = self._known(column) or tuple(map(str, range(found.max() + 1)))
            rank = np.arange(len(classes))
        labels = np.zeros((len(self.offsets) - 1, len(classes)), np.float32)
        labels[np.frombuffer(item, np.int64), rank[found]] = 1
        return self._finish(classes, labels)

    def _parts(self, row: TableRow, column: str) -> list[Any]:
        cell = self._cell(row, column)
        if isinstance(cell, list):
            return cell
        if self._wanted.label_delimiter is None:
            raise self._error(
                row, column, f"{_SHORT.repr(cell)} is not a list, as in the first row"
            )
        parts = [part.strip() for part in str(cell).split(self._wanted.label_delimiter)]
        return [part for part in parts if part]

    def _with_columns(self, rows: Iterator[TableRow], columns: Sequence[str]) -> Table:
        values = bytearray()
        for row in rows:
            for column in columns:
                cell = self._cell(row, column)
                if not _is_number(cell) or float(cell) not in (0, 1):
                    raise self._error(row, column, f"{_SHORT.repr(cell)} is neither 0 nor 1")
                values.append(int(float(cell)))
        labels = np.frombuffer(values, np.uint8).astype(np.float32)
        return self._finish(tuple(columns), labels.reshape(-1, len(columns)))

    def _class_name(self, row: TableRow, column: str, name: str) -> str:
        try:
            name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise self._error(row, column, f"{name!r} is not Unicode text") from None
        if "\0" in name:
            raise self._error(row, column, f"{name!r} holds a NUL, which HDF5 cannot keep")
        return name

    def _with_targets(self, rows: Iterator[TableRow], columns: Sequence[str]) -> Table:
        values = array("f")
        for row in rows:
            for column in columns:
                values.append(self._target(row, column))
        count = len(self.offsets) - 1
        if not columns:  # boxes may have the classes
            return self._finish(self.classes, np.full(count, -1, np.int64))
        table = self._finish((), np.frombuffer(values, np.float32).reshape(count, -1))
        return replace(table, targets=tuple(columns))

    def _target(self, row: TableRow, column: str) -> float:
        cell = self._cell(row, column)
        if isinstance(cell, list):
            raise self._error(
                row, column, f"{_SHORT.repr(cell)} is a list: give one column per target"
            )
        if not _is_number(cell):
            raise self._error(row, column, f"{_SHORT.repr(cell)} is not a number to predict")
        number = float(cell)
        if not abs(number) <= _LARGEST:
            what = f"{cell!r} is not a target to learn: give a finite number of 32 bits"
            raise self._error(row, column, what)
        return number

    def _finish(
        self, classes: tuple[str, ...], labels: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    ) -> Table:
        twice = self._listed_twice()
        return Table(
            classes=classes,
            labels=labels,
            key_bytes=np.frombuffer(self.blob, np.uint8),
            key_offsets=np.frombuffer(self.offsets, np.int64),
            fields={one.name: one.values() for one in self.fields},
            notes=(f"listed more than once: {counted(twice, 'image')}",) if twice else (),
        )

    def _listed_twice(self) -> int:
        """Return how many images have more than one row; each row is an item."""
        if self._table.find is None:
            return 0
        ends = self.offsets.tolist()
        keys = (hash(bytes(self.blob[a:b])) for a, b in pairwise(ends))
        counts = np.unique(np.fromiter(keys, np.int64, len(ends) - 1), return_counts=True)[1]
        return int((counts > 1).sum())
