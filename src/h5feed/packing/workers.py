"""Who packs: this process, or worker processes that encode blocks and write them where told.

A block crosses the pipes three times: out as `EncodeTask`, back as `BlockResult`, and out again as
`WriteTask` when all blocks before it are known. Workers never wait for one another unless they
hold `_HELD_BYTES` of finished pixels: until then they go on with their next block.
"""

import gc
import multiprocessing
import multiprocessing.popen_fork
import multiprocessing.sharedctypes  # here: a worker's start must not depend on importing
import os
import signal
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, Protocol

import cv2

from h5feed.errors import H5FeedError, PackError
from h5feed.packing.decode import whole_images_only
from h5feed.packing.encode import BlockResult, Job, Payload, encode_block
from h5feed.packing.output import OutputPaths, PayloadFiles
from h5feed.packing.sources import DatasetSource
from h5feed.store.layout import FieldSpec
from h5feed.system import available_cores, available_memory, die_with, exit_reason

__all__ = ["Outputs", "Taker", "pack_here", "pack_images", "pack_in_processes"]

_WORKER_BYTES = 256 << 20
"""What a worker takes with photos of 12 megapixels: see `max_pixels` for the most."""
_OPEN_SHARDS = 4

_HELD_BYTES = 64 << 20
_BLOCK_BYTES = 4 << 20
_MOST_IMAGES = 256
_QUEUED = 2
_SECONDS_BETWEEN_TICKS = 0.5
# Forked workers start in 10 ms with everything imported; elsewhere fork is unsafe or missing.
_START_METHOD = "fork" if sys.platform == "linux" else "spawn"

Tick = Callable[[Sequence[BlockResult]], None]


class EncodeTask(NamedTuple):
    """Encode these images, up to one skip more than are left."""

    start: int
    stop: int
    skips_left: int


class WriteTask(NamedTuple):
    """Write the block that begins with image `start` at these positions, one for each file."""

    start: int
    at: tuple[int, ...]


class Written(NamedTuple):
    """The block that begins with image `start` is in the payload files."""

    start: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that a job's images go to: one, or a shard for each stretch of them."""

    paths: Sequence[OutputPaths]
    stops: Sequence[int]
    """Behind the last image of each, ascending; the last is the number of all images."""

    def of(self, image: int) -> int:
        """Return the number of the file that this image goes to."""
        return bisect_right(self.stops, image)


class Taker(Protocol):
    """Takes blocks in order of `start`, and says where each is written: `Results`, or a set's."""

    stop: int
    total: int

    @property
    def skips_left(self) -> int:
        """How many images of a block may be skipped before the run has to stop."""
        ...

    def accept(self, block: BlockResult) -> tuple[int, ...]:
        """Add the next block; return where its payloads begin, a position for each file."""
        ...


def pack_here(job: Job, outputs: Outputs, results: Taker, tick: Tick) -> None:
    """Pack all that `results` lacks in this process; `tick` gets each written block's result."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # an image is too small to share, and the bytes must not depend on it
    try:
        with _OpenFiles(outputs, job.specs) as files, _strict(job):
            for start, stop in cut_blocks(results.stop, outputs.stops, 1, job.specs[0]):
                result, payloads = encode_block(job, start, stop, results.skips_left)
                files.write(start, results.accept(result), payloads)
                tick([result])
    finally:
        torch.set_num_threads(threads)


def pack_in_processes(job: Job, outputs: Outputs, results: Taker, tick: Tick, count: int) -> None:
    """Pack all that `results` lacks in `count` processes.

    `tick` gets the results of written blocks in source order, and is called twice a second at
    least. Raises PackError when a worker dies, and what a worker raised.
    """
    with _team(job, outputs, count) as team:
        _Coordinator(job, outputs, results, team).run(tick)


def pack_images(job: Job, outputs: Outputs, results: Taker, tick: Tick) -> None:
    """Pack all that `results` lacks, in as many processes as the options or the machine say.

    `tick` gets the results of written blocks in source order.
    """
    count = _worker_count(job, results.total - results.stop)
    if count:
        pack_in_processes(job, outputs, results, tick, count)
    else:
        pack_here(job, outputs, results, tick)


def _strict(job: Job) -> AbstractContextManager[None]:
    """Refuse truncated files; a dataset opens its files as the program told Pillow to."""
    return nullcontext() if isinstance(job.source, DatasetSource) else whole_images_only()


def _worker_count(job: Job, images: int) -> int:
    wanted = job.options.num_workers
    if isinstance(job.source, DatasetSource) and wanted != 0 and not job.source.pickles:
        return 0
    if wanted is None:
        wanted = available_cores()
        if (memory := available_memory()) is not None:
            wanted = max(1, min(wanted, memory // _WORKER_BYTES))
    return min(wanted, images)


class _OpenFiles:
    """The payload files of outputs, opened when something is written; the last few stay open."""

    def __init__(self, outputs: Outputs, specs: Sequence[FieldSpec]) -> None:
        self._outputs, self._specs = outputs, specs
        self._open: dict[int, PayloadFiles] = {}

    def __enter__(self) -> "_OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for files in self._open.values():
            files.close()

    def write(
        self, start: int, positions: Sequence[int], payloads: Sequence[Sequence[Payload]]
    ) -> None:
        """Write the payloads of the block that begins with image `start`."""
        number = self._outputs.of(start)
        if number not in self._open:
            if len(self._open) == _OPEN_SHARDS:
                self._open.pop(min(self._open)).close()
            self._open[number] = PayloadFiles(self._outputs.paths[number], self._specs)
        self._open[number].write(positions, payloads)


class _Worker:
    """The coordinator's view of one worker process."""

    def __init__(
        self, context: BaseContext, job: Job, outputs: Outputs, elders: Sequence["_Worker"]
    ) -> None:
        self.conn, theirs = context.Pipe()
        # A forked child inherits the coordinator's ends of all pipes and must close them, or it
        # would never see the coordinator go. A spawned one has only what it is given.
        leave = [self.conn, *(w.conn for w in elders)] if _START_METHOD == "fork" else []
        self.current = context.RawArray("q", [-1])
        self.waiting: deque[EncodeTask] = deque()
        """Blocks given out and not yet reported."""
        self.process = context.Process(  # type: ignore[attr-defined]
            target=_serve,
            args=(job, outputs, theirs, leave, self.current, os.getpid()),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """End the process at once and wait until it is gone."""
        self.process.kill()
        self.process.join()
        self.conn.close()


def cut_blocks(
    start: int, stops: Sequence[int], workers: int, spec: FieldSpec
) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive blocks: about 4 MB of pixels, smaller towards the end.

    No block goes beyond one of `stops`, where files end. The last ones are small so that all
    workers finish together. Where blocks begin and end does not show in the result.
    """
    if spec.is_fixed:
        most = max(4, min(_MOST_IMAGES, _BLOCK_BYTES // spec.item_bytes))
    elif spec.encoding == "original":
        most = 16
    else:
        most = max(4, min(_MOST_IMAGES, _BLOCK_BYTES // (3 * spec.height * spec.width)))
    for stop in stops:
        while start < stop:
            size = min(most, max(1, (stops[-1] - start) // (3 * max(1, workers))), stop - start)
            yield start, start + size
            start += size


@contextmanager
def _team(job: Job, outputs: Outputs, count: int) -> Iterator[list[_Worker]]:
    import torch  # noqa: F401 - before the fork, so that the workers share it

    context = multiprocessing.get_context(_START_METHOD)
    team: list[_Worker] = []
    try:
        for _ in range(count):
            try:
                team.append(_Worker(context, job, outputs, team))
            except OSError as ex:  # no memory, no descriptors, no processes
                raise PackError(
                    f"cannot start {count} worker processes: {ex.strerror}: give fewer --workers"
                ) from ex
        yield team
    finally:
        for worker in team:
            worker.end()


class _Coordinator:
    """Gives out tasks, and takes results in source order."""

    def __init__(self, job: Job, outputs: Outputs, results: Taker, team: list[_Worker]) -> None:
        self._job, self._results, self._team = job, results, team
        self._blocks = cut_blocks(results.stop, outputs.stops, len(team), job.specs[0])
        self._reported: dict[int, tuple[_Worker, BlockResult]] = {}
        self._being_written: deque[BlockResult] = deque()
        self._written: set[int] = set()

    def run(self, tick: Tick) -> None:
        """Work until every block is written."""
        for _ in range(_QUEUED):
            for worker in self._team:
                self._give_block(worker)
        by_conn = {worker.conn: worker for worker in self._team}
        while self._results.stop < self._results.total or self._being_written:
            for conn in wait(list(by_conn), _SECONDS_BETWEEN_TICKS):
                assert isinstance(conn, Connection)
                self._receive(by_conn[conn])
            tick(self._take_written())

    def _give_block(self, worker: _Worker) -> None:
        block = next(self._blocks, None)
        if block is not None:
            worker.waiting.append(EncodeTask(*block, self._results.skips_left))
            self._send(worker, worker.waiting[-1])

    def _receive(self, worker: _Worker) -> None:
        try:
            message = worker.conn.recv()
        except (EOFError, ConnectionError):
            raise self._death(worker) from None
        if isinstance(message, Exception):
            raise message
        if isinstance(message, Written):
            self._written.add(message.start)
        else:
            worker.waiting.popleft()
            self._give_block(worker)
            self._reported[message.start] = (worker, message)
            self._give_positions()

    def _give_positions(self) -> None:
        while self._results.stop in self._reported:
            worker, result = self._reported.pop(self._results.stop)
            self._send(worker, WriteTask(result.start, self._results.accept(result)))
            self._being_written.append(result)

    def _take_written(self) -> list[BlockResult]:
        """Return the results of blocks that were written, as far as they follow each other."""
        done = []
        while self._being_written and self._being_written[0].start in self._written:
            done.append(self._being_written.popleft())
            self._written.remove(done[-1].start)
        return done

    def _send(self, worker: _Worker, message: NamedTuple) -> None:
        try:
            worker.conn.send(message)
        except ConnectionError:
            raise self._death(worker) from None

    def _death(self, worker: _Worker) -> PackError:
        worker.process.join(5)
        index = worker.current[0]
        where = f" at {self._job.name(index)}" if index >= 0 else ""
        return PackError(f"a worker process died ({exit_reason(worker.process.exitcode)}){where}")


def _serve(
    job: Job,
    outputs: Outputs,
    conn: Connection,
    leave: Sequence[Connection],
    current: Any,
    parent: int,
) -> None:
    """Run one worker until the coordinator closes its end."""
    for other in leave:
        other.close()
    die_with(parent)
    gc.freeze()  # or the collector would touch, and so copy, 50 MB shared with the coordinator
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    import torch

    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    try:
        with _OpenFiles(outputs, job.specs) as files, _strict(job):
            _serve_tasks(job, conn, files, current)
    except (EOFError, ConnectionError):
        pass  # the coordinator is gone, or wants no more
    except (H5FeedError, OSError) as ex:
        _tell(conn, ex)
    except MemoryError:
        where = job.name(current[0])
        _tell(conn, PackError(f"out of memory at {where}: fewer --workers need less"))


def _tell(conn: Connection, error: Exception) -> None:
    with suppress(ConnectionError):
        conn.send(error)


def _serve_tasks(job: Job, conn: Connection, files: _OpenFiles, current: Any) -> None:
    todo: deque[EncodeTask] = deque()
    held: dict[int, Sequence[Sequence[Payload]]] = {}
    held_bytes: dict[int, int] = {}
    while True:
        while conn.poll() or not todo or sum(held_bytes.values()) > _HELD_BYTES:
            message = conn.recv()
            if isinstance(message, EncodeTask):
                todo.append(message)
            else:
                files.write(message.start, message.at, held.pop(message.start))
                del held_bytes[message.start]
                conn.send(Written(message.start))
        task = todo.popleft()
        result, held[task.start] = encode_block(job, *task, current)
        held_bytes[task.start] = sum(result.sizes)
        conn.send(result)
