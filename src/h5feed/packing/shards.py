"""A set packed: several shards made at once by the same workers, each whole or not there at all.

A shard is begun under a name of this run's own, and gets its name when it is finished. So several
runs may make the same shard at the same time, on machines that share nothing but the folder: their
bytes are equal, and the last one to rename wins nothing and loses nothing.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from h5feed.disk import create_file, open_file
from h5feed.errors import H5FormatError, PackError, UsageError
from h5feed.packing.encode import BlockResult, Job, Shard
from h5feed.packing.items import ImageSource, SomeImages
from h5feed.packing.options import PackOptions
from h5feed.packing.output import OutputPaths, Results, check_space, finish, what_failed
from h5feed.packing.shard_plan import SetFolder, ShardPlan, find_part, look_into
from h5feed.packing.workers import Outputs, pack_images
from h5feed.progress import Progress
from h5feed.store.layout import FieldSpec, FileIndex
from h5feed.store.read import read_index
from h5feed.text import counted

__all__ = [
    "MakeShards",
    "PackedSet",
    "PackedShard",
    "check_set_folder",
    "pack_set",
    "pack_shards",
    "what_is_kept",
]

_MOST_UNFINISHED = 8
"""Shards that are written and wait for their names; small ones are written faster than finished."""


class SkippedImage(NamedTuple):
    """An image that could not be packed, by its key."""

    key: str
    reason: str
    """One of a few fixed texts, to count by."""
    text: str
    """The reason in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShard:
    """What a finished shard holds: facts, no pixels."""

    name: str
    items: int
    bytes_out: int
    bytes_in: int
    """Bytes of the images' files; 0 where an earlier run has made it."""
    skipped: tuple[SkippedImage, ...]
    source_shapes: npt.NDArray[np.int32]
    """(N, 2) height and width."""
    boxes_left_out: int = 0
    """Boxes outside what is stored; 0 where an earlier run has made it."""
    was_there: bool = False
    """Whether an earlier run has made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSet:
    """What a run made of a set."""

    plan: ShardPlan
    shards: tuple[PackedShard, ...]
    """Those of this run's part, also those that were there already."""
    missing: tuple[str, ...]
    """The plan's shards that are not there yet: without them there is no index."""


class MakeShards(Protocol):
    """Makes shards of a plan, as `pack_shards` does here; others do it elsewhere."""

    def __call__(
        self,
        source: ImageSource,
        specs: tuple[FieldSpec, ...],
        folder: Path,
        options: PackOptions,
        plan: ShardPlan,
        numbers: Sequence[int],
        *,
        progress: bool = False,
    ) -> list[PackedShard]:
        """Make these shards in `folder`; return what they hold."""


def check_set_folder(
    out: str | os.PathLike[str], source: Path | None, options: PackOptions
) -> Path:
    """Refuse a folder that cannot or must not become a set, before any work is done."""
    given = Path(out)
    folder = Path(os.path.realpath(given))
    if folder.exists() and not folder.is_dir():
        if options.append:
            raise UsageError(
                f"OUT {given} is a file, and append adds shards to a set: make one of it with "
                f"`merge-h5 {given} SET`"
            )
        raise UsageError(
            f"OUT {given} is a file, and shards={options.shards} makes a folder of shards: give "
            "another name, or leave shards out"
        )
    if not folder.parent.is_dir():
        raise UsageError(f"OUT {given}: the folder {folder.parent} does not exist: make it first")
    if source is not None and source.resolve() in (folder, *folder.parents):
        raise UsageError(
            f"OUT {given} lies inside SRC {source}: give a path outside the images' folder"
        )
    found = look_into(folder)
    if found.others:
        raise UsageError(
            f"OUT {given} holds what is not a part of a set ({found.others[0]}): give a folder of "
            "its own"
        )
    if options.append:
        if not found.has_index:
            raise UsageError(
                f"OUT {given} is not a whole set that could be appended to: it has no index"
            )
    elif not found.is_empty and not (options.resume or options.overwrite or options.part):
        raise UsageError(
            f"OUT {given} holds shards: --resume makes those that are missing, --overwrite packs "
            "all anew, --append adds other images"
        )
    return folder


def pack_set(
    source: ImageSource,
    specs: tuple[FieldSpec, ...],
    folder: Path,
    options: PackOptions,
    plan: ShardPlan,
    *,
    make: "MakeShards",
    progress: bool,
) -> PackedSet:
    """Pack the shards of this run's part that are not there yet; `make` makes them."""
    part, parts = (0, 1) if options.part is None else find_part(options.part)
    before = look_into(folder)
    if not options.overwrite:
        _refuse_strays(before, plan)
    made_folder = not folder.exists()
    folder.mkdir(exist_ok=True)
    mine = range(part, plan.count, parts)
    there: list[PackedShard] = []
    if options.resume or not options.overwrite:
        there = [*_finished(folder, plan, mine, options)]
    if (
        options.overwrite and before.has_index
    ):  # from here on it would speak of shards that are replaced
        (folder / "index.h5").unlink(missing_ok=True)
    _remove_unfinished(before, [plan.name(shard) for shard in mine])
    names = {shard.name for shard in there}
    numbers = [shard for shard in mine if plan.name(shard) not in names]
    try:
        made = make(source, specs, folder, options, plan, numbers, progress=progress)
    except BaseException:
        if made_folder:
            with suppress(OSError):  # where nothing was kept
                folder.rmdir()
        raise
    after = look_into(folder)
    if options.overwrite:
        for name in after.names():
            if name not in {plan.name(shard) for shard in range(plan.count)}:
                (folder / name).unlink(missing_ok=True)
        after = look_into(folder)
    missing = after.missing(plan)
    if not missing:  # nobody needs what killed runs of other parts have left
        _remove_unfinished(after, [plan.name(shard) for shard in range(plan.count)])
    shards = tuple(sorted([*there, *made], key=lambda shard: shard.name))
    return PackedSet(plan=plan, shards=shards, missing=missing)


def _refuse_strays(found: SetFolder, plan: ShardPlan) -> None:
    if strays := found.strays(plan):
        raise UsageError(
            f"OUT {found.path} holds {strays[0]}, and these images and options make "
            f"{counted(plan.count, 'shard')}: give the options it was begun with, or --overwrite"
        )


def _finished(
    folder: Path, plan: ShardPlan, numbers: Sequence[int], options: PackOptions
) -> Iterator[PackedShard]:
    """Yield those shards that are there, whole; UsageError for another one without `overwrite`."""
    for number in numbers:
        path = folder / plan.name(number)
        try:
            index = read_index(path)
        except FileNotFoundError:
            continue
        except H5FormatError as ex:
            if options.overwrite:
                continue
            raise PackError(
                f"{ex.sentence.partition('; ')[0]}: it is not a whole shard; remove it, and pack "
                "its part again"
            ) from ex
        facts = plan.facts() | {"shard": number}
        if index.provenance.get("set") != facts:
            if options.overwrite:
                continue
            raise _another_shard(index, facts, options.content())
        yield PackedShard(
            name=path.name,
            items=len(index),
            bytes_out=index.size,
            bytes_in=0,
            skipped=tuple(
                SkippedImage(key, why.partition(" (")[0], why)
                for key, why in index.provenance.get("skipped", ())
            ),
            source_shapes=index.source_shapes,
            was_there=True,
        )


def _another_shard(index: FileIndex, facts: dict[str, Any], content: dict[str, Any]) -> UsageError:
    """Say how a shard differs from the one that `facts` describes."""
    have = index.provenance.get("set", {})
    then = index.provenance.get("options", {})
    differ = [
        f"{name} was {then.get(name)!r} and is {value!r}"
        for name, value in content.items()
        if then.get(name) != value
    ]
    differ += [
        f"{name} was {have.get(name)!r} and is {facts[name]!r}"
        for name in ("shard", "images", "shards", "order", "seed")
        if have.get(name) != facts[name]
    ]
    why = "; ".join(differ) or "the list of images, their labels or a library's version"
    return UsageError(
        f"{index.path} is a shard of another packing ({why}): give what it was packed with, or "
        "another OUT"
    )


def pack_shards(
    source: ImageSource,
    specs: tuple[FieldSpec, ...],
    folder: Path,
    options: PackOptions,
    plan: ShardPlan,
    numbers: Sequence[int],
    *,
    progress: bool = False,
) -> list[PackedShard]:
    """Make these shards of the plan in `folder`, whatever is there; return what they hold.

    Raises PackError where that cannot be finished: shards that are finished stay.
    """
    if not numbers:
        return []
    sequence = plan.sequence()
    places = [sequence[slice(*plan.bounds(number))] for number in numbers]
    chosen = SomeImages.of(source, np.concatenate(places))
    job = Job(source=chosen, specs=specs, options=options)
    with Progress(len(chosen), "packing", show=progress) as bar:
        for note in source.notes:
            bar.say(note)
        run = _Run(job, folder, plan, numbers, places, bar)
        try:
            check_space(run.outputs.paths[0], job)
            pack_images(job, run.outputs, run, run.written)
            return run.finished(wait=True)
        except H5FormatError as ex:
            raise PackError(f"a shard would not be valid ({ex.sentence})") from ex
        except (PackError, OSError, MemoryError, KeyboardInterrupt) as ex:
            kind = KeyboardInterrupt if isinstance(ex, KeyboardInterrupt) else PackError
            raise kind(f"{what_failed(ex, folder)}; {run.kept()}") from ex
        finally:
            run.end()


def what_is_kept(whole: int, shards: int, folder: Path, options: PackOptions) -> str:
    """Say what is kept of a run that ended with so many of its shards whole."""
    if not whole:
        return "nothing was kept"
    again = "the same command" + ("" if options.part else " with --resume")
    return f"{whole:,} of {counted(shards, 'shard')} are kept in {folder}: {again} makes the others"


class _Run:
    """Takes the blocks of all shards of one run, and finishes a shard when its last is written."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        plan: ShardPlan,
        numbers: Sequence[int],
        places: Sequence[npt.NDArray[np.int64]],
        bar: Progress,
    ) -> None:
        self._job, self._folder, self._plan, self._bar = job, folder, plan, bar
        self._numbers, self._places = numbers, places
        tag = f".{secrets.token_hex(6)}"
        stops = np.cumsum([len(some) for some in places]).tolist()
        self.outputs = Outputs(
            [OutputPaths(folder / plan.name(number), folder, tag) for number in numbers], stops
        )
        self.stop, self.total = 0, stops[-1]
        self.skips_left = max(job.options.skip_limit(len(some)) for some in places)
        """Of a whole shard: a worker may be ahead of those whose skips are known."""
        self._open: dict[int, tuple[Results, int]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="h5feed-shards")
        self._finishing: list[Future[PackedShard]] = []
        self._done: list[PackedShard] = []

    def accept(self, block: BlockResult) -> tuple[int, ...]:
        """Add the next block; return where in its shard its payloads begin."""
        shard = self.outputs.of(block.start)
        if shard not in self._open:
            self._begin(shard)
        positions = self._open[shard][0].accept(self._in_shard(block, shard))
        self.stop = block.stop
        return positions

    def written(self, blocks: Sequence[BlockResult]) -> None:
        """Finish the shards whose last block is among these; raise what finishing others raised."""
        self._bar.advance(sum(block.stop - block.start for block in blocks))
        for block in blocks:
            shard = self.outputs.of(block.start)
            if block.stop == self.outputs.stops[shard]:
                self._finishing.append(self._pool.submit(self._finish, shard))
                if len(self._finishing) > _MOST_UNFINISHED:  # each holds a descriptor
                    self._done.append(self._finishing.pop(0).result())
        self.finished(wait=False)

    def finished(self, *, wait: bool) -> list[PackedShard]:
        """Return the shards that have their names; raise what finishing one raised."""
        while self._finishing and (wait or self._finishing[0].done()):
            self._done.append(self._finishing.pop(0).result())
        return self._done

    def kept(self) -> str:
        """Say what is kept, once no shard is being finished any more."""
        self._pool.shutdown(wait=True)
        whole = len(self._done) + sum(one.exception() is None for one in self._finishing)
        return what_is_kept(whole, len(self._numbers), self._folder, self._job.options)

    def end(self) -> None:
        """Leave nothing unfinished behind."""
        self._pool.shutdown(wait=True)
        for shard, (_, handle) in self._open.items():
            self.outputs.paths[shard].discard(self._job.specs)
            os.close(handle)

    def _begin(self, shard: int) -> None:
        first, stop = self._range(shard)
        number, places = self._numbers[shard], self._places[shard]
        handle = _create_locked(self.outputs.paths[shard].partial)
        facts = self._plan.facts() | {"shard": number}
        source = self._job.source
        assert isinstance(source, ImageSource)
        job = replace(
            self._job,
            source=SomeImages.of(source, np.arange(first, stop)),
            shard=Shard(facts, places),
        )
        results = Results(job)
        results.say = self._bar.say
        self._open[shard] = results, handle
        for path in self.outputs.paths[shard].side(job.specs).values():
            os.close(create_file(path))

    def _range(self, shard: int) -> tuple[int, int]:
        stops = self.outputs.stops
        return stops[shard - 1] if shard else 0, stops[shard]

    def _in_shard(self, block: BlockResult, shard: int) -> BlockResult:
        """Return the block with images numbered from the shard's first."""
        first, _ = self._range(shard)
        rows = block.rows.copy()
        rows["index"] -= first
        return replace(
            block,
            start=block.start - first,
            stop=block.stop - first,
            rows=rows,
            skips=tuple(skip._replace(item=skip.item - first) for skip in block.skips),
        )

    def _finish(self, shard: int) -> PackedShard:
        """Give a shard its name; runs in a thread, so that workers go on with the next one."""
        results, handle = self._open[shard]
        paths, job = self.outputs.paths[shard], results.job
        if not results.count:
            why = ", ".join(results.skipped_by_reason())
            raise PackError(
                f"none of the {results.total:,} images of {paths.out.name} can be packed ({why}): "
                "give fewer shards, or --max-skipped 0 to stop at the first"
            )
        finish(paths, results)
        del self._open[shard]
        os.close(handle)
        return PackedShard(
            name=paths.out.name,
            items=results.count,
            bytes_out=paths.out.stat().st_size,
            bytes_in=results.source_bytes,
            skipped=tuple(
                SkippedImage(job.name(skip.item), skip.reason, str(skip)) for skip in results.skips
            ),
            source_shapes=results.rows["source_shape"].copy(),
            boxes_left_out=results.boxes_left_out,
        )


# --- unfinished shards: whose run lives is told by a lock, which the system drops with the process


def _create_locked(path: Path) -> int:
    """Make an empty file and lock it, so that no other run takes it for one that was left."""
    while True:
        handle = create_file(path)
        _try_lock(handle)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.lstat()):
                return handle
        os.close(handle)  # it was removed between the two steps


def _try_lock(handle: int) -> bool:
    import fcntl  # not on Windows, where packing is refused and all else can be imported

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks: nothing may be removed
        return False
    return True


def _remove_unfinished(found: SetFolder, shards: Sequence[str]) -> None:
    """Remove what runs that were killed have left of these shards; never what one works at."""
    wanted = set(shards)
    for name in found.unfinished:
        head, mark, _ = name.partition(".partial")
        if mark and head.partition(".h5")[0] + ".h5" in wanted:
            with suppress(OSError), _locked(found.path / (head + mark)) as is_left:
                if is_left:
                    (found.path / name).unlink()


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Give whether no run holds `path`, which is so where it is gone."""
    try:
        handle = open_file(path)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _try_lock(handle)
    finally:
        os.close(handle)
