"""What every loader over packed files shares: which batches come, and where it stands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from torch.utils.data import Sampler

from h5feed.errors import UsageError
from h5feed.feed.arrange import Arrangement, Shuffle
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.order import Order
from h5feed.feed.run import Cursor
from h5feed.feed.setup import block_length, check_ranks, choose_ranks
from h5feed.feed.state import State, check_place, read_state
from h5feed.feed.steps import Steps, Tail
from h5feed.feed.whole import check_whole

__all__ = ["PackedLoader"]

Loader = TypeVar("Loader", bound="PackedLoader")


class PackedLoader(ABC):
    """Base: order, ranks, epochs and state. Subclasses make the batches of a pass.

    Args are those of H5Loader.
    """

    def __init__(
        self,
        ds: H5Dataset,
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
        window: int,
    ) -> None:
        check_whole(None, seed=seed)
        self.dataset = ds
        self.batch_size = batch_size
        self.seed = seed
        self.drop_last = drop_last
        self._tail: Tail = tail
        check_ranks(rank, world_size)
        self._given_ranks = rank, world_size
        self._arrangement = Arrangement(
            len(ds),
            shuffle=shuffle,
            sampler=sampler,
            indices=indices,
            block=block_length(ds.pixels) if block is None else block,
            window=window,
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

        Raises UsageError for what is no whole number of at least 0.
        """
        check_whole(0, epoch=epoch)
        if epoch != self._cursor.epoch or self._cursor.begun:
            self._cursor = Cursor(epoch)
        self._cursor.named = True

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest pass stands: what it delivered, not what it made ahead."""
        return asdict(
            State(
                fingerprint=self.dataset.pixels.fingerprint,
                order=self._arrangement.kind,
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

        Takes the state's seed. Raises UsageError for what is no state, for one of other data or
        of another order, and for one that stands outside its epoch.
        """
        found = read_state(
            state, fingerprint=self.dataset.pixels.fingerprint, order=self._arrangement.kind
        )
        check_place(found, self._arrangement.samples(found.epoch))
        self.seed = found.seed
        self._cursor = Cursor(found.epoch, found.consumed, found.listed)

    def _begin(self) -> tuple[Cursor, Order, Steps]:
        """Go to where the next pass begins; return that, with its order and what is left of it."""
        cursor = replace(self._cursor)
        if cursor.begun or self._is_over(cursor):
            cursor = Cursor(cursor.epoch + 1)
        order = self._arrangement.order(self.seed, cursor.epoch)
        self._check_listed(cursor, self._arrangement.listed(order))
        self._cursor = cursor
        return cursor, order, self._steps(cursor.consumed)

    def _is_over(self, cursor: Cursor) -> bool:
        """Whether a loaded state left nothing of its epoch, which nobody asked for by name."""
        if cursor.named or cursor.consumed == 0:
            return False
        self._arrangement.samples(cursor.epoch)  # a sampler's length may depend on the epoch
        return len(self._steps(cursor.consumed)) == 0

    def _steps(self, start: int) -> Steps:
        rank, world_size = choose_ranks(*self._given_ranks)
        return Steps(
            samples=len(self._arrangement),
            batch_size=self.batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last,
            tail=self._tail,
            start=start,
        )

    def _check_listed(self, cursor: Cursor, listed: int) -> None:
        if cursor.listed and cursor.listed != listed:
            raise UsageError(
                "sampler gave another order than in the pass that is to be gone on with; put its "
                "generator into the state it had then, or leave its generator out"
            )
        cursor.listed = listed
