"""Batches in the shape of DALI's own DALIGenericIterator, for code written to that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from h5feed.errors import UsageError
from h5feed.interop.dali._library import LastBatchPolicy
from h5feed.interop.dali.loader import DaliLoader

__all__ = ["GenericIterator"]


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
                f"last_batch_policy={last_batch_policy!r} is no LastBatchPolicy of "
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


def _filled(part: Any, count: int) -> Any:
    """Return `count` rows, the last one repeated."""
    if not isinstance(part, torch.Tensor) or len(part) == count:
        return part
    rows = torch.arange(count, device=part.device).clamp(max=len(part) - 1)
    if part.dim() < 4:
        return part[rows]
    return part[rows].contiguous(memory_format=torch.channels_last)
