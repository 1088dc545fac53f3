"""How near packing comes to its bound: a bare pool that only reads, decodes and resizes.

    python tools/bench_pack.py PHOTOS [--repeat 4] [--ffcv /path/to/python]

Both use the same images, the same functions and as many processes, in turns; what is shown
are medians of `--rounds`. "pool + write" is the pool that also writes its pixels, each to its
place of one file: what is left of the difference is packing's own. "whole" is the time from
call to return, start-up and all; "steady" leaves the start-up out: (long run − short run) per
image. With --ffcv, an interpreter that has FFCV packs the same images with its DatasetWriter
(raw, longest side at most --size).

"pack, shards" makes a set of --shards shards. With --parts N, CPU seconds are compared as well:
of one job, of a set made by one, and of N jobs with --part, one after the other.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import torch

import h5feed.packing
from h5feed.packing.decode import decode_rgb
from h5feed.packing.options import PackOptions, field_specs
from h5feed.packing.resize import fit_image
from h5feed.packing.sources import open_source
from h5feed.store.layout import FieldSpec
from harness import ffcv_process, in_turns, link


def decode_and_resize(spec: FieldSpec, path: bytes) -> int:
    """Do what packing cannot do without."""
    pixels, _ = fit_image(decode_rgb(Path(os.fsdecode(path)).read_bytes()), spec)
    return len(pixels)


def decode_and_write(spec: FieldSpec, out: str, job: tuple[int, bytes]) -> int:
    """Do the same, and write the pixels to their place."""
    number, path = job
    pixels, _ = fit_image(decode_rgb(Path(os.fsdecode(path)).read_bytes()), spec)
    descriptor = os.open(out, os.O_WRONLY)
    try:
        return os.pwrite(descriptor, pixels.data, number * spec.item_bytes)
    finally:
        os.close(descriptor)


def single_thread() -> None:
    """Set a worker up as packing does."""
    torch.set_num_threads(1)
    cv2.setNumThreads(0)


def time_pool(source: Path, size: int, workers: int, *, write: bool = False) -> float:
    """Seconds of a bare pool over the images of `source`."""
    with tempfile.NamedTemporaryFile(dir=source.parent) as out:
        began = time.perf_counter()
        images = open_source(source)
        (spec,) = field_specs(PackOptions(), (size, size))
        jobs: list[Any] = [images.path(index) for index in range(len(images))]
        work: Callable[[Any], int] = partial(decode_and_resize, spec)
        if write:
            work, jobs = partial(decode_and_write, spec, out.name), list(enumerate(jobs))
        with multiprocessing.get_context("fork").Pool(workers, single_thread) as pool:
            for _ in pool.imap_unordered(work, jobs, chunksize=16):
                pass
        return time.perf_counter() - began


def time_pack(source: Path, size: int, workers: int, shards: int | None = None) -> float:
    """Seconds of packing the images of `source`, into one file or so many shards."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        began = time.perf_counter()
        out = Path(folder, "out.h5" if shards is None else "out")
        h5feed.packing.pack(source, out, size=size, num_workers=workers, shards=shards)
        return time.perf_counter() - began


def cpu_of_parts(source: Path, size: int, shards: int | None, parts: int) -> float:
    """CPU seconds of packing by so many jobs, one after the other; their imports not counted."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        began = _cpu_seconds()
        out = Path(folder, "out.h5" if shards is None else "out")
        for part in range(1, parts + 1):
            given = None if parts == 1 else f"{part}/{parts}"
            h5feed.packing.pack(source, out, size=size, num_workers=1, shards=shards, part=given)
        return _cpu_seconds() - began


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def time_ffcv(python: str, source: Path, size: int, workers: int) -> float:
    """Seconds of FFCV's DatasetWriter over the images of `source`, its imports not counted."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder, ffcv_process(python) as remote:
        params = {"source": str(source), "out": folder, "variant": "raw", "size": size}
        told = remote.ask({"do": "convert", "params": params | {"workers": workers}}, 3600)
    seconds: float = told["writing_seconds"]
    return seconds


def repeated(photos: Path, scratch: Path, times: int) -> Path:
    """Make a source that has the class folders `times` over, without copying them."""
    source = scratch / f"times{times}"
    for folder in sorted(entry for entry in photos.resolve().iterdir() if entry.is_dir()):
        for number in range(times):
            link(folder, source / f"{folder.name}-{number}")
    return source


def main() -> None:
    """Run all subjects in turns."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("photos", type=Path, help="a folder of class folders")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--parts", type=int, help="compare the CPU time of so many jobs as well")
    parser.add_argument("--ffcv", help="a python that has FFCV")
    parser.add_argument(
        "--folder", type=Path, help="where to write (default: the temporary folder)"
    )
    args = parser.parse_args()
    subjects: dict[str, Callable[[Path], float]] = {
        "bare pool": lambda source: time_pool(source, args.size, args.workers),
        "pool + write": lambda s: time_pool(s, args.size, args.workers, write=True),
        "pack": lambda source: time_pack(source, args.size, args.workers),
        "pack, shards": lambda source: time_pack(source, args.size, args.workers, args.shards),
    }
    if args.ffcv:
        subjects["ffcv"] = lambda source: time_ffcv(args.ffcv, source, args.size, args.workers)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        short = repeated(args.photos, Path(folder), 1)
        long = repeated(args.photos, Path(folder), args.repeat)
        count = len(open_source(short))
        both = {
            name: partial(lambda work: (work(short), work(long)), work)
            for name, work in subjects.items()
        }
        rounds = in_turns(both, args.rounds)
        parts = {
            "one file": partial(cpu_of_parts, long, args.size, None, 1),
            "shards": partial(cpu_of_parts, long, args.size, args.shards, 1),
            f"{args.parts} parts": partial(cpu_of_parts, long, args.size, args.shards, args.parts),
        }
        jobs = in_turns(parts, args.rounds) if args.parts else {}
    report(rounds, count, args.repeat)
    for name, seconds in jobs.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, jobs["one file"], strict=True))
        print(f"{name:14}{statistics.median(seconds):8.1f} CPU s{ratio:8.3f} of one file's")


def report(rounds: dict[str, list[tuple[float, float]]], count: int, repeat: int) -> None:
    """Print img/s, and the median of each round's share of the bare pool."""
    print(f"{count} and {count * repeat} images, {len(rounds['pack'])} rounds, medians, img/s")
    print(f"{'':14}{'whole':>8}{'':>7}{'steady':>10}")
    bound = rounds["bare pool"]
    for name, seconds in rounds.items():
        whole = statistics.median(count * repeat / long for _, long in seconds)
        steady = statistics.median(count * (repeat - 1) / (long - short) for short, long in seconds)
        pairs = list(zip(seconds, bound, strict=True))
        share = statistics.median(b[1] / s[1] for s, b in pairs)
        steady_share = statistics.median((b[1] - b[0]) / (s[1] - s[0]) for s, b in pairs)
        print(f"{name:14}{whole:8.0f}{share:7.2f}{steady:10.0f}{steady_share:7.2f}")


if __name__ == "__main__":
    sys.exit(main())
