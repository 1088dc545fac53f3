"""The steps that a pipeline is made of."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from h5feed.augment.crop_cpu import Image, Scratch, crop_image, crop_mask
from h5feed.augment.crop_device import crop_batch
from h5feed.augment.crops import AxisOp
from h5feed.augment.frame import COLUMNS, Antialias, Frame, Shapes
from h5feed.augment.nv12 import nv12_batch, nv12_box
from h5feed.augment.ops import Draws

__all__ = ["CropStage", "FirstStep", "Rows", "Stage", "Step", "kernel_dtype", "stream"]

Rows = NDArray[Any]
"""A stage's parameters: one row per image."""

Step = Callable[[int, Image, Image | None], Image]
"""(i, image, out) -> image i of a chunk changed.

A resampling step writes into `out` where it is given, else into memory of its own that the next
call reuses; another changes `image` in place and returns it.
"""


def stream(position: int, view: int) -> int:
    """Return the random stream of the op at this position of the list, for this view."""
    return view << 16 | position


def kernel_dtype(device: torch.device) -> torch.dtype:
    """float16 on CUDA: its products add up in float32, and 11 bits hold 0..255 within 1/16."""
    return torch.float16 if device.type == "cuda" else torch.float32


class FirstStep(Protocol):
    """A step that also takes an image of which only a part is given, from (top, left) on."""

    def __call__(self, i: int, src: Image, out: Image | None, top: int = 0, left: int = 0) -> Image:
        """Return image i of a chunk."""
        ...


class Stage(Protocol):
    """One step: draws rows of parameters, then changes images by them, on the CPU or a device."""

    columns: int
    """How many numbers a row of its parameters has."""
    resamples: bool
    """Whether it makes a new image; else it changes the one given."""

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return the (height, width) it gives to images of one size, None where they vary."""
        ...

    def draw(self, draws: Draws, view: int, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return the parameters (B, columns) of a batch, and what its images become."""
        ...

    def cpu(self, rows: Rows) -> Step:
        """Return the step for a chunk of parameters (n, columns)."""
        ...

    def mask(self, rows: Rows) -> Step | None:
        """Return the step for a chunk of masks (h, w); None where masks stay as they are."""
        ...

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return images (B, C, *size) changed by float32 rows (B, columns).

        Images are float, of whole numbers 0..255, so that rounding falls where it does on the CPU.
        """
        ...


class CropStage:
    """Consecutive axis-aligned ops."""

    columns = len(COLUMNS)
    resamples = True

    def __init__(self, antialias: Antialias) -> None:
        self._default: Antialias = antialias
        self.nv12 = False
        self.ops: list[tuple[int, AxisOp]] = []
        self.fill: tuple[float, ...] = (0.0,)
        self.mask_fill = 0

    def accepts(self, op: AxisOp) -> bool:
        """Whether `op` folds with the ops so far, fill and all."""
        if op.resizes:
            return all(before.padding_color is None for _, before in self.ops)
        return op.padding_color is None or not any(before.crops for _, before in self.ops)

    def add(self, position: int, op: AxisOp) -> None:
        """Append the op at this position of the pipeline's list."""
        self.ops.append((position, op))
        if op.padding_color is not None:
            self.fill, self.mask_fill = op.padding_color, op.mask_fill

    @property
    def antialias(self) -> Antialias:
        """The setting of the last op that says one; else the pipeline's."""
        said = [op.antialias for _, op in self.ops if op.antialias is not None]
        return said[-1] if said else self._default

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return what all the ops make of it."""
        for _, op in self.ops:
            size = op.size_after(size)
        return size

    def draw(self, draws: Draws, view: int, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return int32 (B, 12) rows, see frame.COLUMNS."""
        frame = Frame(shapes)
        for position, op in self.ops:
            op.fold(frame, draws.uniform(stream(position, view), op.uniforms))
        return frame.finish(self.antialias), frame.shapes()

    def cpu(self, rows: Rows) -> FirstStep:
        """Return the step that crops image i of the chunk."""
        listed, fill, nv12 = rows.tolist(), self.fill, self.nv12
        made, rgb = Scratch(), Scratch()

        def step(i: int, src: Image, out: Image | None, top: int = 0, left: int = 0) -> Image:
            row = listed[i]
            y, x, h, w = row[:4]
            y, x = y - top, x - left
            box = nv12_box(src, y, x, h, w, rgb) if nv12 else src[y : y + h, x : x + w]
            image = made(row[8], row[9], box.shape[2]) if out is None else out
            crop_image(row, box, image, fill)
            return image

        return step

    def mask(self, rows: Rows) -> Step:
        """Return the step that crops mask i of the chunk."""
        listed, made, fill = rows.tolist(), Scratch(), self.mask_fill

        def step(i: int, src: Image, out: Image | None) -> Image:
            row = listed[i]
            y, x, h, w = row[:4]
            image = made(row[8], row[9]) if out is None else out
            crop_mask(row, src[y : y + h, x : x + w], image, fill)
            return image

        return step

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return the crops (B, 3, *size), rounded."""
        kind = kernel_dtype(images.device)
        images = nv12_batch(images, kind) if self.nv12 else images.to(kind)
        return crop_batch(rows, images, size, self.fill).round()
