"""Small packed files made in memory, for tests that are not about packing."""

import os
import zlib
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import h5py
import numpy as np

from h5feed.jpeg import restart_segments
from h5feed.store import (
    Columns,
    FileReader,
    finalize,
    head_bytes,
    images_spec,
    masks_spec,
    read_index,
    write_file,
)
from h5feed.store.fields import FieldType, FieldValues, continue_checksums
from h5feed.store.index import write_index
from h5feed.store.layout import LIBVER, fingerprint, segment_offsets


def image_spec(encoding="raw", size=(32, 32), fit="stretch"):
    return images_spec(encoding, *size, fit)


def mask_spec(size=(32, 32), fit="stretch"):
    return masks_spec(image_spec(size=size, fit=fit))


def write_packed(path, images, *, spec=None, labels=None, classes=("cat", "dög"), **kwargs):
    """Pack `images` (a list of uint8 arrays or bytes, as `spec` stores them) into `path`.

    Further keyword arguments: masks (list of (H, W, 1) arrays), source_shapes, stored_shapes,
    segments (list of uint16 arrays, of jpeg), letterbox, positions, keys, further (FieldValues by
    name).
    """
    count = len(images)
    spec = spec or image_spec(size=images[0].shape[:2])
    payloads = {"images": images}
    specs = [spec]
    if spec.encoding == "jpeg":
        counts = np.diff(segment_offsets(kwargs["stored_shapes"])) // 2
        payloads["images/segments"] = kwargs.get("segments") or [
            segments_of(image, count) for image, count in zip(images, counts, strict=True)
        ]
    if "masks" in kwargs:
        payloads["masks"] = kwargs["masks"]
        specs.append(kwargs.get("mask_spec") or masks_spec(spec))
    sources = kwargs.get("source_shapes")
    if sources is None:
        sources = np.tile(np.int32([spec.height or 1, spec.width or 1]), (count, 1))
    keys = kwargs.get("keys") or [f"{i % max(1, len(classes))}/ü{i}.png" for i in range(count)]
    key_bytes = [os.fsencode(key) for key in keys]
    crc = np.zeros(count, np.uint32)
    for name in payloads:
        for i, item in enumerate(payloads[name]):
            crc[i] = zlib.crc32(bytes(item), int(crc[i]))
    columns = Columns(
        labels=np.arange(count) % max(1, len(classes)) if labels is None else labels,
        classes=tuple(classes),
        key_bytes=np.frombuffer(b"".join(key_bytes), np.uint8),
        key_offsets=np.cumsum([0, *map(len, key_bytes)], dtype=np.int64),
        source_shapes=np.asarray(sources, np.int32),
        crc32=continue_checksums(crc, kwargs.get("further", {})),
        letterbox=kwargs.get("letterbox"),
        positions=kwargs.get("positions"),
    )
    shapes = {"images": kwargs.get("stored_shapes")}
    write_file(
        Path(path),
        specs,
        columns,
        payloads,
        {"made": "by a test"},
        shapes=shapes,
        further=kwargs.get("further"),
    )
    return Path(path)


def further_fields(count):
    """Values of fields `price`, `boxes` (two a row) and `caption` for `count` items."""
    boxes = FieldType(kind="boxes", dtype="float32", shape=(4,))
    return {
        "price": FieldValues.of_fixed(np.arange(count) / 2, "float64"),
        "boxes": FieldValues.of_arrays(
            [np.array([[1, 2, 3, 4], [k, k, k + 5, k + 9]]) for k in range(count)], boxes
        ),
        "caption": FieldValues.of_texts([f"image {k}" for k in range(count)]),
    }


def segments_of(image, count):
    """The lengths of a JPEG's segments; of something broken as many as its place asks for."""
    with suppress(ValueError):
        if len(found := restart_segments(bytes(image))) == count:
            return found
    return np.ones(count, "<u2")


def write_sparse(path, count, side):
    """A file of `count` black images whose pixels are a hole: as large as wanted, on no disk."""
    spec = image_spec(size=(side, side))
    partial = path.with_name("partial")
    partial.touch()
    os.truncate(partial, head_bytes([spec]) + count * spec.item_bytes)
    key = b"a/b.png"
    columns = Columns(
        labels=np.zeros(count, np.int64),
        classes=("a",),
        key_bytes=np.frombuffer(key * count, np.uint8),
        key_offsets=np.arange(count + 1) * len(key),
        source_shapes=np.full((count, 2), side, np.int32),
        crc32=np.zeros(count, np.uint32),
    )
    nothing = {"images": None}
    finalize(partial, path, [spec], columns, {}, offsets=nothing, shapes=nothing, side={})
    return path


def random_images(count=10, size=(32, 32), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for _ in range(count)]


def write_provenance(path, text):
    """Put any text in the place of a file's provenance, and make its fingerprint right again."""
    index = read_index(path)
    extents = index.extents
    seal = fingerprint(
        [extent.spec for extent in extents.values()],
        index.starts,
        index,
        text,
        {name: extent.offsets for name, extent in extents.items()},
        {name: extent.shapes for name, extent in extents.items()},
        index.fields,
    )
    with h5py.File(path, "r+", libver=LIBVER) as file:
        file.attrs["provenance"] = np.bytes_(text.encode("utf-8", "surrogateescape"))
        file.attrs["fingerprint"] = np.bytes_(seal.encode())


def write_set(folder, images, *, shards=3, seed=0, **kwargs):
    """Pack `images` into a set, as `split_into_set` does; keyword arguments of `write_packed`."""
    folder.mkdir(exist_ok=True)
    whole = write_packed(folder / "whole.h5", images, **kwargs)
    split_into_set(whole, folder, shards=shards, seed=seed)
    whole.unlink()
    return folder


def split_into_set(path, folder, *, shards=3, seed=0):
    """Write the items of a packed file as a set of `shards` files, in a random order."""
    folder.mkdir(exist_ok=True)
    names = []
    with FileReader(path) as file:
        order = np.random.default_rng(seed).permutation(len(file.index))
        for number, part in enumerate(np.array_split(order, shards)):
            names.append(f"shard-{number:05}-of-{shards:05}.h5")
            _write_items(folder / names[-1], file, part.astype(np.int64))
    write_index(folder, names, generation=1, plan={"made": "by a test"})
    return folder


def _write_items(path, file, part):
    index = file.index
    keys = [os.fsencode(index.key(i)) for i in part]
    columns = replace(
        Columns(**{f.name: getattr(index, f.name) for f in fields(Columns)}),
        labels=index.labels[part],
        key_bytes=np.frombuffer(b"".join(keys), np.uint8),
        key_offsets=np.cumsum([0, *map(len, keys)], dtype=np.int64),
        source_shapes=index.source_shapes[part],
        crc32=index.crc32[part],
        letterbox=None if index.letterbox is None else index.letterbox[part],
        positions=part,
    )
    extents = index.extents.items()
    write_file(
        path,
        [extent.spec for _, extent in extents],
        columns,
        {n: [file.read(*e.item_range(i)) for i in part] for n, e in index.pixel_parts.items()},
        {"made": "by a test"},
        shapes={n: None if e.shapes is None else e.shapes[part] for n, e in extents},
        further={name: _values(file, extent, part) for name, extent in index.fields.items()},
    )


def _values(file, extent, part):
    items = [file.read(*extent.item_range(i)) for i in part]
    if extent.offsets is None:
        data = np.frombuffer(b"".join(items), extent.type.dtype)
        return FieldValues(type=extent.type, data=data.reshape(len(part), *extent.type.shape))
    offsets = np.cumsum([0, *map(len, items)], dtype=np.int64)
    return FieldValues.of_bytes(extent.type, b"".join(items), offsets)
