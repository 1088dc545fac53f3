"""The files that bench_loader.py measures on, made once and kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import h5feed
from h5feed.store import Columns, images_spec, write_file


def copies(images: Path, out: Path, times: int) -> Path:
    """Return a folder in which every image of `images` is `times` times."""
    if out.exists():
        return out
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for path in sorted(p for p in images.rglob("*") if p.is_file()):
        folder = partial / path.parent.relative_to(images)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(times):
            shutil.copy(path, folder / f"{number}_{path.name}")
    return partial.rename(out)


def packed(source: Path, out: Path, **options: Any) -> Path:
    """Return `out`, packed from `source` if it is not there."""
    if not out.exists():
        h5feed.pack(source, out, **options)
    return out


def synthetic(out: Path, count: int, side: int, *, random: bool = False) -> Path:
    """Return `out`: `count` raw items of side x side pixels, with ImageNet-like labels and keys."""
    if out.exists():
        return out
    spec = images_spec("raw", side, side, "stretch")
    key = b"n01440764/n01440764_00000.JPEG"
    columns = Columns(
        labels=np.arange(count) * 1000 // count,
        classes=tuple(f"n{number:08}" for number in range(1000)),
        key_bytes=np.frombuffer(key * count, np.uint8),
        key_offsets=np.arange(count + 1) * len(key),
        source_shapes=np.tile(np.int32([375, 500]), (count, 1)),
        crc32=np.zeros(count, np.uint32),
    )
    write_file(out, [spec], columns, {"images": _pixels(count * spec.item_bytes, random)})
    return out


def _pixels(size: int, random: bool) -> Iterator[bytes]:
    block = os.urandom(1 << 24) if random else bytes(1 << 24)
    while size > 0:
        yield block[:size]
        size -= len(block)
