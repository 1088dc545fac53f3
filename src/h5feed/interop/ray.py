"""Packing on a Ray cluster: one task a shard, which writes it and returns facts, no pixels."""

import logging
import os
import platform
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from h5feed.errors import H5FeedError, PackError, UsageError
from h5feed.optional import require
from h5feed.packing.items import ImageSource
from h5feed.packing.options import PackOptions
from h5feed.packing.output import versions
from h5feed.packing.run import open_set, pack_with
from h5feed.packing.shard_plan import ShardPlan
from h5feed.packing.shards import PackedShard, pack_shards, what_is_kept
from h5feed.packing.sources import names_files
from h5feed.packing.summary import PackSummary
from h5feed.progress import Progress
from h5feed.store.layout import FieldSpec
from h5feed.text import counted

__all__ = ["pack"]

_TASKS_PER_CPU = 2
"""One that runs, and one that follows it at once."""
_FEWEST_TASKS = 8
"""In flight on a cluster that has yet to grow."""
_SECONDS_TO_END = 30.0
"""For the tasks of a run that failed, to remove what they have begun."""
_PATHS = ("manifest", "annotations", "masks")


def pack(
    source: Any,
    out: str | os.PathLike[str],
    options: PackOptions,
    *,
    address: str = "auto",
    retries: int = 3,
    progress: bool = False,
) -> PackSummary:
    """Pack a set on a Ray cluster: one task of one CPU a shard; return a summary.

    The bytes are those of one machine's `h5feed.pack`. The folder (or tar or parquet files)
    `source` and the folder `out` must be reached by all nodes under the same paths, as on NFS or
    Lustre, and h5feed be installed there in the same versions; which is checked. Through Ray go
    options and facts, never pixels.

    Args:
        source: a folder, or tar or parquet files, as `h5feed.pack` takes them.
        out: folder of the set. Each shard gets its name when it is whole, the index comes last.
        options: with `shards` or `append`; `part` and `num_workers` are not for Ray.
        address: of the cluster, as `ray.init` takes it; "auto" finds the one that this machine
            is in. A program that has called `ray.init` keeps its connection.
        retries: how often a shard is begun again whose process or node died.
        progress: whether a bar, or lines, are shown on stderr.

    Raises UsageError for a wrong argument, PackError when packing cannot finish, for which shards
    that are whole stay (`resume=True` makes the others), ImportError without Ray.

        from h5feed.interop import ray
        from h5feed.packing import PackOptions

        ray.pack("/nfs/images", "/nfs/images.set", PackOptions(size="256", shards="256MB"))

    """
    options.check()
    if not options.makes_a_set:
        raise UsageError("Ray packs sets, a task a shard: give shards as well, such as 256MB")
    if options.part is not None:
        raise UsageError(f"part={options.part} with Ray, which deals all shards: leave part out")
    if options.num_workers:
        raise UsageError(
            f"num_workers={options.num_workers} with Ray, whose tasks take a CPU each: leave it out"
        )
    if not names_files(source):
        raise UsageError(
            f"source is a {type(source).__name__}, and the nodes of a Ray cluster open SRC "
            "themselves: give the path of a folder, or of tar or parquet files"
        )
    if retries < 0:
        raise UsageError(f"retries={retries} is too small: give 0 or more")
    ray = require("ray", "ray")
    with _connection(ray, address):
        make = partial(
            _pack_on_nodes, ray, _everywhere(source), Path(os.path.abspath(out)), retries
        )
        return pack_with(source, out, options, make=make, progress=progress)


@contextmanager
def _connection(ray: Any, address: str) -> Iterator[None]:
    """Connect to the cluster, unless the program is connected already."""
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as ex:
        raise PackError(
            f"no Ray cluster is found at address={address!r} ({_first_line(ex)}): start one with "
            "ray start --head, or give the address of one"
        ) from ex
    try:
        yield
    finally:
        ray.shutdown()


def _everywhere(path: Any) -> Any:
    """Return paths and patterns of this process so that they hold in any folder."""
    if isinstance(path, list | tuple):
        return tuple(_everywhere(one) for one in path)
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


# --- here: tasks are handed out, a bounded number at a time


def _pack_on_nodes(
    ray: Any,
    src: Any,
    out: Path,
    retries: int,
    source: ImageSource,
    specs: tuple[FieldSpec, ...],
    folder: Path,
    options: PackOptions,
    plan: ShardPlan,
    numbers: Sequence[int],
    *,
    progress: bool = False,
) -> list[PackedShard]:
    """Have these shards made by the nodes of the cluster; `src` and `out` are paths on them."""
    run = secrets.token_hex(8)
    shared = _Shared(
        run=run,
        source=src,
        out=out,
        mark=f".h5feed-{run}",
        options=_on_nodes(options),
        plan=plan,
        listing=source.listing().hexdigest(),
        versions=versions(),
    )
    running: dict[Any, int] = {}
    done: list[PackedShard] = []
    bounds = [plan.bounds(number) for number in numbers]
    images = sum(stop - first for first, stop in bounds)
    mark = folder / shared.mark
    with Progress(images, "packing", show=progress) as bar:
        for note in source.notes:
            bar.say(note)
        try:
            mark.touch()
            for number, shard in _results(ray, shared, retries, numbers, running):
                done.append(shard)
                first, stop = plan.bounds(number)
                bar.advance(stop - first)
        except (PackError, KeyboardInterrupt) as ex:
            _cancel(ray, running)
            what = ex.sentence if isinstance(ex, PackError) else "interrupted"
            what = what.removesuffix("; nothing was kept")
            kind = PackError if isinstance(ex, PackError) else KeyboardInterrupt
            raise kind(f"{what}; {what_is_kept(len(done), len(numbers), folder, options)}") from ex
        finally:
            mark.unlink(missing_ok=True)
    return done


def _on_nodes(options: PackOptions) -> PackOptions:
    """Return the options for tasks, whose working folder and whose share of a machine differ."""
    # An append that this process has allowed goes on there, whatever shards it has by then.
    paths = {name: getattr(options, name) for name in _PATHS}
    paths = {name: path and Path(_everywhere(path)) for name, path in paths.items()}
    return replace(options, **paths, num_workers=0, resume=options.append or options.resume)


def _results(
    ray: Any, shared: "_Shared", retries: int, numbers: Sequence[int], running: dict[Any, int]
) -> Iterator[tuple[int, PackedShard]]:
    """Yield (number, shard) as they are finished; `running` has those that are handed out."""
    task = ray.remote(_pack_shard).options(num_cpus=1, max_retries=retries)
    waiting = iter(numbers)
    while True:
        most = max(_FEWEST_TASKS, _TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 0)))
        while len(running) < most and (number := next(waiting, None)) is not None:
            running[task.remote(shared, number)] = number
        if not running:
            return
        ready, _ = ray.wait(list(running), num_returns=1)
        for one in ready:
            number = running.pop(one)
            try:
                shard = ray.get(one)
            except ray.exceptions.RayError as ex:
                raise _failed(ex, shared.plan.name(number), retries) from ex
            yield number, shard


def _failed(error: Any, name: str, retries: int) -> PackError:
    """Return what to say of a task that gave no shard."""
    cause = getattr(error, "cause", None)  # what the task itself raised
    if isinstance(cause, PackError):
        return cause
    if cause is not None:
        return PackError(f"{name} cannot be packed ({type(cause).__name__}: {_first_line(cause)})")
    return PackError(
        f"{name}: its task ended {counted(retries + 1, 'time')} without a result "
        f"({type(error).__name__}: {_first_line(error)})"
    )


def _cancel(ray: Any, running: dict[Any, int]) -> None:
    """End the tasks that run, and wait until they have removed what they had begun."""
    for one in running:
        ray.cancel(one)
    if running:
        ray.wait(list(running), num_returns=len(running), timeout=_SECONDS_TO_END)


# --- on a node


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What all tasks of a run are told."""

    run: str
    """Tells this run from any other."""
    source: Any
    """Absolute path of SRC, or several."""
    out: Path
    mark: str
    """A file in `out` while the run lasts: who sees it sees the same folder."""
    options: PackOptions
    plan: ShardPlan
    listing: str
    """SHA-256 (hex) of the list of images and labels."""
    versions: dict[str, str]


_opened: dict[str, tuple[ImageSource, tuple[FieldSpec, ...]]] = {}
"""The source of the last run that this process made a shard of: Ray keeps processes for tasks."""


def _pack_shard(shared: _Shared, number: int) -> PackedShard:
    """Make one shard in a process of a node."""
    if not (shared.out / shared.mark).exists():
        raise PackError(
            f"node {platform.node()} does not see the folder OUT {shared.out} in which this run "
            "packs: it has to be shared by all nodes, under one path"
        )
    if shared.run not in _opened:
        _opened.clear()
        _opened[shared.run] = _open_on_node(shared)
    source, specs = _opened[shared.run]
    return pack_shards(source, specs, shared.out, shared.options, shared.plan, [number])[0]


def _open_on_node(shared: _Shared) -> tuple[ImageSource, tuple[FieldSpec, ...]]:
    """Return the images as this node sees them, which must be those that were planned with."""
    differ = [
        f"{name} {mine}, not {shared.versions.get(name)}"
        for name, mine in versions().items()
        if mine != shared.versions.get(name)
    ]
    if differ:
        raise PackError(
            f"node {platform.node()} has {', '.join(differ)}, which would make other bytes: "
            "install the same versions on all nodes"
        )
    try:
        source, specs, plan = open_set(shared.source, shared.out, shared.options)
    except H5FeedError as ex:
        raise _another_source(shared, ex.sentence) from ex
    if source.listing().hexdigest() != shared.listing:
        seen = f"its list of {counted(len(source), 'image')} differs"
        raise _another_source(shared, seen)
    if plan != shared.plan:
        raise _another_source(shared, "the files of these names differ")
    return source, specs


def _another_source(shared: _Shared, seen: str) -> PackError:
    return PackError(
        f"node {platform.node()} does not see SRC {shared.source} as this machine does ({seen}): "
        "it has to be shared by all nodes, under one path"
    )
