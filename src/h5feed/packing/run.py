"""One run of packing: from a folder or a dataset to one finished file, and what it says of it."""

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from h5feed.errors import H5FormatError, PackError, UsageError
from h5feed.jpeg import MAX_PIXELS
from h5feed.packing.append import plan_append
from h5feed.packing.arrow import is_hugging_face
from h5feed.packing.encode import BlockResult, Job, encode_block
from h5feed.packing.items import EXTENSIONS, ClassOrder, ImageSource
from h5feed.packing.journal import Header, Journal, JournalWriter, intact_blocks, lock
from h5feed.packing.merge import merge_set
from h5feed.packing.options import PackOptions, field_specs
from h5feed.packing.output import (
    OutputPaths,
    Results,
    check_out,
    check_space,
    finish,
    is_finished,
    refuse_existing,
    versions,
    what_failed,
)
from h5feed.packing.resize import stored_size
from h5feed.packing.shard_plan import ShardPlan, plan_shards
from h5feed.packing.shards import MakeShards, check_set_folder, pack_set, pack_shards
from h5feed.packing.sources import DatasetSource, names_files, open_source
from h5feed.packing.summary import PackSummary, describe_fit, label_numbers
from h5feed.packing.tables import ColumnOptions
from h5feed.packing.workers import Outputs, pack_images
from h5feed.progress import Progress
from h5feed.store.layout import Encoding, FieldSpec, Fit

__all__ = ["PackSummary", "open_set", "pack", "pack_with"]


def pack(
    source: Any,
    out: str | os.PathLike[str],
    *,
    size: str | int | tuple[int, int] = "auto",
    fit: Fit = "stretch",
    store: Encoding = "raw",
    quality: int = 90,
    manifest: Any = None,
    path_column: str | None = None,
    label_column: str | None = None,
    label_delimiter: str | None = None,
    class_columns: Sequence[str] = (),
    targets: Sequence[str] = (),
    fields: Sequence[str] = (),
    classes: str | os.PathLike[str] | None = None,
    annotations: str | os.PathLike[str] | None = None,
    masks: str | os.PathLike[str] | None = None,
    annotation_masks: bool = False,
    extensions: Sequence[str] = EXTENSIONS,
    class_order: ClassOrder = "sorted",
    background: tuple[int, int, int] = (255, 255, 255),
    mask_fill: int = 0,
    max_pixels: int = MAX_PIXELS,
    non_jpeg: Literal["refuse", "reencode"] = "refuse",
    any_size: bool = False,
    allow_empty: bool = False,
    on_error: Literal["skip", "fail"] = "skip",
    max_skipped: int | None = None,
    shards: int | str | None = None,
    order: Literal["random", "source"] | None = None,
    seed: int = 0,
    part: str | None = None,
    append: bool = False,
    num_workers: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = False,
) -> PackSummary:
    """Pack the images of `source` into the HDF5 file `out`; return a summary.

    `source` is a folder; tar files (WebDataset's) or parquet files with image bytes, by path, list
    of paths or pattern; a Hugging Face Dataset; or any dataset with `len(source)` and
    `source[i] == (image, label)`: image a PIL image, a uint8 array (H, W, 3) or a uint8 tensor
    (3, H, W), label a class number or numeric targets. Such a dataset is read by worker processes
    where it pickles, else in this one, and must give the same items when a run is resumed. `size`
    is "auto", S, "HxW" or (H, W); `manifest` may be a pandas DataFrame; `progress` shows a bar or
    lines on stderr; the other options are those of `PackOptions`, which describes them.

    A folder of class folders:

    >>> pack("images", "new.h5", size=64, num_workers=0).items
    24

    A dataset, here a list of gray squares and their classes:

    >>> import numpy as np
    >>> squares = [(np.full((32, 32, 3), gray, np.uint8), gray % 2) for gray in range(10)]
    >>> pack(squares, "squares.h5", size=32, store="yuv420").items
    10

    Raises UsageError for a wrong argument, and PackError when packing cannot finish; its text
    says what was kept to resume from. `out` is either the finished file or does not exist.
    """
    options = PackOptions(
        size=_size_text(size),
        fit=fit,
        store=store,
        quality=quality,
        manifest=Path(manifest) if _is_path(manifest) else None,
        path_column=path_column,
        label_column=label_column,
        label_delimiter=label_delimiter,
        class_columns=tuple(class_columns),
        targets=tuple(targets),
        fields=tuple(fields),
        classes=None if classes is None else Path(classes),
        annotations=None if annotations is None else Path(annotations),
        masks=None if masks is None else Path(masks),
        annotation_masks=annotation_masks,
        extensions=tuple(extensions),
        class_order=class_order,
        background=background,
        mask_fill=mask_fill,
        max_pixels=max_pixels,
        non_jpeg=non_jpeg,
        any_size=any_size,
        allow_empty=allow_empty,
        on_error=on_error,
        max_skipped=max_skipped,
        shards=None if shards is None else str(shards),
        order=order,
        seed=seed,
        part=part,
        append=append,
        num_workers=num_workers,
        overwrite=overwrite,
        resume=resume,
    )
    if manifest is None or _is_path(manifest):
        return pack_with(source, out, options, progress=progress)
    if not hasattr(manifest, "to_json"):
        raise UsageError(
            f"manifest is a {type(manifest).__name__}: give the path of a csv, tsv, jsonl or "
            "parquet file, or a pandas DataFrame"
        )
    with TemporaryDirectory() as folder:
        table = Path(folder) / "DataFrame.jsonl"
        manifest.to_json(table, orient="records", lines=True, default_handler=str)
        return pack_with(source, out, replace(options, manifest=table), progress=progress)


def pack_with(
    source: Any,
    out: str | os.PathLike[str],
    options: PackOptions,
    *,
    make: MakeShards = pack_shards,
    progress: bool = False,
) -> PackSummary:
    """Do what `pack` does, with the options in one object; `make` makes the shards of a set.

    >>> options = PackOptions(size="64", store="jpeg", quality=95, num_workers=0)
    >>> pack_with("images", "small.h5", options).items
    24
    """
    began = time.monotonic()
    options.check()
    if not hasattr(os, "pwrite"):  # before any work: the end would need it
        raise PackError("packing needs Linux or macOS: this system cannot write at a position")
    if options.makes_a_set:
        return _pack_set(source, out, options, make=make, progress=progress, began=began)
    paths = OutputPaths.of(out)
    check_out(paths, Path(source) if _is_path(source) else None, options)
    found = _open(source, options, progress)
    specs = field_specs(options, stored_size(found, options, progress=progress))
    if isinstance(found, DatasetSource) and options.num_workers != 0:
        found.check_pickles()  # here: reading sizes may have opened files
    job = Job(source=found, specs=specs, options=options)
    with lock(paths, specs) as journal:
        results, resumed = _run(paths, job, journal, progress)
    return _summarize(paths, results, resumed=resumed, began=began)


def _pack_set(
    source: Any,
    out: str | os.PathLike[str],
    options: PackOptions,
    *,
    make: MakeShards,
    progress: bool,
    began: float,
) -> PackSummary:
    """Pack a set, or a part of one; where all of its shards are there, write its index."""
    folder = check_set_folder(out, Path(source) if _is_path(source) else None, options)
    found, specs, plan = open_set(source, folder, options, progress=progress)
    packed = pack_set(found, specs, folder, options, plan, make=make, progress=progress)
    if not packed.missing:
        merge_set(folder, progress=progress)
    seconds = time.monotonic() - began
    items = sum(shard.items for shard in packed.shards)
    new = sum(shard.items + len(shard.skipped) for shard in packed.shards if not shard.was_there)
    skipped = [skip for shard in packed.shards for skip in shard.skipped]
    shapes = [shard.source_shapes for shard in packed.shards]
    return PackSummary(
        out=str(out),
        items=items,
        classes=len(found.classes),
        targets=found.targets or label_numbers(found.classes, found.labels),
        resumed=sum(shard.items for shard in packed.shards if shard.was_there),
        bytes_in=sum(shard.bytes_in for shard in packed.shards),
        bytes_out=sum(shard.bytes_out for shard in packed.shards),
        seconds=seconds,
        images_per_second=new / seconds,
        skipped=tuple((skip.key, skip.text) for skip in skipped),
        skipped_by_reason=dict(Counter(skip.reason for skip in skipped).most_common()),
        fit=describe_fit(specs, np.concatenate(shapes)) if shapes else "",
        boxes_left_out=sum(shard.boxes_left_out for shard in packed.shards),
        shards=len(packed.shards),
        missing=packed.missing,
    )


def open_set(
    source: Any, folder: Path, options: PackOptions, *, progress: bool = False
) -> tuple[ImageSource, tuple[FieldSpec, ...], ShardPlan]:
    """Return the images of a set, their pixel fields, and which shard holds which of them."""
    found = _open(source, options, progress)
    if not isinstance(found, ImageSource):
        what = "append" if options.append else f"shards={options.shards}"
        raise UsageError(
            f"{what} needs images in files, and source is a dataset: pack one file, and make a set "
            "of it with merge-h5"
        )
    if options.append:
        return plan_append(found, folder, options)
    specs = field_specs(options, stored_size(found, options, progress=progress))
    return found, specs, plan_shards(found, specs, options)


def _size_text(size: str | int | tuple[int, int]) -> str:
    return "x".join(map(str, size)) if isinstance(size, tuple | list) else str(size)


def _is_path(source: Any) -> bool:
    return isinstance(source, str | os.PathLike)


def _open(source: Any, options: PackOptions, progress: bool) -> ImageSource | DatasetSource:
    if names_files(source) or is_hugging_face(source):
        return open_source(
            source,
            manifest=options.manifest,
            path_column=options.path_column,
            label_column=options.label_column,
            label_delimiter=options.label_delimiter,
            class_columns=options.class_columns,
            targets=options.targets,
            fields=options.fields,
            classes=options.classes,
            annotations=options.annotations,
            masks=options.masks,
            annotation_masks=options.annotation_masks,
            extensions=options.extensions,
            class_order=options.class_order,
            allow_empty=options.allow_empty,
            num_workers=options.num_workers,
            progress=progress,
        )
    for name in ("manifest", "annotations", "masks", "annotation_masks"):
        if getattr(options, name):
            raise UsageError(
                f"{name}={getattr(options, name)} needs a folder, and source is a dataset"
            )
    ColumnOptions(
        **{one.name: getattr(options, one.name) for one in dataclass_fields(ColumnOptions)}
    ).refuse("a table's columns, and source is a dataset: leave it out")
    if options.class_order != "sorted":
        raise UsageError(
            f"class_order={options.class_order} numbers the classes of a folder, and source is a "
            "dataset, which numbers its own: leave it out"
        )
    if options.store == "original":
        raise UsageError("store=original needs a folder of files, and source is a dataset")
    return DatasetSource(source, background=options.background)


def _run(paths: OutputPaths, job: Job, journal: Journal, progress: bool) -> tuple[Results, int]:
    """Pack and finish; return the results, and how many images an earlier run had done."""
    done_before = _resume_or_begin(paths, job, journal, progress)
    results = Results(job)
    try:
        for block in done_before:
            results.accept(block)
        resumed = results.stop
        if os.path.lexists(paths.partial):
            check_space(paths, job)
            _fill(paths, results, journal, progress)
            if not results.count:
                why = ", ".join(results.skipped_by_reason())
                raise PackError(f"none of the {results.total:,} images can be packed: {why}")
            finish(paths, results)
        paths.discard(job.specs)  # all there is to do where a run died after the last rename
    except H5FormatError as ex:  # after a forged journal: all that this run did itself makes sense
        raise PackError(
            f"the packed file would not be valid ({ex}): --overwrite starts again"
        ) from ex
    except (PackError, OSError, MemoryError, KeyboardInterrupt) as ex:
        raise _explain(ex, paths, results, journal) from ex
    except BaseException:
        # An item is not what packing takes, a dataset ends the program, a library can't be loaded.
        if not _is_kept(results, journal):
            paths.discard(job.specs)
        raise
    return results, resumed


def _resume_or_begin(
    paths: OutputPaths, job: Job, journal: Journal, progress: bool
) -> list[BlockResult]:
    """Return what an earlier run had done, as far as that is really there; or start again."""
    source = job.source
    header = Header(
        source=source.digest(progress=progress),
        count=len(source),
        content=job.options.content(),
        versions=versions(),
    )
    try:
        done = journal.read(header) if job.options.resume else None
        if done and os.path.lexists(paths.partial):
            del done[intact_blocks(paths, job.specs, done, progress=progress) :]
            journal.cut(done)
        elif done and not _is_already_out(paths, job, done, progress):
            done = None
    except OSError as ex:
        raise PackError(f"cannot resume from {ex.filename}: {ex.strerror}") from ex
    if done:
        _refuse_other_items(paths, job, done)
        return done
    refuse_existing(paths, job.options)
    try:
        paths.begin(job.specs)
        journal.begin(header)
    except OSError as ex:
        paths.discard(job.specs)
        raise PackError(f"{what_failed(ex, paths.partial)}; nothing was kept") from ex
    return []


def _refuse_other_items(paths: OutputPaths, job: Job, done: Sequence[BlockResult]) -> None:
    """Refuse to go on with a dataset whose last packed item is another one today.

    Of a folder everything is compared; of a dataset nothing can be, short of reading it all.
    """
    rows = next((block.rows for block in reversed(done) if len(block.rows)), None)
    if rows is None or not isinstance(job.source, DatasetSource):
        return
    index = int(rows["index"][-1])
    again, _ = encode_block(job, index, index + 1, 1)
    if not np.array_equal(again.rows, rows[-1:]):
        raise PackError(
            f"{paths.journal} cannot be resumed: item {index} of the dataset is another one than "
            "then. Give what it was begun with, or --overwrite to start again"
        )


def _is_already_out(
    paths: OutputPaths, job: Job, done: Sequence[BlockResult], progress: bool
) -> bool:
    """Return whether OUT is the file of these blocks: the run died after its last rename."""
    if not done or done[-1].stop < len(job.source) or not paths.out.exists():
        return False
    results = Results(job)
    for block in done:
        results.accept(block)
    return is_finished(paths, results, progress=progress)


def _fill(paths: OutputPaths, results: Results, journal: Journal, progress: bool) -> None:
    """Bring the pixels of all images that `results` lacks into the payload files."""
    job = results.job
    with (
        Progress(results.total, "packing", show=progress, done=results.stop) as bar,
        JournalWriter(journal) as writer,
    ):
        results.say = bar.say
        for note in job.source.notes:
            bar.say(note)

        def tick(written: Sequence[BlockResult]) -> None:
            bar.advance(sum(block.stop - block.start for block in written))
            writer.add(written)
            writer.poll()

        try:
            outputs = Outputs([paths], [results.total])
            pack_images(job, outputs, results, tick)
            writer.finish()
        except BaseException:
            with suppress(OSError):  # what is said is the first error
                writer.finish()
            raise


def _is_kept(results: Results, journal: Journal) -> bool:
    """Whether there is something to resume from."""
    return bool(journal.stop and results.count)


def _explain(
    error: PackError | OSError | MemoryError | KeyboardInterrupt,
    paths: OutputPaths,
    results: Results,
    journal: Journal,
) -> PackError | KeyboardInterrupt:
    """Add to an error what is kept; where nothing is, leave nothing behind."""
    what = what_failed(error, paths.partial)
    if not _is_kept(results, journal):
        paths.discard(results.job.specs)
        kept = "nothing was kept"
    else:
        kept = (
            f"{journal.stop:,} of {results.total:,} images are kept in {paths.partial}: the same "
            "command with --resume goes on"
        )
    kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else PackError
    return kind(f"{what}; {kept}")


def _summarize(paths: OutputPaths, results: Results, *, resumed: int, began: float) -> PackSummary:
    """Say what was done; `began` is the monotonic time of the start."""
    seconds = time.monotonic() - began
    job = results.job
    return PackSummary(
        out=str(paths.given),
        items=results.count,
        classes=len(job.source.classes),
        targets=job.source.targets or label_numbers(job.source.classes, job.source.labels),
        resumed=resumed,
        bytes_in=results.source_bytes,
        bytes_out=paths.out.stat().st_size,
        seconds=seconds,
        images_per_second=(results.total - resumed) / seconds,
        skipped=tuple((job.name(skip.item), str(skip)) for skip in results.skips),
        skipped_by_reason=results.skipped_by_reason(),
        fit=describe_fit(job.specs, results.rows["source_shape"]),
        boxes_left_out=results.boxes_left_out,
    )
