"""ToFloat and Normalize: from bytes to floats in one pass, on the CPU or a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import cv2
import numpy as np
import torch

from h5feed.augment.crop_cpu import Image
from h5feed.augment.crop_device import per_channel
from h5feed.augment.ops import Op, check_numbers, check_pair, refuse

__all__ = ["ROW_DTYPES", "FloatStage", "Normalize", "ToFloat"]

ROW_DTYPES: Final[dict[torch.dtype, np.dtype[Any]]] = {
    torch.uint8: np.dtype(np.uint8),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(np.uint16),
}
"""numpy's type for memory of each output type; numpy has no bfloat16, its bits lie in uint16."""


@dataclass(frozen=True)
class ToFloat(Op):
    """Make floats of the bytes: 0 becomes range[0], 255 becomes range[1].

    As torchvision's ToDtype(dtype, scale=True), which knows the range (0, 1) only.
    """

    dtype: torch.dtype = torch.float32
    """torch.float32, torch.float16 or torch.bfloat16."""
    range: tuple[float, float] = (0.0, 1.0)
    """(-1, 1) for models that want it."""

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            wrong = "must be torch.float32, torch.float16 or torch.bfloat16"
            raise refuse(self, "dtype", self.dtype, wrong)
        check_pair(self, "range", self.range)


@dataclass(frozen=True)
class Normalize(Op):
    """Subtract `mean` and divide by `std`, channel by channel; after ToFloat."""

    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        mean, std = check_numbers(self, "mean", self.mean), check_numbers(self, "std", self.std)
        if len(mean) != len(std):
            raise refuse(self, "std", self.std, f"must have as many numbers as mean={self.mean!r}")
        if min(std) <= 0:
            raise refuse(self, "std", self.std, "must be positive")


class FloatStage:
    """ToFloat and what Normalize ops follow it, as one factor and offset for each channel."""

    def __init__(self, to_float: ToFloat, channels: int) -> None:
        self.dtype = to_float.dtype
        low, high = to_float.range
        self.factor = np.full(channels, (high - low) / 255)
        self.offset = np.full(channels, float(low))

    def add(self, op: Normalize) -> None:
        """Append a Normalize. Raises UsageError where it has other channels than the images."""
        mean, std = np.array(op.mean, float), np.array(op.std, float)
        if len(mean) not in (1, len(self.factor)):
            wrong = f"must have one number for each of the image's {len(self.factor)} channels"
            raise refuse(op, "mean", op.mean, wrong)
        self.factor = self.factor / std
        self.offset = (self.offset - mean) / std

    def cpu(self) -> Callable[[Image, Image], None]:
        """Return a function (image, out) that writes floats of uint8 (H, W, C) into `out`."""
        channels = len(self.factor)
        if self.dtype == torch.float32:
            matrix = np.column_stack([np.diag(self.factor), self.offset]).astype(np.float32)
            floats: Image = np.empty(0, np.float32)

            def write(image: Image, out: Image) -> None:
                nonlocal floats
                if floats.shape != image.shape:
                    floats = np.empty(image.shape, np.float32)
                np.copyto(floats, image)
                cv2.transform(floats, matrix, out)  # 27 us at 224x224; cv2.LUT 62

            return write
        table = self.offset + self.factor * np.arange(256)[:, None]
        bits = torch.from_numpy(table).to(self.dtype).view(torch.int16).numpy().view(np.uint16)
        table_bits = bits.reshape(256, 1, channels)

        def look_up(image: Image, out: Image) -> None:
            cv2.LUT(image, table_bits, out.view(np.uint16))

        return look_up

    def device(self, images: torch.Tensor) -> torch.Tensor:
        """Return float32 (B, C, H, W), not yet of `dtype`, from floats of 0..255."""
        images = images.float()
        return images * per_channel(self.factor, images) + per_channel(self.offset, images)
