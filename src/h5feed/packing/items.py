"""What is to be packed: keys, labels and fields as columns, and a way to the bytes."""

import hashlib
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from h5feed.jpeg import MAX_PIXELS
from h5feed.packing.decode import DecodeError
from h5feed.progress import Progress
from h5feed.store.fields import FieldValues, take_ragged

__all__ = [
    "EXTENSIONS",
    "FURTHER_EXTENSIONS",
    "ClassOrder",
    "ImageSource",
    "SomeImages",
    "Table",
    "file_status",
    "sorted_classes",
]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""torchvision's IMG_EXTENSIONS; the case does not matter."""
FURTHER_EXTENSIONS = (".gif", ".jfif", ".jpe", ".pnm")
"""Of images that packing decodes and torchvision's ImageFolder leaves out."""

ClassOrder = Literal["sorted", "natural"]
_DIGITS = re.compile(r"(\d+)")


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

    def columns(self) -> dict[str, Any]:
        """Return what a table is made of by name, to make a source of it."""
        return {column.name: getattr(self, column.name) for column in dataclass_fields(Table)}

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
class ImageSource(Table):
    """Items, and a way to the bytes of each one's image: what packing reads in any process."""

    sampled: ClassVar[int] = 2000
    """How many images size=auto looks at: as many as can be read here and there in a moment."""

    def read(self, index: int, *, max_pixels: int, most: int | None = None) -> bytes:
        """Return the bytes of an item's image file, its first `most` where that is given.

        Raises DecodeError where there is none that can be decoded, and OSError.
        """
        raise NotImplementedError

    def mask(self, index: int, *, max_pixels: int) -> npt.NDArray[np.uint8] | None:
        """Return an item's mask of class numbers (H, W), or None; raises as `read` does."""
        return None

    def statuses(self) -> Iterator[bytes]:
        """Yield what changes with the images, one after the other."""
        raise NotImplementedError

    def bytes_of(self, index: int) -> int:
        """Return how large an item's image file is; 0 where it cannot be read."""
        try:
            return len(self.read(index, max_pixels=MAX_PIXELS))
        except (DecodeError, OSError):
            return 0

    def listing(self) -> "hashlib._Hash":
        """Return a SHA-256 so far over keys, labels, classes and fields, not images."""
        digest = hashlib.sha256(
            "\0".join(self.classes + self.targets).encode("utf-8", "surrogateescape")
        )
        columns: list[npt.NDArray[Any]] = [self.key_offsets, self.key_bytes, self.labels]
        for name, values in sorted(self.fields.items()):
            digest.update(f"{name}\0{values.type}\0".encode())
            columns += [values.data, *([] if values.offsets is None else [values.offsets])]
        for column in columns:
            digest.update(np.ascontiguousarray(column).data if column.size else b"")
        return digest

    def digest(self, *, progress: bool = False) -> str:
        """Return a SHA-256 that changes with any key, label, class, field and status."""
        digest = self.listing()
        with Progress(len(self), "looking at files", show=progress, brief=True) as bar:
            for status in self.statuses():
                digest.update(status)
                bar.advance()
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeImages(ImageSource):
    """Some images of another source, in an order of their own: those of a shard."""

    whole: ImageSource
    index: npt.NDArray[np.int64]
    """(N,) which of its images these are."""

    @classmethod
    def of(cls, source: ImageSource, index: npt.NDArray[np.int64]) -> "SomeImages":
        """Return the images `index` of `source`, in that order."""
        key_bytes, key_offsets = take_ragged(source.key_bytes, source.key_offsets, index)
        return cls(
            whole=source.whole if isinstance(source, SomeImages) else source,
            index=source.index[index] if isinstance(source, SomeImages) else index,
            classes=source.classes,
            labels=source.labels[index],
            key_bytes=key_bytes,
            key_offsets=key_offsets,
            targets=source.targets,
            fields={name: values.take(index) for name, values in source.fields.items()},
        )

    def read(self, index: int, *, max_pixels: int, most: int | None = None) -> bytes:
        """Return the bytes of an item's image file, as its source does."""
        return self.whole.read(int(self.index[index]), max_pixels=max_pixels, most=most)

    def mask(self, index: int, *, max_pixels: int) -> npt.NDArray[np.uint8] | None:
        """Return an item's mask, as its source does."""
        return self.whole.mask(int(self.index[index]), max_pixels=max_pixels)


def file_status(path: str | bytes | os.PathLike[str]) -> bytes:
    """Return size in bytes and time of change in ns; zeros for a file that is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return bytes(16)
    return struct.pack("<qq", status.st_size, status.st_mtime_ns)
