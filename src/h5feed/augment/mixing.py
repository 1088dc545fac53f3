"""MixUp and CutMix: each image of a batch takes something of the one before it, labels likewise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cv2
import numpy as np

from h5feed.augment.cpu import Image
from h5feed.augment.frame import Floats
from h5feed.augment.ops import Op, refuse
from h5feed.errors import UsageError

if TYPE_CHECKING:
    import torch

    from h5feed.augment.plan import Plan

__all__ = [
    "CutMix",
    "MixOp",
    "MixUp",
    "MixUpOrCutMix",
    "NoMix",
    "mix_images",
    "mix_labels",
    "mix_rows",
    "unmixed",
]

# A batch's parameters, float64 (6,): what the label keeps of its own, what a pixel in the box keeps
# of its own, and the box: y0, x0, y1, x1.


@dataclass(frozen=True, kw_only=True)
class MixOp(Op):
    """Base of the ops that mix a batch; the partner of an image is the one before it."""

    alpha: float = 1.0
    """Both parameters of the Beta distribution from which the share is drawn."""
    num_classes: int | None = None
    """For labels that are class numbers; None takes the data set's number of classes."""

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise refuse(self, "alpha", self.alpha, "must be positive")
        if self.num_classes is not None and self.num_classes < 1:
            raise refuse(self, "num_classes", self.num_classes, "must be at least 1")

    def join(self, plan: Plan, position: int) -> None:
        """Come last."""
        plan.mix = (position, self)

    def draw(self, u: Floats, size: tuple[int, int]) -> Floats:
        """Return the batch's parameters for images of `size` from three uniforms."""
        # RandomState, because its sequence is frozen for good (NEP 19)
        share = np.random.RandomState(int(u[0] * 2**32)).beta(self.alpha, self.alpha)
        return np.array(self.mixture(float(share), float(u[1]), float(u[2]), size))

    def mixture(
        self, share: float, u_x: float, u_y: float, size: tuple[int, int]
    ) -> tuple[float, ...]:
        """Return the parameters for a share drawn and two uniforms."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MixUp(MixOp):
    """Blend each image with its partner (Zhang et al., arXiv 1710.09412).

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import MixUp, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), MixUp(alpha=0.2)]
    >>> images, targets = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> targets.shape  # shares of the two classes
    torch.Size([4, 2])
    """

    def mixture(
        self, share: float, u_x: float, u_y: float, size: tuple[int, int]
    ) -> tuple[float, ...]:
        """Return one share for labels and for all pixels."""
        return share, share, 0, 0, *size


@dataclass(frozen=True, kw_only=True)
class CutMix(MixOp):
    """Put a box of its partner into each image (Yun et al., arXiv 1905.04899).

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CutMix, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), CutMix(alpha=1.0)]
    >>> images, targets = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> targets.sum(dim=1)
    tensor([1., 1., 1., 1.])
    """

    def mixture(
        self, share: float, u_x: float, u_y: float, size: tuple[int, int]
    ) -> tuple[float, ...]:
        """Return the box as torchvision draws it, and the share of the area outside it."""
        return _cut(share, u_x, u_y, size)


def _cut(share: float, u_x: float, u_y: float, size: tuple[int, int]) -> tuple[float, ...]:
    height, width = size
    x, y = int(u_x * width), int(u_y * height)
    half = 0.5 * math.sqrt(1 - share)
    half_w, half_h = int(half * width), int(half * height)
    x0, y0 = max(x - half_w, 0), max(y - half_h, 0)
    x1, y1 = min(x + half_w, width), min(y + half_h, height)
    kept = 1 - (x1 - x0) * (y1 - y0) / (width * height)
    return kept, 0, y0, x0, y1, x1


@dataclass(frozen=True, kw_only=True)
class MixUpOrCutMix(MixOp):
    """Mix each batch one way or the other, as timm's Mixup does, and torchvision's RandomChoice.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import MixUpOrCutMix, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), MixUpOrCutMix(alpha=0.8, label_smoothing=0.1)]
    >>> images, targets = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> targets.shape, round(targets.sum().item(), 4)
    (torch.Size([4, 2]), 4.0)
    """

    cutmix_alpha: float = 1.0
    """CutMix's alpha; `alpha` is MixUp's."""
    cutmix_p: float = 0.5
    """How probable CutMix is."""
    p: float = 1.0
    """How probable it is that a batch is mixed at all."""
    label_smoothing: float = 0.0
    """What of each target goes to all classes alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cutmix_alpha > 0:
            raise refuse(self, "cutmix_alpha", self.cutmix_alpha, "must be positive")
        for name in ("p", "cutmix_p", "label_smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise refuse(self, name, getattr(self, name), "must be between 0 and 1")

    def draw(self, u: Floats, size: tuple[int, int]) -> Floats:
        """Return the batch's parameters for images of `size` from three uniforms."""
        random = np.random.RandomState(int(u[0] * 2**32))
        mixes, cuts = random.uniform(size=2) < (self.p, self.cutmix_p)
        if not mixes:
            return np.array(_NOT_MIXED)
        alpha = self.cutmix_alpha if cuts else self.alpha
        share = float(random.beta(alpha, alpha))
        if cuts:
            return np.array(_cut(share, float(u[1]), float(u[2]), size))
        return np.array((share, share, 0, 0, *size))


_NOT_MIXED = (1.0, 1.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class NoMix(MixOp):
    """Leave images alone; targets are shares of the classes as with MixUp, one of them 1."""

    label_smoothing: float = 0.0

    def mixture(
        self, share: float, u_x: float, u_y: float, size: tuple[int, int]
    ) -> tuple[float, ...]:
        """Return that all is an image's own."""
        return _NOT_MIXED


def unmixed(op: Op) -> Op:
    """Return an op that mixes nothing in the place of one that mixes; other ops as they are."""
    if not isinstance(op, MixOp):
        return op
    smoothing = getattr(op, "label_smoothing", 0.0)
    return NoMix(alpha=op.alpha, num_classes=op.num_classes, label_smoothing=smoothing)


def mix_labels(
    labels: torch.Tensor, kept: float, num_classes: int | None, *, wait: bool = True
) -> torch.Tensor:
    """Return float32 (B, K) mixed targets from int64 (B,) or float (B, K) ones.

    Raises UsageError for class numbers without `num_classes`, or outside them. To look at the
    latter waits for the labels' device; without `wait` they are torch's RuntimeError, on a GPU
    once it gets there.
    """
    import torch

    if labels.ndim == 1:
        if num_classes is None:
            raise UsageError(
                "MixUp and CutMix need to know how many classes there are: give num_classes"
            )
        valid = (labels >= 0) & (labels < num_classes)
        if not wait:
            said = f"MixUp or CutMix met a label outside of 0 to {num_classes - 1}"
            torch._assert_async(valid.all(), said)
        elif not valid.all():
            raise UsageError(
                f"MixUp and CutMix met label {labels[~valid][0].item()}, and num_classes="
                f"{num_classes} means 0 to {num_classes - 1}: give num_classes above every label, "
                "and leave items without a class (-1) out by indices="
            )
        labels = labels[:, None] == torch.arange(num_classes, device=labels.device)
    labels = labels.float()
    return labels.roll(1, 0) * (1 - kept) + labels * kept


def mix_images(images: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """Return images (B, C, H, W) mixed by parameters (6,) on the same device.

    Whole numbers cannot be blended: of them CutMix's parameters alone may be given.
    """
    import torch

    _, kept, y0, x0, y1, x1 = mix.unbind(0)
    y = torch.arange(images.shape[2], device=images.device).view(-1, 1)
    x = torch.arange(images.shape[3], device=images.device)
    inside = (y >= y0) & (y < y1) & (x >= x0) & (x < x1)
    partners = images.roll(1, 0)
    if not images.is_floating_point():
        return torch.where(inside, partners, images)
    return torch.lerp(partners, images, torch.where(inside, kept, 1.0).to(images.dtype))


def mix_rows(rows: Image, mix: Floats, dtype: torch.dtype) -> None:
    """Mix a batch (B, H, W, C) of memory that holds `dtype`, in place, by parameters (6,)."""
    kept = float(mix[1])
    y0, x0, y1, x1 = (int(v) for v in mix[2:])
    box = rows[:, y0:y1, x0:x1]
    before = box[-1].copy()
    for k in range(len(rows) - 1, -1, -1):
        other = box[k - 1] if k else before
        if kept == 0:
            box[k] = other
        else:
            _blend(box[k], other, kept, dtype)


def _blend(own: Image, other: Image, kept: float, dtype: torch.dtype) -> None:
    import torch

    if dtype == torch.uint8:
        cv2.addWeighted(own, kept, other, 1 - kept, 0, own)
        return
    if dtype == torch.bfloat16:
        own, other = own.view(np.int16), other.view(np.int16)
    mine, partner = (torch.from_numpy(image).view(dtype) for image in (own, other))
    mine.lerp_(partner, 1 - kept)
