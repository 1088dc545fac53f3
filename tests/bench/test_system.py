import multiprocessing
import os
import sys
import time

import numpy as np
import pytest

from h5feed.bench import system

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def _burn(seconds, stay):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    stay.wait()


@linux
def test_cpu_seconds_count_living_and_ended_children():
    stay = multiprocessing.Event()
    before = system.cpu_seconds()
    child = multiprocessing.Process(target=_burn, args=(0.3, stay))
    child.start()
    deadline = time.monotonic() + 30
    while system.cpu_seconds() - before < 0.3 and time.monotonic() < deadline:
        time.sleep(0.02)
    living = system.cpu_seconds() - before
    assert living >= 0.3
    assert child.pid in system.tree()
    stay.set()
    child.join()
    assert system.cpu_seconds() - before >= living
    assert child.pid not in system.tree()


@linux
def test_memory_peak_sees_what_was_freed():
    size = 64 << 20
    with system.MemoryPeak(every=0.01) as watch:
        before = system.memory().private
        held = np.ones(size, np.uint8)
        deadline = time.monotonic() + 60
        while watch.peak.private - before <= 0.8 * size and time.monotonic() < deadline:
            time.sleep(0.01)  # until the watching thread has had its turn
        del held
    assert watch.peak.private - before > 0.8 * size


@linux
def test_reading_from_disk_is_counted(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(os.urandom(8 << 20))
    system.evict([file])
    if system.resident_share([file]) != 0.0:
        pytest.skip("this file system keeps its pages")
    before = system.read_bytes()
    file.read_bytes()
    assert system.read_bytes() - before >= 8 << 20


def test_folder_is_taken_with_all_its_files(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("a/1", "a/2", "3"):
        (tmp_path / name).write_bytes(b"x")
    assert len(system.files_below([tmp_path])) == 3


@linux
def test_evicted_file_is_not_resident_and_a_read_one_is(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(os.urandom(1 << 20))
    file.read_bytes()
    assert system.resident_share([file]) == 1.0
    assert system.evict([file])
    assert system.resident_share([file]) < 0.01
