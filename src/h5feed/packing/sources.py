"""What is to be packed, in which order: folders, manifests and masks.

Memory is what counts here: 1.28 million items stay under 100 bytes each.
"""

import hashlib
import os
import re
import shlex
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from h5feed.errors import PackError, UsageError
from h5feed.packing.manifest import read_manifest

__all__ = ["EXTENSIONS", "Source", "open_source"]

EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif",
)  # fmt: skip
"""torchvision's IMG_EXTENSIONS and GIF; the case does not matter."""

_MASK_EXTENSIONS = (
    ".png", ".tif", ".tiff", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".jpg", ".jpeg",
)  # fmt: skip
_MASK_ENDS = _MASK_EXTENSIONS + tuple(end.upper() for end in _MASK_EXTENSIONS)
_SPLIT = re.compile("train|training|val|valid|validation|test|testing", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """N pictures, their labels and, where there are any, their masks."""

    root: Path
    classes: tuple[str, ...]
    labels: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    """int64 (N,), −1 where there is none; or float32 (N, K) targets."""
    key_bytes: npt.NDArray[np.uint8]
    """The paths below `root`, '/' between folders, back to back (file-system bytes)."""
    key_offsets: npt.NDArray[np.int64]
    """(N+1,) where each key begins in `key_bytes`."""
    mask_root: Path | None = None
    mask_ends: npt.NDArray[np.uint8] | None = None
    """(N,) which of `_MASK_ENDS` each item's mask has."""
    notes: tuple[str, ...] = ()
    """What a user should be told, such as pictures that belong to no class."""

    def __len__(self) -> int:
        return len(self.key_offsets) - 1

    def key(self, index: int) -> bytes:
        """Return an item's path below `root`, in file-system bytes."""
        return self.key_bytes[self.key_offsets[index] : self.key_offsets[index + 1]].tobytes()

    def path(self, index: int) -> bytes:
        """Return the path of an item's picture."""
        return os.path.join(os.fsencode(self.root), self.key(index))

    def mask_path(self, index: int) -> bytes | None:
        """Return the path of an item's mask; None in a source without masks."""
        if self.mask_root is None or self.mask_ends is None:
            return None
        end = _MASK_ENDS[self.mask_ends[index]]
        return os.path.join(os.fsencode(self.mask_root), _stem(self.key(index)) + end.encode())

    def digest(self) -> str:
        """Return a SHA-256 that changes with any key, size, time of change, label or class."""
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        for column in (self.key_offsets, self.key_bytes, self.labels):
            digest.update(np.ascontiguousarray(column).data)
        for index in range(len(self)):
            digest.update(_status(self.path(index)))
            if (mask := self.mask_path(index)) is not None:
                digest.update(_status(mask))
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
    masks: str | os.PathLike[str] | None = None,
    allow_empty: bool = False,
) -> Source:
    """Find the pictures of a folder of class folders, a flat folder, or a manifest.

    Class folders follow torchvision's ImageFolder to the letter: sorted class names, nested
    files, links followed. A folder without subfolders is flat: its labels are −1. With
    `manifest` (csv, tsv or jsonl) its rows say which files, in which order, with which labels.
    `masks` is a folder that holds a file of the same relative stem for every picture.

    Raises UsageError for an argument that names the wrong thing, PackError for what cannot
    be read.
    """
    folder = Path(root)
    _check_folder(folder, "SRC")
    if manifest is not None:
        source = _from_manifest(folder, Path(manifest))
    else:
        source = _from_folder(folder, allow_empty)
    return source if masks is None else _with_masks(source, Path(masks))


def _check_folder(folder: Path, what: str) -> None:
    if not folder.exists():
        raise UsageError(f"{what} {str(folder)!r} does not exist: give a folder")
    if not folder.is_dir():
        raise UsageError(f"{what} {str(folder)!r} is a file: give the folder it lies in")


class _Keys:
    """Keys and labels as they come in, compact from the start."""

    def __init__(self) -> None:
        self.blob = bytearray()
        self.offsets = array("q", [0])
        self.labels = array("q")

    def add(self, key: bytes, label: int) -> None:
        self.blob += key
        self.offsets.append(len(self.blob))
        self.labels.append(label)

    def source(self, root: Path, classes: tuple[str, ...], notes: tuple[str, ...]) -> Source:
        return Source(
            root=root,
            classes=classes,
            labels=np.frombuffer(self.labels, np.int64),
            key_bytes=np.frombuffer(self.blob, np.uint8),
            key_offsets=np.frombuffer(self.offsets, np.int64),
            notes=notes,
        )


def _from_folder(root: Path, allow_empty: bool) -> Source:
    classes, loose = _scan(root)
    keys = _Keys()
    notes: tuple[str, ...] = ()
    if classes:
        _refuse_splits(root, classes)
        if loose:
            notes = (f"{len(loose)} pictures beside the class folders have no class: left out",)
        _add_classes(keys, root, classes, allow_empty)
    else:
        loose.sort(reverse=True)
        while loose:  # frees each name as its bytes are kept
            keys.add(os.fsencode(loose.pop()), -1)
    if not keys.labels:
        raise UsageError(f"SRC {str(root)!r} holds no pictures ({', '.join(EXTENSIONS)})")
    return keys.source(root, tuple(classes), notes)


def _scan(folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of a folder's subfolders, and those of the pictures beside them."""
    folders, pictures = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.name.lower().endswith(EXTENSIONS):
                    pictures.append(entry.name)
    except OSError as ex:
        raise _unreadable(ex) from ex
    return sorted(folders), pictures


def _unreadable(ex: OSError) -> PackError:
    return PackError(f"cannot read the folder {os.fsdecode(ex.filename)!r}: {ex.strerror}")


def _refuse_splits(root: Path, classes: list[str]) -> None:
    if all(_SPLIT.fullmatch(name) for name in classes):
        commands = "\n".join(
            f"  pack-h5 {shlex.quote(str(root / name))} {shlex.quote(name + '.h5')}"
            for name in classes
        )
        raise UsageError(
            f"SRC {str(root)!r} holds splits ({', '.join(classes)}), not classes; packed as it is, "
            f"the split would become the label. Pack each split by itself:\n{commands}"
        )


def _add_classes(keys: _Keys, root: Path, classes: list[str], allow_empty: bool) -> None:
    empty = []
    for label, name in enumerate(classes):
        before = len(keys.labels)
        for key in _walk(root, name):
            keys.add(key, label)
        if len(keys.labels) == before:
            empty.append(name)
    if empty and not allow_empty:
        raise UsageError(
            f"no pictures ({', '.join(EXTENSIONS)}) in the class folders {', '.join(empty)} of "
            f"{str(root)!r}: remove them, or keep them as classes with --allow-empty"
        )


def _walk(root: Path, name: str) -> Iterator[bytes]:
    """Yield the keys of one class in torchvision's order: sorted(os.walk(class folder))."""
    start = len(os.path.join(root, ""))
    for folder, files in sorted(_folders(os.path.join(root, name))):
        for file in sorted(files):
            if file.lower().endswith(EXTENSIONS):
                key = os.path.join(folder, file)[start:]
                yield os.fsencode(key.replace(os.sep, "/") if os.sep != "/" else key)


def _folders(top: str) -> Iterator[tuple[str, list[str]]]:
    def refuse(ex: OSError) -> None:
        raise _unreadable(ex) from ex

    for folder, subfolders, files in os.walk(top, onerror=refuse, followlinks=True):
        for name in subfolders:
            _refuse_loop(os.path.join(folder, name))
        yield folder, files


def _refuse_loop(folder: str) -> None:
    """Refuse a link to a folder above itself, whose pictures torchvision would take 40 times."""
    if not os.path.islink(folder):
        return
    target, here = os.path.realpath(folder), os.path.realpath(os.path.dirname(folder))
    if os.path.join(here, "").startswith(os.path.join(target, "")):
        raise UsageError(f"{folder!r} links to a folder above itself ({target!r}): remove the link")


def _from_manifest(root: Path, manifest: Path) -> Source:
    table = read_manifest(manifest, root)
    return Source(
        root=root,
        classes=table.classes,
        labels=table.labels,
        key_bytes=table.key_bytes,
        key_offsets=table.key_offsets,
    )


def _with_masks(source: Source, masks: Path) -> Source:
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
    return replace(source, mask_root=masks, mask_ends=ends)


def _stem(key: bytes) -> bytes:
    return os.path.splitext(key)[0]


def _find_mask(stem: bytes) -> int | None:
    """Return the number in `_MASK_ENDS` of the first mask that exists."""
    for number, end in enumerate(_MASK_ENDS):
        if os.path.isfile(stem + end.encode()):
            return number
    return None
