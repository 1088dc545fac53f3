"""Which packed files make one dataset."""

import glob
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from h5feed.errors import UsageError
from h5feed.store import FieldSpec, FileIndex

__all__ = ["FilePath", "check_alike", "expand_paths", "joint_fingerprint"]

FilePath = str | os.PathLike[str]


def expand_paths(path: FilePath | Sequence[FilePath]) -> list[str]:
    """Return the files that `path` names: one file, a glob pattern, or a sequence of files.

    A pattern's files come in sorted order. Raises UsageError where nothing is named.
    """
    if not isinstance(path, str | os.PathLike):
        paths = [os.fspath(p) for p in path]
        if not paths:
            raise UsageError(f"path={path!r} names no file; give at least one packed file")
        return paths
    name = os.fspath(path)
    if Path(name).exists() or not glob.has_magic(name):
        return [name]
    paths = sorted(glob.glob(name, recursive=True))
    if not paths:
        raise UsageError(f"path={name!r} matches no file; check the pattern")
    return paths


def joint_fingerprint(indexes: Sequence[FileIndex]) -> str:
    """SHA-256 (hex) of several files in their order; a single file's is its own."""
    if len(indexes) == 1:
        return indexes[0].fingerprint
    return hashlib.sha256(" ".join(i.fingerprint for i in indexes).encode()).hexdigest()


def check_alike(indexes: Sequence[FileIndex]) -> None:
    """Refuse files that were not packed alike: a dataset has one set of fields and classes.

    Raises UsageError, naming the first two files that differ and in what.
    """
    first = indexes[0]
    for other in indexes[1:]:
        for what, have, want in (
            ("pixel fields", _fields(other), _fields(first)),
            ("classes", other.classes, first.classes),
            ("kind of labels", _label_kind(other), _label_kind(first)),
            ("letterbox boxes", other.boxes is None, first.boxes is None),
        ):
            if have != want:
                raise UsageError(
                    f"{other.path} and {first.path} differ in their {what}; files of one dataset "
                    "must be packed with the same options and classes"
                )


def _fields(index: FileIndex) -> dict[str, FieldSpec]:
    return {name: extent.spec for name, extent in index.extents.items()}


def _label_kind(index: FileIndex) -> tuple[str, tuple[int, ...]]:
    return index.labels.dtype.str, index.labels.shape[1:]
