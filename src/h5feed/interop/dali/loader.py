"""`DaliLoader`: the batches of H5Loader, made by NVIDIA DALI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import Sampler

from h5feed.augment import Op
from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.device import open_transfer
from h5feed.feed.iterator import Counts
from h5feed.feed.loader import PackedLoader, check_arguments
from h5feed.feed.options import OnError, Shuffle, Tail, check_choices, choose_workers
from h5feed.interop.dali.agenda import Pass
from h5feed.interop.dali.delivery import Delivery
from h5feed.interop.dali.feed import Course, OnDamage
from h5feed.interop.dali.maker import Maker, bound_pipeline
from h5feed.interop.dali.run import Run

__all__ = ["DaliLoader", "pipeline"]


class DaliLoader(PackedLoader):
    """Batches of an H5Dataset's file, made by NVIDIA DALI: `for images, labels in loader`.

    The same samples and, up to rounding, the same images as H5Loader with the same arguments
    (max 2, mean 0.5 of 255): order, crops and flips are h5feed's, on any device, whatever the
    batch size, thread count or world size. Batches, epochs, state and errors are H5Loader's, too.

    It carries the ops of h5feed.interop.dali.CARRIED. One process makes and uses it: DALI's
    threads do not survive a fork.

    Args:
        ds: what to feed. Its `target_transform` and `target_dtype` apply; it may have no
            `transform`.
        batch_size: samples of a batch, of this rank.
        shuffle: as H5Loader's.
        augment: ops of h5feed.augment, in order.
        views: how many differently augmented versions of each image to deliver, as a tuple.
        antialias: True, False or "auto", see h5feed.augment.Pipeline.
        device: where batches are made and delivered: "cpu", "cuda" (or "gpu"), or a torch device.
        num_workers: DALI's CPU threads, or "auto", as H5Loader's.
        prefetch: batches in the making at once.
        py_num_workers: processes that read the file and draw the parameters (store=yuv420 on the
            CPU: convert as well), started by spawn; 0: the thread that iterates does.
        drop_last: leave out a last batch that would be short.
        tail: as H5Loader's.
        seed: any int.
        rank: as H5Loader's.
        world_size: as H5Loader's.
        on_error: "raise", or "skip": the next whole sample of the batch stands in for one whose
            bytes are not those that were packed, or that DALI cannot decode.
        with_index: deliver (images, labels, indices).
        sampler: any torch Sampler that has a length; not with `py_num_workers`.
        indices: the samples to take, as positions in `ds`.
        block: as H5Loader's.
        window: as H5Loader's.
        lookahead: bytes announced to the kernel ahead of the batches in the making.

    Raises:
        ImportError: where DALI is not installed.
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
        num_workers: int | str = "auto",
        prefetch: int = 2,
        py_num_workers: int = 0,
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
    ) -> None:
        check_arguments(ds, batch_size=batch_size, prefetch=prefetch, views=views)
        check_choices(tail=tail, on_error=on_error, lookahead=lookahead)
        _check_workers(py_num_workers, sampler)
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
        self.device = open_transfer(device).device
        self.num_workers = choose_workers(num_workers, self.device)
        self.prefetch = prefetch
        self.py_num_workers = py_num_workers
        self._with_index = with_index
        self._on_error: OnError = on_error
        augmentation = bound_pipeline(ds.pixels, augment, antialias, views)
        self._maker = Maker(
            ds.pixels,
            augmentation,
            antialias,
            device=self.device,
            batch_size=batch_size,
            threads=self.num_workers,
            prefetch=prefetch,
            workers=py_num_workers,
            lookahead=lookahead,
        )
        self._delivery = Delivery(
            ds.pixels,
            augmentation,
            device=self.device,
            target_transform=ds.target_transform,
            target_dtype=ds.target_dtype,
            with_index=with_index,
        )
        self._counts = Counts()

    def __iter__(self) -> Run:
        """Begin a pass; it makes batches ahead as soon as it exists."""
        self._maker.check_process()
        cursor, order, steps = self._begin()
        return Run(
            self._maker,
            self._delivery,
            self._course(cursor.epoch, steps.start),
            order,
            cursor,
            self._counts,
            "skip" if self._on_error == "skip" else "mark",
        )

    def close(self) -> None:
        """Let go of the pipeline that waits for the next pass, its threads and processes."""
        self._maker.keep(None)

    def pipeline(self) -> Any:
        """Return a nvidia.dali.Pipeline of its own: from where this loader stands, then on.

        Its outputs: HWC images of each view, (H, W) masks of each field and view, labels (1,) int64
        as DALI's readers have them, or (K,) float32, and indices where the loader gives them. A
        damaged item ends it with DamagedItemError, unless on_error="skip".
        """
        cursor, _, steps = self._begin()
        on_damage: OnDamage = "skip" if self._on_error == "skip" else "raise"
        course = self._course(cursor.epoch, steps.start)
        return self._maker.make(course, on_damage, agenda=None, with_index=self._with_index)[1]

    def stats(self) -> dict[str, Any]:
        """Return what was delivered since the loader was made, as H5Loader.stats counts it."""
        return {
            **asdict(self._counts),
            "num_workers": self.num_workers,
            "prefetch": self.prefetch,
            "py_num_workers": self.py_num_workers,
            "device": str(self.device),
        }

    def _course(self, epoch: int, start: int) -> Course:
        return Course(self._order, self._steps(0), Pass(self.seed, epoch, start))


def pipeline(ds: H5Dataset, batch_size: int, **options: Any) -> Any:
    """Return a nvidia.dali.Pipeline over a packed file, for code that iterates by itself.

    Options are those of DaliLoader, which describes them; see DaliLoader.pipeline for its outputs.
    Epochs follow one another: each begins with the pipeline's `reset()` after StopIteration.
    """
    return DaliLoader(ds, batch_size, **options).pipeline()


def _check_workers(workers: Any, sampler: Any) -> None:
    if not isinstance(workers, int) or workers < 0:
        raise UsageError(f"py_num_workers={workers!r} must be a whole number, 0 for none")
    if workers and sampler is not None:
        raise UsageError(
            f"py_num_workers={workers} processes would each ask the sampler, and get orders of "
            "their own: use py_num_workers=0, or give indices instead of a sampler"
        )
