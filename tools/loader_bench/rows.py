"""What bench_loader.py compares, and what opens each side."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from h5feed.augment import RandomCrop, RandomHorizontalFlip
from loader_bench import files, processes, subjects
from loader_bench.results import Comparison
from loader_bench.subjects import Window

__all__ = ["BATCH", "CIFAR_BATCH", "COLD", "chosen", "makers"]

BATCH, CIFAR_BATCH = 256, 512
_CIFAR = (RandomCrop(32, padding=4), RandomHorizontalFlip())
_CROP = "RandomResizedCrop(224) + flip"

ROWS = [
    Comparison(
        what="raw crop / bare loop",
        title=f"raw 256 px, {_CROP}",
        beside="the bare kernels in a thread pool",
        ours="raw",
        other="bare raw",
        least=0.95,
        pixels=224**2,
    ),
    Comparison(
        what="raw crop / FFCV raw",
        title="the same",
        beside="FFCV, raw",
        ours="raw",
        other="ffcv raw",
        least=3.2,
        pixels=224**2,
    ),
    Comparison(
        what="jpeg crop / bare loop",
        title=f"JPEG 256 px, {_CROP}",
        beside="whole decoding and the bare kernels",
        ours="jpeg",
        other="bare jpeg",
        least=1,
        pixels=224**2,
    ),
    Comparison(
        what="jpeg crop / region loop",
        title="the same",
        beside="decoding what the crop needs and the bare kernels",
        ours="jpeg",
        other="bare region",
        least=0.9,
        pixels=224**2,
    ),
    Comparison(
        what="jpeg crop / FFCV jpg",
        title="the same",
        beside="FFCV, jpg",
        ours="jpeg",
        other="ffcv jpg",
        least=1.6,
        pixels=224**2,
    ),
    Comparison(
        what="yuv420 crop / raw crop",
        title=f"yuv420 256 px, {_CROP}",
        beside="H5Loader, raw",
        ours="yuv420",
        other="raw",
        least=0.85,
        pixels=224**2,
    ),
    Comparison(
        what="gather / index_select",
        title="raw 256 px, bytes for a device",
        beside="torch.index_select in a thread pool",
        ours="gather",
        other="select",
        least=0.9,
        pixels=256**2,
    ),
    Comparison(
        what="CIFAR crop / FFCV",
        title="CIFAR-10, RandomCrop(32, padding=4) + flip",
        beside="FFCV, flip + translate",
        ours="cifar",
        other="ffcv cifar",
        least=2,
        pixels=32**2,
    ),
    Comparison(
        what="CIFAR gather / FFCV",
        title="CIFAR-10, bytes for a device",
        beside="FFCV, flip + translate",
        ours="cifar gather",
        other="ffcv cifar",
        least=8,
        pixels=32**2,
    ),
]

COLD = Comparison(
    what="cold / 16 threads pread",
    title="3 GB from the disk, random order",
    beside="bare pread, 16 threads",
    ours="ours",
    other="pread",
    least=0.9,
    pixels=256**2,
)


def chosen(options: argparse.Namespace) -> list[Comparison]:
    """Return the rows asked for, of those that can be measured here."""
    return [
        row
        for row in ROWS
        if options.only in row.what
        and (options.ffcv or "FFCV" not in row.what)
        and (options.cifar or "CIFAR" not in row.what)
    ]


def makers(options: argparse.Namespace) -> dict[str, Callable[[], Window]]:
    """Return what opens each subject."""
    work, threads, python = options.work, options.threads, options.ffcv
    photos = work / f"photos{options.times}"

    def file(store: str) -> Path:
        files.copies(options.photos, photos, options.times)
        return files.packed(photos, work / f"{store}.h5", size=256, store=store)

    def cifar() -> Path:
        return files.packed(options.cifar, work / "cifar.h5", size=32)

    def crop(store: str) -> Window:
        return subjects.loader(file(store), BATCH, threads, augment=subjects.CROP)

    def ffcv(mode: str) -> Window:
        return processes.ffcv(
            python,
            files.copies(options.photos, photos, options.times),
            work / f"{mode}.beton",
            mode=mode,
            longest=256,
            batch_size=BATCH,
            workers=threads,
            crop=224,
        )

    def ffcv_cifar() -> Window:
        return processes.ffcv(
            python,
            options.cifar,
            work / "cifar.beton",
            mode="raw",
            longest=32,
            batch_size=CIFAR_BATCH,
            workers=threads,
            crop=0,
        )

    return {
        "raw": lambda: crop("raw"),
        "jpeg": lambda: crop("jpeg"),
        "yuv420": lambda: crop("yuv420"),
        "bare raw": lambda: subjects.bare(file("raw"), BATCH, threads),
        "bare jpeg": lambda: subjects.bare(file("jpeg"), BATCH, threads),
        "bare region": lambda: subjects.bare(file("jpeg"), BATCH, threads, region=True),
        "gather": lambda: subjects.loader(file("raw"), BATCH, threads, augment_on="device"),
        "select": lambda: subjects.index_select(file("raw"), BATCH, threads),
        "cifar": lambda: subjects.loader(cifar(), CIFAR_BATCH, threads, augment=_CIFAR),
        "cifar gather": lambda: subjects.loader(cifar(), CIFAR_BATCH, threads, augment_on="device"),
        "ffcv raw": lambda: ffcv("raw"),
        "ffcv jpg": lambda: ffcv("jpg"),
        "ffcv cifar": ffcv_cifar,
    }
