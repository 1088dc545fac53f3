"""What is to be packed: the images of a folder or a manifest, and their masks."""

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from h5feed.errors import UsageError
from h5feed.packing.folders import read_folder
from h5feed.packing.manifest import read_manifest
from h5feed.packing.table import Table
from h5feed.progress import Progress

__all__ = ["Source", "open_source"]

_MASK_EXTENSIONS = (
    ".png", ".tif", ".tiff", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".jpg", ".jpeg",
)  # fmt: skip
_MASK_ENDS = _MASK_EXTENSIONS + tuple(end.upper() for end in _MASK_EXTENSIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(Table):
    """N images, their labels and, where there are any, their masks."""

    root: Path
    mask_root: Path | None = None
    mask_ends: npt.NDArray[np.uint8] | None = None
    """(N,) which of `_MASK_ENDS` each item's mask has."""

    def path(self, index: int) -> bytes:
        """Return the path of an item's image."""
        return os.path.join(os.fsencode(self.root), self.key(index))

    def mask_path(self, index: int) -> bytes | None:
        """Return the path of an item's mask; None in a source without masks."""
        if self.mask_root is None or self.mask_ends is None:
            return None
        end = _MASK_ENDS[self.mask_ends[index]]
        return os.path.join(os.fsencode(self.mask_root), _stem(self.key(index)) + end.encode())

    def digest(self, *, progress: bool = False) -> str:
        """Return a SHA-256 that changes with any key, size, time of change, label or class."""
        digest = hashlib.sha256(
            "\0".join(self.classes + self.targets).encode("utf-8", "surrogateescape")
        )
        for column in (self.key_offsets, self.key_bytes, self.labels):
            digest.update(np.ascontiguousarray(column).data)
        with Progress(len(self), "looking at files", show=progress, brief=True) as bar:
            for index in range(len(self)):
                digest.update(_status(self.path(index)))
                if (mask := self.mask_path(index)) is not None:
                    digest.update(_status(mask))
                bar.advance()
        return digest.hexdigest()


def _status(path: bytes) -> bytes:
    """Return size in bytes and time of change in ns; zeros for a file that is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return bytes(16)
    return struct.pack("<qq", status.st_size, status.st_mtime_ns)


def open_source(
    root: str | os.PathLike[str],
    *,
    manifest: str | os.PathLike[str] | None = None,
    targets: Sequence[str] = (),
    masks: str | os.PathLike[str] | None = None,
    allow_empty: bool = False,
    progress: bool = False,
) -> Source:
    """Find the images of a folder of class folders, a flat folder, or a manifest.

    Class folders follow torchvision's ImageFolder to the letter: sorted class names, nested
    files, links followed. A folder without subfolders is flat: its labels are −1. With
    `manifest` (csv, tsv or jsonl) its rows say which files, in which order, with which labels;
    `targets` are its columns of numbers to predict.
    `masks` is a folder that holds a file of the same relative stem for every image.
    `progress` says on stderr what is found, where that takes a while.

    Raises UsageError for an argument that names the wrong thing, PackError for what cannot
    be read.
    """
    folder = Path(root)
    _check_folder(folder, "SRC")
    with Progress(None, "finding images", show=progress, brief=True) as bar:
        if manifest is not None:
            table = read_manifest(Path(manifest), folder, targets=targets, seen=bar.advance)
        else:
            table = read_folder(folder, allow_empty=allow_empty, seen=bar.advance)
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    source = Source(root=folder, **columns)
    if masks is None:
        return source
    with Progress(len(source), "finding masks", show=progress, brief=True) as bar:
        return _with_masks(source, Path(masks), seen=bar.advance)


def _check_folder(folder: Path, what: str) -> None:
    if not folder.exists():
        raise UsageError(f"{what} {str(folder)!r} does not exist: give a folder")
    if not folder.is_dir():
        raise UsageError(f"{what} {str(folder)!r} is a file: give the folder it lies in")


def _with_masks(source: Source, masks: Path, *, seen: Callable[[], None]) -> Source:
    _check_folder(masks, "masks")
    ends = np.empty(len(source), np.uint8)
    for index in range(len(source)):
        key = source.key(index)
        number = _find_mask(os.path.join(os.fsencode(masks), _stem(key)))
        if number is None:
            raise UsageError(
                f"masks {str(masks)!r} has no mask for {os.fsdecode(key)!r}: it would be "
                f"{os.fsdecode(_stem(key) + b'.png')!r}, or the same with another extension"
            )
        ends[index] = number
        seen()
    return replace(source, mask_root=masks, mask_ends=ends)


def _stem(key: bytes) -> bytes:
    return os.path.splitext(key)[0]


def _find_mask(stem: bytes) -> int | None:
    """Return the number in `_MASK_ENDS` of the first mask that exists."""
    for number, end in enumerate(_MASK_ENDS):
        if os.path.isfile(stem + end.encode()):
            return number
    return None
