"""A plan carried out on the CPU, for the images of one chunk, on the calling thread."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from h5feed.augment.crop_cpu import Image
from h5feed.augment.ops import Ints
from h5feed.augment.plan import Plan
from h5feed.augment.stages import Rows, Step
from h5feed.augment.windows import SMALL, are_windows, copy_windows

__all__ = ["Kernel", "kernel", "run_fixed", "run_masks"]

_TOGETHER = 16  # small images converted to floats by one call; their bytes stay in the L1 cache


class Kernel(Protocol):
    """Makes image i of a chunk from what is stored of it, or the part from (top, left) on."""

    def __call__(self, i: int, src: Image, out: Image, top: int = 0, left: int = 0) -> None:
        """Write into `out` (H, W, C), a row of a batch slot."""
        ...


def _steps(plan: Plan, rows: Sequence[Rows]) -> tuple[list[Step], list[Step]]:
    """Return the steps on bytes after the first, and those on floats, for a chunk's rows."""
    stages = [*plan.stages, *plan.after]
    steps = [stage.cpu(part) for stage, part in zip(stages[1:], rows[1:], strict=True)]
    middle = len(plan.stages) - 1
    return steps[:middle], steps[middle:]


def kernel(plan: Plan, rows: Sequence[Rows]) -> Kernel:
    """Return the function that makes the images of a chunk, whose rows are given per stage."""
    first = plan.first.cpu(rows[0])
    on_bytes, on_floats = _steps(plan, rows)
    to_float = plan.floats.cpu() if plan.floats is not None else None
    direct = max(k for k, stage in enumerate(plan.stages) if stage.resamples)
    if to_float is not None:
        direct = -1  # the bytes go to scratch memory, the floats to the row

    def make(i: int, src: Image, out: Image, top: int = 0, left: int = 0) -> None:
        image = first(i, src, None if direct else out, top, left)
        for k, step in enumerate(on_bytes, 1):
            image = step(i, image, out if k == direct else None)
        if to_float is not None:
            to_float(image, out)
            for step in on_floats:
                step(i, out, None)

    return make


def run_fixed(plan: Plan, rows: Sequence[Rows], field: Image, indices: Ints, out: Image) -> None:
    """Make images `indices` (n) of a raw field (N, H, W, C) into `out` (n, H, W, C)."""
    height, width = field.shape[1:3]
    small = field[0].nbytes <= SMALL and not any(stage.resamples for stage in plan.stages[1:])
    if not small or plan.first.nv12 or not are_windows(rows[0], height, width):
        make = kernel(plan, rows)
        for i, index in enumerate(indices.tolist()):
            make(i, field[index], out[i])
        return
    on_bytes, on_floats = _steps(plan, rows)
    images = out if plan.floats is None else np.empty((len(out), *out.shape[1:3], 3), np.uint8)
    copy_windows(rows[0], field, indices, images, plan.first.fill)
    for step in on_bytes:
        for i, image in enumerate(images):
            step(i, image, None)
    if plan.floats is not None:
        to_float = plan.floats.cpu()
        for i in range(0, len(out), _TOGETHER):
            some = slice(i, i + _TOGETHER)
            to_float(_tall(images[some]), _tall(out[some]))
        for step in on_floats:
            for i, image in enumerate(out):
                step(i, image, None)


def _tall(images: Image) -> Image:
    """Return images (n, H, W, C) one below the other, (n*H, W, C)."""
    return images.reshape(-1, *images.shape[2:])


def run_masks(plan: Plan, rows: Sequence[Rows], masks: Sequence[Image], out: Image) -> None:
    """Make masks (h, w, 1) into `out` (n, H, W, 1)."""
    made = [stage.mask(part) for stage, part in zip([*plan.stages, *plan.after], rows, strict=True)]
    steps = [step for step in made if step is not None]
    for i, src in enumerate(masks):
        mask = src[..., 0]
        for step in steps:
            mask = step(i, mask, out[i, ..., 0] if step is steps[-1] else None)
