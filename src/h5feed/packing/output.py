"""Where a run writes, what became of each image, and how OUT is made of it in the end.

OUT appears by one rename when all is done. Until then pixels lie in OUT.partial, and
`Results` has all that the finished file says beside them.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

import h5feed
from h5feed.disk import create_file, open_file, write_at
from h5feed.errors import H5FormatError, PackError, UsageError
from h5feed.packing.encode import BlockResult, Job, Payload, Skip, payload_sizes, row_type
from h5feed.packing.options import PackOptions
from h5feed.packing.places import stored_places
from h5feed.packing.sources import DatasetSource
from h5feed.progress import Progress
from h5feed.store.check import check_file
from h5feed.store.fields import FieldValues, continue_checksums, take_ragged
from h5feed.store.layout import (
    MASKS,
    MAX_PROVENANCE,
    SEGMENTS,
    Columns,
    FieldSpec,
    canonical_json,
    fingerprint,
    payload_names,
)
from h5feed.store.read import read_index
from h5feed.store.write import finalize, head_bytes, side_files
from h5feed.text import in_bytes, printable

__all__ = [
    "OutputPaths",
    "PayloadFiles",
    "Results",
    "check_out",
    "check_space",
    "finish",
    "is_finished",
    "refuse_existing",
    "versions",
    "what_failed",
]

Array = npt.NDArray[Any]

_JOIN_BELOW = 64 << 10
_SKIPPED_CHARACTERS = MAX_PROVENANCE // 2
"""What the provenance spends on the names of skipped images."""


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """The files of one run."""

    out: Path
    """The finished file; nothing unfinished ever has this name."""
    given: Path
    """OUT as the user wrote it: `out`, or a link that leads there; of a shard its folder."""
    tag: str = ""
    """What tells this run's unfinished file from those of other runs at the same shard."""

    @classmethod
    def of(cls, out: str | os.PathLike[str]) -> "OutputPaths":
        """Return the files for OUT. A link stays a link: what it leads to is made or replaced."""
        given = Path(out)
        return cls(Path(os.path.realpath(given)) if given.is_symlink() else given, given)

    @property
    def partial(self) -> Path:
        """The first field's pixels, in place; in the end it becomes `out`."""
        return self.out.with_name(f"{self.out.name}{self.tag}.partial")

    @property
    def journal(self) -> Path:
        """What of `partial` is safely on the disk."""
        return self.partial.with_name(self.partial.name + ".journal")

    def side(self, specs: Sequence[FieldSpec]) -> dict[str, Path]:
        """Return a file for each of `payload_names` but the first."""
        return side_files(self.partial, specs)

    def payloads(self, specs: Sequence[FieldSpec]) -> tuple[Path, ...]:
        """Return the file of each of `payload_names`."""
        return (self.partial, *self.side(specs).values())

    def heads(self, specs: Sequence[FieldSpec]) -> tuple[int, ...]:
        """Return the byte in each of `payloads` at which its first item begins."""
        return (head_bytes(specs), *(0 for _ in self.side(specs)))

    def begin(self, specs: Sequence[FieldSpec]) -> None:
        """Make the payload files, empty, in place of what has their names.

        The masks and segments of an earlier run that was given up go, too, where this one has none.
        """
        for name in (MASKS, SEGMENTS):
            with suppress(OSError):
                self.partial.with_name(f"{self.partial.name}.{name}").unlink()
        for path in self.payloads(specs):
            os.close(create_file(path))

    def discard(self, specs: Sequence[FieldSpec]) -> None:
        """Remove what is unfinished, as far as that can be done."""
        for path in (*self.payloads(specs), self.journal):
            with suppress(OSError):
                path.unlink()


def check_out(paths: OutputPaths, source: Path | None, options: PackOptions) -> None:
    """Refuse an OUT that cannot or must not be written, before any work is done."""
    out, given, folder = paths.out, paths.given, paths.out.parent
    if out.is_symlink():
        raise UsageError(f"OUT {given} is a link that leads to itself: give another name")
    if not folder.is_dir():
        raise UsageError(f"OUT {given}: the folder {folder} does not exist: make it first")
    if out.is_dir():
        raise UsageError(
            f"OUT {given} is a folder: give the name of a file, such as {given / 'out.h5'}, "
            "or --shards for a set"
        )
    if out.exists() and not out.is_file():
        raise UsageError(f"OUT {given} is a device or a pipe: give the name of a file")
    if source is not None and source.resolve() == out.resolve():
        raise UsageError(f"OUT {given} is SRC: give another name")
    if source is not None and source.resolve() in out.resolve().parents:
        raise UsageError(
            f"OUT {given} lies inside SRC {source}: give a path outside the images' folder"
        )
    finishing = options.resume and paths.journal.exists() and not paths.partial.exists()
    if not finishing:
        refuse_existing(paths, options)
    if os.path.lexists(paths.partial) and not (options.overwrite or options.resume):
        raise UsageError(
            f"{paths.partial} exists: a run was interrupted, or is still at work; --resume "
            "continues it, --overwrite starts again"
        )


def refuse_existing(paths: OutputPaths, options: PackOptions) -> None:
    """Refuse to replace a file or to follow a link without being asked to."""
    if options.overwrite or not os.path.lexists(paths.given):
        return
    if not paths.out.exists():
        raise UsageError(
            f"OUT {paths.given} is a link to {paths.out}, which does not exist: give another "
            "name, or --overwrite to make that file"
        )
    raise UsageError(f"OUT {paths.given} exists: give another name, or --overwrite to replace it")


def check_space(paths: OutputPaths, job: Job) -> None:
    """Refuse to begin what cannot fit on the disk, however many images are skipped."""
    specs = job.specs
    if not all(spec.is_fixed for spec in specs):
        return
    # A further field is copied from its own file into OUT at the end.
    count = len(job.source) - job.options.skip_limit(len(job.source))
    need = count * sum(spec.item_bytes * (1 + (k > 0)) for k, spec in enumerate(specs))
    for path in paths.payloads(specs):
        with suppress(OSError):
            need -= path.stat().st_blocks * 512
    free = shutil.disk_usage(paths.out.parent).free
    if need > free:
        raise PackError(
            f"OUT {paths.given} needs {in_bytes(need)} more, and {in_bytes(free)} are free there: "
            "free some, take a smaller --size, or --store yuv420 or jpeg"
        )


def what_failed(error: BaseException, place: Path) -> str:
    """Say what ended a run that writes to `place`."""
    if isinstance(error, OSError):
        return f"cannot write {error.filename or place}: {error.strerror or error}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return error.sentence if isinstance(error, PackError) else str(error) or "interrupted"


class PayloadFiles:
    """The files that payloads are written to, opened by each process for itself."""

    def __init__(self, paths: OutputPaths, specs: Sequence[FieldSpec]) -> None:
        self._files = [(open_file(path), path) for path in paths.payloads(specs)]
        self._heads = paths.heads(specs)

    def close(self) -> None:
        """Close them."""
        for handle, _path in self._files:
            os.close(handle)

    def write(self, positions: Sequence[int], payloads: Sequence[Sequence[Payload]]) -> None:
        """Write payloads, a list for each file, from its position on (bytes after the head)."""
        for (handle, path), head, position, field in zip(
            self._files, self._heads, positions, payloads, strict=True
        ):
            at = head + position
            for chunk in _chunks(field):
                write_at(handle, chunk, at, path)
                at += len(chunk)


def _chunks(payloads: Sequence[Payload]) -> Sequence[Payload]:
    """Join small payloads: a call to the system costs as much as copying some kilobytes."""
    if payloads and len(payloads[0]) < _JOIN_BELOW:
        return [b"".join(payloads)]
    return payloads


class Results:
    """What became of each image, in source order; it says where the next block is written.

    Blocks are accepted in order of `start`, so a skipped image leaves no hole. Kept per image:
    one row of `row_type`.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.total = len(job.source)
        self.stop = 0
        """Everything before this image has its position."""
        self.count = 0
        self.sizes = [0] * len(payload_names(job.specs))
        """Bytes of payload so far, for each of `payload_names`."""
        self.source_bytes = 0
        self.skips: list[Skip] = []
        self.boxes_left_out = 0
        """Boxes of packed images that lie outside what is stored; known once they are finished."""
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

    def accept(self, block: BlockResult) -> tuple[int, ...]:
        """Add the next block; return where its payloads begin, a position for each file."""
        assert block.start == self.stop, f"{block.start=} after {self.stop=}"
        self._check_skips(block.skips)
        if block.labels is not None and isinstance(self.job.source, DatasetSource):
            self.job.source.note(block.rows["index"], block.labels)
        positions = tuple(self.sizes)
        self._rows[self.count : self.count + len(block.rows)] = block.rows
        self.count += len(block.rows)
        self.sizes = [a + b for a, b in zip(self.sizes, block.sizes, strict=True)]
        self.source_bytes += block.source_bytes
        self.skips += block.skips
        self.stop = block.stop
        return positions

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


def finish(paths: OutputPaths, results: Results) -> None:
    """Make `paths.out` from the pixels in `paths.partial`, and clear up; raises OSError."""
    specs = results.job.specs
    finalize(
        paths.partial,
        paths.out,
        specs,
        _columns(results),
        _provenance(results),
        offsets=_offsets(results),
        shapes=_shapes(results),
        side=paths.side(specs),
        further=_further(results),
    )
    paths.discard(specs)


def is_finished(paths: OutputPaths, results: Results, *, progress: bool) -> bool:
    """Return whether `paths.out` is the file that `finish` would make: every byte is compared.

    Raises PackError where it is that file and damaged.
    """
    try:
        found = read_index(paths.out)
    except (OSError, H5FormatError):
        return False
    text = canonical_json(_provenance(results))
    specs, columns = results.job.specs, _columns(results)
    if len(found.starts) != len(payload_names(specs)):
        return False
    made = fingerprint(
        specs, found.starts, columns, text, _offsets(results), _shapes(results), found.fields
    )
    if found.fingerprint != made:
        return False
    with Progress(results.count, "checking", show=progress, brief=True) as bar:
        report = check_file(paths.out, progress=lambda done, _: bar.advance(done - bar.done))
    if not report.is_sound:
        raise PackError(
            f"OUT {paths.given} was finished and is damaged ({len(report.damaged):,} of "
            f"{results.count:,} images): --overwrite packs it anew"
        )
    return True


def _columns(results: Results) -> Columns:
    job, rows = results.job, results.rows
    source, index = job.source, rows["index"].astype(np.int64)
    labels = source.labels
    assert labels is not None
    key_bytes, key_offsets = take_ragged(source.key_bytes, source.key_offsets, index)
    return Columns(
        labels=labels[index],
        classes=source.classes,
        key_bytes=key_bytes,
        key_offsets=key_offsets,
        source_shapes=np.ascontiguousarray(rows["source_shape"]),
        crc32=continue_checksums(np.ascontiguousarray(rows["crc32"]), _further(results)),
        letterbox=np.ascontiguousarray(rows["box"]) if "box" in (rows.dtype.names or ()) else None,
        positions=None if job.shard is None else job.shard.positions[index],
    )


def _further(results: Results) -> dict[str, FieldValues]:
    """Return the further fields' values of the packed images."""
    rows, job = results.rows, results.job
    index = rows["index"].astype(np.int64)
    fields = {name: values.take(index) for name, values in job.source.fields.items()}
    stored = stored_places(fields, rows["source_shape"], job.specs[0])
    results.boxes_left_out = sum(
        (values.data.nbytes - stored[name].data.nbytes) // values.type.row_bytes
        for name, values in fields.items()
        if values.type.kind == "boxes"
    )
    return stored


def _offsets(results: Results) -> dict[str, Array | None]:
    """Return where each item begins (int64, N+1), for the fields that are not fixed."""
    specs = results.job.specs
    sizes = dict(zip(payload_names(specs), payload_sizes(specs, results.rows), strict=True))
    return {
        spec.name: None
        if spec.is_fixed
        else np.concatenate([[0], sizes[spec.name].cumsum()], dtype=np.int64)
        for spec in specs
    }


def _shapes(results: Results) -> dict[str, Array | None]:
    """Return the stored sizes (int32, N×2), for the fields that are not fixed."""
    return {
        spec.name: None if spec.is_fixed else np.ascontiguousarray(results.rows["shape"])
        for spec in results.job.specs
    }


def _provenance(results: Results) -> dict[str, Any]:
    """Return what made the file, without what differs from run to run of the same input."""
    job = results.job
    targets = {"targets": list(job.source.targets)} if job.source.targets else {}
    skipped, left = [], _SKIPPED_CHARACTERS
    for skip in results.skips:
        skipped.append([job.name(skip.item), str(skip)])
        left -= len(canonical_json(skipped[-1]))
        if left < 0:  # the counts tell of the others
            del skipped[-1]
            break
    of_set = {} if job.shard is None else {"set": job.shard.facts}
    return (
        targets
        | of_set
        | {
            "options": job.options.content(),
            "versions": versions(),
            "counts": {
                "found": results.total,
                "packed": results.count,
                "skipped": results.skipped_by_reason(),
            },
            "skipped": skipped,
        }
    )
