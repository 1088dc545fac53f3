"""The end of a run: the small arrays, the provenance, the finished file, the summary."""

import shutil
import time
from importlib.metadata import version
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

import h5feed
from h5feed.errors import PackError
from h5feed.packing.ledger import Ledger
from h5feed.packing.place import Place
from h5feed.packing.summary import PackSummary, describe_fit, in_bytes
from h5feed.store.layout import Columns, FieldSpec
from h5feed.store.write import finalize

__all__ = ["finish", "summarize", "versions"]

Array = npt.NDArray[Any]

_METADATA_BYTES = 1 << 20
"""More than HDF5's own metadata takes, twice."""


def versions() -> dict[str, str]:
    """Return the versions of all that has a hand in the file's bytes."""
    names = ("h5py", "numpy", "pillow", "simplejpeg", "torch")
    return {
        "h5feed": h5feed.__version__,
        "opencv": cv2.__version__,
        **{name: version(name) for name in names},
    }


def finish(place: Place, ledger: Ledger) -> None:
    """Make `place.out` from the pixels in `place.partial`, and clear up.

    Where a run died after the last rename, the file is there and only the clearing is left.
    """
    job = ledger.job
    if place.partial.exists():
        columns = _columns(ledger)
        _check_space(place, ledger, columns)
        finalize(
            place.partial,
            place.out,
            job.specs,
            columns,
            _provenance(ledger),
            offsets={spec.name: _offsets(spec, ledger.rows) for spec in job.specs},
            shapes={
                spec.name: None if spec.is_fixed else np.ascontiguousarray(ledger.rows["shape"])
                for spec in job.specs
            },
            side=place.side(job.specs),
        )
    place.discard(job.specs)


def _check_space(place: Place, ledger: Ledger, columns: Columns) -> None:
    """Refuse to begin the end on a full disk: HDF5 cannot close a file there, and crashes."""
    arrays = (columns.labels, columns.key_bytes, columns.key_offsets, columns.source_shapes)
    small = sum(array.nbytes for array in arrays) + 40 * len(columns)  # checksums, shapes, boxes
    text = len(str(_provenance(ledger)))
    need = 2 * (small + text) + sum(ledger.sizes[1:]) + _METADATA_BYTES
    free = shutil.disk_usage(place.out.parent).free
    if free < need:
        raise PackError(
            f"the end of OUT {place.out} needs {in_bytes(need)} more, and {in_bytes(free)} are "
            "free there: free some"
        )


def summarize(place: Place, ledger: Ledger, *, resumed: int, began: float) -> PackSummary:
    """Say what was done; `began` is the monotonic time of the start."""
    seconds = time.monotonic() - began
    job = ledger.job
    return PackSummary(
        out=str(place.out),
        items=ledger.count,
        classes=len(job.source.classes),
        resumed=resumed,
        bytes_in=ledger.source_bytes,
        bytes_out=place.out.stat().st_size,
        seconds=seconds,
        images_per_second=(ledger.total - resumed) / seconds,
        skipped=tuple((job.name(skip.item), str(skip)) for skip in ledger.skips),
        skipped_by_reason=ledger.skipped_by_reason(),
        fit=describe_fit(job.specs, ledger.rows["source_shape"]),
    )


def _columns(ledger: Ledger) -> Columns:
    source, rows = ledger.job.source, ledger.rows
    index = rows["index"]
    labels = source.labels
    assert labels is not None
    key_bytes, key_offsets = _keys(source.key_bytes, source.key_offsets, index)
    return Columns(
        labels=labels[index],
        classes=source.classes,
        key_bytes=key_bytes,
        key_offsets=key_offsets,
        source_shapes=np.ascontiguousarray(rows["source_shape"]),
        crc32=np.ascontiguousarray(rows["crc32"]),
        boxes=np.ascontiguousarray(rows["box"]) if "box" in (rows.dtype.names or ()) else None,
    )


def _keys(blob: Array, offsets: Array, index: Array) -> tuple[Array, Array]:
    """Return the keys of the items `index` (increasing), back to back, and where each begins."""
    lengths = np.diff(offsets)
    if len(index) == len(lengths):
        return blob, offsets
    kept = np.zeros(len(lengths), bool)
    kept[index] = True
    return blob[np.repeat(kept, lengths)], np.cumsum([0, *lengths[index]])


def _offsets(spec: FieldSpec, rows: Array) -> Array | None:
    if spec.is_fixed:
        return None
    shapes = rows["shape"].astype(np.int64)
    sizes = rows["bytes"] if spec.is_encoded else spec.pixel_bytes(shapes[:, 0], shapes[:, 1])
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _provenance(ledger: Ledger) -> dict[str, Any]:
    """Return what made the file, without what differs from run to run of the same input."""
    job = ledger.job
    return {
        "options": job.options.content(),
        "versions": versions(),
        "counts": {
            "found": ledger.total,
            "packed": ledger.count,
            "skipped": ledger.skipped_by_reason(),
        },
        "skipped": [[job.name(skip.item), str(skip)] for skip in ledger.skips],
    }
