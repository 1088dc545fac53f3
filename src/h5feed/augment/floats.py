"""ToDtype and Normalize: from bytes to floats in one pass, on the CPU or a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

from h5feed.augment.cpu import Image
from h5feed.augment.device import per_channel
from h5feed.augment.ops import Op, check_numbers, plain, refuse
from h5feed.errors import UsageError

if TYPE_CHECKING:
    import torch

    from h5feed.augment.plan import Plan

__all__ = ["FloatStage", "Normalize", "ToDtype", "as_row", "row_dtype"]

_ROW_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "torch.uint8": np.dtype(np.uint8),
    "torch.float32": np.dtype(np.float32),
    "torch.float16": np.dtype(np.float16),
    "torch.bfloat16": np.dtype(np.uint16),
}


def row_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return numpy's type for memory of an output type; numpy has no bfloat16, and holds uint16."""
    return _ROW_DTYPES[str(dtype)]


def as_row(values: NDArray[np.float32], dtype: np.dtype[Any]) -> Image:
    """Return float32 `values` as they lie in a batch slot of this numpy type, see row_dtype."""
    if dtype != _ROW_DTYPES["torch.bfloat16"]:
        return values.astype(dtype)
    import torch

    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(dtype)


@dataclass(frozen=True)
class ToDtype(Op):
    """Make floats of the bytes; with scale=True 0..255 becomes 0..1.

    For a model that wants -1..1, put Normalize([0.5], [0.5]) after it.

    >>> import torch
    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, Normalize, ToDtype
    >>> ops = [CenterCrop(48), ToDtype(torch.float16, scale=True), Normalize([0.5], [0.5])]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.dtype, bool(images.min() >= -1), bool(images.max() <= 1)
    (torch.float16, True, True)
    """

    dtype: torch.dtype
    """torch.float32, torch.float16 or torch.bfloat16."""
    scale: bool = False
    """Divide by 255."""

    def __post_init__(self) -> None:
        import torch

        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            wrong = "must be torch.float32, torch.float16 or torch.bfloat16"
            raise refuse(self, "dtype", self.dtype, wrong)

    def join(self, plan: Plan, position: int) -> None:
        """Turn images to floats from here on."""
        plan.check_takes(self)
        plan.floats = FloatStage(self, plan.channels)


@dataclass(frozen=True)
class Normalize(Op):
    """Subtract `mean` and divide by `std`, channel by channel; after ToDtype.

    >>> import torch
    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, Normalize, ToDtype
    >>> mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # ImageNet's
    >>> ops = [CenterCrop(48), ToDtype(torch.float32, scale=True), Normalize(mean, std)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.dtype
    torch.float32
    """

    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        plain(self, mean=self.mean, std=self.std)
        mean, std = check_numbers(self, "mean", self.mean), check_numbers(self, "std", self.std)
        if len(mean) != len(std):
            raise refuse(self, "std", self.std, f"must have as many numbers as mean={self.mean!r}")
        if min(std) <= 0:
            raise refuse(self, "std", self.std, "must be positive")

    def join(self, plan: Plan, position: int) -> None:
        """Fold into the factors of ToDtype."""
        if plan.floats is None:
            example = "ToDtype(torch.float32, scale=True)"
            raise UsageError(f"{self!r} works on floats: put {example} before it")
        if plan.after:
            raise UsageError(f"{self!r} comes too late: put it next to ToDtype")
        plan.floats.add(self)


class FloatStage:
    """ToDtype and what Normalize ops follow it, as one factor and offset for each channel."""

    def __init__(self, op: ToDtype, channels: int) -> None:
        self.dtype = op.dtype
        self.factor = np.full(channels, 1 / 255 if op.scale else 1.0)
        self.offset = np.zeros(channels)

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
        import torch

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
