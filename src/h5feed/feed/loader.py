"""`H5Loader`: batches of a packed file, made by threads in memory that is used again."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Sampler, Subset
from typing_extensions import Unpack

from h5feed.augment import Op, from_torchvision
from h5feed.augment.geometry import with_size
from h5feed.augment.mixing import MixOp, NoMix, unmixed
from h5feed.errors import UsageError
from h5feed.feed.as_dataloader import (
    DataLoaderFacts,
    LoaderCollate,
    PlannedBatch,
    StockOptions,
    as_planned,
    find_items,
    places_of,
    read_stock,
)
from h5feed.feed.batch import BatchBuilder
from h5feed.feed.dataset import H5Dataset, checked_keys
from h5feed.feed.device import Residency, choose_resident, open_transfer
from h5feed.feed.files import PackedFiles
from h5feed.feed.iterator import Counts, Cursor, Engine, Epoch, EpochIterator
from h5feed.feed.memory import SharedMemory, check_room
from h5feed.feed.options import (
    AugmentOn,
    EngineName,
    Io,
    OnError,
    Shuffle,
    Tail,
    block_length,
    check_choices,
    check_ranks,
    check_whole,
    choose_engine,
    choose_files,
    choose_nodes,
    choose_pipeline,
    choose_ranks,
    choose_workers,
    compile_ops,
    explain_decoding,
    leave_cores_to_loader,
)
from h5feed.feed.order import Order
from h5feed.feed.processes import ProcessPool, WorkerSetup
from h5feed.feed.readahead import ReadAhead
from h5feed.feed.sampling import BatchPlan, Drawing, SampleOrder, Steps, Weights, choose_weights
from h5feed.feed.workers import WorkerPool

__all__ = [
    "H5Loader",
    "PackedLoader",
    "State",
    "check_arguments",
    "check_place",
    "read_state",
]

Loader = TypeVar("Loader", bound="PackedLoader")

_VERSION = 1


class PackedLoader(DataLoaderFacts, ABC):
    """Base: order, ranks, epochs and state. Subclasses make the batches of a pass.

    Args are those of H5Loader, and `whole`: what `dataset`, which has `items` of it, is a part of.
    """

    _drawing: Drawing | None = None
    """What draws the parameters of a batch."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: Shuffle,
        drop_last: bool,
        tail: Tail,
        seed: int,
        rank: int | None,
        world_size: int | None,
        sampler: Sampler[int] | None,
        indices: Sequence[int] | None,
        block: int | None,
        window: int | None,
        streams: int,
        weights: Weights = None,
        repeats: int = 1,
        whole: H5Dataset | None = None,
        items: NDArray[np.int64] | None = None,
    ) -> None:
        check_whole(None, seed=seed)
        self.dataset = dataset
        self._files: PackedFiles = (dataset if whole is None else whole).files
        self._items = items
        self.batch_size = batch_size
        self.seed = seed
        self.drop_last = drop_last
        self._tail: Tail = tail
        check_ranks(rank, world_size)
        self._given_ranks = rank, world_size
        if weights is not None:
            labels = self._files.labels
            weights = choose_weights(weights, labels if items is None else labels[items])
        self._order = SampleOrder(
            len(dataset),
            shuffle=shuffle,
            sampler=sampler,
            indices=indices,
            block=block_length(self._files) if block is None else block,
            window=window,
            streams=streams,
            shards=self._files.shards,
            weights=weights,
            repeats=repeats,
            items=items,
        )
        self._cursor = Cursor(epoch=0)

    @property
    def rank(self) -> int:
        """The place of this process among those that share an epoch, as it is now."""
        return choose_ranks(*self._given_ranks)[0]

    @property
    def world_size(self) -> int:
        """How many processes share an epoch, as it is now."""
        return choose_ranks(*self._given_ranks)[1]

    def __len__(self) -> int:
        """Return the batches of a whole epoch, on every rank the same."""
        return len(self._steps(0))

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Begin a pass; it makes batches ahead as soon as it exists."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what makes the batches."""

    def __enter__(self: Loader) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`, from where a loaded state left it, or whole.

        Raises UsageError unless that is a whole number of at least 0.
        """
        check_whole(0, epoch=epoch)
        if epoch != self._cursor.epoch or self._cursor.begun:
            self._cursor = Cursor(epoch)
        self._cursor.named = True

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest pass stands: what it delivered, not what it made ahead."""
        return asdict(
            State(
                fingerprint=self._files.fingerprint,
                order=self._order.kind,
                listed=self._cursor.listed,
                seed=self.seed,
                epoch=self._cursor.epoch,
                consumed=self._cursor.consumed,
            )
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass deliver exactly what was left, at any batch and world size.

        Where nothing was left, as with a state taken in the last batch's loop body, it is the next
        epoch, unless `set_epoch` names that one: then it is an empty pass.

        Takes over the state's seed. Raises UsageError if `state` is not a state, belongs to other
        data or another order, or points outside its epoch.
        """
        found = read_state(state, fingerprint=self._files.fingerprint, order=self._order.kind)
        check_place(found, self._order.samples(found.epoch))
        self.seed = found.seed
        self._cursor = Cursor(found.epoch, found.consumed, found.listed)

    def _begin(self) -> tuple[Cursor, Order, Steps]:
        """Go to where the next pass begins; return that, with its order and what is left of it."""
        cursor = self._upcoming()
        order = self._order.order(self.seed, cursor.epoch)
        self._check_listed(cursor, self._order.listed(order))
        self._cursor = cursor
        return cursor, order, self._steps(cursor.consumed)

    def _upcoming(self) -> Cursor:
        """Return where the next pass begins."""
        cursor = replace(self._cursor)
        return Cursor(cursor.epoch + 1) if cursor.begun or self._is_over(cursor) else cursor

    def _is_over(self, cursor: Cursor) -> bool:
        """Whether a loaded state is at the end of its epoch and `set_epoch` did not ask for it."""
        if cursor.named or cursor.consumed == 0:
            return False
        self._order.samples(cursor.epoch)  # a sampler's length may depend on the epoch
        return len(self._steps(cursor.consumed)) == 0

    def _steps(self, start: int) -> Steps:
        rank, world_size = choose_ranks(*self._given_ranks)
        return Steps(
            samples=len(self._order),
            batch_size=self.batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last,
            tail=self._tail,
            start=start,
            streams=self._order.streams,
            nodes=choose_nodes(world_size),
        )

    @property
    def collate_fn(self) -> LoaderCollate:
        """Makes batches of what `batch_sampler` yields, in a DataLoader built by someone else."""
        return LoaderCollate(_refuse_to_build, ())

    def _share(self) -> int:
        steps = self._steps(0)
        return (
            sum(steps.share(step) for step in {0, len(steps) - 1} if len(steps))
            + max(len(steps) - 2, 0) * self.batch_size
        )

    def _places(self) -> Iterator[NDArray[np.int64]]:
        cursor = self._upcoming()
        order, steps = self._order.order(self.seed, cursor.epoch), self._steps(cursor.consumed)
        places = places_of(self._items)
        for step in range(len(steps)):
            yield places(order(steps.positions(step)))

    def _plans(self) -> Iterator[PlannedBatch]:
        cursor, order, steps = self._begin()
        plan = BatchPlan(order, steps, self._drawing, seed=self.seed, epoch=cursor.epoch)
        places = places_of(self._items)
        for step in range(len(steps)):
            [samples] = plan.samples(step, step + 1)
            cursor.advance(steps.consumed(step + 1))
            yield PlannedBatch(places(samples.indices).tolist(), samples)
        cursor.complete()

    def _check_listed(self, cursor: Cursor, listed: int) -> None:
        if cursor.listed and cursor.listed != listed:
            raise UsageError(
                "sampler gave another order than in the pass that the state belongs to; put its "
                "generator into the state it had then, or leave its generator out"
            )
        cursor.listed = listed


class H5Loader(PackedLoader):
    """Batches of an H5Dataset's file: `for images, labels in loader`.

    >>> from h5feed.augment import RandomHorizontalFlip, RandomResizedCrop
    >>> ops = [RandomResizedCrop(32), RandomHorizontalFlip()]
    >>> loader = H5Loader(H5Dataset("photos.h5"), 4, shuffle=True, augment=ops, seed=1)
    >>> for images, labels in loader:
    ...     print(images.shape, len(labels))
    torch.Size([4, 3, 32, 32]) 4
    torch.Size([4, 3, 32, 32]) 4
    torch.Size([4, 3, 32, 32]) 4
    >>> state = loader.state_dict()  # a few numbers; load_state_dict goes on from there
    >>> loader.close()

    `images` is (B, C, H, W) in channels_last memory, uint8 unless `augment` ends in a float op;
    `labels` int64 (B,), float32 (B, K), or for files with masks uint8 (B, H, W), with the same
    geometry as their images. With several `views`, images and masks are tuples.
    A batch's memory is reused once neither the batch nor any view of it is referenced.

    Which samples come and what happens to them is a function of seed, epoch and sample: workers,
    batch size and world size change nothing. Exceptions: MixUp and CutMix choose partners within
    a batch; a `sampler` is asked again in every epoch, and a program that resumes has to restore
    the sampler's own generator, if it has one.

    Every pass is the next epoch, unless `set_epoch` or `load_state_dict` said otherwise, also where
    the pass before was broken off. A pass counts once it has delivered a batch: dropping one before
    that changes nothing, and two that begin together, as in zip(loader, loader), are the same epoch
    unless `set_epoch` comes between. Threads may share a pass: each batch goes to one of them.

    Most programs give shuffle, augment, device, num_workers, drop_last and seed. The others are
    for special cases: several processes (rank, world_size, tail), damaged files and failing disks
    (on_error, io), orders of your own (sampler, indices, block, window, streams), GPUs (augment_on,
    residency, compile), slow disks (prefetch, lookahead), self-supervised learning (views).

    JPEG is decoded by the loader's threads, wherever batches go; h5feed.interop.dali.DaliLoader,
    which takes the same arguments, decodes it on a GPU.

    It has a DataLoader's attributes, and takes a DataLoader's other arguments (StockOptions says
    what they do). It pickles as its arguments and its position; memory and threads are created
    again where it is unpickled. It is not a torch DataLoader, so accelerate's `prepare` leaves it
    alone: give `device=accelerator.device`. It divides samples among the ranks itself.

    For images of more than 65,536 pixels it calls cv2.setNumThreads(1), for the whole process:
    otherwise cv2 would split each image among threads of its own, which compete with the loader's.

    Args:
        dataset: what to feed: an H5Dataset, or a Subset or ConcatDataset of such, nested as you
            like. Its `target_transform` and `target_dtype` apply; it may have no `transform`, and
            no `output` or `aspect` but tensors of the images as they are stored.
        batch_size: samples of a batch, of this rank.
        shuffle: False, True, "block" (for disks that hate seeks: long sequential reads), or
            "shards" (for several files on many machines: each machine reads its own files only,
            a few at a time; see streams and window).
        augment: ops of h5feed.augment, in order; or torchvision's Compose, or a list of its
            transforms, as h5feed.augment.from_torchvision knows them.
        views: how many differently augmented images of each, as a tuple; or in place of `augment`
            the ops of each view, whose sizes may differ (multi-crop of SwAV and DINO):
            views=[global_ops, global_ops, *[local_ops] * 6]. An image is read and decoded once.
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
        num_workers: workers that make the batches (0, which a DataLoader takes, is one), or "auto":
            the cores this process may use, less one for the trainer where the device is not the
            CPU, and at most 16.
        engine: what the workers are. "thread": they start at once, and share Python's lock, which
            few cores do not feel. "process": threads of other processes, one or two in each,
            that share the memory of batches, and scale with the cores. "auto": processes where
            threads would wait for the lock (from four workers on with JPEG, six with raw images)
            and nothing is against it; stats() says why. Samples, crops and states are the same in
            both; ops of your own must be defined in a module that a worker can import. With
            processes, a forked child sees its parent's batches change.
        prefetch: batches in the making at once.
        drop_last: drop the last batch if it is short.
        tail: what a last step does whose samples do not divide among the ranks: "pad" repeats
            some, "drop" leaves some out. Every rank has equally many steps and samples.
        seed: any int.
        rank: this process; None asks torch.distributed, when a pass begins.
        world_size: how many share an epoch; None asks torch.distributed, when a pass begins.
        on_error: "raise", or "skip": the next whole sample of the batch stands in for one that
            cannot be decoded, or read with io="read"; see stats().
        with_index: deliver (images, labels, indices); indices are those of the packed items.
        keys: names of images and target, such as ("pixel_values", "labels"), which make a batch a
            dict; indices are then its "index". None takes the dataset's.
        sampler: any torch Sampler that has a length; it gives the order of all ranks together.
        indices: the samples to take, as positions in `dataset`.
        block: samples of a block with shuffle="block"; None: 8 MB of them.
        window: blocks, or shards of a stream, that are shuffled together; None: 16 blocks, or 4
            shards.
        streams: with shuffle="shards", how many streams the shards are dealt to, which the
            machines share out. An epoch needs window shards of each stream at a time; up to as
            many machines as there are streams read shards that no other does. It is part of the
            order: a state goes on only with the same, on any number of machines. Under torchrun
            the ranks of a machine share its streams, else each has its own.
        weights: how often each sample comes: "balanced" (each class as often as any other), or an
            array of one number per sample of `ds`. Samples are drawn with replacement, as many
            in an epoch as there are; each is augmented anew.
        repeats: how often each sample comes in a row, differently augmented (repeated
            augmentation, Hoffer et al. 2020); an epoch stays as long, so it has only a part of
            the samples: shuffle them.
        lookahead: bytes announced to the kernel ahead of the batches in the making.
        io: "map": items are views of mapped files, which costs least; a disk that fails, or a file
            cut short meanwhile, ends the process by SIGBUS. "read": each is read (raw
            256x256 takes 15 % more CPU so, JPEG no more), and what the disk does not give is a
            DamagedItemError that names item and errno.
        stock: DataLoader's other arguments, see StockOptions.

    Raises:
        UsageError: for an argument that is wrong, with what to do.

    """

    def __init__(
        self,
        dataset: H5Dataset | Subset[Any] | ConcatDataset[Any],
        batch_size: int = 1,
        *,
        shuffle: Shuffle = False,
        augment: Sequence[Op] | Callable[..., Any] = (),
        views: int | Sequence[Sequence[Op] | Callable[..., Any]] = 1,
        antialias: bool | str = "auto",
        device: str | torch.device = "cpu",
        augment_on: AugmentOn = "auto",
        residency: Residency = "stream",
        compile: bool = False,
        num_workers: int | str = "auto",
        engine: EngineName = "auto",
        prefetch: int = 2,
        drop_last: bool = False,
        tail: Tail = "pad",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        on_error: OnError = "raise",
        with_index: bool = False,
        keys: tuple[str, str] | None = None,
        sampler: Sampler[int] | None = None,
        indices: Sequence[int] | None = None,
        block: int | None = None,
        window: int | None = None,
        streams: int = 64,
        weights: Weights = None,
        repeats: int = 1,
        lookahead: int = 64 << 20,
        io: Io = "map",
        **stock: Unpack[StockOptions],
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__", "stock")}
        self._arguments: dict[str, Any] = {**given, **stock}
        packed, items = find_items(dataset)
        numbers = {"views": views} if isinstance(views, int) else {}
        check_arguments(packed, batch_size=batch_size, prefetch=prefetch, **numbers)
        check_choices(tail=tail, on_error=on_error, lookahead=lookahead)
        super().__init__(
            as_planned(dataset),
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            tail=tail,
            seed=read_stock(stock, seed),
            rank=rank,
            world_size=world_size,
            sampler=sampler,
            indices=indices,
            block=block,
            window=window,
            streams=streams,
            weights=weights,
            repeats=repeats,
            whole=packed,
            items=items,
        )
        self.prefetch = prefetch
        self._lookahead = lookahead
        self._transfer = open_transfer(device)
        self._read = choose_files(packed.files, io, residency)
        self.residency, why, self._resident = choose_resident(
            residency, packed.files, self._transfer, augment_on=augment_on
        )
        self._reasons = {
            "residency_reason": why,
            "decoding": explain_decoding(packed.files, self._transfer),
        }
        self._target: dict[str, Any] = {
            "target_transform": packed.target_transform,
            "target_dtype": packed.target_dtype,
            "target": packed.target,
            "keys": packed.keys if keys is None else checked_keys(keys),
        }
        self._ops: tuple[Op, ...] = from_torchvision(augment)
        self.num_workers = choose_workers(num_workers, self._transfer.device)
        self._build()
        if num_workers == "auto" and not self._builder.fields:
            self.num_workers = 1  # the device does it all
        self._engine: Engine = WorkerPool(self.num_workers)
        self._employ()
        self._counts = Counts()
        self._passes: list[weakref.ref[EpochIterator]] = []

    def _build(self) -> None:
        """Make what makes batches, by the ops there are now."""
        arguments, resides = self._arguments, self._resident is not None
        pipeline, on_device, reason = choose_pipeline(
            self._files,
            self._ops,
            views=arguments["views"],
            antialias=arguments["antialias"],
            on="device" if resides else arguments["augment_on"],
            transfer=self._transfer,
        )
        self._reasons["augment_on_reason"] = "the images are there" if resides else reason
        compiles = arguments["compile"]
        compiled = compile_ops(pipeline, on_device=on_device) if compiles else None
        self.engine, self._threads, self._reasons["engine_reason"] = choose_engine(
            arguments["engine"],
            self.num_workers,
            self._files,
            None if on_device else pipeline,
            batch_size=self.batch_size,
            fills=not resides or len(self._files.specs) > 1,
        )
        shared = None
        if self.engine == "process":
            shared = SharedMemory(self._transfer.device if self._transfer.pinned else None)
        builder = BatchBuilder(
            self._read,
            pipeline,
            self._transfer,
            batch_size=self.batch_size,
            on_device=on_device,
            keep=self.prefetch + 2,
            on_error=arguments["on_error"],
            with_index=arguments["with_index"],
            resident=self._resident,
            shared=shared,
            **self._target,
        )
        check_room(builder.rings, self.prefetch + 1)
        self._builder, self._compiled = builder, compiled
        self._drawing = builder.drawing

    def _employ(self) -> None:
        """Have workers who know the ops there are now."""
        builder = self._builder
        if builder.shared is None:
            if not builder.on_device:
                leave_cores_to_loader(builder.pipeline, self.num_workers)
            return
        setup = WorkerSetup(
            files=self._files,
            reads=not self._read.mapped,
            pipeline=builder.pipeline,
            names=tuple(field.name for field in builder.fields),
            on_device=builder.on_device,
            on_error=builder.on_error,
        )
        # those of passes that have begun end with these
        self._engine = ProcessPool(
            self.num_workers, self._threads, setup.pickled(), builder.shared, WorkerPool(1)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (self._arguments, self._ops, self.seed, replace(self._cursor))

    @property
    def collate_fn(self) -> LoaderCollate:
        """Makes batches of what `batch_sampler` yields, in a DataLoader built by someone else.

        accelerate's `skip_first_batches` builds one. Its batches lie on the CPU.
        """
        return LoaderCollate(partial(_cpu_builder, self._arguments, self._ops), self._ops)

    def set_size(self, size: int | tuple[int, int]) -> None:
        """Make images of another size from the next pass on.

        The last op that has a size gets it, those before change in proportion: Resize(256),
        CenterCrop(224) becomes Resize(146), CenterCrop(128) by `set_size(128)`. Samples, crops (as
        shares of the image) and the state stay those they are: a program that resumes calls
        `set_size` as it did before. Raises UsageError for a wrong size, where no op has one, and
        where views have ops of their own.
        """
        if not isinstance(views := self._arguments["views"], int):
            raise UsageError(
                f"size={size!r}: the {len(views)} views have ops and sizes of their own: make a "
                "loader with others"
            )
        self._change(with_size(self._ops, size))

    @property
    def mixup_enabled(self) -> bool:
        """Whether MixUp or CutMix mix batches, as timm's loaders call it.

        False, from the next pass on, leaves images alone; targets stay shares of the classes.
        """
        return any(isinstance(op, MixOp) and not isinstance(op, NoMix) for op in self._ops)

    @mixup_enabled.setter
    def mixup_enabled(self, enabled: bool) -> None:
        if not enabled:
            self._change([unmixed(op) for op in self._ops])
        elif not self.mixup_enabled:
            given = from_torchvision(self._arguments["augment"])
            if not any(isinstance(op, MixOp) for op in given):
                raise UsageError(
                    f"mixup_enabled=True, and augment={given!r} has no MixUp and no CutMix: give "
                    "H5Loader one, last in augment"
                )
            mixing = {type(op): op for op in given if isinstance(op, MixOp)}
            self._change([*[o for o in self._ops if not isinstance(o, MixOp)], *mixing.values()])

    def _change(self, ops: Sequence[Op]) -> None:
        """Go on with other ops; passes that have begun keep theirs."""
        before, self._ops = self._ops, tuple(ops)
        try:
            self._build()
        except UsageError:
            self._ops = before
            raise
        self._employ()

    def __iter__(self) -> EpochIterator:
        """Begin a pass; it makes batches ahead as soon as it exists."""
        cursor, order, steps = self._begin()
        plan = BatchPlan(order, steps, self._builder.drawing, seed=self.seed, epoch=cursor.epoch)
        fields = [field.name for field in self._builder.fields]
        ahead = ReadAhead(self._files, plan, lookahead=self._lookahead, fields=fields)
        epoch = Epoch(
            builder=self._builder, ahead=ahead, engine=self._engine, prefetch=self.prefetch
        )
        begun = EpochIterator(epoch, cursor, self._counts)
        # no WeakSet: that would run Python, in which a Ctrl-C is lost, when a pass ends
        self._passes = [other for other in self._passes if other() is not None]
        self._passes.append(weakref.ref(begun))
        return begun

    def close(self) -> None:
        """End all passes and the threads; a later pass starts new ones.

        Without it, they end when the loader is garbage-collected or the program ends.
        """
        for reference in self._passes:
            if begun := reference():
                begun.close()
        self._engine.close()

    def stats(self) -> dict[str, Any]:
        """Return counts since the loader was made, and its settings with the reasons for them.

        batches, images, repeated (only to even out the ranks' last step), skipped (a substitute
        stood in), wait_s (seconds the consumer waited), announced_bytes (to the kernel, ahead of
        their use), held_many (the caller held so many batches that it was warned), slots,
        slot_bytes, num_workers, prefetch, engine, residency and augment_on with the reason for
        each, resident_bytes (of images held for the device), compiled (whether the ops are),
        decoding (who decodes, and why).
        """
        rings, resident = self._builder.rings, self._builder.resident
        return {
            **asdict(self._counts),
            "slots": sum(map(len, rings)),
            "slot_bytes": sum(ring.nbytes for ring in rings),
            "engine": self.engine,
            "num_workers": self.num_workers,
            "prefetch": self.prefetch,
            "residency": self.residency,
            "resident_bytes": 0 if resident is None else resident.nbytes,
            "augment_on": "device" if self._builder.on_device else "cpu",
            "compiled": self._compiled is not None and self._compiled.error is None,
            **self._reasons,
        }


def _remake(arguments: dict[str, Any], ops: tuple[Op, ...], seed: int, cursor: Cursor) -> H5Loader:
    """Make a loader again that was pickled."""
    made = H5Loader(**arguments)
    made.seed, made._cursor = seed, cursor
    if ops != made._ops:
        made._change(ops)
    return made


def _refuse_to_build() -> BatchBuilder:
    raise UsageError(
        "batch_sampler and collate_fn of this loader make no batches in another DataLoader, such "
        "as accelerate's skip_first_batches builds: load_state_dict begins in mid-epoch"
    )


def _cpu_builder(arguments: dict[str, Any], ops: tuple[Op, ...]) -> BatchBuilder:
    """Make what makes a loader's batches, without threads and devices."""
    plain = {"rank": 0, "world_size": 1, "sampler": None, "indices": None, "num_workers": 1}
    plain |= {"weights": None, "repeats": 1}
    here = {
        "engine": "thread",
        "device": "cpu",
        "augment_on": "auto",
        "residency": "stream",
        "compile": False,
    }
    return H5Loader(**{**arguments, **plain, **here, "augment": ops})._builder


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is written: plain ints and strings, so that any checkpoint holds it."""

    version: int = _VERSION
    fingerprint: str
    """Of the data, all files together."""
    order: str
    """SampleOrder.kind."""
    listed: int
    """CRC-32 of what a sampler gave, where there is one."""
    seed: int
    epoch: int
    consumed: int
    """Positions of the epoch delivered to all ranks together."""


def read_state(state: Mapping[str, Any], *, fingerprint: str, order: str) -> State:
    """Return `state` checked; UsageError where it is none, or belongs to other data or order."""
    if not isinstance(state, Mapping):
        raise UsageError(f"state={state!r} is not a state of H5Loader; pass what state_dict() gave")
    kinds = {field.name: field.type for field in fields(State)}
    wrong = [k for k, kind in kinds.items() if type(state.get(k)).__name__ != kind]
    if wrong or state["version"] != _VERSION:
        raise UsageError(
            f"state={state!r} is not a state of H5Loader, version {_VERSION} "
            f"({', '.join(wrong) or 'version'} is missing or wrong); pass what state_dict() gave"
        )
    found = State(**{name: state[name] for name in kinds})
    if found.fingerprint != fingerprint:
        raise UsageError(
            f"the state belongs to other data: its fingerprint is {found.fingerprint[:12]}…, that "
            f"of this loader's is {fingerprint[:12]}…; open the files it was made with"
        )
    if found.order != order:
        raise UsageError(
            f"the state belongs to the order {found.order!r}, this loader has {order!r}; give it "
            "the same shuffle, block, window, streams, indices and sampler"
        )
    return found


def check_place(state: State, samples: int) -> None:
    """Raise UsageError where `state` stands before or behind an epoch of so many samples."""
    if state.epoch < 0:
        raise UsageError(
            f"state has epoch={state.epoch}, and epochs count from 0; pass what state_dict() gave"
        )
    if not 0 <= state.consumed <= samples:
        raise UsageError(
            f"state has consumed={state.consumed}, and an epoch has {samples} samples; pass what "
            "state_dict() gave, to a loader with the same sampler"
        )


def check_arguments(ds: Any, **numbers: Any) -> None:
    """Refuse a dataset that is none of ours or asks for what no loader does, and counts below 1."""
    if not isinstance(ds, H5Dataset):
        raise UsageError(
            f"dataset={ds!r} is not an H5Dataset; for any other dataset use torch's DataLoader, "
            "and for a part of an H5Dataset the whole and indices="
        )
    if ds.image_transform is not None:
        name = "transform" if ds.transform is not None else "transforms"
        raise UsageError(
            f"dataset.{name}={ds.image_transform!r} would have to run in Python for every image: "
            "give it to H5Loader as augment=, which takes torchvision's transforms and ops of "
            "h5feed.augment, or use make_dataloader"
        )
    if ds.output != "tensor" or ds.aspect != "stored":
        raise UsageError(
            f"dataset has output={ds.output!r} and aspect={ds.aspect!r}, and H5Loader makes "
            "tensors of the images as they are stored; its crops are drawn in the source's "
            "proportions and undo fit=stretch: give it H5Dataset(path) with neither, or use "
            "make_dataloader"
        )
    check_whole(1, **numbers)
