"""Base of the ops that change pixels where they are, one row of parameters per image."""

from typing import ClassVar

import torch

from h5feed.augment.crop_cpu import Image
from h5feed.augment.frame import Shapes
from h5feed.augment.ops import Draws, Floats, Op
from h5feed.augment.stages import Rows, Step, stream

__all__ = ["PixelOp", "PixelStage"]


class PixelOp(Op):
    """An op on uint8 images in place; its class says how many parameters and uniforms it needs."""

    columns: ClassVar[int]
    """Numbers in a row of its parameters; their meaning is `rows`' to say."""
    uniforms: ClassVar[int] = 0
    colors: ClassVar[bool] = False
    """It makes sense for color images only."""

    def rows(self, u: Floats) -> Floats:
        """Return parameters float64 (B, columns) from uniforms (B, uniforms)."""
        raise NotImplementedError

    def on_cpu(self, row: list[float], image: Image) -> None:
        """Change uint8 (H, W, C) in place."""
        raise NotImplementedError

    def on_device(self, rows: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Return float32 (B, C, H, W) of whole numbers 0..255, changed by rows (B, columns)."""
        raise NotImplementedError


class PixelStage:
    """A pixel op at its place in the pipeline."""

    resamples = False

    def __init__(self, op: PixelOp, position: int) -> None:
        self.op = op
        self._position = position
        self.columns = op.columns

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return the same size."""
        return size

    def draw(self, draws: Draws, view: int, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return the op's rows."""
        u = draws.uniform(stream(self._position, view), self.op.uniforms)
        return self.op.rows(u), shapes

    def cpu(self, rows: Rows) -> Step:
        """Return the step that changes image i in place."""
        listed = rows.tolist()

        def step(i: int, src: Image, out: Image | None) -> Image:
            self.op.on_cpu(listed[i], src)
            return src

        return step

    def mask(self, rows: Rows) -> Step | None:
        """Masks have no colors."""
        return None

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return what the op makes of them."""
        return self.op.on_device(rows, images.float())
