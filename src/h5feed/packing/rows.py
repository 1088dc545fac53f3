"""The rows of a manifest's file, one at a time: csv and tsv, or a JSON object a line."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from h5feed.errors import UsageError
from h5feed.text import counted

__all__ = ["Row", "csv_rows", "json_rows"]

Row = tuple[int, Mapping[str, Any]]
"""Line number from 1, and the line's cells by column."""


def csv_rows(manifest: Path) -> Iterator[Row]:
    """Yield the rows of a csv or tsv file under its header.

    Raises UsageError for what is no table, and OSError.
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


def json_rows(manifest: Path) -> Iterator[Row]:
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
