"""The index of a set: one file that says of many shards what each holds, and all small columns.

Opening a set is one read, of this file: where an item's bytes lie in its shard is arithmetic, and
a shard is opened when the first of its items is needed, without HDF5. Columns are mapped, not read;
what they say of a shard is held against a checksum, and bounds, before the first of it is used.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from h5feed.disk import create_file, naming, rename_file, write_at
from h5feed.errors import H5FormatError, UsageError
from h5feed.store.fields import FIELDS, FieldExtent, FieldType, is_field_name
from h5feed.store.gate import (
    Gate,
    check_further,
    check_head,
    check_items,
    check_offsets,
    check_spec,
    read_json,
)
from h5feed.store.layout import (
    ALIGNMENT,
    FORMAT,
    FORMAT_VERSION,
    IMAGES,
    LIBVER,
    MASKS,
    MAX_SIDE,
    SEGMENTS,
    Columns,
    Extent,
    FieldSpec,
    FileIndex,
    Int32,
    Int64,
    UInt8,
    canonical_json,
    images_spec,
    masks_spec,
    payload_names,
    segment_offsets,
)
from h5feed.store.read import MappedBytes, OpenFile, map_file, open_validated, read_index
from h5feed.store.write import MemoryFile, add_extent, attribute_value, between, new_group

__all__ = [
    "INDEX_NAME",
    "SetIndex",
    "check_alike",
    "is_set",
    "listed_index",
    "open_index",
    "write_index",
]

INDEX_NAME = "index.h5"
"""The name of a set's index, beside its shards."""

_KIND = "set"
_SEAL_BYTES = 64  # of a fingerprint, as a shard's attribute has it
_SMALL = 1 << 32  # items that are numbered by four bytes

Array = npt.NDArray[Any]


class _Column(NamedTuple):
    """A dataset of the index with rows for all items, in stored order."""

    path: str
    dtype: str
    tail: tuple[int, ...] = ()
    """Shape of an item's row."""
    ends: bool = False
    """Offsets: for n items of a shard n + 1 numbers, beginning with 0."""


@dataclass(frozen=True, kw_only=True)
class SetIndex:
    """What is known of several packed files as one row of items.

    A stored position numbers the items shard by shard. A dataset numbers them in the order of the
    source, ImageFolder's: `columns["order"]` leads from there to the stored position, and
    `columns["positions"]` back; without these two, both are the same.
    """

    path: str
    """Absolute path of the index; "" where files were listed without one."""
    paths: tuple[str, ...]
    """Absolute path of each shard."""
    specs: dict[str, FieldSpec]
    """What each pixel field holds, by name; "images" is first."""
    fields: dict[str, FieldType]
    """What each further field holds, by name, sorted."""
    classes: tuple[str, ...]
    fingerprint: str
    """SHA-256 (hex) of all shards and their items' order; of a single file alone its own."""
    generation: int
    plan: dict[str, Any]
    """How the set was packed; of files without an index the first one's provenance."""
    sizes: Int64
    """(S,) bytes of each shard."""
    starts: Int64
    """(S+1,) stored position of each shard's first item."""
    fingerprints: tuple[str, ...]
    """Of each shard."""
    seals: Int64
    """(S,) byte address of its fingerprint in each shard; empty without an index."""
    addresses: dict[str, Int64]
    """(S,) byte address in each shard of its first item's bytes, by part."""
    lengths: dict[str, Int64]
    """(S,) bytes of a shard's items, by part: `payload_names`, then "fields/NAME"."""
    largest: Int32
    """(S, 2) stored height and width of each shard's largest image."""
    key_starts: Int64
    """(S+1,) where each shard's keys begin in `key_bytes`."""
    key_bytes: UInt8
    columns: dict[str, Array]
    """Of all items: "labels", "source_shapes", "crc32", "letterbox" (fit=pad), "shapes" (stored;
    where items have their own), and offsets: "keys", and each part whose items have no common
    length, of which shard s has those from `starts[s] + s` on."""
    checksums: dict[str, npt.NDArray[np.uint32]]
    """(S,) CRC-32 of a shard's rows of each column; empty without an index."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def count(self, shard: int) -> int:
        """Return how many items a shard has."""
        return int(self.starts[shard + 1] - self.starts[shard])

    def first(self, shards: int, classes: int) -> SetIndex:
        """Return the index of the first shards alone, of so many classes: an older generation's.

        Where what was packed later comes behind, it is what that one said, fingerprint and all.
        """
        count = int(self.starts[shards])
        ends = {"keys", *self.addresses}
        checksums = {name: column[:shards] for name, column in self.checksums.items()}
        prints = self.fingerprints[:shards]
        return replace(
            self,
            paths=self.paths[:shards],
            classes=self.classes[:classes],
            fingerprint=_set_fingerprint(prints, np.stack(list(checksums.values()), axis=1)),
            sizes=self.sizes[:shards],
            starts=self.starts[: shards + 1],
            fingerprints=prints,
            seals=self.seals[:shards],
            addresses={name: found[:shards] for name, found in self.addresses.items()},
            lengths={name: found[:shards] for name, found in self.lengths.items()},
            largest=self.largest[:shards],
            key_starts=self.key_starts[: shards + 1],
            columns={n: c[: count + shards * (n in ends)] for n, c in self.columns.items()},
            checksums=checksums,
        )

    def item_bytes(self, part: str) -> int | None:
        """Bytes of every item of a part; None where each has its own."""
        return _item_bytes(part, self.specs, self.fields)

    def rows(self, name: str, shard: int) -> Array:
        """Return what a column, or "key_bytes", has of one shard."""
        if name == "key_bytes":
            first, last = self.key_starts[shard : shard + 2].tolist()
            return self.key_bytes[first:last]
        first, last = self.starts[shard : shard + 2].tolist()
        if name == "keys" or name in self.addresses:
            return self.columns[name][first + shard : last + shard + 1]
        return self.columns[name][first:last]

    def items(self, shard: int) -> Columns:
        """Return the small columns of one shard."""
        has_letterbox = "letterbox" in self.columns
        return Columns(
            labels=self.rows("labels", shard),
            classes=self.classes,
            key_bytes=self.rows("key_bytes", shard),
            key_offsets=self.rows("keys", shard),
            source_shapes=self.rows("source_shapes", shard),
            crc32=self.rows("crc32", shard),
            letterbox=self.rows("letterbox", shard) if has_letterbox else None,
        )

    def extents(self, shard: int) -> dict[str, Extent]:
        """Return where the pixel fields of one shard lie, but for restart segments."""
        count, made = self.count(shard), {}
        for name, spec in self.specs.items():
            start = int(self.addresses[name][shard])
            made[name] = Extent(
                spec=spec,
                start=start,
                count=count,
                offsets=None if spec.is_fixed else self.rows(name, shard),
                shapes=None if spec.is_fixed else self._shapes(shard),
            )
        return made

    def _shapes(self, shard: int) -> Int32:
        size = self.specs[IMAGES].common_size
        if size is None:
            return self.rows("shapes", shard)
        return np.broadcast_to(np.array(size, np.int32), (self.count(shard), 2))

    def further(self, shard: int) -> dict[str, FieldExtent]:
        """Return where the further fields of one shard lie."""
        return {
            name: FieldExtent(
                type=kind,
                start=int(self.addresses[f"{FIELDS}/{name}"][shard]),
                count=self.count(shard),
                offsets=None if kind.is_fixed else self.rows(f"{FIELDS}/{name}", shard),
            )
            for name, kind in self.fields.items()
        }

    def refuse(self, what: str) -> H5FormatError:
        """Return the error to raise about the index."""
        return Gate(Path(self.path), 0, _make_anew(Path(self.path))).refuse(what)

    def check_rows(self, shard: int, names: Iterable[str] | None = None) -> None:
        """Refuse rows of one shard, of columns `names` or all, that are damaged or impossible.

        Once for each shard, before they are used: about 0.1 ms for a thousand items.
        """
        for name in names if names is not None else self.checksums:
            if name in self.checksums and self.checksums[name][shard] != _crc(
                self.rows(name, shard)
            ):
                raise self.refuse(
                    f"its column {name} is damaged where it is about "
                    f"{Path(self.paths[shard]).name} (checksum)"
                )
        if names is None and self.checksums:
            self._check_values(shard)

    def _check_values(self, shard: int) -> None:
        """Hold against each other, and against bounds, what the columns say of one shard."""
        path = Path(self.path)
        gate = Gate(path, 0, f"(of {Path(self.paths[shard]).name}) {_make_anew(path)}")
        items, extents, further = self.items(shard), self.extents(shard), self.further(shard)
        check_offsets(gate, "/keys/offsets", items.key_offsets, len(items.key_bytes))
        for part, lengths in self.lengths.items():
            if part in self.columns:
                offsets = self.rows(part, shard)
                check_offsets(gate, f"/{part}/offsets", offsets, int(lengths[shard]))
        check_items(gate, items, extents)
        check_further(gate, further)
        if (part := f"{IMAGES}/{SEGMENTS}") in self.columns and not np.array_equal(
            self.rows(part, shard), segment_offsets(self._shapes(shard))
        ):
            raise gate.refuse(f"/{part} does not agree with the sizes of images")
        areas = _areas(self._shapes(shard)) if self.specs[IMAGES].common_size is None else None
        if areas is not None and areas.max() > _areas(self.largest)[shard]:
            raise gate.refuse("/shapes has an image larger than the largest")
        if self.rows("positions", shard).max() >= len(self):
            raise gate.refuse("/positions has an item beyond the last")

    def compare(self, shard: int, file: FileIndex) -> None:
        """Refuse the index where a shard itself says something else."""
        own = _one_index(file)
        pairs = [(name, rows, self.rows(name, shard)) for name, rows in own.columns.items()]
        for name, found in own.addresses.items():
            pairs.append((f"address of {name}", found[0], self.addresses[name][shard]))
        pairs.append(("key_bytes", own.key_bytes, self.rows("key_bytes", shard)))
        if file.positions is not None:  # other shards' items may lie between
            ranks = self.rows("positions", shard).argsort()
            pairs.append(("positions", file.positions.argsort(), ranks))
        for name, theirs, ours in pairs:
            if not np.array_equal(theirs, ours):
                raise self.refuse(f"its {name} is not that of {Path(self.paths[shard]).name}")

    def open_shard(self, shard: int) -> MappedBytes:
        """Map one shard, after a look at whether it is the one that the index describes.

        Raises H5FormatError, which names the shard and says what to do, where it is not.
        """
        path, size = Path(self.paths[shard]), int(self.sizes[shard])
        try:
            file = OpenFile.by_name(path)
        except FileNotFoundError as ex:
            raise H5FormatError(
                f"{path}: this shard of the set is missing; bring it back or pack its part again, "
                f"then {_make_anew(Path(self.path))}"
            ) from ex
        with file:
            if file.size == size and self._is_sealed(file, shard):
                return MappedBytes(file)
        raise self._another_shard(path, shard, file.size)

    def _is_sealed(self, file: OpenFile, shard: int) -> bool:
        seal = file.read(int(self.seals[shard]), _SEAL_BYTES)
        return seal == self.fingerprints[shard].encode()

    def _another_shard(self, path: Path, shard: int, size: int) -> H5FormatError:
        """Say what is in the place of a shard."""
        again = _make_anew(Path(self.path))
        try:
            found = read_index(path).fingerprint
        except H5FormatError as ex:
            have, want = size, self.sizes[shard]
            cut = f" (it has {have} bytes of {want})" if have < want else ""
            return H5FormatError(f"{ex.sentence}{cut}, then {again}")
        return H5FormatError(
            f"{path}: another shard than the one that the index of its set describes (fingerprint "
            f"{found[:12]}…, not {self.fingerprints[shard][:12]}…); bring that one back, or {again}"
        )


def _make_anew(index: Path) -> str:
    return f"make the index anew with `merge-h5 {index.parent}`"


def _item_bytes(
    part: str, specs: Mapping[str, FieldSpec], fields: Mapping[str, FieldType]
) -> int | None:
    name, _, of = part.partition("/")
    if name == FIELDS:
        return fields[of].row_bytes if fields[of].is_fixed else None
    spec = specs[name]
    if of == SEGMENTS:
        size = spec.common_size
        return None if size is None else int(segment_offsets(np.array([size], np.int32))[-1])
    return spec.item_bytes if spec.is_fixed else None


def _parts(specs: Mapping[str, FieldSpec], fields: Mapping[str, FieldType]) -> list[str]:
    """Return the names of all that an item has, in the order of its checksum."""
    return [*payload_names(list(specs.values())), *(f"{FIELDS}/{name}" for name in fields)]


def _areas(shapes: Int32) -> Int64:
    areas: Int64 = shapes.astype(np.int64).prod(axis=1)
    return areas


def _crc(rows: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(rows).data.cast("B")) if rows.size else 0


def listed_index(indexes: Sequence[FileIndex]) -> SetIndex:
    """Return files that were packed alike as one row of items, in their order.

    Raises UsageError, naming the first two files that differ and in what.
    """
    return _joined([_one_index(index) for index in indexes])


def _one_index(index: FileIndex) -> SetIndex:
    specs = {name: extent.spec for name, extent in index.extents.items()}
    fields = {name: extent.type for name, extent in index.fields.items()}
    parts = dict(zip(_parts(specs, fields), index.parts, strict=True))
    wanted = _columns_of(specs, fields, index.labels, index.letterbox is not None, None)
    return SetIndex(
        path="",
        paths=(index.path,),
        specs=specs,
        fields=fields,
        classes=index.classes,
        fingerprint=index.fingerprint,
        generation=0,
        plan=index.provenance,
        sizes=np.array([index.size]),
        starts=np.array([0, len(index)]),
        fingerprints=(index.fingerprint,),
        seals=np.zeros(0, np.int64),
        addresses={part: np.array([extent.start]) for part, extent in parts.items()},
        lengths={part: np.array([extent.nbytes]) for part, extent in parts.items()},
        largest=np.array([_largest(index)], np.int32),
        key_starts=np.array([0, len(index.key_bytes)]),
        key_bytes=index.key_bytes,
        columns={name: _rows_of(index, name) for name in wanted},
        checksums={},
    )


def _joined(files: Sequence[SetIndex]) -> SetIndex:
    """Return several indexes of one file each as one."""
    first = files[0]
    if len(files) == 1:
        return first
    check_alike(files)
    fingerprints = tuple(one.fingerprint for one in files)
    return replace(
        first,
        paths=tuple(one.paths[0] for one in files),
        classes=max((one.classes for one in files), key=len),
        fingerprint=_digest(" ".join(fingerprints).encode()),
        sizes=np.concatenate([one.sizes for one in files]),
        starts=_cumulated(map(len, files)),
        fingerprints=fingerprints,
        addresses={n: np.concatenate([one.addresses[n] for one in files]) for n in first.addresses},
        lengths={n: np.concatenate([one.lengths[n] for one in files]) for n in first.lengths},
        largest=np.concatenate([one.largest for one in files]),
        key_starts=_cumulated(int(one.key_starts[1]) for one in files),
        key_bytes=np.concatenate([one.key_bytes for one in files]),
        columns={n: np.concatenate([one.columns[n] for one in files]) for n in first.columns},
    )


def _digest(*contents: Any) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def _cumulated(counts: Iterable[int]) -> Int64:
    return np.cumsum([0, *counts], dtype=np.int64)


def _largest(index: FileIndex) -> tuple[int, int]:
    extent = index.extents[IMAGES]
    if extent.shapes is None:
        return extent.spec.height, extent.spec.width
    height, width = extent.shapes[int(_areas(extent.shapes).argmax())].tolist()
    return height, width


def _rows_of(index: FileIndex, name: str) -> Array:
    """Return what a file has for a column of an index."""
    if name == "keys":
        return index.key_offsets
    found: Array | None
    if name == "shapes":
        found = index.extents[IMAGES].shapes
    elif name == f"{IMAGES}/{SEGMENTS}":
        segments = index.extents[IMAGES].segments
        found = None if segments is None else segments.offsets
    elif name.startswith(f"{FIELDS}/"):
        found = index.fields[name.partition("/")[2]].offsets
    elif name in index.extents:
        found = index.extents[name].offsets
    else:
        found = getattr(index, name)
    assert found is not None
    return found


def _columns_of(
    specs: Mapping[str, FieldSpec],
    fields: Mapping[str, FieldType],
    labels: Array | h5py.Dataset,
    letterbox: bool,
    count: int | None,
) -> dict[str, _Column]:
    """Return the columns of an index of `count` items; None is without an order of their own."""
    found = {
        "labels": _Column("labels", labels.dtype.str, labels.shape[1:]),
        "source_shapes": _Column("source_shapes", "<i4", (2,)),
        "crc32": _Column("crc32", "<u4"),
        "keys": _Column("offsets/keys", "<i8", ends=True),
    }
    if letterbox:
        found["letterbox"] = _Column("letterbox", "<i4", (4,))
    if specs[IMAGES].common_size is None:
        found["shapes"] = _Column("shapes", "<i4", (2,))
    for part in _parts(specs, fields):
        if _item_bytes(part, specs, fields) is None:
            path = part if part.startswith(FIELDS) else f"offsets/{part.rpartition('/')[2]}"
            found[part] = _Column(path, "<i8", ends=True)
    if count is not None:
        number = "<u4" if count <= _SMALL else "<i8"
        found["positions"] = _Column("positions", number)
        found["order"] = _Column("order", number)
    return found


def check_alike(files: Sequence[SetIndex]) -> None:
    """Refuse files that were not packed alike: a dataset has one set of fields and classes.

    The classes of one may go on after those of another. Raises UsageError, naming the first two
    files that differ and in what.
    """
    longest = first = files[0]
    for other in files[1:]:
        for (what, have), (_, want) in zip(_described(other), _described(first), strict=True):
            if have != want:
                raise _differ(other, first, what)
        shorter = other
        if len(other.classes) > len(longest.classes):
            longest, shorter = other, longest
        same = longest.classes[: len(shorter.classes)] == shorter.classes
        if not same or bool(longest.classes) != bool(shorter.classes):
            raise _differ(other, first, "classes")


def _differ(other: SetIndex, first: SetIndex, what: str) -> UsageError:
    return UsageError(
        f"{other.paths[0]} and {first.paths[0]} differ in their {what}; files of one dataset "
        "must be packed with the same options and classes"
    )


def _described(file: SetIndex) -> list[tuple[str, Any]]:
    labels = file.columns["labels"]
    return [
        ("pixel fields", file.specs),
        ("further fields", file.fields),
        ("kind of labels", (labels.dtype.str, labels.shape[1:])),
        ("letterboxes", "letterbox" in file.columns),
    ]


def write_index(
    folder: str | os.PathLike[str],
    shards: Sequence[str | os.PathLike[str]],
    *,
    generation: int,
    plan: Mapping[str, Any],
    bases: Sequence[int] | None = None,
) -> Path:
    """Write the index of the set `folder` over the files `shards` in it, in this order.

    Every shard is opened and validated, twice, and nothing is believed of an index that was there;
    it is replaced in one step once the new one is whole, so that who has it open goes on.
    generation: a number that grows with every index of this set. plan: how it was packed, JSON.
    bases: added to the `/positions` of each shard, so that what was packed later comes behind; by
    default 0, and where a shard has no positions, the items of the shards before it.
    Returns the path of the index. Raises OSError, H5FormatError for a shard that is not sound, and
    UsageError for shards that do not belong together.
    """
    home = Path(folder).absolute()
    paths = [home / Path(shard).name for shard in shards]
    if not paths:
        raise UsageError(f"shards=[] makes no set: pack some into {home}")
    tables, seals, positions = _look_at(paths, bases)
    partial = home / f"{INDEX_NAME}.{secrets.token_hex(4)}.partial"
    try:
        whole = replace(tables, generation=generation, seals=seals)
        _write(partial, whole, _rows_of_shards(whole, positions), plan)
        open_index(partial)
        rename_file(partial, home / INDEX_NAME)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return home / INDEX_NAME


def _look_at(paths: Sequence[Path], bases: Sequence[int] | None) -> tuple[SetIndex, Int64, Int64]:
    """Return what is known of all shards but rows, where their fingerprints lie, and `positions`.

    Those are of all items, one shard's after the other.
    """
    files, seals, places = [], [], []
    for path in paths:
        index = read_index(path)
        whole = _one_index(index)
        none = {name: column[:0].copy() for name, column in whole.columns.items()}
        files.append(replace(whole, columns=none, key_bytes=whole.key_bytes[:0].copy()))
        seals.append(_seal_address(index))
        places.append(index.positions)
    tables = _joined(files)
    if bases is None:
        plain = any(one is None for one in places)
        bases = tables.starts[:-1].tolist() if plain else [0] * len(paths)
    positions = np.concatenate(
        [
            base + (np.arange(len(file)) if place is None else place)
            for base, file, place in zip(bases, files, places, strict=True)
        ]
    )
    return tables, np.array(seals), positions


def _seal_address(index: FileIndex) -> int:
    """Return where in a file the attribute with its fingerprint lies."""
    payload = [(part.start, part.nbytes) for part in index.parts]
    with open(index.path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with data:
        for start, stop in between(payload, index.size):
            at = data.find(index.fingerprint.encode(), start, stop)
            if at >= 0:
                return at
    raise H5FormatError(f"{index.path}: its fingerprint is not where HDF5 keeps attributes")


def _write(
    partial: Path,
    index: SetIndex,
    of_shards: Iterable[Mapping[str, Array]],
    plan: Mapping[str, Any],
) -> None:
    """Write the whole index into a new file: columns first, shard by shard, then HDF5's part.

    of_shards: what the columns have of one shard after the other.
    """
    labels = index.columns["labels"]
    columns = _columns_of(
        index.specs, index.fields, labels, "letterbox" in index.columns, len(index)
    )
    shapes = {column.path: _shape_in(index, column) for column in columns.values()}
    shapes["key_bytes"] = (int(index.key_starts[-1]),)
    kinds = {column.path: np.dtype(column.dtype) for column in columns.values()}
    kinds["key_bytes"] = np.dtype("u1")
    tables = _tables(index) | {"classes": _texts(index.classes)}
    checked = [*columns, "key_bytes"]
    checksums = np.zeros((len(index.paths), len(checked)), np.uint32)
    for name, table in (tables | {"shards/checksums": checksums}).items():
        shapes[name], kinds[name] = table.shape, table.dtype
    memory = MemoryFile()
    with h5py.File(
        memory, "w", libver=LIBVER, alignment_threshold=1, alignment_interval=ALIGNMENT
    ) as file:
        places = _reserve(file, shapes, kinds)
    handle = create_file(partial)
    try:

        def put(name: str, row: int, rows: Array) -> None:
            """Write `rows` from row number `row` of a dataset on."""
            data = np.ascontiguousarray(rows, kinds[name])
            if data.size:
                step = int(np.prod(shapes[name][1:], dtype=np.int64)) * kinds[name].itemsize
                write_at(handle, data.data.cast("B"), places[name][0] + row * step, partial)

        for shard, rows in enumerate(of_shards):
            first = int(index.starts[shard])
            for number, name in enumerate(checked):
                checksums[shard, number] = _crc(rows[name])
                if name == "key_bytes":
                    put(name, int(index.key_starts[shard]), rows[name])
                else:
                    column = columns[name]
                    put(column.path, first + shard * column.ends, rows[name])
        tables["shards/checksums"] = checksums
        for name, table in tables.items():
            put(name, 0, table)
        facts: dict[str, str | int] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "complete": 1,
            "kind": _KIND,
            "generation": index.generation,
            "plan": canonical_json(plan),
            "contents": _contents(index),
            "fingerprint": _set_fingerprint(index.fingerprints, checksums),
        }
        facts["checksum"] = _checksum(facts, tables)
        with h5py.File(memory, "r+", libver=LIBVER) as file:
            for key, value in facts.items():
                file.attrs[key] = attribute_value(value)
        if memory.error is not None:
            raise memory.error
        with naming(partial):
            os.ftruncate(handle, memory.size)
        memory.write_around(list(places.values()), handle, partial)
    finally:
        os.close(handle)


def _rows_of_shards(index: SetIndex, positions: Int64) -> Iterator[dict[str, Array]]:
    """Yield what the columns have of one shard after the other, which is opened for it again."""
    order = np.argsort(positions, kind="stable")
    _refuse_twins(index, positions, order)
    ranks = np.empty(len(index), np.int64)
    ranks[order] = np.arange(len(index))
    kind = "<u4" if len(index) <= _SMALL else "<i8"
    for shard, path in enumerate(index.paths):
        again = _one_index(read_index(path))
        if again.fingerprint != index.fingerprints[shard]:
            raise H5FormatError(f"{path}: replaced while the index was made; run merge-h5 again")
        first, last = index.starts[shard : shard + 2].tolist()
        both = {"positions": ranks, "order": order}
        own = {name: column[first:last].astype(kind) for name, column in both.items()}
        yield again.columns | own | {"key_bytes": again.key_bytes}


def _refuse_twins(index: SetIndex, positions: Int64, order: Int64) -> None:
    """Refuse two items of one place in the source's order."""
    places = positions[order]
    same = np.flatnonzero(places[1:] == places[:-1])
    if len(same):
        at = int(same[0])
        pair = np.searchsorted(index.starts, order[at : at + 2], side="right") - 1
        one, other = (index.paths[number] for number in sorted(pair.tolist()))
        raise UsageError(
            f"{one} and {other} both hold item {places[at]} of the source: they are of two "
            "packings, or one is a copy of the other; merge folders with `merge-h5 A B OUT`, or "
            "remove the one that does not belong here"
        )


def _shape_in(index: SetIndex, column: _Column) -> tuple[int, ...]:
    return (len(index) + column.ends * len(index.paths), *column.tail)


def _texts(texts: Sequence[str]) -> Array:
    """Return texts as UTF-8 of one length, as an HDF5 file has them."""
    found = [text.encode("utf-8", "surrogateescape") for text in texts]
    return np.array(found, f"S{max([1, *map(len, found)])}")


def _tables(index: SetIndex) -> dict[str, Array]:
    """Return what has a row for each shard, by dataset."""
    return {
        "shards/names": _texts([os.path.basename(path) for path in index.paths]),
        "shards/sizes": index.sizes,
        "shards/counts": np.diff(index.starts),
        "shards/fingerprints": _texts(index.fingerprints),
        "shards/seals": index.seals,
        "shards/addresses": np.stack(list(index.addresses.values()), axis=1),
        "shards/lengths": np.stack(list(index.lengths.values()), axis=1),
        "shards/largest": index.largest,
        "shards/key_bytes": np.diff(index.key_starts),
    }


def _contents(index: SetIndex) -> str:
    """Return as JSON what the fields of all shards are."""
    return canonical_json(
        {
            "pixels": [[name, spec.attributes()] for name, spec in index.specs.items()],
            "further": [[name, kind.attributes()] for name, kind in index.fields.items()],
        }
    )


def _set_fingerprint(fingerprints: Sequence[str], checksums: Array) -> str:
    return _digest(" ".join(fingerprints).encode(), np.ascontiguousarray(checksums).data.cast("B"))


def _checksum(facts: Mapping[str, Any], tables: Mapping[str, Array]) -> str:
    """SHA-256 (hex) of all of an index but the columns, which `checksums` are of."""
    said = canonical_json({name: value for name, value in facts.items() if name != "checksum"})
    contents = [said.encode()]
    for name, table in sorted(tables.items()):
        contents += [f"{name}{table.dtype.str}{table.shape}".encode(), table.tobytes()]
    return _digest(*contents)


def _reserve(
    file: h5py.File, shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, Any]
) -> dict[str, tuple[int, int]]:
    """Make the datasets without writing them; return (address, bytes) of each."""
    places = {}
    for path, shape in shapes.items():
        parent, _, name = path.rpartition("/")
        group = file if not parent else file[parent] if parent in file else new_group(file, parent)
        kind = h5py.h5t.py_create(kinds[path])
        data = add_extent(group, name, shape, kind)
        places[path] = (data.id.get_offset() or 0, data.id.get_storage_size())
    return places


def is_set(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a folder that has the index of a set."""
    return Path(path, INDEX_NAME).is_file()


def open_index(path: str | os.PathLike[str]) -> SetIndex:
    """Open the index of a set, given its folder or the index itself.

    Its columns are views of the file, mapped: nothing is read that has a row for each item. Raises
    OSError, and H5FormatError, one sentence, where it is none or damaged.

    >>> index = open_index("set")
    >>> len(index), len(index.paths), index.specs["images"].encoding
    (12, 3, 'raw')
    """
    where = Path(path).absolute()
    if where.is_dir():
        where /= INDEX_NAME
        if not where.exists():
            raise H5FormatError(
                f"{where.parent}: no set, for it has no {INDEX_NAME}: pack-h5 makes one, and "
                f"`merge-h5 {where.parent}` where its shards are all there"
            )
    fd, (tables, columns) = open_validated(where, _validated, then=_make_anew(where))
    with OpenFile(where, fd) as file, naming(where):
        data = map_file(fd, file.size)
    views = {name: place.view(data) for name, place in columns.items()}
    return replace(tables, key_bytes=views.pop("key_bytes"), columns=views)


class _Rows(NamedTuple):
    """Where a column lies in the index."""

    start: int
    nbytes: int
    dtype: Any
    shape: tuple[int, ...]

    def view(self, data: UInt8) -> Array:
        """Return it as a view of the mapped file."""
        rows: Array = data[self.start : self.start + self.nbytes].view(self.dtype)
        return rows.reshape(self.shape)


def _validated(gate: Gate, file: h5py.File) -> tuple[SetIndex, dict[str, _Rows]]:
    """Return an opened index without its columns, and where these lie."""
    check_head(gate, file)
    members = gate.members(file)
    if "kind" not in file.attrs or gate.text(file, "kind") != _KIND:
        raise gate.refuse("it is not the index of a set")
    numbers = ("format_version", "complete", "generation")
    texts = ("format", "kind", "plan", "contents", "fingerprint", "checksum")
    facts: dict[str, Any] = {name: gate.integer(file, name) for name in numbers}
    facts |= {name: gate.text(file, name) for name in texts}
    names = {"names", "sizes", "counts", "fingerprints", "seals", "addresses", "lengths"}
    shards = gate.group(file, "shards", names | {"largest", "key_bytes", "checksums"})
    tables = {f"shards/{name}": gate.dataset(shards, name)[()] for name in shards}
    tables["classes"] = gate.dataset(file, "classes")[()]
    if facts["checksum"] != _checksum(facts, tables):
        raise gate.refuse("the index does not match its checksum (altered or damaged)")
    specs, fields = _read_contents(gate, facts["contents"])
    made = _read_tables(gate, tables, specs, fields)
    labels = gate.dataset(file, "labels")
    if (labels.dtype.str, labels.ndim) not in (("<i8", 1), ("<f4", 2)) or labels.size < 1:
        raise gate.refuse(f"/labels is {labels.dtype} {labels.shape}")
    wanted = _columns_of(specs, fields, labels, "letterbox" in members, len(made))
    checked = [*wanted, "key_bytes"]
    sums = tables["shards/checksums"]
    if sums.dtype != np.uint32 or sums.shape != (len(made.paths), len(checked)):
        raise gate.refuse(f"/shards/checksums is {sums.dtype} {sums.shape}")
    if facts["fingerprint"] != _set_fingerprint(made.fingerprints, sums):
        raise gate.refuse("the fingerprint is not that of its shards")
    columns = {
        name: _rows(gate, file, column.path, column.dtype, _shape_in(made, column))
        for name, column in wanted.items()
    }
    total = (int(made.key_starts[-1]),)
    columns["key_bytes"] = _rows(gate, file, "key_bytes", "|u1", total)
    index = replace(
        made,
        fingerprint=facts["fingerprint"],
        generation=facts["generation"],
        plan=read_json(gate, "plan", facts["plan"]),
        checksums={name: sums[:, number] for number, name in enumerate(checked)},
    )
    return index, columns


def _rows(gate: Gate, file: h5py.File, path: str, dtype: str, shape: tuple[int, ...]) -> _Rows:
    parent, _, name = path.rpartition("/")
    group = gate.group(file, parent, None) if parent else file
    gate.members(group)  # no links
    data = gate.dataset(group, name)
    gate.expect(data, dtype, shape)
    return _Rows(gate.address(data), data.nbytes, np.dtype(dtype), shape)


def _read_contents(gate: Gate, text: str) -> tuple[dict[str, FieldSpec], dict[str, FieldType]]:
    """Return the fields that `_contents` wrote; refuse others than packing makes."""
    try:
        said = json.loads(text)
        specs = {n: FieldSpec.from_attributes(n, values) for n, values in said["pixels"]}
        fields = {n: FieldType.from_attributes(values) for n, values in said["further"]}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as ex:
        raise gate.refuse(f"attribute contents makes no sense ({ex})") from ex
    names = list(specs)
    if names not in ([IMAGES], [IMAGES, MASKS]):
        raise gate.refuse(f"attribute contents has the pixel fields {names}")
    images = specs[IMAGES]
    check_spec(gate, images, images_spec(images.encoding, images.height, images.width, images.fit))
    if MASKS in specs:
        check_spec(gate, specs[MASKS], masks_spec(images))
    if list(fields) != sorted(fields) or not all(map(is_field_name, fields)):
        raise gate.refuse(f"attribute contents has the fields {list(fields)}")
    return specs, fields


def _read_tables(
    gate: Gate,
    tables: Mapping[str, Array],
    specs: dict[str, FieldSpec],
    fields: dict[str, FieldType],
) -> SetIndex:
    """Return an index of these tables, without columns, once none of their numbers can mislead."""

    def table(name: str, dtype: str, *tail: int) -> Array:
        found = tables[f"shards/{name}"]
        if found.dtype.kind != dtype[1] or (dtype[1] != "S" and found.dtype != np.dtype(dtype)):
            raise gate.refuse(f"/shards/{name} is {found.dtype}")
        if found.shape != (count, *tail):
            raise gate.refuse(f"/shards/{name} is {found.shape}, not {(count, *tail)}")
        return found

    count = len(tables["shards/sizes"]) if tables["shards/sizes"].ndim == 1 else 0
    parts = _parts(specs, fields)
    names = _shard_names(gate, table("names", "|S"))
    sizes, counts, keys = (table(name, "<i8") for name in ("sizes", "counts", "key_bytes"))
    seals = table("seals", "<i8")
    starts, lengths = (table(name, "<i8", len(parts)) for name in ("addresses", "lengths"))
    largest, images = table("largest", "<i4", 2), specs[IMAGES]
    prints = table("fingerprints", "|S")
    ends = sizes[:, None] - lengths
    few = min((counts.min(), keys.min() + 1, lengths.min() + 1, starts.min() + 1, seals.min()))
    if few < 1 or (starts > ends).any() or (seals > sizes - _SEAL_BYTES).any():
        raise gate.refuse("/shards has something outside its shard")
    if max(counts.max(), keys.max()) > 1 << 40 or count > 1 << 22:
        raise gate.refuse("/shards has more items than there can be")
    for number, part in enumerate(parts):
        size = _item_bytes(part, specs, fields)
        if size and ((counts > sizes // size).any() or (lengths[:, number] != counts * size).any()):
            raise gate.refuse(f"/shards/lengths does not agree with /{part}")
    common = images.common_size
    if largest.min() < 1 or largest.max() > MAX_SIDE or (common and (largest != common).any()):
        raise gate.refuse("/shards/largest does not agree with the images")
    classes = tables["classes"]
    if classes.dtype.kind != "S" or classes.ndim != 1:
        raise gate.refuse(f"/classes is {classes.dtype} {classes.shape}")
    return SetIndex(
        path=str(gate.path),
        paths=tuple(str(gate.path.parent / name) for name in names),
        specs=specs,
        fields=fields,
        classes=_decoded(classes),
        fingerprint="",
        generation=0,
        plan={},
        sizes=sizes,
        starts=_cumulated(counts.tolist()),
        fingerprints=_decoded(prints),
        seals=seals,
        addresses={part: starts[:, number] for number, part in enumerate(parts)},
        lengths={part: lengths[:, number] for number, part in enumerate(parts)},
        largest=largest,
        key_starts=_cumulated(keys.tolist()),
        key_bytes=np.zeros(0, np.uint8),
        columns={},
        checksums={},
    )


def _decoded(texts: Array) -> tuple[str, ...]:
    return tuple(text.decode("utf-8", "surrogateescape") for text in texts.tolist())


def _shard_names(gate: Gate, table: Array) -> tuple[str, ...]:
    """Return the shards' file names; refuse paths, which could lead anywhere."""
    names = _decoded(table)
    for name in names:
        if Path(name).name != name or "\0" in name or name == "..":
            raise gate.refuse(f"/shards/names has {name!r}, which is not a file's name")
    if not names or len(set(names)) < len(names):
        raise gate.refuse("/shards/names has no shard, or one twice")
    return names
