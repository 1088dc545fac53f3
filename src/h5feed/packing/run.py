"""One run of packing: from a folder or a dataset to one finished file."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from h5feed.errors import H5FormatError, PackError, UsageError
from h5feed.jpeg import MAX_PIXELS
from h5feed.packing.dataset_source import DatasetSource
from h5feed.packing.encode import Job, Record
from h5feed.packing.journal import Header, Journal, JournalWriter, intact_records, lock
from h5feed.packing.ledger import Ledger, finish, is_finished, summarize, versions
from h5feed.packing.options import PackOptions, field_specs
from h5feed.packing.output import OutputPaths, check_out, check_space, refuse_existing
from h5feed.packing.size import stored_size
from h5feed.packing.sources import Source, open_source
from h5feed.packing.summary import PackSummary
from h5feed.packing.workers import Target, pack_here, pack_in_processes
from h5feed.progress import Progress
from h5feed.store.layout import Encoding, Fit
from h5feed.system import available_cores, available_memory

__all__ = ["pack", "pack_with"]

_WORKER_BYTES = 256 << 20
"""What a worker takes with photos of 12 megapixels: see `max_pixels` for the most."""


def pack(
    source: Any,
    out: str | os.PathLike[str],
    *,
    size: str | int | tuple[int, int] = "auto",
    fit: Fit = "stretch",
    store: Encoding = "raw",
    quality: int = 90,
    manifest: str | os.PathLike[str] | None = None,
    targets: Sequence[str] = (),
    masks: str | os.PathLike[str] | None = None,
    background: tuple[int, int, int] = (255, 255, 255),
    mask_fill: int = 0,
    max_pixels: int = MAX_PIXELS,
    non_jpeg: Literal["refuse", "reencode"] = "refuse",
    any_size: bool = False,
    allow_empty: bool = False,
    on_error: Literal["skip", "fail"] = "skip",
    max_skipped: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = False,
) -> PackSummary:
    """Pack the images of `source` into the HDF5 file `out`; return what was done.

    `source` is a folder, or any dataset with `len(source)` and `source[i] == (image, label)`:
    image a PIL image, a uint8 array (H, W, 3) or a uint8 tensor (3, H, W), label a class number
    or numeric targets. A dataset is read in this process, one item after the other, and cannot
    be resumed. `size` is "auto", S, "HxW" or (H, W); the other options are `PackOptions`', one
    for one. `progress` shows a bar or lines on stderr.

    Raises UsageError for a wrong argument and PackError when packing cannot finish; its text
    says what was kept to resume from. `out` is the finished file or not there at all.
    """
    options = PackOptions(
        size=_size_text(size),
        fit=fit,
        store=store,
        quality=quality,
        manifest=None if manifest is None else Path(manifest),
        targets=tuple(targets),
        masks=None if masks is None else Path(masks),
        background=background,
        mask_fill=mask_fill,
        max_pixels=max_pixels,
        non_jpeg=non_jpeg,
        any_size=any_size,
        allow_empty=allow_empty,
        on_error=on_error,
        max_skipped=max_skipped,
        workers=workers,
        overwrite=overwrite,
        resume=resume,
    )
    return pack_with(source, out, options, progress=progress)


def pack_with(
    source: Any, out: str | os.PathLike[str], options: PackOptions, *, progress: bool = False
) -> PackSummary:
    """Do what `pack` does, with the options in one object."""
    began = time.monotonic()
    options.check()
    if not hasattr(os, "pwrite"):  # before any work: the end would need it
        raise PackError("packing needs Linux or macOS: this system cannot write at a position")
    paths = OutputPaths.of(out)
    check_out(paths, Path(source) if _is_path(source) else None, options)
    found = _open(source, options, progress)
    specs = field_specs(options, stored_size(found, options, progress=progress))
    job = Job(source=found, specs=specs, options=options)
    with lock(paths, specs) as journal:
        ledger, resumed = _run(paths, job, journal, progress)
    return summarize(paths, ledger, resumed=resumed, began=began)


def _size_text(size: str | int | tuple[int, int]) -> str:
    return "x".join(map(str, size)) if isinstance(size, tuple | list) else str(size)


def _is_path(source: Any) -> bool:
    return isinstance(source, str | os.PathLike)


def _open(source: Any, options: PackOptions, progress: bool) -> Source | DatasetSource:
    if _is_path(source):
        return open_source(
            source,
            manifest=options.manifest,
            targets=options.targets,
            masks=options.masks,
            allow_empty=options.allow_empty,
            progress=progress,
        )
    for name in ("manifest", "masks", "resume"):
        if getattr(options, name):
            raise UsageError(
                f"{name}={getattr(options, name)} needs a folder, and source is a dataset"
            )
    if options.store == "original":
        raise UsageError("store=original needs a folder of files, and source is a dataset")
    return DatasetSource(source, background=options.background)


def _run(paths: OutputPaths, job: Job, journal: Journal, progress: bool) -> tuple[Ledger, int]:
    """Pack and finish; return the book, and how many images an earlier run had done."""
    records = _take_up(paths, job, journal, progress)
    ledger = Ledger(job)
    try:
        for record in records:
            ledger.accept(record)
        resumed = ledger.stop
        if os.path.lexists(paths.partial):
            check_space(paths, job)
            _fill(paths, ledger, journal, progress)
            if not ledger.count:
                why = ", ".join(ledger.skipped_by_reason())
                raise PackError(f"none of the {ledger.total:,} images can be packed: {why}")
            finish(paths, ledger)
        paths.discard(job.specs)  # all there is to do where a run died after the last rename
    except H5FormatError as ex:  # after a forged journal: all that this run did itself makes sense
        raise PackError(
            f"what was packed makes no sound file ({ex}): --overwrite begins anew"
        ) from ex
    except (PackError, OSError, MemoryError, KeyboardInterrupt) as ex:
        raise _explain(ex, paths, ledger, journal) from ex
    except BaseException:
        # An item is not what packing takes, a dataset ends the program, a library can't be loaded.
        if not _is_kept(ledger, journal):
            paths.discard(job.specs)
        raise
    return ledger, resumed


def _take_up(paths: OutputPaths, job: Job, journal: Journal, progress: bool) -> list[Record]:
    """Return what an earlier run had done, as far as that is really there; or begin anew."""
    source = job.source
    header = Header(
        source=source.digest(progress=progress) if isinstance(source, Source) else "",
        count=len(source),
        content=job.options.content(),
        versions=versions(),
    )
    try:
        records = journal.read(header) if job.options.resume else None
        if records and os.path.lexists(paths.partial):
            del records[intact_records(paths, job.specs, records, progress=progress) :]
            journal.cut(records)
        elif records and not _is_whole(paths, job, records, progress):
            records = None
    except OSError as ex:
        raise PackError(f"cannot resume from {ex.filename}: {ex.strerror}") from ex
    if records:
        return records
    refuse_existing(paths, job.options)
    try:
        paths.begin(job.specs)
        journal.begin(header)
    except OSError as ex:
        paths.discard(job.specs)
        raise PackError(f"{_cannot_write(ex, paths)}; nothing was kept") from ex
    return []


def _is_whole(paths: OutputPaths, job: Job, records: Sequence[Record], progress: bool) -> bool:
    """Return whether OUT is what these records tell of: the run died after its last rename."""
    if not records or records[-1].stop < len(job.source) or not paths.out.exists():
        return False
    ledger = Ledger(job)
    for record in records:
        ledger.accept(record)
    return is_finished(paths, ledger, progress=progress)


def _fill(paths: OutputPaths, ledger: Ledger, journal: Journal, progress: bool) -> None:
    """Bring the pixels of all images that `ledger` lacks into the payload files."""
    job = ledger.job
    target = Target(paths.payloads(job.specs), paths.heads(job.specs))
    with (
        Progress(ledger.total, "packing", show=progress, done=ledger.stop) as bar,
        JournalWriter(journal, target.paths) as writer,
    ):
        ledger.say = bar.say
        for note in getattr(job.source, "notes", ()):
            bar.say(note)

        def tick(records: Sequence[Record]) -> None:
            bar.advance(sum(record.stop - record.start for record in records))
            writer.add(records)
            writer.poll()

        try:
            workers = _worker_count(ledger)
            if workers:
                pack_in_processes(job, target, ledger, tick, workers)
            else:
                pack_here(job, target, ledger, tick)
            writer.finish()
        except BaseException:
            with suppress(OSError):  # what is said is the first error
                writer.finish()
            raise


def _worker_count(ledger: Ledger) -> int:
    wanted = ledger.job.options.workers
    if isinstance(ledger.job.source, DatasetSource):
        return 0
    if wanted is None:
        wanted = available_cores()
        if (memory := available_memory()) is not None:
            wanted = max(1, min(wanted, memory // _WORKER_BYTES))
    return min(wanted, ledger.total - ledger.stop)


def _is_kept(ledger: Ledger, journal: Journal) -> bool:
    """Whether there is something to resume from: a dataset begins anew each time."""
    return bool(journal.stop and ledger.count) and isinstance(ledger.job.source, Source)


def _explain(
    error: PackError | OSError | MemoryError | KeyboardInterrupt,
    paths: OutputPaths,
    ledger: Ledger,
    journal: Journal,
) -> PackError | KeyboardInterrupt:
    """Add to an error what is kept; where nothing is, leave nothing behind."""
    if isinstance(error, OSError):
        what = _cannot_write(error, paths)
    elif isinstance(error, MemoryError):
        what = "out of memory"
    else:
        what = str(error) or "interrupted"
    if not _is_kept(ledger, journal):
        paths.discard(ledger.job.specs)
        kept = "nothing was kept"
    else:
        kept = (
            f"{journal.stop:,} of {ledger.total:,} images are kept in {paths.partial}: the same "
            "command with --resume goes on"
        )
    kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else PackError
    return kind(f"{what}; {kept}")


def _cannot_write(error: OSError, paths: OutputPaths) -> str:
    return f"cannot write {error.filename or paths.partial}: {error.strerror or error}"
