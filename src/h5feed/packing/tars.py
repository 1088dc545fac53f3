"""Tar files of images as WebDataset has them: members that share a name belong together.

`0001.jpg` and `0001.cls` are an image and its label, `0001.json` has columns, `0001.txt` is a text.
The headers are read once, the small members with them; images are read where they lie.
"""

import json
import multiprocessing
import os
import signal
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from h5feed.errors import PackError, UsageError
from h5feed.packing.decode import read_file
from h5feed.packing.items import ImageSource, file_status
from h5feed.packing.tables import ColumnOptions, RowTable, TableRow, build_table
from h5feed.system import available_cores
from h5feed.text import counted, in_bytes

__all__ = ["TarSource", "open_tars"]

_TEXTS = ("cls", "cls2", "index", "inx", "id", "txt", "text", "caption")
"""Members that are the cell of a column of that name, as WebDataset decodes them."""
_MOST_BYTES = 64 << 20  # of such a member, and of a JSON
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True, slots=True, kw_only=True)
class TarSource(ImageSource):
    """Images that are members of tar files."""

    paths: tuple[Path, ...]
    tars: npt.NDArray[np.uint32]
    """(N,) the number in `paths` of each image's tar."""
    extents: npt.NDArray[np.int64]
    """(N, 2) where its bytes begin there, and how many they are."""

    def read(self, index: int, *, max_pixels: int, most: int | None = None) -> bytes:
        """Return the bytes of an image, the first `most` of them."""
        start, size = self.extents[index].tolist()
        path = os.fsencode(self.paths[self.tars[index]])
        return read_file(path, max_pixels=max_pixels, most=most, extent=(start, size))

    def statuses(self) -> Iterator[bytes]:
        """Yield size and time of change of each tar, and where the images lie."""
        yield from map(file_status, self.paths)
        yield self.tars.tobytes() + self.extents.tobytes()


class _Sample(NamedTuple):
    """One image of a tar and what stands beside it."""

    key: str
    extent: tuple[int, int]
    cells: dict[str, Any]


class _Scanned(NamedTuple):
    """What one tar holds."""

    samples: list[_Sample]
    left: Counter[str]
    """Members of other kinds, by their extensions; "" counts samples without an image."""


def open_tars(
    paths: Sequence[Path],
    names: Sequence[str],
    wanted: ColumnOptions,
    *,
    extensions: Sequence[str],
    num_workers: int | None,
    seen: Callable[[], None],
) -> TarSource:
    """Open tar files, one after the other; `names` begin the keys of their images.

    `num_workers` processes read them, by default as many as there are cores.

    Raises UsageError for what is no such tar, PackError for one that is cut off or damaged.
    """
    ends = tuple(end.removeprefix(".") for end in extensions)
    tars, extents, left = list[int](), list[tuple[int, int]](), Counter[str]()

    def rows() -> Iterator[TableRow]:
        for number, found in enumerate(_scan_all(paths, ends, num_workers)):
            left.update(found.left)
            for sample in found.samples:
                tars.append(number)
                extents.append(sample.extent)
                where = f"{paths[number].name}, sample {sample.key!r}"
                key = os.fsencode(f"{names[number]}/{sample.key}")
                yield TableRow(where, sample.cells, key)

    table = RowTable(name=str(paths[0].parent / "*.tar"), rows=rows())
    columns = build_table(table, wanted, seen=seen).columns()
    if alone := left.pop("", 0):
        columns["notes"] += (f"left out, without an image: {counted(alone, 'sample')}",)
    if left:
        said = ", ".join(f"{n:,} .{end}" for end, n in left.most_common(10))
        columns["notes"] += (f"left out of the tars, members of other kinds: {said}",)
    return TarSource(
        paths=tuple(paths),
        tars=np.array(tars, np.uint32),
        extents=np.array(extents, np.int64).reshape(-1, 2),
        **columns,
    )


def _scan_all(
    paths: Sequence[Path], ends: Sequence[str], num_workers: int | None
) -> Iterator[_Scanned]:
    """Yield what the tars hold, in their order; several are read at a time.

    In processes, because a header costs Python 70 µs, and ImageNet has 2.5 million.
    """
    count = min(len(paths), available_cores() if num_workers is None else num_workers)
    if count < 2:
        yield from (_scan(path, ends) for path in paths)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    ignored = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is this process's to handle
    try:
        with ProcessPoolExecutor(count, context, signal.signal, ignored) as pool:
            yield from pool.map(_scan, paths, [ends] * len(paths))
    except BrokenProcessPool as ex:
        raise PackError("a process that read the tars died: is there memory enough?") from ex


def _scan(path: Path, ends: Sequence[str]) -> _Scanned:
    """Read the headers and the small members of one tar."""
    try:
        with path.open("rb") as file:
            if file.read(6).startswith(_PACKED):
                raise UsageError(f"{path} is compressed: unpack it to a plain tar first")
        with tarfile.open(path, "r:") as tar:
            return _grouped(path, tar, ends)
    except tarfile.TarError as ex:
        raise PackError(f"{path} is not a tar file, or cut off ({ex}): fetch it again") from ex
    except OSError as ex:
        raise PackError(f"cannot read {str(path)!r}: {ex.strerror or ex}") from ex


def _grouped(path: Path, tar: tarfile.TarFile, ends: Sequence[str]) -> _Scanned:
    """Put the members together that share a name up to the first dot, as WebDataset does."""
    images: dict[str, tuple[int, int]] = {}
    cells: dict[str, dict[str, Any]] = {}
    left = Counter[str]()
    for member in _members(tar):
        folder, _, name = member.name.rpartition("/")
        stem, _, end = name.partition(".")
        key, end = (f"{folder}/{stem}" if folder else stem), end.lower()
        if not (member.isfile() and stem and end):
            continue
        if end in ends:
            if key in images:
                raise UsageError(f"{path}: sample {key!r} has two images: give each its own name")
            images[key] = (member.offset_data, member.size)
        elif end in (*_TEXTS, "json"):
            found, row = _cells(path, tar, member, end), cells.setdefault(key, {})
            if twice := sorted(row.keys() & found.keys()):
                raise UsageError(f"{path}: sample {key!r} has {twice[0]!r} twice: keep one")
            row |= found
        else:
            left[end] += 1
    left[""] = len(cells.keys() - images.keys())
    samples = [_Sample(key, extent, cells.get(key, {})) for key, extent in images.items()]
    return _Scanned(samples, +left)


def _members(tar: tarfile.TarFile) -> Iterable[tarfile.TarInfo]:
    """Yield the members; ReadError where the last is cut off, or there is no end."""
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # they would fill the memory
        yield member
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if len(tar.fileobj.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("unexpected end of data")


def _cells(path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, end: str) -> dict[str, Any]:
    """Return what a member says of its sample: the cell of one column, or the cells of several."""
    file = tar.extractfile(member)
    if file is None or member.size > _MOST_BYTES:
        raise UsageError(
            f"{path}: {member.name!r} of {in_bytes(member.size)} is not a column's cell"
        )
    try:
        text = file.read().decode("utf-8").strip()
        found = json.loads(text) if end == "json" else {end: text}
    except (ValueError, RecursionError) as ex:
        raise UsageError(f"{path}: {member.name!r} is not {end} in UTF-8 ({ex})") from ex
    return found if isinstance(found, dict) else {"json": found}
