"""Samples to a batch, without turning pixels around on the way."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from h5feed.errors import UsageError

__all__ = ["collate", "transform_targets"]


def collate(samples: list[Any]) -> Any:
    """Return what `default_collate` returns; images in channels_last memory are stacked as such.

    H5Dataset's images lie in memory as (H, W, C). Stacking their (C, H, W) views gathers every
    plane byte by byte; stacking (H, W, C) and permuting the batch copies whole images, and the
    batch is channels_last, which is what convolutions want (`tools/bench_dataset.py collate`).
    Everything but such images goes to `default_collate` as it is.

    Raises UsageError where the images of a batch differ in size.
    """
    if type(samples[0]) is not tuple:
        return default_collate(samples)
    return [_stack(column) for column in zip(*samples, strict=True)]


def _stack(column: Sequence[Any]) -> Any:
    """Make one part of a batch: all its images, or all its labels."""
    first = column[0]
    if isinstance(first, Tensor):
        return _stack_images(column)
    if isinstance(first, np.ndarray) and first.ndim:
        # Over read-only arrays, as output="numpy" gives them, default_collate warns.
        return torch.from_numpy(np.stack(column))
    return default_collate(list(column))


def _stack_images(images: Sequence[Tensor]) -> Tensor:
    _check_sizes(images)
    first = images[0]
    if first.dim() == 3 and first.permute(1, 2, 0).is_contiguous():
        batch: Tensor = default_collate([image.permute(1, 2, 0) for image in images])
        return batch.permute(0, 3, 1, 2)
    stacked: Tensor = default_collate(list(images))
    return stacked


def _check_sizes(images: Sequence[Tensor]) -> None:
    sizes = {tuple(image.shape) for image in images}
    if len(sizes) > 1:
        raise UsageError(
            f"images of one batch have {len(sizes)} different sizes, among them "
            f"{' and '.join(map(str, sorted(sizes)[:2]))}; give the dataset a transform that "
            "ends in one size, such as RandomResizedCrop(224), or use batch_size=1"
        )


def transform_targets(
    targets: Any,
    transform: Callable[[Any], Any] | None,
    name: Callable[[int], str],
    dtype: torch.dtype | None = None,
) -> Any:
    """Return a batch's targets, a tensor or one for each view, each target changed by itself.

    They have `dtype`, where one is given, when `transform` gets them. What `transform` raises goes
    on, with a note (from Python 3.11 on) of the item: `name(k)`.
    """
    if isinstance(targets, tuple):
        return tuple(transform_targets(view, transform, name, dtype) for view in targets)
    targets = targets if dtype is None else targets.to(dtype)
    if transform is None:
        return targets
    made = []
    plain = targets.dim() == 1 and dtype is None  # as H5Dataset hands them out
    for k, target in enumerate(targets.tolist() if plain else targets):
        try:
            made.append(transform(target))
        except Exception as ex:
            if hasattr(ex, "add_note"):
                ex.add_note(f"target_transform was at the target of {name(k)}")
            raise
    return default_collate(made)
