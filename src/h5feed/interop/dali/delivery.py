"""From DALI's outputs to the batch that the consumer gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from h5feed.augment import Pipeline
from h5feed.feed.batch import transform_targets
from h5feed.feed.files import PackedFiles

__all__ = ["Delivery"]


class Delivery:
    """Delivers batches as H5Loader does. Arguments are DaliLoader's."""

    def __init__(
        self,
        pixels: PackedFiles,
        pipeline: Pipeline,
        *,
        device: torch.device,
        target_transform: Callable[[Any], Any] | None,
        target_dtype: torch.dtype | None,
        with_index: bool,
    ) -> None:
        self._pixels = pixels
        self._views = pipeline.views
        self._dtype = pipeline.out_dtype
        self._masks = [spec.name for spec in pixels.specs.values() if spec.channels == 1]
        self._device = device
        self._target_transform = target_transform
        self._target_dtype = target_dtype
        self._with_index = with_index

    def batch(self, outputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """Return (images, targets), and indices if wanted, of a pipeline's outputs."""
        views, indices = self._views, outputs[-1]
        images = [self._image(output) for output in outputs[:views]]
        masks = [_one_or_all(outputs[k : k + views]) for k in range(views, len(outputs) - 2, views)]
        target = self._target(masks, outputs[-2], indices)
        batch = (_one_or_all(images), target)
        return (*batch, indices.to(self._device)) if self._with_index else batch

    def _image(self, output: torch.Tensor) -> torch.Tensor:
        return output.permute(0, 3, 1, 2).to(self._dtype)

    def _target(self, masks: list[Any], labels: torch.Tensor, indices: torch.Tensor) -> Any:
        def name(k: int) -> str:
            return self._pixels.place("images", int(indices[k]))

        transform, dtype = self._target_transform, self._target_dtype
        if len(masks) > 1:
            made = [transform_targets(mask, None, name, dtype) for mask in masks]
            return dict(zip(self._masks, made, strict=True))
        if masks:
            return transform_targets(masks[0], transform, name, dtype)
        if transform is None:
            labels = labels[:, 0] if labels.dtype == torch.int64 else labels
            return transform_targets(labels, None, name, dtype)
        labels = torch.from_numpy(self._pixels.labels[indices.numpy()])
        made = transform_targets(labels, transform, name, dtype)
        return made.to(self._device) if isinstance(made, torch.Tensor) else made


def _one_or_all(views: list[torch.Tensor]) -> Any:
    return views[0] if len(views) == 1 else tuple(views)
