"""`H5Loader`: batches of a packed file, made by threads in memory that is used again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import Sampler

from h5feed.augment import Op
from h5feed.feed.ahead import Ahead
from h5feed.feed.arrange import Shuffle
from h5feed.feed.base import PackedLoader
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.device import open_lane
from h5feed.feed.pool import Pool
from h5feed.feed.recipe import OnError, Recipe
from h5feed.feed.residency import Residency
from h5feed.feed.resident import choose_resident
from h5feed.feed.run import Counts, Run
from h5feed.feed.schedule import Schedule
from h5feed.feed.setup import (
    AugmentOn,
    Io,
    check_arguments,
    check_choices,
    choose_pipeline,
    choose_pixels,
    choose_workers,
    compile_ops,
    explain_decoding,
    leave_cores_to_loader,
)
from h5feed.feed.slots import check_room
from h5feed.feed.steps import Tail
from h5feed.feed.work import Epoch

__all__ = ["H5Loader"]


class H5Loader(PackedLoader):
    """Batches of an H5Dataset's file: `for images, labels in loader`.

    `images` is (B, C, H, W) in channels_last memory, uint8 unless `augment` ends in a float op;
    `labels` int64 (B,), float32 (B, K), or for files with masks uint8 (B, H, W), with the same
    geometry as their images. With `views` above 1, images and masks are tuples.
    A batch's memory is used again once nobody holds it or any view of it.

    Which samples come and what happens to them is a function of seed, epoch and sample: workers,
    batch size and world size change nothing. Exceptions: MixUp and CutMix choose partners within
    a batch; a `sampler` is asked again in every epoch, and one with a generator of its own has to
    be put back into its state by whoever resumes.

    Every pass is the next epoch, unless `set_epoch` or `load_state_dict` said otherwise; one that
    was broken off counts as a pass. A pass counts from its first batch on: until then a state says
    where it begins, and one that is let go loses nothing of what was to be gone on with. So two
    begun before either delivers, as in zip(loader, loader), are the same epoch; `set_epoch` between
    makes them two. Threads may share a pass: each batch goes to one of them.

    JPEG is decoded by the loader's threads, wherever batches go; h5feed.interop.dali.DaliLoader,
    which takes the same arguments, decodes it on a GPU.

    For images of more than 65,536 pixels it sets cv2.setNumThreads(1), in all of the process: cv2
    would else split each one among threads of its own, which compete with the loader's.

    Args:
        ds: what to feed. Its `target_transform` and `target_dtype` apply; it may have no
            `transform`, and no `output` or `aspect` but tensors of the images as they are stored.
        batch_size: samples of a batch, of this rank.
        shuffle: False, True, or "block" (for disks that hate seeks: long sequential reads).
        augment: ops of h5feed.augment, in order.
        views: how many differently augmented images of each, as a tuple.
        antialias: True, False or "auto", see h5feed.augment.Pipeline.
        device: where batches are delivered: "cpu", "cuda" (or "gpu"), or a torch device.
        augment_on: "cpu" (loader threads), "device" (whole batches, there), or "auto": on a CUDA
            device wherever images have one size. Both make the same images, up to rounding,
            which changes of color in a row multiply: h5feed.augment says by how much.
        residency: where images lie. "stream": in the file; threads read each batch. "device": in
            the device's memory; "pinned": in page-locked memory of the host, over the bus. There
            the device gathers and augments by itself, and the CPU only draws numbers; all
            images are copied there when the loader is made, once for all loaders of a process.
            "auto": "device" if a quarter of its free memory will do, else "pinned" if half of
            the host's will, else "stream". Samples, crops and states are the same in all.
        compile: run the ops on the device as kernels made by torch.compile, at the first batch;
            that takes from seconds to a minute. What cannot be compiled runs as it is, with one
            warning.
        num_workers: threads that make the batches, or "auto": the cores this process may use, less
            one for the trainer where the device is not the CPU, and at most 16.
        prefetch: batches in the making at once.
        drop_last: leave out a last batch that would be short.
        tail: what a last step does whose samples do not divide among the ranks: "pad" repeats
            some, "drop" leaves some out. Every rank has equally many steps and samples.
        seed: any int.
        rank: this process; None asks torch.distributed, when a pass begins.
        world_size: how many share an epoch; None asks torch.distributed, when a pass begins.
        on_error: "raise", or "skip": the next whole sample of the batch stands in for one that
            cannot be decoded, or read with io="read"; see stats().
        with_index: deliver (images, labels, indices).
        sampler: any torch Sampler that has a length; it gives the order of all ranks together.
        indices: the samples to take, as positions in `ds`.
        block: samples of a block with shuffle="block"; None: 8 MB of them.
        window: blocks that are shuffled together.
        lookahead: bytes announced to the kernel ahead of the batches in the making.
        io: "map": items are views of mapped files, which costs least; a disk that fails, or a file
            cut short meanwhile, ends the process by SIGBUS. "read": each is read (raw
            256x256 takes 15 % more CPU so, JPEG no more), and what the disk does not give is a
            DamagedItemError that names item and errno.

    Raises:
        UsageError: for an argument that is wrong, with what to do.

    """

    def __init__(
        self,
        ds: H5Dataset,
        batch_size: int,
        *,
        shuffle: Shuffle = False,
        augment: Sequence[Op] = (),
        views: int = 1,
        antialias: bool | str = "auto",
        device: str | torch.device = "cpu",
        augment_on: AugmentOn = "auto",
        residency: Residency = "stream",
        compile: bool = False,
        num_workers: int | str = "auto",
        prefetch: int = 2,
        drop_last: bool = False,
        tail: Tail = "pad",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        on_error: OnError = "raise",
        with_index: bool = False,
        sampler: Sampler[int] | None = None,
        indices: Sequence[int] | None = None,
        block: int | None = None,
        window: int = 16,
        lookahead: int = 64 << 20,
        io: Io = "map",
    ) -> None:
        check_arguments(ds, batch_size=batch_size, prefetch=prefetch, views=views)
        check_choices(tail=tail, on_error=on_error, lookahead=lookahead)
        super().__init__(
            ds,
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            tail=tail,
            seed=seed,
            rank=rank,
            world_size=world_size,
            sampler=sampler,
            indices=indices,
            block=block,
            window=window,
        )
        self.prefetch = prefetch
        self._lookahead = lookahead
        lane = open_lane(device)
        pixels = choose_pixels(ds.pixels, io, residency)
        self.residency, why, resident = choose_resident(
            residency, ds.pixels, lane, augment_on=augment_on
        )
        resides = resident is not None
        pipeline, on_device, reason = choose_pipeline(
            ds.pixels,
            augment,
            views=views,
            antialias=antialias,
            on="device" if resides else augment_on,
            lane=lane,
        )
        self._reasons = {
            "residency_reason": why,
            "augment_on_reason": "the images are there" if resides else reason,
            "decoding": explain_decoding(ds.pixels, lane),
        }
        self._compiled = compile_ops(pipeline, on_device=on_device) if compile else None
        self._recipe = Recipe(
            pixels,
            pipeline,
            lane,
            batch_size=batch_size,
            on_device=on_device,
            keep=prefetch + 2,
            on_error=on_error,
            target_transform=ds.target_transform,
            target_dtype=ds.target_dtype,
            with_index=with_index,
            resident=resident,
        )
        check_room(self._recipe.rings, prefetch + 1)
        idle = num_workers == "auto" and not self._recipe.fields  # the device does it all
        self.num_workers = 1 if idle else choose_workers(num_workers, lane.device)
        leave_cores_to_loader(None if on_device else pipeline, self.num_workers)
        self._pool = Pool(self.num_workers)
        self._counts = Counts()
        self._runs: list[weakref.ref[Run]] = []

    def __iter__(self) -> Run:
        """Begin a pass; it makes batches ahead as soon as it exists."""
        cursor, order, steps = self._begin()
        schedule = Schedule(order, steps, self._recipe.drawing, seed=self.seed, epoch=cursor.epoch)
        fields = [field.name for field in self._recipe.fields]
        ahead = Ahead(self.dataset.pixels, schedule, lookahead=self._lookahead, fields=fields)
        epoch = Epoch(recipe=self._recipe, ahead=ahead, pool=self._pool)
        run = Run(epoch, cursor, self._counts, prefetch=self.prefetch)
        # no WeakSet: that would run Python, in which a Ctrl-C is lost, when a pass ends
        self._runs = [other for other in self._runs if other() is not None] + [weakref.ref(run)]
        return run

    def close(self) -> None:
        """End all passes and the threads; a later pass starts new ones.

        A loader that is let go, or a program that ends, does so by itself.
        """
        for reference in self._runs:
            if run := reference():
                run.close()
        self._pool.close()

    def stats(self) -> dict[str, Any]:
        """Return what was delivered since the loader was made, and by what means.

        batches, images, repeated (only to even out the ranks' last step), skipped (a substitute
        stood in), wait_s (seconds the consumer waited), announced_bytes (to the kernel, ahead of
        their use), held_many (the caller held so many batches that it was warned), slots,
        slot_bytes, num_workers, prefetch, residency and augment_on with the reason for each,
        resident_bytes (of images held for the device), compiled (whether the ops are),
        decoding (who decodes, and why).
        """
        rings, resident = self._recipe.rings, self._recipe.resident
        return {
            **asdict(self._counts),
            "slots": sum(map(len, rings)),
            "slot_bytes": sum(ring.nbytes for ring in rings),
            "num_workers": self.num_workers,
            "prefetch": self.prefetch,
            "residency": self.residency,
            "resident_bytes": 0 if resident is None else resident.nbytes,
            "augment_on": "device" if self._recipe.on_device else "cpu",
            "compiled": self._compiled is not None and self._compiled.error is None,
            **self._reasons,
        }
