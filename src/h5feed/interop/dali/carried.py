"""Which ops DALI carries here, and the steps they come to; all others are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from h5feed.augment import (
    CenterCrop,
    Normalize,
    Op,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToDtype,
)
from h5feed.augment.frame import Antialias
from h5feed.augment.plan import CropStage, OpStage, Plan, Stage
from h5feed.errors import UsageError
from h5feed.interop.dali.parts import Box, Crop, Erase, Floats, Part

__all__ = ["CARRIED", "Step", "make_steps"]

CARRIED: tuple[type[Op], ...] = (
    Resize,
    CenterCrop,
    RandomCrop,
    RandomResizedCrop,
    RandomHorizontalFlip,
    RandomVerticalFlip,
    RandomErasing,
    ToDtype,
    Normalize,
)
"""RandomErasing with a color only, not with value="random"."""

_DTYPES = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "FLOAT",  # DALI makes no bfloat16: torch rounds the batch
}


@dataclass(frozen=True, slots=True)
class Step:
    """A part, and the stage of h5feed.augment whose parameters it takes."""

    part: Part
    stage: int
    """Number in Params.views[view]."""


def make_steps(ops: Sequence[Op], antialias: Antialias) -> tuple[Step, ...]:
    """Return the steps that `ops` come to, on images from which the first box has been cut.

    Raises UsageError that names an op that DALI does not carry.
    """
    for op in ops:
        _check(op)
    plan = Plan(ops, antialias)
    steps: list[Step] = []
    for number, stage in enumerate(plan.stages):
        steps += [Step(part, number) for part in _parts(stage, number)]
    if plan.floats is not None:
        steps.append(Step(Floats(plan.floats, _DTYPES[plan.floats.dtype]), 0))
    for number, stage in enumerate(plan.after, len(plan.stages)):
        steps += [Step(part, number) for part in _parts(stage, number)]
    return tuple(steps)


def _check(op: object) -> None:
    names = ", ".join(kind.__name__ for kind in CARRIED)
    if isinstance(op, RandomErasing) and op.value == "random":
        raise UsageError(
            f'{op!r}: value="random" is not carried by DaliLoader; give a color, or use H5Loader'
        )
    if isinstance(op, Op) and not isinstance(op, CARRIED):
        raise UsageError(
            f"{type(op).__name__} is not carried by DaliLoader, which has {names}; leave it out, "
            "or use H5Loader"
        )


def _parts(stage: Stage, number: int) -> list[Part]:
    if isinstance(stage, CropStage):
        crop = [Crop(stage)] if stage.ops else []
        return [Box(), *crop] if number else list(crop)
    assert isinstance(stage, OpStage)
    assert isinstance(stage.op, RandomErasing)
    value = stage.op.value
    assert not isinstance(value, str)
    return [Erase([value] if isinstance(value, (int, float)) else value)]
