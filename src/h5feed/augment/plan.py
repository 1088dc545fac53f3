"""A list of ops, put in the order in which a pipeline runs them; or refused in one sentence."""

from collections.abc import Sequence

import torch

from h5feed.augment.affine import AffineStage, RandomAffine
from h5feed.augment.crops import AxisOp
from h5feed.augment.erasing import ErasingStage, RandomErasing
from h5feed.augment.floats import FloatStage, Normalize, ToFloat
from h5feed.augment.frame import Antialias
from h5feed.augment.gray import Grayscale, GrayStage, RandomGrayscale
from h5feed.augment.mixing import MixOp
from h5feed.augment.ops import Op
from h5feed.augment.pixel import PixelOp, PixelStage
from h5feed.augment.stages import CropStage, Stage
from h5feed.errors import UsageError

__all__ = ["Plan"]


class Plan:
    """What a list of ops comes to: stages on bytes, then floats, stages on floats, then a mix."""

    def __init__(self, ops: Sequence[Op], antialias: Antialias) -> None:
        self._antialias: Antialias = antialias
        self.first = CropStage(antialias)  # always there, for it takes the stored images
        self.stages: list[Stage] = [self.first]
        self.floats: FloatStage | None = None
        self.after: list[Stage] = []
        self.mix: tuple[int, MixOp] | None = None
        self.channels = 3
        for position, op in enumerate(ops):
            if not isinstance(op, Op):
                raise UsageError(f"augment holds {op!r}, which is no op of h5feed.augment")
            if self.mix is not None:
                raise UsageError(f"{self.mix[1]!r} works on whole batches: put it last")
            self._add(position, op)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the output."""
        return torch.uint8 if self.floats is None else self.floats.dtype

    def _add(self, position: int, op: Op) -> None:
        if isinstance(op, MixOp):
            self.mix = (position, op)
        elif isinstance(op, RandomErasing):
            stages = self.stages if self.floats is None else self.after
            stages.append(ErasingStage(op, position, self.channels, self.dtype))
        elif isinstance(op, Normalize):
            if self.floats is None:
                raise UsageError(f"{op!r} works on floats: put ToFloat() before it")
            if self.after:
                raise UsageError(f"{op!r} comes too late: put it next to ToFloat")
            self.floats.add(op)
        elif self.floats is not None:
            raise UsageError(f"{op!r} works on bytes: put it before ToFloat")
        elif isinstance(op, ToFloat):
            self.floats = FloatStage(op, self.channels)
        else:
            self._add_on_bytes(position, op)

    def _add_on_bytes(self, position: int, op: Op) -> None:
        if self.channels == 1 and (isinstance(op, Grayscale) or getattr(op, "colors", False)):
            raise UsageError(f"{op!r} works on colors: put it before Grayscale")
        if isinstance(op, AxisOp):
            self._fold(position, op)
        elif isinstance(op, RandomAffine):
            self.stages.append(AffineStage(op, position))
        elif isinstance(op, PixelOp):
            self.stages.append(PixelStage(op, position))
        elif isinstance(op, Grayscale) and op.num_output_channels == 3:
            self.stages.append(PixelStage(RandomGrayscale(p=1), position))
        elif isinstance(op, Grayscale):
            self.stages.append(GrayStage())
            self.channels = 1
        else:
            raise UsageError(f"augment holds {op!r}, which is no op of h5feed.augment")

    def _fold(self, position: int, op: AxisOp) -> None:
        last = self.stages[-1]
        if not isinstance(last, CropStage) or not last.accepts(op):
            last = CropStage(self._antialias)
            self.stages.append(last)
        last.add(position, op)
