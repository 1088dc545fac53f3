"""`DaliLoader`: the batches of H5Loader made by NVIDIA DALI; `GenericIterator`: in DALI's shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import Sampler

from h5feed.augment import Op, Pipeline
from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.device import open_transfer
from h5feed.feed.iterator import Counts
from h5feed.feed.loader import PackedLoader, check_arguments
from h5feed.feed.options import (
    OnError,
    Shuffle,
    Tail,
    bind_pipeline,
    check_choices,
    choose_workers,
)
from h5feed.interop.dali.feed import Epochs, EpochStart, OnDamage
from h5feed.interop.dali.iterator import DaliEpochIterator, OutputConverter, PipelineFactory
from h5feed.interop.dali.parts import LastBatchPolicy

__all__ = ["DaliLoader", "GenericIterator", "pipeline"]


class DaliLoader(PackedLoader):
    """Batches of an H5Dataset's file, made by NVIDIA DALI: `for images, labels in loader`.

    The same samples and, up to rounding, the same images as H5Loader with the same arguments
    (max 2, mean 0.5 of 255): order, crops and flips are h5feed's, on any device, whatever the
    batch size, thread count or world size. Batches, epochs, state and errors are H5Loader's, too.

    It has crops, resizes and flips, RandomErasing with a color, ToDtype and Normalize
    (h5feed.interop.dali.SUPPORTED_OPS). One process makes and uses it: DALI's threads do not
    survive a fork.

    Args:
        dataset: what to feed. Its `target_transform` and `target_dtype` apply; it may have no
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
        indices: the samples to take, as positions in `dataset`.
        block: as H5Loader's.
        window: as H5Loader's.
        streams: as H5Loader's.
        lookahead: bytes announced to the kernel ahead of the batches in the making.

    Raises:
        ImportError: where DALI is not installed.
        UsageError: for an argument that is wrong, with what to do.

    """

    def __init__(
        self,
        dataset: H5Dataset,
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
        window: int | None = None,
        streams: int = 64,
        lookahead: int = 64 << 20,
    ) -> None:
        check_arguments(dataset, batch_size=batch_size, prefetch=prefetch, views=views)
        check_choices(tail=tail, on_error=on_error, lookahead=lookahead)
        _check_workers(py_num_workers, sampler)
        if dataset.target is not None:
            raise UsageError(
                f"dataset.target={dataset.target!r}: DaliLoader hands out labels, or masks where "
                "there are some; leave target out, or use H5Loader"
            )
        super().__init__(
            dataset,
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
            streams=streams,
        )
        self.device = open_transfer(device).device
        self.num_workers = choose_workers(num_workers, self.device)
        self.prefetch = prefetch
        self.py_num_workers = py_num_workers
        self._with_index = with_index
        self._on_error: OnError = on_error
        augmentation = Pipeline(augment, antialias=antialias, views=views)  # type: ignore[arg-type]
        bind_pipeline(augmentation, dataset.files)
        self._factory = PipelineFactory(
            dataset.files,
            augmentation,
            device=self.device,
            batch_size=batch_size,
            threads=self.num_workers,
            prefetch=prefetch,
            workers=py_num_workers,
            lookahead=lookahead,
        )
        self._converter = OutputConverter(
            dataset.files,
            augmentation,
            device=self.device,
            target_transform=dataset.target_transform,
            target_dtype=dataset.target_dtype,
            with_index=with_index,
        )
        self._counts = Counts()

    def __iter__(self) -> DaliEpochIterator:
        """Begin a pass; it makes batches ahead as soon as it exists."""
        self._factory.check_process()
        cursor, order, steps = self._begin()
        return DaliEpochIterator(
            self._factory,
            self._converter,
            self._epochs(cursor.epoch, steps.start),
            order,
            cursor,
            self._counts,
            "skip" if self._on_error == "skip" else "mark",
        )

    def close(self) -> None:
        """End the pipeline that waits for the next pass, with its threads and processes."""
        self._factory.keep(None)

    def pipeline(self) -> Any:
        """Return a nvidia.dali.Pipeline of its own: from where this loader stands, then on.

        Its outputs: HWC images of each view, (H, W) masks of each field and view, labels (1,) int64
        as DALI's readers have them, or (K,) float32, and indices where the loader gives them. A
        damaged item ends it with DamagedItemError, unless on_error="skip".
        """
        cursor, _, steps = self._begin()
        on_damage: OnDamage = "skip" if self._on_error == "skip" else "raise"
        epochs = self._epochs(cursor.epoch, steps.start)
        return self._factory.make(epochs, on_damage, starts=None, with_index=self._with_index)[1]

    def stats(self) -> dict[str, Any]:
        """Return what was delivered since the loader was made, as H5Loader.stats counts it."""
        return {
            **asdict(self._counts),
            "num_workers": self.num_workers,
            "prefetch": self.prefetch,
            "py_num_workers": self.py_num_workers,
            "device": str(self.device),
        }

    def _epochs(self, epoch: int, start: int) -> Epochs:
        return Epochs(self._order, self._steps(0), EpochStart(self.seed, epoch, start))


def pipeline(dataset: H5Dataset, batch_size: int, **options: Any) -> Any:
    """Return a nvidia.dali.Pipeline over a packed file, for code that iterates by itself.

    Options are those of DaliLoader, which describes them; see DaliLoader.pipeline for its outputs.
    Epochs follow one another: each begins with the pipeline's `reset()` after StopIteration.
    """
    return DaliLoader(dataset, batch_size, **options).pipeline()


class GenericIterator(Iterator[list[dict[str, Any]]]):
    """`for (batch,) in iterator: batch["data"], batch["label"]`, as DALIGenericIterator has it.

    Images are (B, C, H, W) in channels_last memory, class numbers int64 (B, 1) as DALI's readers
    give them, everything else is DaliLoader's.

    Unlike DALIGenericIterator over an external source, its `len` is right, its last batch may be
    short, and `reset` in mid-epoch leaves that epoch and goes on to the next.

    Args:
        loader: makes the batches.
        output_map: names of what the loader delivers, in order: each view, targets, indices.
        auto_reset: go on to the next epoch after StopIteration; else `reset` or `iter` does.
        last_batch_policy: of nvidia.dali.plugin.base_iterator: PARTIAL gives a short last batch as
            it is, FILL repeats its last sample, DROP sets the loader's drop_last.

    """

    def __init__(
        self,
        loader: DaliLoader,
        output_map: Sequence[str] = ("data", "label"),
        *,
        auto_reset: bool | str = False,
        last_batch_policy: Any = LastBatchPolicy.PARTIAL,
    ) -> None:
        if not isinstance(last_batch_policy, LastBatchPolicy):
            raise UsageError(
                f"last_batch_policy={last_batch_policy!r} is not a LastBatchPolicy of "
                "nvidia.dali.plugin.base_iterator"
            )
        if len(set(output_map)) != len(output_map):
            raise UsageError(f"output_map={list(output_map)!r} has a name twice")
        self.loader = loader
        self.output_map = list(output_map)
        self.batch_size = loader.batch_size
        self._fills = last_batch_policy is LastBatchPolicy.FILL
        self._auto_reset = auto_reset in (True, "yes")
        self._batches: Iterator[Any] | None = None
        self._ended = False
        loader.drop_last = loader.drop_last or last_batch_policy is LastBatchPolicy.DROP

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> GenericIterator:
        """Return itself, at the next epoch where one has ended."""
        if self._ended:
            self.reset()
        return self

    def __next__(self) -> list[dict[str, Any]]:
        if self._ended:
            raise StopIteration
        if self._batches is None:
            self._batches = iter(self.loader)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches, self._ended = None, not self._auto_reset
            raise
        return [self._named(batch)]

    def next(self) -> list[dict[str, Any]]:
        """Return the next batch."""
        return self.__next__()

    def reset(self) -> None:
        """Make the next batch the first of the next epoch."""
        self._batches, self._ended = None, False

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands; see H5Loader."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next batch the first that was left."""
        self.reset()
        self.loader.load_state_dict(state)

    def _named(self, batch: tuple[Any, ...]) -> dict[str, Any]:
        images, target, *indices = batch
        parts = [*(images if isinstance(images, tuple) else [images]), target, *indices]
        if len(parts) != len(self.output_map):
            raise UsageError(
                f"output_map={self.output_map!r} names {len(self.output_map)} outputs, the loader "
                f"gives {len(parts)}: each view, targets, and indices with with_index=True"
            )
        if isinstance(target, torch.Tensor) and target.dim() == 1:
            parts[-1 - len(indices)] = target[:, None]
        if self._fills:
            parts = [_filled(part, self.batch_size) for part in parts]
        return dict(zip(self.output_map, parts, strict=True))


def _check_workers(workers: Any, sampler: Any) -> None:
    if not isinstance(workers, int) or workers < 0:
        raise UsageError(f"py_num_workers={workers!r} must be a whole number, 0 for none")
    if workers and sampler is not None:
        raise UsageError(
            f"py_num_workers={workers} processes would each ask the sampler, and get orders of "
            "their own: use py_num_workers=0, or give indices instead of a sampler"
        )


def _filled(part: Any, count: int) -> Any:
    """Return `count` rows, the last one repeated."""
    if not isinstance(part, torch.Tensor) or len(part) == count:
        return part
    rows = torch.arange(count, device=part.device).clamp(max=len(part) - 1)
    if part.dim() < 4:
        return part[rows]
    return part[rows].contiguous(memory_format=torch.channels_last)
