"""What each op is in a DALI pipeline: what it is fed for a batch, and the operators it takes.

All geometry is decided by h5feed.augment. DALI gets whole-pixel boxes, sizes and places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from h5feed.augment import Normalize, Op, RandomErasing, ToDtype
from h5feed.augment.floats import FloatStage
from h5feed.augment.geometry import AxisOp
from h5feed.augment.ops import Rows
from h5feed.augment.plan import ChoiceStage, CropStage, OpStage, Plan, Stage
from h5feed.errors import UsageError
from h5feed.optional import require

__all__ = [
    "SUPPORTED_OPS",
    "YX",
    "Box",
    "Crop",
    "Erase",
    "Floats",
    "LastBatchPolicy",
    "Part",
    "Port",
    "Step",
    "dali",
    "fn",
    "make_steps",
    "types",
]

dali: Any = require("nvidia.dali", "dali")
fn: Any = require("nvidia.dali.fn", "dali")
types: Any = require("nvidia.dali.types", "dali")
LastBatchPolicy: Any = require("nvidia.dali.plugin.base_iterator", "dali").LastBatchPolicy

YX = [0, 1]
"""Axes of an HWC image."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input of the pipeline."""

    dtype: str
    """Name in nvidia.dali.types."""
    ndim: int
    """Dimensions of a sample."""
    layout: str = ""


_POINT, _FLOAT_POINT = Port("INT32", 1), Port("FLOAT", 1)


class Part(Protocol):
    """One step on HWC images."""

    ports: tuple[Port, ...]

    def feed(self, rows: Rows) -> list[Any]:
        """Return a batch for each port from the parameters of a stage (B, columns)."""
        ...

    def build(self, image: Any, nodes: Sequence[Any]) -> Any:
        """Return the image changed, with a node for each port."""
        ...


class Box:
    """Cut a box out of each image; of rows of a crop, see augment.frame.COLUMNS."""

    ports: tuple[Port, ...] = (_POINT, _POINT)

    def feed(self, rows: Rows) -> list[Any]:
        """Return where boxes begin and how large they are."""
        return [_ints(rows[:, :2]), _ints(rows[:, 2:4])]

    def build(self, image: Any, nodes: Sequence[Any]) -> Any:
        """Return the boxes."""
        start, shape = nodes
        return fn.slice(image, start=start, shape=shape, axes=YX)


class Crop:
    """Resize and flip boxes, and lay them in their place; see augment.frame.COLUMNS.

    Flips are negative sizes of fn.resize, which cost nothing.
    """

    def __init__(self, stage: CropStage) -> None:
        self._antialiases = stage.antialias is not False
        self._places = any(op.crops for _, op in stage.ops)
        self._fill = list(stage.fill)
        self.ports: tuple[Port, ...] = (
            _FLOAT_POINT,
            *((Port("BOOL", 0), *_ANTIALIAS) if self._antialiases else ()),
            *((_POINT, _POINT) if self._places else ()),
        )

    def feed(self, rows: Rows) -> list[Any]:
        """Return signed sizes, what antialiasing needs, and where the output begins."""
        y_flips, x_flips = rows[:, 10] & 2, rows[:, 10] & 1
        flips = np.stack([y_flips, x_flips], axis=1) > 0
        box, size, place, out = (rows[:, k : k + 2] for k in (2, 4, 6, 8))
        made: list[Any] = [np.where(flips, -size, size).astype(np.float32)]
        if self._antialiases:
            made += [rows[:, 11] != 0, *_renormalization(box, size, rows[:, 11] != 0)]
        if self._places:  # the flip is done already, so places are mirrored
            start = np.where(flips, place + size - out, -place)
            made += [_ints(start), _ints(out)]
        return made

    def build(self, image: Any, nodes: Sequence[Any]) -> Any:
        """Return the crops."""
        rest = list(nodes)
        size = rest.pop(0)
        if self._antialiases:
            image = _resized(image, size, *rest[:7])
            rest = rest[7:]
        else:
            image = fn.resize(image, size=size, antialias=False)
        if self._places:
            start, shape = rest
            image = fn.slice(
                image,
                start=start,
                shape=shape,
                axes=YX,
                out_of_bounds_policy="pad",
                fill_values=self._fill,
            )
        return image


_ANTIALIAS = (_POINT, _POINT, _FLOAT_POINT, _FLOAT_POINT, Port("FLOAT", 3), Port("FLOAT", 3))


def _resized(
    image: Any,
    size: Any,
    antialias: Any,
    start: Any,
    shape: Any,
    roi_start: Any,
    roi_end: Any,
    down: Any,
    along: Any,
) -> Any:
    """Resize with an antialiasing filter where `antialias` says so.

    DALI repeats the border pixel under the part of the filter that reaches outside, torch leaves
    that part out and divides by the rest: up to 13 levels between them in the outermost pixels.
    So zeros are laid around, which fn.resize sees beyond its roi, and the border is scaled up.
    A DALI conditional: pipeline_def splits the batch.
    """
    if antialias:
        padded = fn.slice(
            image, start=start, shape=shape, axes=YX, out_of_bounds_policy="pad", fill_values=0
        )
        floats = fn.resize(
            padded, size=size, roi_start=roi_start, roi_end=roi_end, dtype=types.FLOAT
        )
        out = fn.cast(floats * down * along, dtype=types.UINT8)
    else:
        out = fn.resize(image, size=size, antialias=False)
    return out


def _renormalization(box: Rows, size: Rows, antialias: Rows) -> list[Any]:
    """Return what the ports of _ANTIALIAS get: padding, region of interest, and two factors.

    An enlarged axis has neither: there both repeat the border pixel.
    """
    shrinks = box > size
    border = np.where(shrinks, -(-box // size) + 1, 0)
    factors = []
    for axis, shape in ((0, (-1, 1, 1)), (1, (1, -1, 1))):
        outer = np.where(shrinks[:, axis], _outer_factor(box[:, axis], size[:, axis]), 1.0)
        lengths = np.where(antialias, size[:, axis], 1)  # the others do not come to see theirs
        ends = zip(lengths.tolist(), outer.tolist(), strict=True)
        factors.append([_ends(n, f).reshape(shape) for n, f in ends])
    region = [border.astype(np.float32), (border + box).astype(np.float32)]
    return [_ints(-border), _ints(box + 2 * border), *region, *factors]


def _outer_factor(length: Rows, resized: Rows) -> NDArray[np.float64]:
    """Return all of the filter's weight over what lies inside, for the outermost output pixel.

    No other one's filter reaches outside: its center is a whole filter's half-width away.
    """
    scale = np.maximum(length / resized, 1)[:, None]
    pixels = np.arange(-int(scale.max()) - 2, int(2 * scale.max()) + 2)
    weights = np.clip(1 - np.abs(pixels - (scale - 1) / 2) / scale, 0, None)
    inside = (pixels >= 0) & (pixels < length[:, None])
    factor: NDArray[np.float64] = weights.sum(1) / (weights * inside).sum(1)
    return factor


@lru_cache(maxsize=1024)
def _ends(count: int, factor: float) -> NDArray[np.float32]:
    """Return `count` ones, the outermost scaled. Most images of a batch ask for the same."""
    made = np.ones(count, np.float32)
    made[0] = made[-1] = factor
    return made


class Erase:
    """Paint a rectangle over; rows are those of RandomErasing. UsageError for one with noise."""

    ports: tuple[Port, ...] = (_FLOAT_POINT, _FLOAT_POINT)

    def __init__(self, op: RandomErasing) -> None:
        if not op.color:
            raise UsageError(
                f'{op!r}: DaliLoader does not support value="random"; give a color, or use H5Loader'
            )
        self._color = [float(value) for value in op.color]

    def feed(self, rows: Rows) -> list[Any]:
        """Return where rectangles begin and how large they are."""
        return [rows[:, k : k + 2].astype(np.float32) for k in (0, 2)]

    def build(self, image: Any, nodes: Sequence[Any]) -> Any:
        """Return images with the rectangles painted over."""
        anchor, shape = nodes
        return fn.erase(image, anchor=anchor, shape=shape, axes=YX, fill_value=self._color)


_DTYPES = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "FLOAT",  # DALI makes no bfloat16: torch rounds the batch
}


class Floats:
    """From bytes to floats, one factor and offset for each channel."""

    ports: tuple[Port, ...] = ()

    def __init__(self, stage: FloatStage) -> None:
        self._mean = (-stage.offset / stage.factor).tolist()
        self._std = (1 / stage.factor).tolist()
        self._dtype = _DTYPES[stage.dtype]

    def feed(self, rows: Rows) -> list[Any]:
        """Return nothing: it has no parameters."""
        return []

    def build(self, image: Any, nodes: Sequence[Any]) -> Any:
        """Return float images."""
        return fn.crop_mirror_normalize(
            image,
            dtype=getattr(types, self._dtype),
            mean=self._mean,
            std=self._std,
            output_layout="HWC",
        )


def _ints(values: NDArray[Any]) -> NDArray[np.int32]:
    return np.ascontiguousarray(values, np.int32)


_PARTS = {RandomErasing: Erase}
"""Of the ops that are steps of their own."""

SUPPORTED_OPS: tuple[type[Op], ...] = (AxisOp, ToDtype, Normalize, *_PARTS)
"""What DaliLoader can do: crops, resizes and flips, floats, and RandomErasing with a color."""


@dataclass(frozen=True, slots=True)
class Step:
    """A part, and the stage of h5feed.augment whose parameters it takes."""

    part: Part
    stage: int
    """Number in Params.views[view]."""


def make_steps(ops: Sequence[Op], plan: Plan) -> tuple[Step, ...]:
    """Return the steps of `plan`, which `ops` made, on images whose first box has been cut.

    Raises UsageError that names an op that DaliLoader does not support.
    """
    for op in ops:
        if not isinstance(op, SUPPORTED_OPS):
            raise UsageError(
                f"{type(op).__name__} is not supported by DaliLoader, which has crops, resizes, "
                "flips, RandomErasing, ToDtype and Normalize; leave it out, or use H5Loader"
            )
        for name, known in (("interpolation", "bilinear"), ("padding_mode", "constant")):
            value = getattr(op, name, known)
            if value != known:
                raise UsageError(
                    f"{type(op).__name__}: {name}={value!r} is not supported by DaliLoader, which "
                    f"has {known!r} alone; leave it out, or use H5Loader"
                )
    first = len(plan.stages)  # of those that come after the floats
    steps = [Step(part, n) for n, stage in enumerate(plan.stages) for part in _parts(stage, n)]
    if plan.floats is not None:
        steps.append(Step(Floats(plan.floats), 0))
    after = enumerate(plan.after, first)
    return (*steps, *(Step(part, n) for n, stage in after for part in _parts(stage, n)))


def _parts(stage: Stage, number: int) -> list[Part]:
    """Return what stage `number` comes to; the first box has been cut by who read the image."""
    if isinstance(stage, ChoiceStage):
        return []  # none gets here: make_steps refuses its op
    if isinstance(stage, OpStage):
        return [made(stage.op) for kind, made in _PARTS.items() if isinstance(stage.op, kind)]
    crop: list[Part] = [Crop(stage)] if stage.ops else []
    return [Box(), *crop] if number else crop
