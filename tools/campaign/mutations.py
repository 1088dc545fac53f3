"""Packed files whose bytes, values or structure were changed: by chance, or by a forger."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from cases import Case, Wrong, limit_memory
from hdf5 import mend_checksums, mend_fingerprint, metadata_bytes
from material import BROKEN, Kind, bytes_of, truth
from reading import Refused, refusals, use

from h5feed import H5Dataset
from h5feed.store import FileReader, check_file, read_index

__all__ = ["forged", "mutated_metadata", "mutated_pixels"]

MEMORY = 3 << 30  # bytes that a reader of a small file may map more than it has
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    255,
    2**15,
    2**16,
    2**24,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
)
TEXTS = (
    "",
    "raw",
    "jpeg",
    "original",
    "yuv420",
    "keep",
    "pad",
    "stretch",
    "x" * 300,
    "\x1b[2J\u202e\n",
)
_MOST_BYTES = 1 << 24  # sparse files of other mutations are not read whole
PROVENANCES = (
    "", "1", "null", "[]", '"x"', "{", "NaN", "[" * 1000 + "]" * 1000, '{"a":' * 100_000,
    '{"options": 3}', '{"options": {"a": "\\u001b[31m\\u202e"}}', '{"skipped": 5}',
    '{"skipped": [1, null, "\\u0007"]}', '{"versions": []}', "9" * 100_000,
)  # fmt: skip


def mutated_pixels(case: Case) -> None:
    """Bytes of items flipped: check-h5 names those items, and no other item changes."""
    kind, path = case.copy()
    index = read_index(path)
    parts = index.pixel_parts.values()
    spans = [part.item_range(i) for part in parts for i in range(len(index))]
    data = bytearray(path.read_bytes())
    for start, length in case.random.sample(spans, case.random.randint(1, 3)):
        header = length if case.random.random() < 0.5 else min(length, 700)
        for _ in range(case.random.choice([1, 1, 1, 4, 50])):
            data[start + case.random.randrange(header)] ^= 1 << case.random.randrange(8)
    path.write_bytes(data)
    was, now = bytes_of(kind.path), bytes_of(path)
    changed = [i for i in range(len(was)) if was[i] != now[i]]
    if [item.index for item in check_file(path).damaged] != changed:
        raise Wrong(f"check-h5 does not name the damaged items {changed}")
    limit_memory(MEMORY)
    _compare_items(kind, path, changed)
    use(case, path)


def mutated_metadata(case: Case) -> None:
    """Anything but pixels changed by chance, checksums mended or not: refused, or all as it was."""
    kind, path = case.copy()
    data = bytearray(path.read_bytes())
    _scatter(case, data, _metadata(path, data))
    path.write_bytes(data)
    mended = case.random.random() < 0.7
    if mended:
        mend_checksums(path)
    case.note(f"{kind.name}, {mended=}")
    limit_memory(MEMORY)
    try:
        with refusals():
            index = read_index(path)
    except Refused as ex:
        case.note(f"refused: {ex}")
    else:
        _compare_columns(index, read_index(kind.path))
        _compare_items(kind, path, [])
    use(case, path)


def forged(case: Case) -> None:
    """Values, types and structure changed at will, all seals made right: refused or usable."""
    kind, path = case.copy()
    known = read_index(path).fingerprint
    for _ in range(case.random.choice([1, 1, 1, 2])):
        forge = case.random.choice(FORGERIES)
        case.note(f"{kind.name}: {forge.__name__}")
        try:
            if path.is_file():
                forge(case, path)
        except (OSError, LookupError, ValueError, TypeError, RuntimeError, MemoryError) as ex:
            case.note(f"h5py cannot: {ex}")  # of two, the first may have made it unreadable
    if case.random.random() < 0.9 and path.is_file() and path.stat().st_size < _MOST_BYTES:
        mend_fingerprint(path, known)
    limit_memory(MEMORY)
    use(case, path, doors=3)


def _metadata(path: Path, data: bytes | bytearray) -> list[tuple[int, int]]:
    """Return (start, stop) of all that is not pixels: HDF5's blocks, and the small arrays."""
    spans = metadata_bytes(data)
    with h5py.File(path, "r") as file:

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and item.id.get_offset() is not None:
                pixels = name.split("/")[0] in ("images", "masks") and not name.endswith(
                    ("offsets", "shapes")
                )
                if not pixels and item.nbytes:
                    spans.append((item.id.get_offset(), item.id.get_offset() + item.nbytes))

        file.visititems(visit)
    return spans


def _scatter(case: Case, data: bytearray, spans: list[tuple[int, int]]) -> None:
    for _ in range(case.random.choice([1, 1, 2, 5])):
        start, stop = case.random.choice(spans)
        at = case.random.randrange(start, stop)
        how = case.random.random()
        if how < 0.6:
            data[at] ^= 1 << case.random.randrange(8)
        elif how < 0.8:
            data[at] = case.random.choice([0, 1, 0x7F, 0x80, 0xFF, case.random.randrange(256)])
        elif at + 8 <= stop:
            struct.pack_into("<Q", data, at, case.random.choice(NUMBERS) & (2**64 - 1))


def _compare_columns(now: Any, was: Any) -> None:
    for name in ("labels", "key_bytes", "key_offsets", "source_shapes", "crc32"):
        if not np.array_equal(getattr(now, name), getattr(was, name)):
            raise Wrong(f"{name} changed, and the file opens without a word")
    if now.classes != was.classes:
        raise Wrong("classes changed, and the file opens without a word")


def _compare_items(kind: Kind, path: Path, changed: list[int]) -> None:
    """Refuse an item that is not what it was, unless it was changed; then it has the same shape."""
    now = H5Dataset(path, output="numpy", aspect="stored")
    decoded = kind.name.removeprefix("keep-") in ("jpeg", "original", "yuv420")
    for index, (image, target) in enumerate(truth(kind.path)):
        try:
            with refusals():
                found, label = now[index]
        except Refused:
            if index in changed:
                continue
            raise
        if found.shape != image.shape:
            raise Wrong(
                f"item {index} has the shape {found.shape}, and was packed as {image.shape}"
            )
        # Two decoders may round differently, but never by more.
        most = 8 if decoded else 0
        same = np.abs(found.astype(int) - image).max() <= most and np.array_equal(label, target)
        if not same and index not in changed:
            raise Wrong(f"item {index} was not touched, and is not what it was")


# Forgeries ------------------------------------------------------------------------------------


def _number_attribute(case: Case, path: Path) -> None:
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        field = file[case.random.choice([n for n in ("images", "masks") if n in file])]
        name = case.random.choice(["height", "width", "channels"])
        field.attrs.modify(name, np.int64(case.random.choice(NUMBERS)))


def _text_attribute(case: Case, path: Path) -> None:
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        field = file[case.random.choice([n for n in ("images", "masks") if n in file])]
        name = case.random.choice(["encoding", "color_space", "layout", "fit", "interpolation"])
        field.attrs[name] = np.bytes_(case.random.choice(TEXTS).encode() or b"\0")


def _attribute_type(case: Case, path: Path) -> None:
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        holder = file[case.random.choice(["/", "images"])]
        name = case.random.choice(sorted(holder.attrs))
        strange: list[Any] = [
            1.5,
            np.arange(3),
            "varying",
            np.bool_(True),
            h5py.Empty("f"),
            np.uint8(1),
        ]
        del holder.attrs[name]
        if case.random.random() < 0.9:
            holder.attrs[name] = case.random.choice(strange)


def _provenance(case: Case, path: Path) -> None:
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        text = case.random.choice(PROVENANCES)
        del file.attrs["provenance"]
        file.attrs["provenance"] = np.bytes_((text or "\0").encode()[:60_000])


def _array_value(case: Case, path: Path) -> None:
    """Set numbers of a small array to extremes."""
    with h5py.File(path, "r+") as file:
        data = file[case.random.choice(_arrays(file))]
        value = data[()].reshape(-1)
        if value.dtype.kind not in "iuf" or not value.size:
            return
        for _ in range(case.random.choice([1, 1, 2, 5])):
            at = case.random.choice([0, len(value) - 1, case.random.randrange(len(value))])
            if value.dtype.kind == "f":
                value[at] = case.random.choice([np.nan, np.inf, -np.inf, 1e38, -0.0])
            else:
                bits = 8 * value.dtype.itemsize
                number = case.random.choice([*NUMBERS, case.random.getrandbits(bits)])
                value[at : at + 1] = np.array([number & (2**bits - 1)], f"u{bits // 8}").view(
                    value.dtype
                )
        data[...] = value.reshape(data.shape)


def _many_labels(case: Case, path: Path) -> None:
    with h5py.File(path, "r+") as file:
        labels = file["labels"]
        labels[...] = (
            case.random.choice([10**9, 2**31, 2**62]) if labels.dtype.kind == "i" else np.nan
        )


def _names(case: Case, path: Path) -> None:
    """Write control characters, NULs and undecodable bytes into keys or classes."""
    strange = case.random.choice(
        [b"\x1b[2J\x07", "\u202eabc".encode(), b"\xff\xfe", b"\0\0\0", b"\r\n\n", b"../../x"]
    )
    with h5py.File(path, "r+") as file:
        if case.random.random() < 0.5 and file["classes"].size:
            names = file["classes"][()]
            names[case.random.randrange(len(names))] = strange
            file["classes"][...] = names
        else:
            keys = file["keys/bytes"][()]
            at = case.random.randrange(len(keys) - 16)
            keys[at : at + len(strange)] = np.frombuffer(strange, np.uint8)
            file["keys/bytes"][...] = keys


def _replace_array(case: Case, path: Path) -> None:
    """Put an array of another type, shape, layout or filter in the place of one."""
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        name = case.random.choice([*_arrays(file), "images"])
        if not isinstance(file[name], h5py.Dataset):
            return
        value, attributes = file[name][()], dict(file[name].attrs)
        del file[name]
        ways: list[dict[str, Any]] = [
            {
                "data": value.astype(value.dtype.newbyteorder(">"))
                if value.dtype.kind in "iuf"
                else value[:1]
            },
            {"data": value[:-1]},
            {"data": np.concatenate([value, value])},
            {"data": value[..., None]},
            {"data": value, "chunks": True},
            {"data": value, "compression": "gzip"},
            {"data": value, "maxshape": (None, *value.shape[1:])},
            {"data": np.zeros(0, value.dtype)},
            {
                "shape": (2**40, *value.shape[1:]),
                "dtype": value.dtype,
                "chunks": (1, *value.shape[1:]),
            },
            {
                "shape": value.shape,
                "dtype": value.dtype,
                "external": [("/etc/passwd", 0, h5py.h5f.UNLIMITED)],
            },
            {"data": "a text"},
            {"data": np.array(["a", "b"], dtype=h5py.string_dtype())},
        ]
        made = file.create_dataset(name, **case.random.choice(ways))
        for key, attribute in attributes.items():
            made.attrs[key] = attribute


def _structure(case: Case, path: Path) -> None:
    """Remove, add, link or rename members."""
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        name = case.random.choice(list(file))
        other = case.random.choice(list(file))
        way = case.random.randrange(7)
        if way == 0:
            del file[name]
        elif way == 1:
            file["more"] = case.random.choice([np.zeros(4), "x", 5])
        elif way == 2:
            file.move(name, case.random.choice(["masks", "images2", "fields", "\x1b[2J"]))
        else:
            if name == other:
                return
            del file[name]
            links = [h5py.SoftLink("/" + other), h5py.ExternalLink(str(path), other), file[other]]
            file[name] = links[way % 3] if way < 6 else h5py.SoftLink("/" + name)


def _item_bytes(case: Case, path: Path) -> None:
    """Put other bytes in the place of an encoded item, with its checksum made right."""
    index = read_index(path)
    extent = index.extents["images"]
    item = case.random.randrange(len(index))
    start, length = extent.item_range(item)
    if length > _MOST_BYTES:  # another mutation has made a sparse item of it
        return
    with path.open("r+b") as file:
        file.seek(start)
        old = file.read(length)
        new = _strange_jpeg(case, old) if extent.spec.is_encoded else case.random.randbytes(length)
        new = bytes(new[:length]).ljust(length, b"\0")
        file.seek(start)
        file.write(new)
    _mend_crc32(path, item)


def _segments(case: Case, path: Path) -> None:
    """Give an item of store=jpeg other lengths of segments, with its checksum made right."""
    index = read_index(path)
    segments = index.extents["images"].segments
    item = case.random.randrange(len(index))
    if segments is None or segments.item_range(item)[1] > _MOST_BYTES:
        return
    first, length = segments.item_range(item)
    with h5py.File(path, "r+") as file:
        at, count = (first - segments.start) // 2, length // 2
        lengths = file["images/segments"][at : at + count].astype(np.int64)
        way, one, other = case.random.randrange(5), *case.random.choices(range(count), k=2)
        by = case.random.choice([1, 2, 8, 50, -1, 2**15, 2**16 - 1])
        if way == 0:
            lengths[one] += by
        elif way == 1:  # the same sum
            lengths[one] += by
            lengths[other] -= by
        elif way == 2:
            lengths[[one, other]] = lengths[[other, one]]
        elif way == 3:
            lengths[:] = case.random.choice([0, 1, 2, 2**16 - 1])
        else:  # markers with the same numbers, eight segments later
            lengths = np.concatenate(
                [[lengths[:9].sum()], lengths[9:-1], [1] * 8, [lengths[-1] - 8]]
            )[-count:]
        file["images/segments"][at : at + count] = (lengths % 2**16).astype("<u2")
    _mend_crc32(path, item)


def _mend_crc32(path: Path, item: int) -> None:
    """Make an item's checksum that of its bytes."""
    value = 0
    with FileReader(path) as reader:
        for part in reader.index.parts:
            value = zlib.crc32(reader.read(*part.item_range(item)), value)
    with h5py.File(path, "r+") as file:
        file["crc32"][item] = value


def _strange_jpeg(case: Case, old: bytes) -> bytes:
    """Return a JPEG of another height, width, component count or frame, or none at all."""
    data = bytearray(old)
    frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    way = case.random.randrange(6)
    if frame < 0 or way == 0:
        return BROKEN
    if way == 1:
        side = case.random.choice([0, 1, 16, 12_000, 65_500])
        struct.pack_into(">HH", data, frame + 5, side, case.random.choice([side, 32]))
    elif way == 2:
        data[frame + 9] = case.random.choice([0, 1, 2, 4, 255])
    elif way == 3:
        data[frame + 1] = case.random.choice([0xC1, 0xC2, 0xC3, 0xC9, 0xD8])
    elif way == 4:
        data[frame + 11] = case.random.choice([0x11, 0x21, 0x22, 0x44, 0x00, 0xFF])
    else:
        data[case.random.randrange(len(data))] ^= 1 << case.random.randrange(8)
    return bytes(data)


def _size(case: Case, path: Path) -> None:
    """Cut the file, or append to it."""
    size = path.stat().st_size
    os.truncate(
        path, max(0, size + case.random.choice([-1, -4096, -size // 2, -size, 1, 4096, 2**34]))
    )


def _no_file(case: Case, path: Path) -> None:
    """Put something else than a file in its place."""
    path.unlink()
    way = case.random.randrange(5)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.mkdir()
    elif way == 2:
        path.write_bytes(b"")
    else:
        path.symlink_to(["/dev/zero", "x.h5"][way - 3])


def _arrays(file: h5py.File) -> list[str]:
    found: list[str] = []
    file.visititems(
        lambda name, item: (
            found.append(name)
            if isinstance(item, h5py.Dataset)
            and name not in ("images", "masks", "images/bytes", "masks/bytes")
            else None
        )
    )
    return sorted(found)


FORGERIES: list[Callable[[Case, Path], None]] = [
    _number_attribute, _text_attribute, _attribute_type, _provenance, _array_value, _array_value,
    _array_value, _many_labels, _names, _replace_array, _replace_array, _structure, _item_bytes,
    _item_bytes, _segments, _segments, _size, _no_file,
]  # fmt: skip
