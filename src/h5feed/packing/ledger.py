"""The coordinator's book: where each image goes, what became of it, in source order.

At the end it has all that the finished file says beside the pixels, and that the summary tells.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

import h5feed
from h5feed.errors import H5FormatError, PackError
from h5feed.packing.encode import Job, Record, Skip, field_sizes, row_type
from h5feed.packing.output import OutputPaths
from h5feed.packing.summary import PackSummary, describe_fit
from h5feed.progress import Progress
from h5feed.store.check import check_file
from h5feed.store.fingerprint import canonical_json, fingerprint
from h5feed.store.layout import MAX_PROVENANCE, Columns
from h5feed.store.read import read_index
from h5feed.store.write import finalize
from h5feed.text import printable

__all__ = ["Ledger", "finish", "is_finished", "summarize", "versions"]

Array = npt.NDArray[Any]

_SKIPPED_CHARACTERS = MAX_PROVENANCE // 2
"""What the provenance spends on the names of skipped images."""


class Ledger:
    """Hands out positions in source order, so that a skipped image leaves no hole.

    Records must come in order of `start`. Kept per image: one row of `row_type`.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.total = len(job.source)
        self.stop = 0
        """Everything before this image has its place."""
        self.count = 0
        self.sizes = [0] * len(job.specs)
        """Bytes of payload so far, per field."""
        self.source_bytes = 0
        self.skips: list[Skip] = []
        self.say: Callable[[str], None] = lambda text: None
        """Is told of each image that is skipped."""
        self._rows = np.empty(self.total, row_type(job.specs))
        fail = job.options.on_error == "fail"
        self._limit = 0 if fail else job.options.skip_limit(self.total)

    @property
    def skips_left(self) -> int:
        """How many more images may be skipped before the run has to stop."""
        return self._limit - len(self.skips)

    @property
    def rows(self) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
        """The rows of all packed images."""
        return self._rows[: self.count]

    def accept(self, record: Record) -> tuple[int, ...]:
        """Book the next block; return where its payloads begin, one position per field."""
        assert record.start == self.stop, f"{record.start=} after {self.stop=}"
        self._check_skips(record.skips)
        places = tuple(self.sizes)
        self._rows[self.count : self.count + len(record.rows)] = record.rows
        self.count += len(record.rows)
        self.sizes = [a + b for a, b in zip(self.sizes, record.sizes, strict=True)]
        self.source_bytes += record.source_bytes
        self.skips += record.skips
        self.stop = record.stop
        return places

    def skipped_by_reason(self) -> dict[str, int]:
        """Return how many images each reason cost, the commonest first."""
        return dict(Counter(skip.reason for skip in self.skips).most_common())

    def _check_skips(self, new: Sequence[Skip]) -> None:
        if new and self.job.options.on_error == "fail":
            raise PackError(f"{self._name(new[0])} cannot be packed: {new[0]}")
        last = next(iter(new[self.skips_left :]), None)
        for skip in new[: self.skips_left + 1]:
            self.say(f"skipped {self._name(skip)}: {skip}")
        if last is None:
            return
        raise PackError(
            f"more than max_skipped={self._limit} images cannot be packed; the last is "
            f"{self._name(last)}: {last}"
        )

    def _name(self, skip: Skip) -> str:
        return printable(self.job.name(skip.item))


def versions() -> dict[str, str]:
    """Return the versions of all that has a hand in the file's bytes."""
    names = ("h5py", "numpy", "pillow", "simplejpeg", "torch")
    return {
        "h5feed": h5feed.__version__,
        "opencv": cv2.__version__,
        **{name: version(name) for name in names},
    }


def finish(paths: OutputPaths, ledger: Ledger) -> None:
    """Make `paths.out` from the pixels in `paths.partial`, and clear up; raises OSError."""
    specs = ledger.job.specs
    finalize(
        paths.partial,
        paths.out,
        specs,
        _columns(ledger),
        _provenance(ledger),
        offsets=_offsets(ledger),
        shapes=_shapes(ledger),
        side=paths.side(specs),
    )
    paths.discard(specs)


def is_finished(paths: OutputPaths, ledger: Ledger, *, progress: bool) -> bool:
    """Return whether `paths.out` is the file that `finish` would make: every byte is compared.

    Raises PackError where it is that file and damaged.
    """
    try:
        found = read_index(paths.out)
    except (OSError, H5FormatError):
        return False
    text = canonical_json(_provenance(ledger))
    specs, columns = ledger.job.specs, _columns(ledger)
    starts = [extent.start for extent in found.extents.values()]
    if len(starts) != len(specs):
        return False
    made = fingerprint(specs, starts, columns, text, _offsets(ledger), _shapes(ledger))
    if found.fingerprint != made:
        return False
    with Progress(ledger.count, "checking", show=progress, brief=True) as bar:
        report = check_file(paths.out, progress=lambda done, _: bar.advance(done - bar.done))
    if not report.is_sound:
        raise PackError(
            f"OUT {paths.given} was finished and is damaged ({len(report.damaged):,} of "
            f"{ledger.count:,} images): --overwrite packs it anew"
        )
    return True


def summarize(paths: OutputPaths, ledger: Ledger, *, resumed: int, began: float) -> PackSummary:
    """Say what was done; `began` is the monotonic time of the start."""
    seconds = time.monotonic() - began
    job = ledger.job
    return PackSummary(
        out=str(paths.given),
        items=ledger.count,
        classes=len(job.source.classes),
        targets=job.source.targets or _numbered(job.source.labels),
        resumed=resumed,
        bytes_in=ledger.source_bytes,
        bytes_out=paths.out.stat().st_size,
        seconds=seconds,
        images_per_second=(ledger.total - resumed) / seconds,
        skipped=tuple((job.name(skip.item), str(skip)) for skip in ledger.skips),
        skipped_by_reason=ledger.skipped_by_reason(),
        fit=describe_fit(job.specs, ledger.rows["source_shape"]),
    )


def _numbered(labels: Array | None) -> tuple[str, ...]:
    """Return the numbers of targets that have no names."""
    return () if labels is None or labels.ndim == 1 else tuple(map(str, range(labels.shape[1])))


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


def _offsets(ledger: Ledger) -> dict[str, Array | None]:
    """Return where each item begins (int64, N+1), for the fields that are not fixed."""
    rows = ledger.rows
    return {
        spec.name: None
        if spec.is_fixed
        else np.cumsum([0, *field_sizes(spec, rows)], dtype=np.int64)
        for spec in ledger.job.specs
    }


def _shapes(ledger: Ledger) -> dict[str, Array | None]:
    """Return the stored sizes (int32, N×2), for the fields that are not fixed."""
    return {
        spec.name: None if spec.is_fixed else np.ascontiguousarray(ledger.rows["shape"])
        for spec in ledger.job.specs
    }


def _provenance(ledger: Ledger) -> dict[str, Any]:
    """Return what made the file, without what differs from run to run of the same input."""
    job = ledger.job
    targets = {"targets": list(job.source.targets)} if job.source.targets else {}
    skipped, left = [], _SKIPPED_CHARACTERS
    for skip in ledger.skips:
        skipped.append([job.name(skip.item), str(skip)])
        left -= len(canonical_json(skipped[-1]))
        if left < 0:  # the counts tell of the others
            del skipped[-1]
            break
    return targets | {
        "options": job.options.content(),
        "versions": versions(),
        "counts": {
            "found": ledger.total,
            "packed": ledger.count,
            "skipped": ledger.skipped_by_reason(),
        },
        "skipped": skipped,
    }
