"""`make_dataloader`: a stock torch DataLoader set up right, for arbitrary Python transforms."""

from __future__ import annotations

import operator
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import cv2
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.system import available_cores

__all__ = [
    "auto_workers",
    "collate",
    "make_dataloader",
]

WorkerInit = Callable[[int], None]


def collate(samples: list[Any]) -> Any:
    """Return what `default_collate` returns; images in channels_last memory are stacked as such.

    H5Dataset's images lie in memory as (H, W, C). Stacking their (C, H, W) views gathers every
    plane byte by byte; stacking (H, W, C) and permuting the batch copies whole images, and the
    batch is channels_last, which is what convolutions want (`tools/bench_dataset.py collate`).
    Everything but such images goes to `default_collate` as it is.

    Raises UsageError where the images of a batch differ in size.
    """
    first = samples[0]
    if type(first) is dict:  # what keys= makes of a sample
        return {key: _stack([sample[key] for sample in samples]) for key in first}
    if type(first) is not tuple:
        return default_collate(samples)
    return [_stack(column) for column in zip(*samples, strict=True)]


def _stack(column: Sequence[Any]) -> Any:
    """Make one part of a batch: all its images, or all its labels."""
    first = column[0]
    if isinstance(first, Tensor):
        return _stack_images(column)
    if isinstance(first, np.ndarray) and first.ndim:
        _check_sizes(column)
        # Over read-only arrays, as output="numpy" gives them, default_collate warns.
        return torch.from_numpy(np.stack(column))
    if isinstance(first, Image.Image):
        raise UsageError(
            "the images of a batch are PIL images, which no batch is made of: give the dataset a "
            "transform that ends in a tensor, such as torchvision's ToTensor(), or output="
            '"tensor"'
        )
    return default_collate(list(column))


def _stack_images(images: Sequence[Tensor]) -> Tensor:
    _check_sizes(images)
    first = images[0]
    if first.dim() == 3 and first.permute(1, 2, 0).is_contiguous():
        batch: Tensor = default_collate([image.permute(1, 2, 0) for image in images])
        return batch.permute(0, 3, 1, 2)
    stacked: Tensor = default_collate(list(images))
    return stacked


def _check_sizes(images: Sequence[Tensor | npt.NDArray[Any]]) -> None:
    sizes = {tuple(image.shape) for image in images}
    if len(sizes) > 1:
        raise UsageError(
            f"images of one batch have {len(sizes)} different sizes, among them "
            f"{' and '.join(map(str, sorted(sizes)[:2]))}; give the dataset a transform that "
            "ends in one size, such as RandomResizedCrop(224), or use batch_size=1"
        )


def make_dataloader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool = False,
    num_workers: int | Literal["auto"] = "auto",
    drop_last: bool = False,
    seed: int = 0,
    sampler: Sampler[int] | Iterable[int] | None = None,
    pin_memory: bool | Literal["auto"] = "auto",
    prefetch: int = 2,
    collate_fn: Callable[[list[Any]], Any] = collate,
    worker_init_fn: WorkerInit | None = None,
    context: Literal["fork", "spawn", "forkserver"] | None = None,
) -> DataLoader[Any]:
    """Return a DataLoader over an `H5Dataset`, or a Subset or ConcatDataset of some.

    >>> loader = make_dataloader(H5Dataset("photos.h5"), 8, shuffle=True, num_workers=0)
    >>> images, labels = next(iter(loader))
    >>> images.shape, images.is_contiguous(memory_format=torch.channels_last)
    (torch.Size([8, 3, 64, 64]), True)

    Workers persist over epochs and keep one thread each (torch sets its own to one, cv2 does
    not); each holds `prefetch` batches ready. `seed` determines the order and, with workers,
    the random numbers of torch, numpy and random in each worker; with `num_workers=0` transforms
    draw from this process's generators. A `sampler` decides the order in place of `shuffle`; under
    torch.distributed give torch's DistributedSampler: unlike H5Loader, this splits nothing itself.
    `pin_memory="auto"` pins where there is a CUDA device. The batch is channels_last; see
    `collate`. `context` is how workers start, by default as Python does.

    `num_workers="auto"` is `auto_workers(dataset, batch_size, prefetch)`.
    """
    if shuffle and sampler is not None:
        raise UsageError("sampler decides the order alone: leave shuffle out, or leave sampler out")
    count = _check_count("batch_size", batch_size, least=1)
    _check_count("prefetch", prefetch, least=1)
    if num_workers == "auto":
        num_workers = auto_workers(dataset, count, prefetch)
    _check_count("num_workers", num_workers, least=0, other=', or "auto"')
    generator = torch.Generator()
    generator.manual_seed(_check_count("seed", seed, least=0))
    return DataLoader(
        dataset,
        batch_size=count,
        shuffle=shuffle,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=torch.cuda.is_available() if pin_memory == "auto" else pin_memory,
        drop_last=drop_last,
        worker_init_fn=partial(_start_worker, worker_init_fn),
        multiprocessing_context=context if num_workers else None,
        generator=generator,
        prefetch_factor=prefetch if num_workers else None,
        persistent_workers=num_workers > 0,
    )


def auto_workers(dataset: Dataset[Any], batch_size: int, prefetch: int = 2) -> int:
    """Return how many worker processes suit a dataset, this machine and this batch size.

    One per core that this process may use (affinity, cgroup; shared fairly with the other
    ranks of a torchrun); two at most where nothing is to do but copying raw pixels; no more
    than an epoch has batches, and no more than shared memory has room for, since a container's
    64 MB kill a worker with a bus error (none where not even one batch fits).

    Measured by `python tools/bench_dataset.py workers FILE.h5` on 2 cores that other processes
    used too (256² raw, batches of 64, medians of 5, img/s):

        workers                      0                 1       2       3       4
        whole images           230 to 26,000       4,500   4,900   4,800   4,900
        RandomResizedCrop+flip   4,600             2,900   5,000   4,700   4,900

    More workers than cores gain nothing. Without any, torch's threads and a fresh batch each
    time make whole images fast or slow by chance, and nothing is ready when a step ends.
    """
    cores = max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    base = _packed(dataset)
    workers = min(2, cores) if base is not None and _only_copies(base) else cores
    if base is not None:
        spec = base.files.specs["images"]  # of store=original the size of a batch is unknown
        ready = batch_size * prefetch * 3 * max(1, spec.height * spec.width)
        workers = min(workers, _shared_memory() // ready)
    batches = -(-len(cast(Sized, dataset)) // batch_size)
    return int(min(workers, batches))


def _packed(dataset: Any) -> H5Dataset | None:
    """Return the (first) H5Dataset under Subset and ConcatDataset."""
    while not isinstance(dataset, H5Dataset):
        parts = getattr(dataset, "datasets", None)
        dataset = parts[0] if parts else getattr(dataset, "dataset", None)
        if dataset is None:
            return None
    return dataset


def _only_copies(dataset: H5Dataset) -> bool:
    return (
        dataset.image_transform is None
        and dataset.output != "pil"
        and dataset.aspect == "stored"
        and all(spec.encoding == "raw" for spec in dataset.files.specs.values())
    )


def _shared_memory() -> int:
    """Bytes free where worker processes leave their batches."""
    place = Path("/dev/shm")
    return shutil.disk_usage(place).free if place.is_dir() else sys.maxsize


def _start_worker(then: WorkerInit | None, worker: int) -> None:
    # Not 1: that takes cv2's pool down, and a forked worker waits forever for the parent's threads.
    cv2.setNumThreads(0)
    if then is not None:
        then(worker)


def _check_count(name: str, value: Any, *, least: int, other: str = "") -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if count < least or isinstance(value, bool):
        raise UsageError(f"{name}={value!r} is not a whole number of at least {least}{other}")
    return count
