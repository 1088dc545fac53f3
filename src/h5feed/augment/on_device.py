"""A plan carried out on a whole batch, on any device, without waiting for it."""

from collections.abc import Sequence

import torch

from h5feed.augment.mixing import mix_images
from h5feed.augment.plan import Plan

__all__ = ["run_batch"]


def run_batch(
    plan: Plan, packed: torch.Tensor, batch: torch.Tensor, sizes: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return images (B, C, H, W), channels_last, from uint8 (B, h, w, 3) or NV12 (B, h*3//2, w).

    packed: Params.packed on the device. sizes: (height, width) after each stage. Nothing here
    depends on values or asks for one, so torch.compile takes it whole.
    """
    images = batch if plan.first.nv12 else batch.permute(0, 3, 1, 2)
    begin = 0
    stages = [*plan.stages, *plan.after]
    for number, (stage, size) in enumerate(zip(stages, sizes, strict=True)):
        if number == len(plan.stages) and plan.floats is not None:
            images = plan.floats.device(images)
        images = stage.device(packed[:, begin : begin + stage.columns], images, size)
        begin += stage.columns
    if plan.floats is not None and not plan.after:
        images = plan.floats.device(images)
    if plan.mix is not None:
        images = mix_images(images, packed[0, begin:])
        images = images if plan.floats is not None else images.round()
    return images.to(plan.dtype, memory_format=torch.channels_last)
