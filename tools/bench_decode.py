"""What decoding a part of a JPEG, or a smaller version of it, saves, and what it changes.

    python tools/bench_decode.py FILE.h5 ...

For each file packed with --store jpeg, and crops of several sizes: CPU time per image
on one thread to decode the whole image, only the part that the crop needs, and the smallest
version that libjpeg-turbo's scaled decoding (1/2, 1/4, 1/8) offers above the crop's size; and how
far the crop made of that version lies from the crop of the whole image (antialiased both).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg

from h5feed import H5Dataset
from h5feed.augment.cpu import crop_image
from h5feed.bench.ceilings import crop_boxes
from h5feed.bench.system import describe_machine, machine_facts
from h5feed.feed.image import JpegItems
from h5feed.jpeg import decode_jpeg, read_header
from harness import in_turns

SIDES = (224, 112, 64, 32)
ROUNDS = 5
Box = tuple[int, int, int, int]


def scaled(data: bytes, box: Box, side: int) -> np.ndarray:
    """Decode the whole image, as small as leaves the box at least `side` long each way."""
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    most = max(1, min(box[2], box[3]) // side)
    return simplejpeg.decode_jpeg(
        data, "RGB", min_height=-(-height // most), min_width=-(-width // most), min_factor=1
    )


def crop(image: np.ndarray, box: Box, of: tuple[int, int], side: int) -> np.ndarray:
    """Resize a box of an image of height and width `of` that is given smaller, antialiased."""
    down, across = image.shape[0] / of[0], image.shape[1] / of[1]
    y, x = round(box[0] * down), round(box[1] * across)
    h, w = max(1, round(box[2] * down)), max(1, round(box[3] * across))
    out = np.empty((side, side, 3), np.uint8)
    row = [0, 0, h, w, side, side, 0, 0, side, side, 0, 1]
    crop_image(row, image[y : y + h, x : x + w], out, (0.0,))
    return out


def microseconds(ways: dict[str, Callable[[], object]], count: int) -> dict[str, float]:
    """Return CPU time per image of each way to decode `count` images, the least of the rounds."""

    def timed(work: Callable[[], object]) -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began

    found = in_turns({name: partial(timed, work) for name, work in ways.items()}, ROUNDS)
    return {name: min(seconds) / count * 1e6 for name, seconds in found.items()}


def decode_parts(
    parts: JpegItems, items: np.ndarray, boxes: np.ndarray, scratch: np.ndarray
) -> int:
    """Decode the parts that H5Loader would, 64 at a time; return how many."""
    return sum(
        1
        for a in range(0, len(items), 64)
        for _ in parts.decode_regions(
            items[a : a + 64], boxes[a : a + 64], lambda size: scratch[:size]
        )
    )


def measure(path: Path, count: int) -> None:
    """Print the rows of one file."""
    files = H5Dataset(path).files
    spec = files.specs["images"]
    items = np.random.default_rng(0).permutation(len(files))[:count]
    data = {int(i): bytes(files.item("images", int(i))) for i in items}
    upright = np.array([i for i in items if read_header(data[int(i)]).orientation == 1])
    shapes = files.stored_shapes
    parts, scratch = (
        JpegItems(files, "images"),
        np.empty(int(shapes.max(axis=0).prod()) * 3, np.uint8),
    )

    def whole(content: bytes) -> None:
        height, width, *_ = simplejpeg.decode_jpeg_header(content)
        decode_jpeg(content, scratch[: height * width * 3].reshape(height, width, 3))

    print(f"\n{path.name}: store={spec.encoding}, {np.median(shapes, axis=0).astype(int)} pixels")
    print("RandomResizedCrop   whole us  part us  scaled us  scaled crop: max, mean off, PSNR")
    for side in SIDES:
        boxes = np.array(crop_boxes(files, side, upright))
        jobs = [(data[int(i)], box) for i, box in zip(upright, boxes.tolist(), strict=True)]
        times = microseconds(
            {
                "whole": lambda jobs=jobs: [whole(content) for content, _ in jobs],
                "part": partial(decode_parts, parts, upright, boxes, scratch),
                "scaled": lambda jobs=jobs, side=side: [scaled(*job, side) for job in jobs],
            },
            len(jobs),
        )
        off = np.array([distance(content, box, side) for content, box in jobs])
        worst, mean, square = off.max(axis=0)[0], *np.median(off[:, 1:], axis=0)
        psnr = 10 * np.log10(255**2 / max(square, 1e-9))
        print(
            f"{side:17} {times['whole']:10.0f} {times['part']:8.0f} {times['scaled']:10.0f}"
            f"{worst:15.0f}, {mean:.2f}, {psnr:.1f} dB"
        )


def distance(data: bytes, box: Box, side: int) -> tuple[float, float, float]:
    """Return the largest, mean and mean squared difference that scaled decoding makes to a crop."""
    full, small = decode_jpeg(data), scaled(data, box, side)
    of = full.shape[:2]
    off = crop(full, box, of, side).astype(float) - crop(small, box, of, side)
    return float(np.abs(off).max()), float(np.abs(off).mean()), float((off**2).mean())


def main() -> None:
    """Measure every file given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=300, help="images (%(default)s)")
    options = parser.parse_args()
    print(describe_machine(machine_facts(options.files[0])))
    for path in options.files:
        measure(path, options.count)


if __name__ == "__main__":
    main()
