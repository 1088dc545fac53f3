"""A few threads that take jobs from a queue, and end once their loader is gone."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from h5feed.feed.iterator import BatchTask

__all__ = [
    "WorkerPool",
]

Job = Callable[[], None]
Jobs = SimpleQueue[Job | None]
_JOBS = 2  # per thread and batch: enough to share the work evenly, few enough to cost nothing


class WorkerPool:
    """Threads that run jobs in the order submitted. Jobs must not raise.

    A thread knows the queue and nothing else, so the pool and its owner die as soon as they are
    unused; then, or when the interpreter exits, the threads end after their present job.
    After a fork the child's pool starts again.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._pid = -1
        self._jobs: Jobs = SimpleQueue()
        self._stop: Job | None = None

    def submit(self, job: Job) -> None:
        """Hand a job over; the first one starts the threads."""
        if self._pid != os.getpid():
            self._start()
        self._jobs.put(job)

    def chunk(self, count: int, prefetch: int) -> int:
        """Return the rows of a job, which costs 10 µs: two jobs for each thread and batch."""
        return -(-count // (_JOBS * self._threads))

    def fill(self, task: BatchTask, chunks: Sequence[range]) -> None:
        """Fill these rows of a batch, a job each; the last one finishes it."""
        for rows in chunks:
            self.submit(partial(task.fill, rows))

    def close(self) -> None:
        """End the threads and wait for them; the next `submit` starts new ones."""
        if self._stop is not None and self._pid == os.getpid():
            self._stop()
        self._pid = -1

    def _start(self) -> None:
        with self._lock:
            if self._pid == os.getpid():
                return
            self._jobs = SimpleQueue()
            ready = threading.Barrier(self._threads + 1)
            workers = [
                threading.Thread(
                    target=_work, args=(self._jobs, ready), name=f"h5feed-{n}", daemon=True
                )
                for n in range(self._threads)
            ]
            for worker in workers:
                worker.start()
            ready.wait()
            # set_num_threads also sets what threads to come begin with: that is the caller's.
            torch.set_num_threads(torch.get_num_threads())
            self._stop = weakref.finalize(self, _stop, self._jobs, workers, os.getpid())
            self._pid = os.getpid()


def _work(jobs: Jobs, ready: threading.Barrier) -> None:
    torch.get_num_threads()  # or torch would set this thread up at its first use, undoing the next
    torch.set_num_threads(1)  # of this thread: the pool is the parallelism
    ready.wait()
    while (job := jobs.get()) is not None:
        job()
        del job  # what it holds must not live until the next one comes


def _stop(jobs: Jobs, workers: list[threading.Thread], pid: int) -> None:
    if pid != os.getpid():
        return  # in a forked child the threads never were
    for _ in workers:
        jobs.put(None)
    if threading.current_thread() in workers:
        return  # a job held the pool last: there are no more to come
    for worker in workers:
        worker.join()
    with suppress(Empty):  # what the last jobs submitted: somebody may be waiting for it
        while True:
            if job := jobs.get_nowait():
                job()
