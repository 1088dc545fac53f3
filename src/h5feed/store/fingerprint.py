"""The identity of a packed file: one SHA-256 over everything but the pixels themselves."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from h5feed.store.layout import FORMAT_VERSION, Columns, FieldSpec

__all__ = ["canonical_json", "fingerprint"]


def canonical_json(value: Any) -> str:
    """Serialize `value` so that equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(
    fields: Sequence[FieldSpec],
    starts: Sequence[int],
    columns: Columns,
    provenance: str,
    offsets: Mapping[str, np.ndarray[Any, Any] | None],
    shapes: Mapping[str, np.ndarray[Any, Any] | None],
) -> str:
    """SHA-256 (hex) over geometry, every small array and the provenance.

    The pixels are covered through `columns.crc32`, and where they lie by `starts`: the byte
    address of each field. At another address sound pixels would be read as other ones.
    """
    digest = hashlib.sha256()
    geometry = [
        [spec.name, spec.attributes(), int(start)]
        for spec, start in zip(fields, starts, strict=True)
    ]
    digest.update(canonical_json([FORMAT_VERSION, geometry, columns.classes]).encode())
    digest.update(provenance.encode())
    arrays = [
        columns.labels,
        columns.key_bytes,
        columns.key_offsets,
        columns.source_shapes,
        columns.crc32,
        columns.boxes,
    ]
    for spec in fields:
        if not spec.is_fixed:
            arrays += [offsets[spec.name], shapes[spec.name]]
    for array in arrays:
        if array is None:
            digest.update(b"-")
            continue
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return digest.hexdigest()
