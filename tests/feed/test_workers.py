import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import torch

from h5feed.feed.workers import WorkerPool
from loaders import loader_threads, wait_until


def test_jobs_run_in_order_on_one_thread():
    pool, done = WorkerPool(1), []
    for k in range(20):
        pool.submit(lambda k=k: done.append(k))
    pool.close()
    assert done == list(range(20))


def test_threads_are_as_many_as_asked_for_and_end_with_close():
    before = loader_threads()
    pool = WorkerPool(3)
    assert loader_threads() <= before, "no thread before the first job"
    together = threading.Barrier(4)
    for _ in range(3):
        pool.submit(together.wait)
    together.wait(10)
    assert len(loader_threads() - before) == 3
    pool.close()
    assert loader_threads() <= before


def test_a_closed_pool_starts_again():
    pool, done = WorkerPool(1), threading.Event()
    pool.submit(lambda: None)
    pool.close()
    pool.close()
    pool.submit(done.set)
    assert done.wait(10)
    pool.close()


def test_close_waits_for_what_the_last_jobs_submit():
    pool, done = WorkerPool(2), []

    def first():
        time.sleep(0.05)
        pool.submit(lambda: done.append(1))

    pool.submit(first)
    pool.close()
    assert done == [1]


def test_letting_go_of_the_pool_ends_its_threads():
    before = loader_threads()
    pool = WorkerPool(2)
    pool.submit(lambda: None)
    watch = weakref.ref(pool)
    del pool
    assert watch() is None
    assert wait_until(lambda: loader_threads() <= before)


def test_a_job_that_holds_the_pool_may_be_the_last_to_do_so():
    before = loader_threads()
    pool = WorkerPool(2)
    go = threading.Event()
    pool.submit(lambda pool=pool: go.wait())
    del pool
    go.set()
    assert wait_until(lambda: gc.collect() is not None and loader_threads() <= before)


def test_a_thread_that_waits_holds_no_job():
    class Thing:
        pass

    pool, thing, done = WorkerPool(1), Thing(), threading.Event()
    watch = weakref.ref(thing)
    pool.submit(lambda thing=thing: done.set())
    del thing
    assert done.wait(10)
    assert wait_until(lambda: watch() is None)
    pool.close()


def test_a_callers_torch_threads_stay_as_they_were():
    counts, old = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pool = WorkerPool(2)
        pool.submit(lambda: counts.append(torch.get_num_threads()))
        pool.close()
        new = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        new.start()
        new.join()
        assert counts == [1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(old)


def test_a_forked_child_begins_anew():
    pool, done = WorkerPool(2), threading.Event()
    pool.submit(done.set)
    assert done.wait(10)
    pid = os.fork()
    if pid == 0:
        again = threading.Event()
        pool.submit(again.set)
        ok = again.wait(10)
        pool.close()
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pool.close()


def test_the_interpreter_ends_with_jobs_under_way():
    code = (
        "import time\n"
        "from h5feed.feed.workers import WorkerPool\n"
        "pool = WorkerPool(4)\n"
        "for _ in range(100): pool.submit(lambda: time.sleep(0.001))\n"
        "print('end', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout == b"end\n"
    assert done.stderr == b""
