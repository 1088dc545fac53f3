"""RandomErasing: a random rectangle of each image is painted over."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from h5feed.augment.crop_cpu import Image
from h5feed.augment.crop_device import per_channel
from h5feed.augment.crops import below
from h5feed.augment.floats import ROW_DTYPES
from h5feed.augment.frame import Shapes
from h5feed.augment.noise import normal_block, normal_grid
from h5feed.augment.ops import Draws, Op, check_numbers, check_pair, check_probability, refuse
from h5feed.augment.stages import Rows, Step, stream

__all__ = ["ErasingStage", "RandomErasing"]

_TRIES: Final = 10  # of torchvision's RandomErasing, before it leaves the image alone


@dataclass(frozen=True)
class RandomErasing(Op):
    """With probability `p`, paint a rectangle of random area and aspect ratio over.

    Before ToFloat its value is a color of 0..255, after it a value of the floats.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    """Smallest and largest share of the image's area."""
    ratio: tuple[float, float] = (0.3, 3.3)
    """Smallest and largest height / width; drawn evenly in its logarithm."""
    value: float | Sequence[float] | Literal["random"] = 0.0
    """One number, or one for each channel, or "random": a normal draw for each, after ToFloat."""

    def __post_init__(self) -> None:
        check_probability(self, self.p)
        check_pair(self, "scale", self.scale, 0, 1)
        if check_pair(self, "ratio", self.ratio, 0)[0] == 0:
            raise refuse(self, "ratio", self.ratio, "must be positive")
        if isinstance(self.value, str) and self.value != "random":
            raise refuse(self, "value", self.value, 'must be numbers or "random"')
        if not isinstance(self.value, str) and not isinstance(self.value, (int, float)):
            check_numbers(self, "value", self.value)


class ErasingStage:
    """RandomErasing on uint8 images, or on floats of one type.

    Its rows, float64 (B, 5): top, left, height and width of the rectangle (0 for none), and a seed
    below 2**24, which float32 holds.
    """

    columns = 5
    resamples = False

    def __init__(self, op: RandomErasing, position: int, channels: int, dtype: torch.dtype) -> None:
        self.op = op
        self._position = position
        self._channels = channels
        self._dtype = dtype
        self._color: tuple[float, ...] = ()
        if not isinstance(op.value, str):
            self._color = (
                check_numbers(op, "value", op.value)
                if isinstance(op.value, Sequence)
                else (float(op.value),)
            )
            if len(self._color) not in (1, channels):
                wrong = f"must be one number, or one for each of {channels} channels"
                raise refuse(op, "value", op.value, wrong)
        if dtype != torch.uint8:
            return
        if not self._color:
            wrong = "draws from a normal distribution: put the op after ToFloat and Normalize"
            raise refuse(op, "value", op.value, wrong)
        if not 0 <= min(self._color) <= max(self._color) <= 255:
            raise refuse(op, "value", op.value, "must lie within 0..255 before ToFloat")

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return the same size."""
        return size

    def draw(self, draws: Draws, view: int, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return rows as torchvision draws them: the first of 10 tries that fits, if any."""
        op = self.op
        u = draws.uniform(stream(self._position, view), 4 + 2 * _TRIES)
        height, width = shapes.actual[:, 0], shapes.actual[:, 1]
        area = (height * width)[:, None] * (
            op.scale[0] + (op.scale[1] - op.scale[0]) * u[:, 4 : 4 + _TRIES]
        )
        low, high = np.log(op.ratio)
        aspect = np.exp(low + (high - low) * u[:, 4 + _TRIES :])
        h = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        w = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = (h < height[:, None]) & (w < width[:, None])
        rows = np.arange(len(fits))
        first = fits.argmax(axis=1)
        h, w = h[rows, first], w[rows, first]
        erases = fits[rows, first] & (u[:, 0] < op.p)
        top, left = below(u[:, 1], height - h + 1), below(u[:, 2], width - w + 1)
        seed = below(u[:, 3], np.int64(1 << 24))
        made = np.stack([top, left, h, w, seed], axis=1)
        return np.where(erases[:, None], made, 0).astype(np.float64), shapes

    def cpu(self, rows: Rows) -> Step:
        """Return the step that erases in place."""
        listed = rows.astype(np.int64).tolist()
        color = self._bits(np.array(self._color))

        def step(i: int, src: Image, out: Image | None) -> Image:
            top, left, h, w, seed = listed[i]
            if h and w:
                paint = color
                if not self._color:
                    paint = self._bits(normal_block(seed, src.shape, top, left, h, w))
                src[top : top + h, left : left + w] = paint
            return src

        return step

    def _bits(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return `values` as they lie in a row of a batch slot."""
        made = torch.from_numpy(values.astype(np.float32)).to(self._dtype)
        if self._dtype == torch.bfloat16:
            made = made.view(torch.int16)
        return made.numpy().view(ROW_DTYPES[self._dtype])

    def mask(self, rows: Rows) -> Step | None:
        """Masks stay whole, as in torchvision."""
        return None

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return images (B, C, H, W) with the rectangles painted over."""
        top, left, h, w, seed = rows[:, :, None, None, None].unbind(1)
        y = torch.arange(size[0], device=images.device).view(1, 1, -1, 1)
        x = torch.arange(size[1], device=images.device).view(1, 1, 1, -1)
        inside = (y >= top) & (y < top + h) & (x >= left) & (x < left + w)
        if self._color:
            paint = per_channel(self._color, images)
        else:
            paint = normal_grid(seed, images.shape).to(images.dtype)
        return torch.where(inside, paint, images)
