"""What the hardware allows: the bare work of a loader with nothing around it.

`CropLoop` crops, resizes and flips stored images in a thread pool into a few buffers used again and
again, JPEGs decoded whole first; `RegionDecodeLoop` decodes of a JPEG only what its crop needs, as
H5Loader does; `CopyLoop` only copies whole images. These are subjects, so that they take their
turns beside the loaders. `disk_rate` reads a file that is not cached; `python_seconds` is what
remains of H5Loader when the kernels take no time: only one thread at a time can do that.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg
import torch

from h5feed import H5Dataset, H5Loader
from h5feed.augment import Op, Pipeline, RandomResizedCrop
from h5feed.bench import system
from h5feed.bench.subjects import Box
from h5feed.feed.files import PackedFiles
from h5feed.feed.image import JpegItems
from h5feed.feed.random import SeededDraws
from h5feed.feed.sampling import Drawing
from h5feed.jpeg import decode_jpeg

__all__ = ["CopyLoop", "CropLoop", "RegionDecodeLoop", "crop_boxes", "disk_rate", "python_seconds"]

UInt8 = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]
_DRAWN = 4096  # crops drawn beforehand and used in turn: drawing is not part of the ceiling
_BLOCK = 4 << 20
_BUFFERS = 4  # enough that no thread waits for the caller to wake up on a busy machine


def _crop_rgb(image: UInt8, box: Box, out: UInt8) -> None:
    top, left, height, width = box
    part = image[top : top + height, left : left + width]
    cv2.resize(part, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)


def _crop_nv12(image: UInt8, box: Box, out: UInt8) -> None:
    """Resize both planes and convert once, at the output's size."""
    rows = image.shape[0] * 2 // 3
    top, left, height, width = (value & ~1 for value in box)
    height, width = max(height, 2), max(width, 2)
    size = out.shape[0] & ~1
    luma = image[top : top + height, left : left + width]
    chroma = image[rows:].reshape(rows // 2, -1, 2)
    chroma = chroma[top // 2 : (top + height) // 2, left // 2 : (left + width) // 2]
    y = cv2.resize(luma, (size, size))
    uv = cv2.resize(chroma, (size // 2, size // 2))
    cv2.cvtColorTwoPlane(y, uv, cv2.COLOR_YUV2RGB_NV12, dst=out[:size, :size])


def _filled(buffer: UInt8, jobs: list[Future[None]]) -> UInt8:
    """Return the buffer once it is full; raise what went wrong in a thread."""
    for job in jobs:
        job.result()
    return buffer


def crop_boxes(files: PackedFiles, side: int, items: Indices) -> list[Box]:
    """Return top, left, height and width of what RandomResizedCrop(side) reads of `items`.

    As H5Loader draws them: in the proportions of the source, so of stretched images taller than
    they are wide or the other way round, which is another work than squares are.
    """
    pipeline = Pipeline([RandomResizedCrop(side)])
    pipeline.bind(None)
    params = Drawing(files, pipeline)(SeededDraws(0, 0, np.arange(len(items))), items)
    return [(y, x, h, w) for y, x, h, w in pipeline.source_rows(params).tolist()]


class _Loop:
    """Fills a few buffers in turn with images in random order, in a pool of threads."""

    dtype = "uint8"
    layout = "NHWC"
    note = ""

    def __init__(self, params: Mapping[str, Any]) -> None:
        cv2.setNumThreads(0)
        self.files = [params["file"]]
        self._packed = PackedFiles(self.files)
        self._encoding = self._packed.specs["images"].encoding
        self._threads = max(params["workers"], 1)
        self._pool = ThreadPoolExecutor(self._threads)
        self._rng = np.random.default_rng(0)
        self._buffers = [self._new_buffer(params) for _ in range(_BUFFERS)]

    def _new_buffer(self, params: Mapping[str, Any]) -> UInt8:
        raise NotImplementedError

    def _fill(self, indices: Indices, out: UInt8) -> None:
        raise NotImplementedError

    def _start(self, indices: Indices, buffer: UInt8) -> list[Future[None]]:
        """Begin to fill `buffer`, in four parts per thread: one that is interrupted costs less."""
        starts = np.linspace(0, len(indices), 4 * self._threads + 1).astype(int).tolist()
        return [
            self._pool.submit(self._fill, indices[a:b], buffer[a:b]) for a, b in pairwise(starts)
        ]

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield full buffers; while one is looked at, the others are filled."""
        order = self._rng.permutation(len(self._packed))
        size = len(self._buffers[0])
        batches = [order[first : first + size] for first in range(0, len(order), size)]
        filling: deque[tuple[UInt8, list[Future[None]]]] = deque()
        try:
            for number, indices in enumerate(batches):
                buffer = self._buffers[number % _BUFFERS][: len(indices)]
                filling.append((buffer, self._start(indices, buffer)))
                if len(filling) == _BUFFERS - 1:  # the last one is in the caller's hands
                    yield _filled(*filling.popleft()), None
            while filling:
                yield _filled(*filling.popleft()), None
        finally:
            for _, jobs in filling:
                wait(jobs)

    def synchronize(self) -> None:
        """The buffer is full when it is handed out."""

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class CropLoop(_Loop):
    """Crop, resize (cv2, bilinear without antialiasing) and flip; JPEGs are decoded whole first."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__(params)
        items = np.arange(max(len(self._packed), _DRAWN)) % len(self._packed)
        self._boxes = crop_boxes(self._packed, params["crop"], items)
        self._crop: Callable[[UInt8, Box, UInt8], None] = (
            _crop_nv12 if self._encoding == "yuv420" else _crop_rgb
        )
        self._memory = threading.local()

    def _new_buffer(self, params: Mapping[str, Any]) -> UInt8:
        return np.zeros((params["batch_size"], params["crop"], params["crop"], 3), np.uint8)

    def _fill(self, indices: Indices, out: UInt8) -> None:
        count = len(self._packed)
        turns = len(self._boxes) // count
        boxes = [
            self._boxes[row % turns * count + index] for row, index in enumerate(indices.tolist())
        ]
        for row, (image, box) in enumerate(self._decoded(indices, boxes)):
            self._crop(image, box, out[row])
            if row % 2:
                cv2.flip(out[row], 1, out[row])

    def _decoded(self, indices: Indices, boxes: Sequence[Box]) -> Iterator[tuple[UInt8, Box]]:
        """Yield each image's pixels, or those around its box, and the box among them."""
        for index, box in zip(indices.tolist(), boxes, strict=True):
            stored = self._packed.item("images", index)
            yield self._decode(index, stored), box

    def _decode(self, index: int, data: Any) -> UInt8:
        if self._encoding not in ("jpeg", "original"):
            stored: UInt8 = data
            return stored
        if self._encoding == "original":
            return decode_jpeg(data)  # may have to be turned: its size is not known before
        height, width = self._packed.row("shapes", index).tolist()
        return decode_jpeg(data, self._scratch(height * width * 3).reshape(height, width, 3))

    def _scratch(self, size: int) -> UInt8:
        """Memory of this thread, used again: fresh memory costs half as much as the decoding."""
        memory: UInt8 | None = getattr(self._memory, "pixels", None)
        if memory is None or len(memory) < size:
            memory = self._memory.pixels = np.empty(size, np.uint8)
        return memory[:size]


class RegionDecodeLoop(CropLoop):
    """The same, decoding of each JPEG no more than the segments that its crop touches."""

    note = "decodes what the crop needs"

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__(params)
        self._items = JpegItems(self._packed, "images")

    def _decoded(self, indices: Indices, boxes: Sequence[Box]) -> Iterator[tuple[UInt8, Box]]:
        parts = self._items.decode_regions(indices, np.array(boxes), self._scratch)
        for (image, y, x), (top, left, height, width) in zip(parts, boxes, strict=True):
            yield image, (top - y, left - x, height, width)


class CopyLoop(_Loop):
    """Copy whole stored images: a loader's work when crops are made elsewhere (a memcpy)."""

    note = "whole stored images"

    def _new_buffer(self, params: Mapping[str, Any]) -> UInt8:
        shape = self._packed.item("images", 0).shape
        return np.zeros((params["batch_size"], *shape), np.uint8)

    def _fill(self, indices: Indices, out: UInt8) -> None:
        for row, index in enumerate(indices.tolist()):
            out[row] = self._packed.item("images", index)


def _read_part(file: Path, start: int, stop: int, deadline: float) -> int:
    """Read [start, stop) of a file until the deadline; return the bytes read."""
    buffer, done = bytearray(_BLOCK), start
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while done < stop and time.perf_counter() < deadline:
            count = stream.readinto(buffer)
            if not count:
                break
            done += count
    return done - start


def disk_rate(
    file: Path, *, seconds: float = 1.0, threads: int = 8, tries: int = 3
) -> float | None:
    """Evict `file` and read it from the disk, each thread its own part; return bytes per second.

    The best of `tries`: other work of the disk is not part of a ceiling. None where the page cache
    cannot be emptied. Nothing may have the file mapped.
    """
    return max(_tried_rates(file, seconds, threads, tries), default=None)


def _tried_rates(file: Path, seconds: float, threads: int, tries: int) -> Iterator[float]:
    size = os.stat(file).st_size
    ends = [size * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        while tries > 0 and system.evict([file]):
            tries -= 1
            begin = time.perf_counter()
            until = begin + seconds
            jobs = [pool.submit(_read_part, file, a, b, until) for a, b in pairwise(ends)]
            yield sum(job.result() for job in jobs) / (time.perf_counter() - begin)


def python_seconds(
    file: Path, ops: Sequence[Op], batch_size: int, *, seconds: float = 0.5
) -> float:
    """Return CPU seconds that H5Loader takes for an image with kernels that take next to no time.

    Python's lock is held for that long, and no more: threads make at most 1 / python_seconds
    images a second, however many cores there are. cv2 is called for one pixel of each image, so
    that its reading of arguments counts; JPEGs are not decoded, and what numpy copies is counted.
    For a process in which nothing else runs.
    """
    dataset = H5Dataset(file)
    options: dict[str, Any] = {"augment": ops, "shuffle": True, "drop_last": True}
    with H5Loader(dataset, min(batch_size, len(dataset)), num_workers=1, **options) as loader:
        _images_in(loader)  # memory is touched for the first time, headers are read
        with _quick_kernels():
            count, cpu, began = 0, time.process_time(), time.perf_counter()
            while count == 0 or time.perf_counter() - began < seconds:
                count += _images_in(loader)
            return (time.process_time() - cpu) / count


def _images_in(loader: H5Loader) -> int:
    return sum(len(images) for images, _ in loader)


@contextmanager
def _quick_kernels() -> Iterator[None]:
    """Let kernels do one pixel of their work, whatever their caller wanted. The pixels are wrong.

    In all of the process.
    """
    resize, flip, convert = cv2.resize, cv2.flip, cv2.cvtColorTwoPlane

    def resize_pixel(src: UInt8, size: tuple[int, int], dst: Any = None, *_: Any, **__: Any) -> Any:
        if dst is None:
            dst = np.empty((size[1], size[0], *src.shape[2:]), np.uint8)
        resize(src[:1, :1], (1, 1), dst[:1, :1])
        return dst

    def flip_pixel(src: UInt8, code: int, dst: UInt8) -> UInt8:
        flip(src[:1, :1], code, dst[:1, :1])
        return dst

    def convert_pixels(luma: UInt8, chroma: UInt8, code: int, dst: UInt8) -> UInt8:
        convert(luma[:2, :2], chroma[:1, :1], code, dst[:2, :2])
        return dst

    def interpolate_nothing(batch: torch.Tensor, size: tuple[int, int], **_: Any) -> torch.Tensor:
        made = batch.new_empty((len(batch), *size, batch.shape[1]))
        return made.permute(0, 3, 1, 2)

    quick = (
        (cv2, "resize", resize_pixel),
        (cv2, "flip", flip_pixel),
        (cv2, "cvtColorTwoPlane", convert_pixels),
        (torch.nn.functional, "interpolate", interpolate_nothing),
        (simplejpeg, "decode_jpeg", _decode_nothing),
    )
    whole = [(module, name, getattr(module, name)) for module, name, _ in quick]
    try:
        for module, name, kernel in quick:
            setattr(module, name, kernel)
        yield
    finally:
        for module, name, kernel in whole:
            setattr(module, name, kernel)


def _decode_nothing(data: Any, *_: Any, buffer: Any = None, **__: Any) -> UInt8:
    """Return pixels of the size that a JPEG's frame header says, whatever `buffer` holds."""
    start = bytes(data[:1024])
    frame = start.find(b"\xff\xc0")  # of a baseline file, behind at most a few tables
    if frame < 0:
        height, width, *_kinds = simplejpeg.decode_jpeg_header(bytes(data))
    else:
        height = int.from_bytes(start[frame + 5 : frame + 7], "big")
        width = int.from_bytes(start[frame + 7 : frame + 9], "big")
    size = height * width * 3
    flat = np.empty(size, np.uint8) if buffer is None else np.asarray(buffer).reshape(-1)[:size]
    return flat.reshape(height, width, 3)
