"""The images of a folder of class folders, or of a flat folder, in torchvision's order."""

import os
import re
import shlex
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from h5feed.errors import PackError, UsageError
from h5feed.packing.table import Table
from h5feed.text import counted

__all__ = ["EXTENSIONS", "read_folder"]

EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif",
)  # fmt: skip
"""torchvision's IMG_EXTENSIONS and GIF; the case does not matter."""

_SPLIT = re.compile("train|training|val|valid|validation|test|testing", re.IGNORECASE)

Seen = Callable[[], None]


def read_folder(root: Path, *, allow_empty: bool, seen: Seen) -> Table:
    """Find the images of `root`; `seen` is called for each.

    Raises UsageError for a folder that holds splits, empty classes or nothing, PackError for
    what cannot be read.
    """
    classes, loose = _scan(root, seen)
    keys = _Keys(seen)
    notes: tuple[str, ...] = ()
    if classes:
        _refuse_splits(root, classes)
        if loose:
            found = counted(len(loose), "image")
            notes = (f"left out, of no class: {found} beside the class folders",)
        _add_classes(keys, root, classes, allow_empty)
    else:
        loose.sort(reverse=True)
        while loose:  # frees each name as its bytes are kept
            keys.keep(os.fsencode(loose.pop()), -1)
    if not keys.labels:
        raise UsageError(f"SRC {str(root)!r} holds no images ({', '.join(EXTENSIONS)})")
    return keys.table(tuple(classes), notes)


class _Keys:
    """Keys and labels as they come in, compact from the start."""

    def __init__(self, seen: Seen) -> None:
        self.blob = bytearray()
        self.offsets = array("q", [0])
        self.labels = array("q")
        self._seen = seen

    def add(self, key: bytes, label: int) -> None:
        self._seen()
        self.keep(key, label)

    def keep(self, key: bytes, label: int) -> None:
        self.blob += key
        self.offsets.append(len(self.blob))
        self.labels.append(label)

    def table(self, classes: tuple[str, ...], notes: tuple[str, ...]) -> Table:
        return Table(
            classes=classes,
            labels=np.frombuffer(self.labels, np.int64),
            key_bytes=np.frombuffer(self.blob, np.uint8),
            key_offsets=np.frombuffer(self.offsets, np.int64),
            notes=notes,
        )


def _scan(folder: Path, seen: Seen) -> tuple[list[str], list[str]]:
    """Return the sorted names of a folder's subfolders, and those of the images beside them."""
    folders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.name.lower().endswith(EXTENSIONS):
                    images.append(entry.name)
                    seen()
    except OSError as ex:
        raise _unreadable(ex) from ex
    return sorted(folders), images


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
            f"no images ({', '.join(EXTENSIONS)}) in the class folders {', '.join(empty)} of "
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
    """Refuse a link to a folder above itself, whose images torchvision would take 40 times."""
    if not os.path.islink(folder):
        return
    target, here = os.path.realpath(folder), os.path.realpath(os.path.dirname(folder))
    if os.path.join(here, "").startswith(os.path.join(target, "")):
        raise UsageError(f"{folder!r} links to a folder above itself ({target!r}): remove the link")
