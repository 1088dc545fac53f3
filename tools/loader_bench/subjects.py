"""What is measured in turns, in this process: loaders, and the bare work that bounds each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from h5feed import H5Dataset, H5Loader
from h5feed.augment import Op, Pipeline, RandomHorizontalFlip, RandomResizedCrop
from h5feed.feed.random import SeededDraws
from h5feed.jpeg import decode_jpeg, decode_jpeg_region

CROP = (RandomResizedCrop(224), RandomHorizontalFlip())
Window = Callable[[float], tuple[float, float]]
"""Runs for about so many seconds; images per second, and CPU seconds per image."""
Epoch = Callable[[], int]
"""Goes once through everything and returns how many images that were."""


def timed(epoch: Epoch) -> Window:
    """Return the window of an epoch repeated."""

    def window(seconds: float) -> tuple[float, float]:
        count, cpu, began = 0, time.process_time(), time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            count += epoch()
        return count / elapsed, (time.process_time() - cpu) / count

    return window


def loader(path: Path, batch_size: int, threads: int, **options: Any) -> Window:
    """Return H5Loader's window: whole epochs, every batch let go of at once."""
    made = H5Loader(
        H5Dataset(path), batch_size, shuffle=True, num_workers=threads, drop_last=True, **options
    )

    return timed(lambda: sum(len(images) for images, _ in made))


def bare(
    path: Path, batch_size: int, threads: int, ops: Sequence[Op] = CROP, *, region: bool = False
) -> Window:
    """Return the window of nothing but cv2 (and simplejpeg) in a pool, into one buffer.

    The crops are drawn beforehand, by the same ops. JPEGs are decoded whole, or, with `region`,
    as far as the crop needs.
    """
    files = H5Dataset(path).files
    spec, count = files.specs["images"], len(files)
    pipeline = Pipeline(ops)
    size = pipeline.bind((spec.height, spec.width))
    order = np.random.default_rng(0).permutation(count)
    params = pipeline.draw(
        SeededDraws(0, 0, order), files.stored_shapes[order], files.source_shapes[order]
    )
    rows, items = params.views[0][0].tolist(), order.tolist()
    view = _view(files, region)
    out = np.zeros((batch_size, *size, 3), np.uint8)
    share = -(-batch_size // (2 * threads))
    shape = size[::-1]

    def fill(begin: int, start: int) -> None:
        for k in range(start, min(start + share, batch_size)):
            y, x, h, w, *_, flip, _ = rows[begin + k]
            row = out[k]
            image, top, left = view(items[begin + k], (y, x, h, w))
            cv2.resize(image[y - top : y - top + h, x - left : x - left + w], shape, row)
            if flip:
                cv2.flip(row, 1, row)

    pool = ThreadPoolExecutor(threads)

    return timed(lambda: _batches(pool, fill, count, batch_size, share))


def _view(files: Any, region: bool) -> Callable[[int, Any], tuple[Any, int, int]]:
    """Return what gives an item's files around a box, and where they begin in the image.

    JPEGs are decoded into each thread's own memory, used again, as H5Loader does: fresh memory
    would cost half as much as the decoding, and the loop be no ceiling.
    """
    if files.specs["images"].is_fixed:
        whole = files.whole("images")
        return lambda index, _: (whole[index], 0, 0)
    size, memory = int(files.stored_shapes.prod(1).max()) * 3, threading.local()

    def decoded(index: int, box: Any) -> tuple[Any, int, int]:
        scratch = getattr(memory, "files", None)
        if scratch is None:
            scratch = memory.pixels = np.empty(size, np.uint8)
        data = files.item("images", index)
        if region:
            return decode_jpeg_region(data, box, scratch)
        height, width = files.stored_shapes[index].tolist()
        out = scratch[: height * width * 3].reshape(height, width, 3)
        return decode_jpeg(data, out), 0, 0

    return decoded


def index_select(path: Path, batch_size: int, threads: int) -> Window:
    """Return the window of torch.index_select into one buffer, a share of it per thread."""
    images = torch.from_numpy(H5Dataset(path).files.writable_whole("images"))
    out = torch.zeros((batch_size, *images.shape[1:]), dtype=torch.uint8)
    order = torch.randperm(len(images))
    share = -(-batch_size // (2 * threads))

    def fill(begin: int, start: int) -> None:
        torch.set_num_threads(1)
        rows = out[start : start + share]
        torch.index_select(images, 0, order[begin + start : begin + start + len(rows)], out=rows)

    pool = ThreadPoolExecutor(threads)

    return timed(lambda: _batches(pool, fill, len(images), batch_size, share))


def _batches(
    pool: ThreadPoolExecutor,
    fill: Callable[[int, int], None],
    count: int,
    batch_size: int,
    share: int,
) -> int:
    """Fill whole batches, a share of each per job."""
    begins = range(0, count - batch_size + 1, batch_size)
    for begin in begins:
        starts = range(0, batch_size, share)
        list(pool.map(fill, [begin] * len(starts), starts))
    return len(begins) * batch_size
