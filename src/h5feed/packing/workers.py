"""Worker processes: they read, decode, size and encode blocks, and write them where told.

A block goes three ways through the coordinator: out as `Work`, back as `Record`, out again as
`Position` when all blocks before it are known. Workers never wait for one another unless they
hold `_HELD_BYTES` of finished pixels: until then they go on with their next block.
"""

import ctypes
import gc
import multiprocessing
import multiprocessing.popen_fork
import multiprocessing.sharedctypes  # here: a worker's start must not depend on importing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple

import cv2

from h5feed.errors import H5FeedError, PackError
from h5feed.packing.blocks import PayloadFiles, blocks
from h5feed.packing.dataset_source import DatasetSource
from h5feed.packing.decode import whole_images_only
from h5feed.packing.encode import Job, Payload, Record, encode_block
from h5feed.packing.ledger import Ledger

__all__ = ["Target", "pack_here", "pack_in_processes"]

_HELD_BYTES = 64 << 20
_QUEUED = 2
_SECONDS_BETWEEN_TICKS = 0.5
_PR_SET_PDEATHSIG = 1
# Forked workers start in 10 ms with everything imported; elsewhere fork is unsafe or missing.
_START_METHOD = "fork" if sys.platform == "linux" else "spawn"

Tick = Callable[[Sequence[Record]], None]


class Target(NamedTuple):
    """Where pixels are written: one file per field, and the bytes to leave free before them."""

    paths: tuple[Path, ...]
    heads: tuple[int, ...]


class Work(NamedTuple):
    """Encode these images, up to one skip more than are left."""

    start: int
    stop: int
    skips_left: int


class Position(NamedTuple):
    """Write the block that begins with image `start` at these positions, one per field."""

    start: int
    at: tuple[int, ...]


class Written(NamedTuple):
    """The block that begins with image `start` is in the payload files."""

    start: int


def pack_here(job: Job, target: Target, ledger: Ledger, tick: Tick) -> None:
    """Pack all that `ledger` lacks in this process; `tick` gets each written block's record."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # an image is too small to share, and the bytes must not depend on it
    try:
        strict = nullcontext() if isinstance(job.source, DatasetSource) else whole_images_only()
        with PayloadFiles(*target) as files, strict:
            for start, stop in blocks(ledger.stop, ledger.total, 1, job.specs[0]):
                record, payloads = encode_block(job, start, stop, ledger.skips_left)
                files.write(ledger.accept(record), payloads)
                tick([record])
    finally:
        torch.set_num_threads(threads)


def pack_in_processes(job: Job, target: Target, ledger: Ledger, tick: Tick, workers: int) -> None:
    """Pack all that `ledger` lacks in `workers` processes.

    `tick` gets the records of written blocks in source order, and is called twice a second at
    least. Raises PackError when a worker dies, and what a worker raised.
    """
    with _team(job, target, workers) as team:
        _Coordinator(job, ledger, team).run(tick)


class _Worker:
    """The coordinator's view of one worker process."""

    def __init__(
        self, context: BaseContext, job: Job, target: Target, elders: Sequence["_Worker"]
    ) -> None:
        self.conn, theirs = context.Pipe()
        # A forked child inherits the coordinator's ends of all pipes and must close them, or it
        # would never see the coordinator go. A spawned one has only what it is given.
        leave = [self.conn, *(w.conn for w in elders)] if _START_METHOD == "fork" else []
        self.current = context.RawArray("q", [-1])
        self.waiting: deque[Work] = deque()
        """Blocks given out and not yet reported."""
        self.process = context.Process(  # type: ignore[attr-defined]
            target=_serve,
            args=(job, target, theirs, leave, self.current, os.getpid()),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """End the process at once and wait until it is gone."""
        self.process.kill()
        self.process.join()
        self.conn.close()


@contextmanager
def _team(job: Job, target: Target, count: int) -> Iterator[list[_Worker]]:
    import torch  # noqa: F401 - before the fork, so that the workers share it

    context = multiprocessing.get_context(_START_METHOD)
    team: list[_Worker] = []
    try:
        for _ in range(count):
            try:
                team.append(_Worker(context, job, target, team))
            except OSError as ex:  # no memory, no descriptors, no processes
                raise PackError(
                    f"cannot start {count} worker processes: {ex.strerror}: give fewer --workers"
                ) from ex
        yield team
    finally:
        for worker in team:
            worker.end()


class _Coordinator:
    """Gives out work and places, and keeps the book in source order."""

    def __init__(self, job: Job, ledger: Ledger, team: list[_Worker]) -> None:
        self._job, self._ledger, self._team = job, ledger, team
        self._blocks = blocks(ledger.stop, ledger.total, len(team), job.specs[0])
        self._reported: dict[int, tuple[_Worker, Record]] = {}
        self._placed: deque[Record] = deque()
        self._written: set[int] = set()

    def run(self, tick: Tick) -> None:
        """Work until every block is written."""
        for _ in range(_QUEUED):
            for worker in self._team:
                self._give_work(worker)
        by_conn = {worker.conn: worker for worker in self._team}
        while self._ledger.stop < self._ledger.total or self._placed:
            for conn in wait(list(by_conn), _SECONDS_BETWEEN_TICKS):
                assert isinstance(conn, Connection)
                self._receive(by_conn[conn])
            tick(self._take_written())

    def _give_work(self, worker: _Worker) -> None:
        block = next(self._blocks, None)
        if block is not None:
            worker.waiting.append(Work(*block, self._ledger.skips_left))
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
            self._give_work(worker)
            self._reported[message.start] = (worker, message)
            self._give_places()

    def _give_places(self) -> None:
        while self._ledger.stop in self._reported:
            worker, record = self._reported.pop(self._ledger.stop)
            self._send(worker, Position(record.start, self._ledger.accept(record)))
            self._placed.append(record)

    def _take_written(self) -> list[Record]:
        """Return the records of blocks that were written, as far as they follow each other."""
        done = []
        while self._placed and self._placed[0].start in self._written:
            done.append(self._placed.popleft())
            self._written.remove(done[-1].start)
        return done

    def _send(self, worker: _Worker, message: NamedTuple) -> None:
        try:
            worker.conn.send(message)
        except ConnectionError:
            raise self._death(worker) from None

    def _death(self, worker: _Worker) -> PackError:
        worker.process.join(5)
        code = worker.process.exitcode
        how = f"exit status {code}"
        if code is not None and code < 0:
            with suppress(ValueError):
                how = signal.Signals(-code).name
        if code == -signal.SIGKILL:
            how += ", as when memory runs out"
        index = worker.current[0]
        where = f" at {self._job.name(index)}" if index >= 0 else ""
        return PackError(f"a worker process died ({how}){where}")


def _serve(
    job: Job,
    target: Target,
    conn: Connection,
    leave: Sequence[Connection],
    current: Any,
    parent: int,
) -> None:
    """Run one worker until the coordinator closes its end."""
    for other in leave:
        other.close()
    _die_with(parent)
    gc.freeze()  # or the collector would touch, and so copy, 50 MB shared with the coordinator
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    import torch

    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    try:
        with PayloadFiles(*target) as files, whole_images_only():
            _work(job, conn, files, current)
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


def _work(job: Job, conn: Connection, files: PayloadFiles, current: Any) -> None:
    todo: deque[Work] = deque()
    held: dict[int, Sequence[Sequence[Payload]]] = {}
    held_bytes: dict[int, int] = {}
    while True:
        while conn.poll() or not todo or sum(held_bytes.values()) > _HELD_BYTES:
            message = conn.recv()
            if isinstance(message, Work):
                todo.append(message)
            else:
                files.write(message.at, held.pop(message.start))
                del held_bytes[message.start]
                conn.send(Written(message.start))
        work = todo.popleft()
        record, held[work.start] = encode_block(job, *work, current)
        held_bytes[work.start] = sum(record.sizes)
        conn.send(record)


def _die_with(parent: int) -> None:
    """Have the system kill this process when the coordinator dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
