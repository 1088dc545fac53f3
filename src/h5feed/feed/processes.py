"""Worker processes: they fill rows in memory that they share with the loader, and hold no lock.

A loader starts one clean Python, which opens the files once and forks the workers: they share what
it has in memory, and start in milliseconds. Nothing is imported there that filling needs not; torch
is not. A batch's samples and parameters are written once into shared memory; an order, 40 bytes in
a pipe that all workers read, says which rows of which batch; an answer is 16 bytes. Whoever dies
closes its ends, and the others see that: the workers end with their server, and that with the
loader's process.
"""

from __future__ import annotations

import copy
import gc
import itertools
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import spawn
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from h5feed.errors import H5FeedError, UsageError
from h5feed.feed.rows import Damage, Field, fill_rows, make_fields
from h5feed.store.layout import MAX_SIDE
from h5feed.system import die_with, exit_reason

if TYPE_CHECKING:
    from h5feed.augment import Op, Pipeline
    from h5feed.feed.files import PackedFiles
    from h5feed.feed.iterator import BatchTask
    from h5feed.feed.memory import SharedMemory
    from h5feed.feed.options import OnError
    from h5feed.feed.workers import Job, WorkerPool

__all__ = ["ProcessPool", "WorkerSetup", "serve", "unknown_to_workers"]

_ORDER: Final = struct.Struct("<qqqqq")
"""Number of the batch; address and length of its plan; first row, and the one after the last."""
_ANSWER: Final = struct.Struct("<qq")
"""Number of the batch; first row. What else there is to say is pickled."""
_STOP: Final = 8  # bytes before a plan: int64, the row from which on nobody needs any
_LEAST: Final = 8
"""Rows worth an order, which costs both sides together 100 µs; of JPEG, numpy's calls as much."""
_GOOD: Final = 64
"""Rows above which an image costs no less: 75 µs of Python (JPEG, simulated) where 16 take 87."""
_MOST: Final = 100_000  # bytes of an answer: a socket takes no more than some 200,000 at once
_PATIENCE: Final = 10.0  # seconds that the processes have to end by themselves
_TICK: Final = 1.0  # seconds after which the server looks whether the loader's process is there
_BOOT: Final = (
    "import pickle, sys\n"
    "sys.path[:] = pickle.load(sys.stdin.buffer)\n"
    "from h5feed.feed.processes import serve\n"
    "serve()"
)
_HEARD: Final = {signal.SIGCHLD, signal.SIGTERM}
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_importing_main = False
"""Whether this is a server that imports the user's script to find his ops in it."""


class WorkerSetup(NamedTuple):
    """What a worker needs to fill rows."""

    files: PackedFiles
    reads: bool
    """Read items rather than map the files."""
    pipeline: Pipeline | None
    names: tuple[str, ...]
    """Of the pixel fields to fill."""
    on_device: bool
    on_error: OnError

    def pickled(self) -> bytes:
        """Return the setup as bytes; UsageError where an op cannot be found by its name."""
        then = 'define it at the top level of a module, or use engine="thread"'
        for op in () if self.pipeline is None else self.pipeline.ops:
            content, why = _pickled(op)
            if content is None:
                raise UsageError(
                    f'engine="process" with {op!r} in augment: worker processes find an op by the '
                    f"name of its class, and this one cannot be found ({why}): {then}"
                )
            if b"__main__" in content and not hasattr(sys.modules["__main__"], "__file__"):
                raise UsageError(
                    f'engine="process" with {op!r} in augment: it is defined in an interactive '
                    f"session, which worker processes cannot import: {then}"
                )
        return pickle.dumps(self)

    def fields(self) -> tuple[Field, ...]:
        """Return what fills the rows, and import beforehand what that will need."""
        files = self.files.reading() if self.reads else self.files
        if self.pipeline is not None:
            size = files.specs["images"].common_size or (MAX_SIDE, MAX_SIDE)
            if self.pipeline.may_antialias(size):
                import torch  # noqa: F401 - its kernel; once, before the workers are forked
        return make_fields(files, self.pipeline, self.names, on_device=self.on_device)


def unknown_to_workers(pipeline: Pipeline) -> Op | None:
    """Return an op that worker processes would find in the user's script, or not at all."""
    for op in pipeline.ops:
        content, _ = _pickled(op)
        if content is None or b"__main__" in content:
            return op
    return None


def _pickled(op: Op) -> tuple[bytes | None, str]:
    """Return an op pickled, or why it cannot be."""
    try:
        return pickle.dumps(op), ""
    except (pickle.PicklingError, AttributeError, TypeError) as ex:
        return None, str(ex)


class ProcessPool:
    """An engine of worker processes; see the module.

    Processes start with the first rows to fill, and stay until `close`, or until nobody can bring
    any more. One thread here plans batches and delivers them. After a fork the child's pool
    begins anew.
    """

    def __init__(
        self, workers: int, each: int, setup: bytes, memory: SharedMemory, threads: WorkerPool
    ) -> None:
        self._workers = workers
        self._each = each
        self._setup = setup
        self._memory = memory
        self._threads = threads
        self._team: _Team | None = None

    def chunk(self, count: int, prefetch: int) -> int:
        """Return the rows of an order: two orders for each worker among the batches in the making.

        All workers read orders from one pipe, so that a batch need not be shared out evenly.
        """
        return min(max(-(-count * prefetch // (2 * self._workers)), _LEAST), _GOOD)

    def submit(self, job: Job) -> None:
        """Have a job run in this process."""
        self._threads.submit(job)

    def fill(self, task: BatchTask, chunks: Sequence[range]) -> None:
        """Have these rows of a batch filled by the workers, and the batch finished here.

        Raises H5FeedError where they cannot be started.
        """
        if self._team is not None and (self._team.told or self._team.pid != os.getpid()):
            self._end()
        if self._team is None:
            self._team = _Team(self._workers, self._each, self._setup, self._memory, self._threads)
            self._stop = weakref.finalize(self, self._team.stop)
        self._team.fill(task, chunks)

    def close(self) -> None:
        """End the processes and the thread, and wait for them."""
        self._end()
        self._threads.close()

    def _end(self) -> None:
        if self._team is not None:
            self._stop()
            self._team = None

    @property
    def processes(self) -> list[int]:
        """The process that starts the workers, where there is one: all others are its children."""
        return [] if self._team is None or self._team.ended else [self._team.server.pid]


class _Sent(NamedTuple):
    """A batch that is with the workers."""

    task: BatchTask
    plan: NDArray[np.uint8]
    """Shared memory: `_STOP` bytes, then the pickled plan."""


class _Team:
    """The processes of one start, as this process sees them."""

    def __init__(
        self, workers: int, each: int, setup: bytes, memory: SharedMemory, threads: WorkerPool
    ) -> None:
        if _importing_main:
            raise H5FeedError(
                f"{sys.argv[0]} defines an op of the pipeline, so that worker processes import it, "
                'and makes batches as it is imported: put what it does below if __name__ == "'
                '__main__", or define the op in a module of its own, or use engine="thread"'
            )
        self.pid = os.getpid()
        self._memory = memory
        self._threads = threads
        self._numbers = itertools.count()
        self._sent: dict[int, _Sent] = {}
        self._plans: deque[NDArray[np.uint8]] = deque()
        """Free memory for plans."""
        self._error: H5FeedError | None = None
        self._stopping = False
        self.ended = False
        self.told = False
        """Whether a batch has failed because the workers ended: then others may be started."""
        try:
            self._start(workers, each, setup)
        except OSError as ex:
            raise H5FeedError(
                f"cannot start {workers} worker processes: {ex.strerror}; give fewer num_workers, "
                'or use engine="thread"'
            ) from ex
        self._listener = threading.Thread(target=self._listen, name="h5feed-answers", daemon=True)
        self._listener.start()

    def _start(self, workers: int, each: int, setup: bytes) -> None:
        reading, writing = os.pipe()
        self._orders = open(writing, "wb", buffering=0)  # noqa: SIM115 - closed with the team
        with open(reading, "rb", buffering=0) as orders:
            self._answers, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with answers:
                file = self._memory.fileno()
                told = (workers, each, orders.fileno(), answers.fileno(), file, os.getpid())
                main = None
                if b"__main__" in setup:
                    main = spawn.get_preparation_data("h5feed")
                    del main["authkey"]
                # A session of its own: Ctrl-C in a terminal goes to this process alone.
                self.server = subprocess.Popen(
                    [os.fsdecode(spawn.get_executable()), "-c", _BOOT],
                    stdin=subprocess.PIPE,
                    pass_fds=told[2:5],
                    start_new_session=True,
                    env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
                )
        assert self.server.stdin is not None
        with suppress(BrokenPipeError), self.server.stdin as pipe:
            pickle.dump(sys.path, pipe)
            pickle.dump((*told, main, setup), pipe)

    def fill(self, task: BatchTask, chunks: Sequence[range]) -> None:
        """Send the orders; where the workers are no more, the task fails."""
        for other in self._sent.copy().values():
            other.plan[:_STOP].view(np.int64)[0] = other.task.stop  # of passes that were let go
        memory = [
            [(self._memory.address(s.rows), s.rows.shape, s.rows.dtype.str) for s in views]
            for views in task.slots
        ]
        content = pickle.dumps((memory, task.indices, task.params), 5)
        plan = self._plan(len(content))
        plan[:_STOP].view(np.int64)[0] = sys.maxsize
        plan[_STOP : _STOP + len(content)] = np.frombuffer(content, np.uint8)
        at, number = self._memory.address(plan), next(self._numbers)
        self._sent[number] = _Sent(task, plan)
        with suppress(OSError, ValueError):  # nobody there to read: the listener hears of it
            for rows in chunks:
                order = _ORDER.pack(number, at, len(content), rows.start, rows.stop)
                self._orders.write(order)
        if self.ended:
            self._fail()

    def stop(self) -> None:
        """End the processes and wait for them; what is with them fails."""
        if self.pid != os.getpid():
            return  # a forked child: they are its parent's
        self._stopping = True
        self.server.terminate()
        if threading.current_thread() is not self._listener:
            self._listener.join(_PATIENCE)
            self.server.kill()  # where it does not listen; its children die with it
            self._listener.join()

    def _plan(self, size: int) -> NDArray[np.uint8]:
        """Return memory for a plan of `size` bytes."""
        while self._plans:
            plan = self._plans.pop()
            if len(plan) >= _STOP + size:
                return plan
        return self._memory.allocate(2 * (_STOP + size))

    def _listen(self) -> None:
        """Hear the answers until all processes are gone (a thread)."""
        try:
            while message := self._answers.recv(2 * _MOST):
                self._hear(message)
        except OSError as ex:
            self._error = H5FeedError(f"the worker processes cannot be heard: {ex.strerror}")
            self.server.kill()
        code = self.server.wait()
        if self._error is None:
            how = "closed" if self._stopping else exit_reason(code)
            self._error = H5FeedError(f"the process of the loader's workers died ({how})")
        self._orders.close()
        self._answers.close()
        self.ended = True
        self._fail()

    def _fail(self) -> None:
        """Let what is with the workers fail; the next pass may have new ones."""
        assert self._error is not None
        while self._sent:
            with suppress(KeyError):  # another thread does the same
                _, sent = self._sent.popitem()
                self.told = True
                # a copy: what is raised holds all who passed it on, and this lives on
                sent.task.fail(_copied(self._error))

    def _hear(self, message: bytes) -> None:
        damage: dict[int, Damage] = {}
        error: BaseException | None = None
        if len(message) == _ANSWER.size:
            number, row = _ANSWER.unpack(message)
        else:
            number, row, damage, error, cause = pickle.loads(message)
            if error is not None:
                error.__cause__ = cause
        if number < 0:  # of the server itself
            self._error = error if isinstance(error, H5FeedError) else _explained(error)
            return
        sent = self._sent[number]
        last = sent.task.filled(row, damage, error)
        if last:
            del self._sent[number]
            self._plans.append(sent.plan)
            self._threads.submit(sent.task.finish)
        elif error is not None:
            sent.plan[:_STOP].view(np.int64)[0] = sent.task.stop


def _copied(error: H5FeedError) -> H5FeedError:
    made = copy.copy(error)
    made.__cause__ = error.__cause__
    return made


def _explained(error: BaseException | None) -> H5FeedError:
    made = H5FeedError(f"the worker processes could not start: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


# --- in the server and its workers --------------------------------------------------------------


class WorkerTraceback(Exception):
    """Where in a worker process an error was raised, as the cause of that error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def serve() -> None:
    """Start the workers and see to them until the loader or one of them is gone (a process)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the loader's to handle
    try:
        count, each, orders, answers, file, parent, main, setup = pickle.load(sys.stdin.buffer)
    except EOFError:
        return
    sys.stdin.close()
    pipe = socket.socket(fileno=answers)
    try:
        work = _prepared(main, setup, file)
    except BaseException as ex:
        _answer(pipe, -1, 0, {}, ex)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    gc.collect()
    gc.freeze()  # or the collector would touch, and so copy, what the workers share
    server = os.getpid()
    children: set[int] = set()
    try:
        for begun in range(0, count, each):
            if (child := os.fork()) == 0:
                _run(work, orders, pipe, server, threads=min(each, count - begun))
            children.add(child)
        os.close(orders)
        _look_after(children, pipe, parent)
    except OSError as ex:
        error = H5FeedError(
            f"cannot start {count} worker processes: {ex.strerror}; give fewer num_workers, or "
            'use engine="thread"'
        )
        _answer(pipe, -1, 0, {}, error)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:  # or they would be zombies, where the first process is not an init
            os.waitpid(child, 0)


class _Work(NamedTuple):
    fields: tuple[Field, ...]
    on_error: OnError
    memory: mmap.mmap


def _prepared(main: dict[str, Any] | None, setup: bytes, file: int) -> _Work:
    global _importing_main
    cv2.setNumThreads(1)
    if main is not None:
        _importing_main = True
        spawn.prepare(main)
        _importing_main = False
    made: WorkerSetup = pickle.loads(setup)
    return _Work(made.fields(), made.on_error, mmap.mmap(file, 0))


def _look_after(children: set[int], pipe: socket.socket, parent: int) -> None:
    """Wait until a worker dies, which is told, or all have ended, or the loader wants no more."""
    while children and os.getppid() == parent:
        heard = signal.sigtimedwait(_HEARD, _TICK)
        if heard is not None and heard.si_signo == signal.SIGTERM:
            return
        while children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                break
            children.discard(child)
            code = os.waitstatus_to_exitcode(status)
            if code != 0:
                error = H5FeedError(f"a worker process of the loader died ({exit_reason(code)})")
                _answer(pipe, -1, 0, {}, error)
                return


def _run(work: _Work, orders: int, pipe: socket.socket, server: int, *, threads: int) -> None:
    """Be so many workers until the loader closes the pipe; never returns."""
    try:
        die_with(server)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        for _ in range(threads - 1):
            threading.Thread(
                target=_fill_rows_until_closed, args=(work, orders, pipe), daemon=True
            ).start()
        _fill_rows_until_closed(work, orders, pipe)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _fill_rows_until_closed(work: _Work, orders: int, pipe: socket.socket) -> None:
    """Be a worker; the process ends with the first of its threads."""
    code = 1
    try:
        _serve_orders(work, orders, pipe)
        code = 0
    except (BrokenPipeError, ConnectionError):
        code = 0  # the loader is gone
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve_orders(work: _Work, orders: int, pipe: socket.socket) -> None:
    current = -1
    while order := os.read(orders, _ORDER.size):
        number, at, size, start, stop = _ORDER.unpack(order)
        if number != current:
            limit = np.frombuffer(work.memory, np.int64, 1, at)
            content = memoryview(work.memory)[at + _STOP : at + _STOP + size]
            places, indices, params = pickle.loads(content)
            memory = [[_rows(work.memory, *place) for place in views] for views in places]
            current = number
        try:
            damage = {}
            if start < limit[0]:
                rows = range(start, stop)
                damage = fill_rows(work.fields, memory, indices, params, rows, work.on_error)
        except BaseException as ex:
            _answer(pipe, number, start, {}, ex)
        else:
            _answer(pipe, number, start, damage)


def _rows(memory: mmap.mmap, at: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    rows: NDArray[Any] = np.ndarray(shape, dtype, memory, at)
    return rows


def _answer(
    pipe: socket.socket,
    number: int,
    row: int,
    damage: dict[int, Damage],
    error: BaseException | None = None,
) -> None:
    if error is None and not damage:
        pipe.send(_ANSWER.pack(number, row))
        return
    # Of damaged rows only the first of a batch is ever told about.
    told = {k: found if k == 0 else Damage(found.field, None) for k, found in damage.items()}
    cause: BaseException | None = None
    if error is not None:
        known = isinstance(error, H5FeedError)
        cause = error.__cause__ if known else WorkerTraceback(traceback.format_exc())
    said = " ".join(f"{type(error).__name__}: {error}".split())[:2000]
    for content in ((told, error, cause), (told, error, None), ({}, H5FeedError(said), None)):
        with suppress(Exception):  # what an error holds may not be for others
            data = pickle.dumps((number, row, *content))
            pickle.loads(data)
            if len(data) <= _MOST:
                pipe.send(data)
                return
