"""A packed file as a folder again: images, masks, and a manifest that packs to the same items."""

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from h5feed.disk import naming
from h5feed.errors import H5FormatError, UsageError
from h5feed.feed.facts import target_names
from h5feed.feed.fields import Fields
from h5feed.feed.files import BYTES_CHANGED, PackedFiles
from h5feed.feed.image import image_reader
from h5feed.system import available_cores
from h5feed.text import printable

__all__ = ["Unpacked", "unpack"]

_AT_ONCE = 1024  # images, after which the manifest's lines of them are written
_IMAGE = re.compile(
    r"\.(jpe?g|jpe|jfif|png|ppm|pgm|pnm|bmp|tiff?|webp|gif)", re.IGNORECASE
)  # what a key may end in
_JPEG = re.compile(r"\.jpe?g", re.IGNORECASE)
_PNG = re.compile(r"\.png", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """What was written, and how to pack it again."""

    folder: str
    images: int
    command: tuple[str, ...]
    """Words of the command that packs it again, to again.h5."""

    def in_words(self) -> str:
        """Return what a user is told."""
        return (
            f"{printable(self.folder)}: {self.images:,} images and manifest.jsonl; packed again "
            f"by\n  {shlex.join(self.command)}"
        )


def unpack(
    files: PackedFiles, folder: Path, *, progress: Callable[[int], None] | None = None
) -> Unpacked:
    """Write all items into `folder`, which is whole at the end or not there at all.

    `images` below it has an image at each item's key: its JPEG file as it is, or a PNG of the
    stored pixels. `masks` has PNGs of the same names, `classes.txt` a class name a line, and
    `manifest.jsonl` a line an item: path, label, class, targets and all further fields; boxes
    and keypoints are in stored pixels. `progress(n)` is called as n more are done.

    Raises UsageError for a folder that cannot be taken, H5FormatError for keys that are no paths
    below it, DamagedItemError for an item that is not as it was packed, and OSError.
    """
    target = _empty(folder)
    manifest, names = _Manifest(files), _file_names(files)
    # Rows of a manifest may be about one file: it is written once.
    first = {names[index]: index for index in reversed(range(len(names)))}
    partial = target.with_name(target.name + ".partial")
    try:
        partial.mkdir()
    except FileExistsError:
        raise UsageError(
            f"{partial} is of an export that was interrupted, or still runs: remove it"
        ) from None
    try:
        if files.classes:
            _write(partial / "classes.txt", _lines(files.classes))
        with (partial / "manifest.jsonl").open("wb") as lines:
            for begin in range(0, len(files), _AT_ONCE):
                some = range(begin, min(begin + _AT_ONCE, len(files)))
                _write_images(files, [i for i in some if first[names[i]] == i], names, partial)
                with naming(Path(lines.name)):
                    lines.writelines(manifest.line(index, names[index]) for index in some)
                if progress is not None:
                    progress(len(some))
            with naming(Path(lines.name)):
                lines.flush()
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Unpacked(folder=str(folder), images=len(files), command=manifest.command(folder))


def _empty(folder: Path) -> Path:
    """Return where the folder lies, links followed; UsageError where there is something."""
    target = Path(os.path.realpath(folder))
    if not target.parent.is_dir():
        raise UsageError(f"export={folder}: {target.parent} is not a folder: make it first")
    if target.exists() and not target.is_dir():
        raise UsageError(f"export={folder} is a file: give a folder that is new, or empty")
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"export={folder} is not empty: give a folder that is new, or empty")
    return target


# --- names


def _file_names(files: PackedFiles) -> list[str]:
    """Return each item's path below `images`: its key, with the extension of what is written.

    Where two keys differ in their extension alone, the later one keeps its own before that.
    """
    keys = [_plain(files, index, key) for index, key in enumerate(files.keys())]
    ending, fits = (".jpg", _JPEG) if files.specs["images"].is_encoded else (".png", _PNG)
    holder: dict[str, int] = {}  # of each path without extension, which masks have too
    names = []
    for index, key in enumerate(keys):
        stem, end = os.path.splitext(key)
        if not _IMAGE.fullmatch(end):
            stem, end = key, ""
        for taken in (stem, key):
            first = holder.setdefault(taken, index)
            if first == index or (keys[first] == key and _are_alike(files, first, index)):
                break
        else:
            raise UsageError(
                f"{files.place('images', index)} would be written to the file of item {first} "
                f"(key {keys[first]!r}), which is another image: these keys cannot be exported"
            )
        names.append(key if taken == stem and fits.fullmatch(end) else taken + ending)
    return names


def _plain(files: PackedFiles, index: int, key: str) -> str:
    """Return a key as a path that leads to a place below a folder, whoever wrote it."""
    parts = [part for part in key.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in key or (os.name == "nt" and re.search(r"[\\:]", key)):
        raise H5FormatError(
            f"{files.place('images', index)}: this key is not a path below a folder, and nothing "
            "is exported: pack-h5 makes no such keys"
        )
    return "/".join(parts)


def _are_alike(files: PackedFiles, one: int, other: int) -> bool:
    """Whether two items have the same image and mask: rows of a manifest about one file."""
    return all(
        np.array_equal(files.item(name, one), files.item(name, other)) for name in files.specs
    )


# --- images and masks


def _write_images(
    files: PackedFiles, some: Sequence[int], names: Sequence[str], folder: Path
) -> None:
    """Write the images and masks of some items, by as many threads as there are cores."""
    reads = {name: _reader(files, name) for name in files.specs}

    def write(index: int) -> None:
        if not files.is_intact(index):
            raise files.damaged("images", index, BYTES_CHANGED)
        for field, read in reads.items():
            name = names[index]
            if field != "images":
                name = os.path.splitext(name)[0] + ".png"
            _write(folder / field / name, read(index))

    files.announce(some)
    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(write, some))


def _reader(files: PackedFiles, field: str) -> Callable[[int], Any]:
    """Return what makes the bytes of an item's file: JPEG as it is stored, or PNG."""
    if files.specs[field].is_encoded:
        return lambda index: files.item(field, index).data
    read = image_reader(files, field, output="numpy", aspect="stored")

    def png(index: int) -> Any:
        pixels = read(index)
        if pixels.ndim == 3:
            pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
        return cv2.imencode(".png", pixels)[1].data

    return png


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("xb") as file:
        file.write(data)


def _lines(names: Sequence[str]) -> bytes:
    for name in names:
        if "\n" in name or "\r" in name:
            raise UsageError(f"class {name!r} has a line end, and classes.txt has a class a line")
    return "".join(f"{name}\n" for name in names).encode("utf-8", "surrogateescape")


# --- the manifest


class _Manifest:
    """The lines about items, and the command that reads them again."""

    def __init__(self, files: PackedFiles) -> None:
        self._files = files
        self._fields = Fields(files)
        self._targets = target_names(files)
        if len({*self._targets, *self._fields}) < len(self._targets) + len(self._fields):
            self._targets = [f"target_{k}" for k in range(len(self._targets))]
        named = any(name.lower().startswith("class") for name in self._fields)
        has_label = not self._targets and bool((files.labels >= 0).any())
        self._has_class = has_label and bool(files.classes) and not named
        self._path = "path"
        while self._path in {*self._targets, *self._fields}:
            self._path += "_"

    def line(self, index: int, name: str) -> bytes:
        """Return the line of an item whose image is the file `name`."""
        row: dict[str, Any] = {self._path: name, **self._label(index)}
        for column, values in self._fields.items():
            value = values.read(index)
            row[column] = value.tolist() if isinstance(value, np.ndarray) else value
        return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"

    def _label(self, index: int) -> dict[str, Any]:
        label, classes = self._files.row("labels", index).tolist(), self._files.classes
        if self._targets:
            return dict(zip(self._targets, label, strict=True))
        if isinstance(label, list):
            label = [number for number, has in enumerate(label) if has > 0]
            named: Any = [classes[number] for number in label]
        else:
            named = classes[label] if self._has_class and label >= 0 else None
        return {"label": label, **({"class": named} if self._has_class else {})}

    def command(self, folder: Path) -> tuple[str, ...]:
        """Return the words of the command that packs `folder` again."""
        files, spec = self._files, self._files.specs["images"]
        words = ["pack-h5", str(folder / "images"), "again.h5", "--store", spec.encoding]
        if spec.encoding != "original":
            sides = {spec.height, spec.width}
            size = str(spec.height) if len(sides) == 1 else f"{spec.height}x{spec.width}"
            words += ["--size", size, "--fit", spec.fit]
            words += ["--any-size"] if any(side & (side - 1) for side in sides) else []
        options = files.provenance.get("options")
        if spec.encoding == "jpeg" and isinstance(options, dict) and "quality" in options:
            words += ["--quality", str(options["quality"])]
        words += ["--manifest", str(folder / "manifest.jsonl"), "--path-column", self._path]
        words += ["--classes", str(folder / "classes.txt")] if files.classes else []
        words += ["--targets", *self._targets] if self._targets else ["--label-column", "label"]
        words += [w for name, t in files.field_types.items() for w in ("--field", f"{name}:{t}")]
        words += ["--masks", str(folder / "masks")] if "masks" in files.specs else []
        return tuple(words)
