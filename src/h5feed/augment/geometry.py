"""Crops, resizes and flips: ops that keep the axes, as torchvision.transforms.v2 defines them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np

from h5feed.augment.frame import Antialias, Floats, Frame, Interpolation, Ints, PaddingMode
from h5feed.augment.ops import (
    Draws,
    Op,
    below,
    check_fill,
    check_mask_fill,
    check_pair,
    check_probability,
    check_size,
    plain,
    refuse,
)
from h5feed.errors import UsageError

if TYPE_CHECKING:
    from h5feed.augment.plan import Plan

__all__ = [
    "AlternatingFlip",
    "AxisOp",
    "CenterCrop",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "with_size",
]

_TRIES = 10  # of torchvision's RandomResizedCrop, before it falls back to the centre


class AxisOp(Op):
    """Base of crops, resizes and flips; neighbours fold into one box and one resize per image.

    >>> from dataclasses import dataclass, replace
    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment.geometry import AxisOp
    >>> @dataclass(frozen=True)
    ... class HalfTurn(AxisOp):
    ...     def fold(self, frame, u):
    ...         frame.flip(x=True, y=True)
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=[HalfTurn()])))
    """

    uniforms: ClassVar[int] = 0
    """How many random numbers an image needs."""
    resizes: ClassVar[bool] = False
    """It resizes."""
    crops: ClassVar[bool] = False
    """It cuts without resizing."""
    antialias: Antialias | None = None
    """What it says about resizing; None takes the pipeline's."""
    mask_fill: int = 0
    """Class number that masks show where it reaches outside the image."""
    padding_mode: PaddingMode = "constant"
    """What shows there instead of a color."""
    interpolation: Interpolation = "bilinear"
    """How it resizes."""

    def join(self, plan: Plan, position: int) -> None:
        """Fold with the ops before, where that is the same as one after the other."""
        plan.fold(self, position)

    @property
    def padding_color(self) -> tuple[float, ...] | None:
        """What shows where it reaches outside the image; None if it never does."""
        return None

    def uniform(self, draws: Draws, stream: int) -> Floats:
        """Return the numbers (B, uniforms) that `fold` gets."""
        return draws.uniform(stream, self.uniforms)

    def fold(self, frame: Frame, u: Floats) -> None:
        """Apply the op to the frame with uniforms `u` (B, uniforms)."""
        raise NotImplementedError

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return the (height, width) it gives to images of one size, None where they vary."""
        return size


def _check_resampling(op: Any) -> None:
    """Check the two arguments of every op that resizes."""
    plain(op, interpolation=op.interpolation)
    if op.interpolation not in ("bilinear", "bicubic"):
        raise refuse(op, "interpolation", op.interpolation, 'must be "bilinear" or "bicubic"')
    if op.antialias not in (None, True, False, "auto"):
        raise refuse(
            op, "antialias", op.antialias, 'must be True, False, "auto" or None (the default)'
        )


@dataclass(frozen=True)
class Resize(AxisOp):
    """Resize to a fixed (height, width), or the short side to a number with proportions kept.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import Resize
    >>> ops = [Resize((48, 64))]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 64])
    """

    size: int | Sequence[int] | None
    """The short side (a number or a sequence of one), or (height, width), or None: see max_size."""
    interpolation: Interpolation = "bilinear"
    max_size: int | None = None
    """The most that the long side may become; with size=None, what it becomes."""
    antialias: Antialias | None = None
    """None takes the pipeline's."""
    resizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.size is not None:
            check_size(self, "size", self.size)
        elif self.max_size is None:
            raise refuse(self, "size", None, "needs max_size")
        if self.max_size is not None:
            self._check_max_size(*check_size(self, "max_size", self.max_size))
        _check_resampling(self)

    def _check_max_size(self, longest: int, _: int) -> None:
        if self._fixed is not None:
            raise refuse(self, "max_size", longest, "goes with one number for size, not two")
        if self.size is not None and longest <= check_size(self, "size", self.size)[0]:
            raise refuse(self, "max_size", longest, f"must be larger than size={self.size!r}")

    @property
    def _fixed(self) -> tuple[int, int] | None:
        one = self.size is None or isinstance(self.size, int) or len(self.size) == 1
        return None if one else check_size(self, "size", self.size)

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return the fixed size, or what becomes of `size` if that is known."""
        if self._fixed is not None or size is None:
            return self._fixed
        height, width = self._sizes(np.array([size[0]]), np.array([size[1]]))
        return int(height[0]), int(width[0])

    def _sizes(self, height: Ints, width: Ints) -> tuple[Ints, Ints]:
        """Return heights and widths as torchvision computes them (truncated), but at least 1."""
        short, long = np.minimum(height, width), np.maximum(height, width)
        if self.size is None:
            assert self.max_size is not None
            new_short = np.maximum((self.max_size * short / long).astype(np.int64), 1)
            new_long = np.full_like(long, self.max_size)
        else:
            new_short = np.full_like(short, check_size(self, "size", self.size)[0])
            new_long = (new_short * long / short).astype(np.int64)
        if self.max_size is not None:
            over = new_long > self.max_size
            fitted = (self.max_size * new_short / new_long).astype(np.int64)
            new_short = np.where(over, np.maximum(fitted, 1), new_short)
            new_long = np.where(over, self.max_size, new_long)
        tall = height > width
        return np.where(tall, new_long, new_short), np.where(tall, new_short, new_long)

    def fold(self, frame: Frame, u: Floats) -> None:
        """Resize."""
        frame.resize(*(self._fixed or self._sizes(frame.height, frame.width)))


@dataclass(frozen=True)
class CenterCrop(AxisOp):
    """Cut the centre out; where the image is smaller, black surrounds it.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, Resize
    >>> ops = [Resize(56), CenterCrop(48)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    size: int | Sequence[int]
    """Output size: a number, or (height, width)."""
    mask_fill: int = 0
    """Class number around a smaller mask, 0..255; such as the loss's ignore_index."""
    crops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, "size", self.size)
        check_mask_fill(self, self.mask_fill)

    @property
    def padding_color(self) -> tuple[float, ...]:
        """Black."""
        return (0.0,)

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return `size`."""
        return check_size(self, "size", self.size)

    def fold(self, frame: Frame, u: Floats) -> None:
        """Crop where torchvision's center_crop does (it rounds half to even)."""
        height, width = self.size_after(None)
        frame.crop(_middle(frame.height, height), _middle(frame.width, width), height, width)


def _middle(extent: Ints, length: int) -> Ints:
    fits = np.rint((extent - length) / 2).astype(np.int64)
    return np.where(extent < length, -((length - extent) // 2), fits)


@dataclass(frozen=True)
class RandomCrop(AxisOp):
    """Cut a box of fixed size out at random, of the image with `padding` around it.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import RandomCrop
    >>> ops = [RandomCrop(64, padding=8)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 64, 64])
    """

    size: int | Sequence[int]
    """Output size: a number, or (height, width)."""
    padding: int | Sequence[int] | None = None
    """One number; (left and right, top and bottom); or (left, top, right, bottom)."""
    pad_if_needed: bool = False
    """Pad a smaller image by what it lacks, on both sides, instead of refusing it."""
    fill: float | Sequence[float] = 0
    """Color of the padding, 0..255: one number, or one for each channel."""
    padding_mode: PaddingMode = "constant"
    """What the padding shows: `fill`, or the image itself, mirrored or its edge drawn out."""
    mask_fill: int = 0
    """Class number of the padding of masks, 0..255; such as the loss's ignore_index."""
    uniforms: ClassVar[int] = 2
    crops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, "size", self.size)
        check_fill(self, self.fill)
        check_mask_fill(self, self.mask_fill)
        items = [self.padding] if isinstance(self.padding, int) else self.padding or [0]
        if len(items) not in (1, 2, 4) or any(i != int(i) or i < 0 for i in items):
            wrong = "must be 1, 2 or 4 whole numbers, none below 0"
            raise refuse(self, "padding", self.padding, wrong)
        if self.padding_mode not in get_args(PaddingMode):
            wrong = f"is none of {', '.join(get_args(PaddingMode))}"
            raise refuse(self, "padding_mode", self.padding_mode, wrong)

    @property
    def padding_color(self) -> tuple[float, ...] | None:
        """`fill`, if there is any padding."""
        return check_fill(self, self.fill) if any(self._sides) or self.pad_if_needed else None

    @property
    def _sides(self) -> tuple[int, int, int, int]:
        """Padding as left, top, right, bottom."""
        items = [self.padding] if isinstance(self.padding, int) else self.padding or [0]
        left, top, right, bottom = (list(items) * 4)[:4]
        return left, top, right, bottom

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return `size`."""
        return check_size(self, "size", self.size)

    def fold(self, frame: Frame, u: Floats) -> None:
        """Crop. Raises UsageError where an image is too small."""
        height, width = self.size_after(None)
        left, top, right, bottom = self._sides
        y = self._begin(frame.height, height, top, bottom, u[:, 0])
        x = self._begin(frame.width, width, left, right, u[:, 1])
        frame.crop(y, x, height, width)

    def _begin(self, extent: Ints, length: int, before: int, after: int, u: Floats) -> Ints:
        """Return where the box begins along one axis, relative to the unpadded image."""
        padded = extent + before + after
        lacking = np.maximum(length - padded, 0)
        if lacking.any() and not self.pad_if_needed:
            wrong = f"is larger than an image of {padded.min()} pixels, padding included: "
            raise refuse(self, "size", self.size, wrong + "give padding, or pad_if_needed=True")
        return below(u, padded + 2 * lacking - length + 1) - before - lacking


@dataclass(frozen=True)
class RandomResizedCrop(AxisOp):
    """Crop a box of random area and aspect ratio, and resize it to `size`.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import RandomResizedCrop
    >>> ops = [RandomResizedCrop(48, scale=(0.25, 1))]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    size: int | tuple[int, int]
    """Output size: a number, or (height, width)."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height; drawn evenly in its logarithm."""
    interpolation: Interpolation = "bilinear"
    antialias: Antialias | None = None
    """None takes the pipeline's."""
    uniforms: ClassVar[int] = 2 + 2 * _TRIES
    resizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, "size", self.size)
        check_pair(self, "scale", self.scale, 0)
        if check_pair(self, "ratio", self.ratio, 0)[0] == 0:
            raise refuse(self, "ratio", self.ratio, "must be positive")
        _check_resampling(self)

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return `size`."""
        return check_size(self, "size", self.size)

    def fold(self, frame: Frame, u: Floats) -> None:
        """Crop, then resize."""
        frame.crop(*self.boxes(frame.height, frame.width, u))
        frame.resize(*self.size_after(None))

    def boxes(self, height: Ints, width: Ints, u: Floats) -> tuple[Ints, Ints, Ints, Ints]:
        """Return top, left, height, width (each B) for images of height, width (each B)."""
        low, high = np.log(self.ratio)
        area = (height * width)[:, None] * (
            self.scale[0] + (self.scale[1] - self.scale[0]) * u[:, 2 : 2 + _TRIES]
        )
        aspect = np.exp(low + (high - low) * u[:, 2 + _TRIES :])
        w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = (w > 0) & (w <= width[:, None]) & (h > 0) & (h <= height[:, None])
        rows = np.arange(len(fits))
        first = fits.argmax(axis=1)
        found = fits[rows, first]
        centre_h, centre_w = self._central(height, width)
        h = np.where(found, h[rows, first], centre_h)
        w = np.where(found, w[rows, first], centre_w)
        top = np.where(found, below(u[:, 0], height - h + 1), (height - h) // 2)
        left = np.where(found, below(u[:, 1], width - w + 1), (width - w) // 2)
        return top, left, h, w

    def _central(self, height: Ints, width: Ints) -> tuple[Ints, Ints]:
        """Return height, width of the central box of the nearest allowed ratio (the fallback)."""
        narrow = width / height < self.ratio[0]
        wide = width / height > self.ratio[1]
        h = np.where(narrow, np.rint(width / self.ratio[0]).astype(np.int64), height)
        w = np.where(wide, np.rint(height * self.ratio[1]).astype(np.int64), width)
        return h, w


@dataclass(frozen=True)
class RandomHorizontalFlip(AxisOp):
    """Mirror left-right with probability `p`.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import RandomHorizontalFlip, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), RandomHorizontalFlip()]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    p: float = 0.5
    uniforms: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_probability(self, self.p)

    def fold(self, frame: Frame, u: Floats) -> None:
        """Flip the images whose uniform lies below p."""
        frame.flip(u[:, 0] < self.p, False)


@dataclass(frozen=True)
class RandomVerticalFlip(AxisOp):
    """Mirror upside-down with probability `p`.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import RandomResizedCrop, RandomVerticalFlip
    >>> ops = [RandomResizedCrop(48), RandomVerticalFlip(p=0.1)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    p: float = 0.5
    uniforms: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_probability(self, self.p)

    def fold(self, frame: Frame, u: Floats) -> None:
        """Flip the images whose uniform lies below p."""
        frame.flip(False, u[:, 0] < self.p)


@dataclass(frozen=True)
class AlternatingFlip(AxisOp):
    """Mirror each image left-right in every other epoch; which ones begin is drawn once.

    Two epochs in a row see both sides of every image, where RandomHorizontalFlip repeats half
    (Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv 2404.00498). A function of
    seed, epoch and sample, as everything here.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import AlternatingFlip, RandomCrop
    >>> ops = [RandomCrop(64, padding=2, padding_mode="reflect"), AlternatingFlip()]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 64, 64])
    """

    uniforms: ClassVar[int] = 1

    def uniform(self, draws: Draws, stream: int) -> Floats:
        """Return (B, 1): 1 for the images to be mirrored, else 0."""
        return draws.alternate(stream)[:, None].astype(np.float64)

    def fold(self, frame: Frame, u: Floats) -> None:
        """Flip those marked."""
        frame.flip(u[:, 0] > 0, False)


def with_size(ops: Sequence[Op], size: Any) -> list[Op]:
    """Return the ops for outputs of another size: the last that has one gets it.

    Those before change in proportion: Resize(256), CenterCrop(224) becomes Resize(146),
    CenterCrop(128). Raises UsageError for a wrong size, and where no op has one.
    """
    sized = [k for k, op in enumerate(ops) if isinstance(op, AxisOp) and hasattr(op, "size")]
    made: list[Any] = list(ops)
    if not sized or made[sized[-1]].size is None:
        raise UsageError(
            f"size={size!r}: no op of augment={made!r} has a size that could change; end with "
            "RandomResizedCrop(size), CenterCrop(size) or Resize((height, width))"
        )
    last = made[sized[-1]]
    new, old = check_size(last, "size", size), check_size(last, "size", last.size)
    factors = new[0] / old[0], new[1] / old[1]
    for k in sized[:-1]:
        if made[k].size is not None:
            made[k] = replace(made[k], size=_scaled(made[k].size, factors))
    made[sized[-1]] = replace(last, size=size)
    return made


def _scaled(size: Any, factors: tuple[float, float]) -> Any:
    if isinstance(size, Sequence) and len(size) == 2:
        return tuple(max(round(n * f), 1) for n, f in zip(size, factors, strict=True))
    side = size[0] if isinstance(size, Sequence) else size
    return max(round(side * max(factors)), 1)
