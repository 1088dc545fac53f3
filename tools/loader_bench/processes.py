"""What takes a process of its own: FFCV, cold reads, a first batch, the cost of scheduling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from loader_bench.subjects import Window

HERE = Path(__file__).parent


def ffcv(
    python: str,
    source: Path,
    beton: Path,
    *,
    mode: str,
    longest: int,
    batch_size: int,
    workers: int,
    crop: int,
) -> Window:
    """Return FFCV's window; its process lives as long as this one."""
    numbers = [longest, batch_size, workers, crop]
    process = subprocess.Popen(
        [python, HERE / "ffcv_subject.py", source, beton, mode, *map(str, numbers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    asks, answers = process.stdin, process.stdout

    def window(seconds: float) -> tuple[float, float]:
        asks.write(f"{seconds}\n")
        asks.flush()
        rate, cpu = json.loads(answers.readline())
        return rate, cpu

    return window


def version(python: str, package: str) -> str:
    """Return the version of a package that another interpreter has."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def evict(path: Path) -> None:
    """Make a file cold. No process may have it mapped."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def run(code: str, *arguments: Any) -> Any:
    """Run Python code that prints one line of JSON, in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


COLD_LOADER = """
    import json, sys, time
    from h5feed import H5Dataset, H5Loader
    path, batch, threads, limit = sys.argv[1], *map(int, sys.argv[2:])
    ds = H5Dataset(path)
    began, count = time.perf_counter(), 0
    with H5Loader(ds, batch, shuffle=True, num_workers=threads, seed=1) as loader:
        for images, _ in loader:
            count += len(images)
            if count >= limit:
                break
        print(json.dumps(count / (time.perf_counter() - began)))
"""
"""H5Loader gathering whole images in random order: PATH BATCH THREADS IMAGES."""

COLD_PREAD = """
    import json, os, sys, time
    from concurrent.futures import ThreadPoolExecutor
    from h5feed.feed.order import FullShuffle
    from h5feed.store import read_index
    import numpy as np
    path, batch, threads, limit = sys.argv[1], *map(int, sys.argv[2:])
    index = read_index(path)
    extent = index.extents["images"]
    order = FullShuffle(len(index), 1, 0)(np.arange(limit))
    fd = os.open(path, os.O_RDONLY)
    size = extent.spec.item_bytes
    def read(part):
        buffer = [memoryview(bytearray(size))]
        for item in part:
            os.preadv(fd, buffer, extent.start + item * size)
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(read, [part.tolist() for part in np.array_split(order, 64 * threads)]))
        print(json.dumps(limit / (time.perf_counter() - began)))
"""
"""Bare pread of the same images in the same order: PATH BATCH THREADS IMAGES."""

FIRST_BATCH = """
    import json, sys, time
    from h5feed import H5Dataset, H5Loader
    from h5feed.augment import RandomHorizontalFlip, RandomResizedCrop
    began = time.perf_counter()
    ds = H5Dataset(sys.argv[1])
    opened = time.perf_counter() - began
    ops = (RandomResizedCrop(224), RandomHorizontalFlip())
    with H5Loader(ds, 256, shuffle=True, augment=ops, num_workers=2) as loader:
        next(iter(loader))
        print(json.dumps([time.perf_counter() - began, opened]))
"""

SCHEDULING = """
    import json, sys, time
    from h5feed import H5Dataset, H5Loader
    from h5feed.augment import RandomHorizontalFlip, RandomResizedCrop
    from h5feed.feed.rows import Augmented
    Augmented.fill = lambda *arguments: None  # the payload
    ops = (RandomResizedCrop(2), RandomHorizontalFlip())
    found = []
    for path in sys.argv[1:]:
        options = {"shuffle": True, "drop_last": True, "num_workers": 1}
        found.append(H5Loader(H5Dataset(path), 256, augment=ops, **options))
    times = [[] for _ in found]
    for turn in range(6):
        for loader, spent in zip(found, times):
            count, began = 0, time.process_time()
            while count < 2340:  # sixty epochs of ten thousand, or a part of one
                for _ in loader:
                    count += 1
                    if count == 2340:
                        break
            spent.append((time.process_time() - began) / count)
    print(json.dumps([min(spent) for spent in times]))
"""
"""CPU seconds per batch with nothing to fill, for each file: PATHS."""
