"""What every op shares: how it joins a pipeline, its random numbers, and checks of arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from h5feed.augment.cpu import Image
from h5feed.augment.frame import Floats, Ints, Shapes
from h5feed.errors import UsageError

if TYPE_CHECKING:
    import torch

    from h5feed.augment.places import Moves
    from h5feed.augment.plan import Plan

__all__ = [
    "CpuStep",
    "Draws",
    "ImageOp",
    "Op",
    "RandomChange",
    "Rows",
    "below",
    "check_fill",
    "check_mask_fill",
    "check_numbers",
    "check_pair",
    "check_probability",
    "check_size",
    "is_number",
    "plain",
    "refuse",
]

Rows = NDArray[Any]
"""Parameters of one step: one row per image."""

CpuStep = Callable[[int, Image, Image | None], Image]
"""(i, src, out) -> image i of a chunk changed.

An op that resamples writes into `out` where it is given, else into memory of its own that the next
call reuses; another changes `src` in place and returns it.
"""


class Draws(Protocol):
    """Random numbers of a batch, a pure function of (seed, epoch, sample index, stream, column)."""

    def uniform(self, stream: int, count: int) -> Floats:
        """Return float64 (B, count) in [0, 1), a row per sample."""
        ...

    def alternate(self, stream: int) -> NDArray[np.bool_]:
        """Return (B,): a bit of each sample's own in even epochs, the other one in odd ones."""
        ...

    def batch_uniform(self, stream: int, count: int) -> Floats:
        """Return float64 (count,) in [0, 1) that belong to the batch as a whole."""
        ...


class Op:
    """Base of all ops. An op is a frozen dataclass; it holds arguments and no state.

    To write one of your own, see ImageOp.

    >>> from h5feed.augment import RandomCrop
    >>> RandomCrop(32, padding=4) == RandomCrop(size=32, padding=4)
    True
    """

    def join(self, plan: Plan, position: int) -> None:
        """Add what the op does to a plan; `position` in the user's list seeds its random numbers.

        Raises UsageError where the op cannot follow the ones before it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it joins a pipeline")


class ImageOp(Op):
    """Base of the ops that change images one by one, and of your own.

    An op that changes pixels where they are says how many random numbers an image needs, and has
    three methods: `rows`, `on_cpu` and `on_device`. The two kernels get the same rows, and should
    make the same of them. One that changes the size, the geometry or the masks replaces
    `size_after`, `draw`, `cpu`, `mask` and `device`; RandomAffine is an example.

    >>> from dataclasses import dataclass
    >>> import torch
    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import ImageOp, RandomResizedCrop
    >>> @dataclass(frozen=True)
    ... class RandomInvert(ImageOp):
    ...     p: float = 0.5
    ...     uniforms: ClassVar[int] = 1
    ...     columns: ClassVar[int] = 1
    ...
    ...     def rows(self, u):
    ...         return (u < self.p).astype(np.float64)
    ...
    ...     def on_cpu(self, row, image):
    ...         if row[0]:
    ...             np.subtract(255, image, out=image)
    ...
    ...     def on_device(self, rows, images):
    ...         return torch.where(rows[:, :, None, None] > 0, 255 - images, images)
    >>> ops = [RandomResizedCrop(48), RandomInvert(p=0.3)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    uniforms: ClassVar[int] = 0
    """How many random numbers an image needs."""
    columns: ClassVar[int] = 0
    """How many numbers a row of its parameters has; their meaning is for `rows` to say."""
    resamples: ClassVar[bool] = False
    """It makes a new image; else it changes the one given."""
    needs_color: ClassVar[bool] = False
    """It makes sense for color images only."""
    takes_floats: ClassVar[bool] = False
    """It may also come after ToDtype, and then gets floats (bfloat16 lies in uint16 on the CPU)."""

    def join(self, plan: Plan, position: int) -> None:
        """Become the next step."""
        plan.add(self, position)

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return the (height, width) it gives to images of one size, None where they vary."""
        return size

    def rows(self, u: Floats) -> Rows:
        """Return parameters (B, columns) from uniforms (B, uniforms): here, those themselves."""
        return u

    def draw(self, u: Floats, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return parameters (B, columns) from uniforms (B, uniforms), and what images become."""
        return self.rows(u), shapes

    def on_cpu(self, row: list[float], image: Image) -> None:
        """Change uint8 (H, W, C) in place."""
        raise NotImplementedError(f"{type(self).__name__} has no on_cpu")

    def on_device(self, rows: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Return float32 (B, C, H, W) of whole numbers 0..255, changed by rows (B, columns)."""
        raise NotImplementedError(f"{type(self).__name__} has no on_device")

    def cpu(self, rows: Rows) -> CpuStep:
        """Return the step for a chunk of parameters (n, columns)."""
        listed = rows.tolist()

        def step(i: int, src: Image, out: Image | None) -> Image:
            self.on_cpu(listed[i], src)
            return src

        return step

    def mask(self, rows: Rows) -> CpuStep | None:
        """Return the step for a chunk of masks (h, w); None where masks stay as they are."""
        return None

    def moves(self, rows: Rows, size: Floats) -> Moves | Sequence[Moves] | None:
        """Return where boxes and keypoints go, step by step; None where they stay as they are.

        rows: (M, columns), size: (M, 2) width and height of the images, one row per box.
        """
        return None

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return images (B, C, *size) changed by float32 rows (B, columns).

        Images are float, of whole numbers 0..255, so that rounding falls where it does on the CPU.
        """
        return self.on_device(rows, images.float())


class RandomChange(ImageOp):
    """Base: a change that happens to an image with probability `p`, a field of the subclass."""

    columns: ClassVar[int] = 1
    """1 for changed, 0 for unchanged."""
    uniforms: ClassVar[int] = 1
    p: float

    def __post_init__(self) -> None:
        check_probability(self, self.p)

    def rows(self, u: Floats) -> Floats:
        """Mark the images whose uniform lies below p."""
        return (u < self.p).astype(np.float64)

    def on_cpu(self, row: list[float], image: Image) -> None:
        """Change one image."""
        if row[0]:
            self.change(image)

    def on_device(self, rows: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Change the images marked."""
        import torch

        return torch.where(rows[:, :, None, None] > 0, self.changed(images), images)

    @abstractmethod
    def change(self, image: Image) -> None:
        """Change uint8 (H, W, C) in place."""

    @abstractmethod
    def changed(self, images: torch.Tensor) -> torch.Tensor:
        """Return float32 (B, C, H, W) of whole numbers 0..255, all changed."""


def below(u: Floats, count: Ints) -> Ints:
    """Return whole numbers in [0, count), as torch.randint draws them."""
    return np.minimum((u * count).astype(np.int64), count - 1)


def refuse(op: object, argument: str, value: Any, wrong: str) -> UsageError:
    """Make the one error of a bad argument: op, argument, value, and what it should be."""
    return UsageError(f"{type(op).__name__}: {argument}={value!r} {wrong}")


_INTERPOLATIONS = {0: "nearest", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers, which torchvision takes, too."""


def plain(op: object, **arguments: Any) -> None:
    """Write an op's arguments as plain values.

    An InterpolationMode as its name, arrays and tensors as tuples.
    """
    for name, value in arguments.items():
        if isinstance(value, Enum):
            value = value.value
        elif name == "interpolation" and isinstance(value, int):
            value = _INTERPOLATIONS.get(value, value)
        elif hasattr(value, "tolist"):  # numpy's and torch's
            value = value.tolist()
            value = tuple(value) if isinstance(value, list) else value
        object.__setattr__(op, name, value)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is an int or a float, numpy's too; True and False are not."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def check_size(op: object, argument: str, size: Any) -> tuple[int, int]:
    """Return (height, width) of an int or of a sequence of one or two ints, all positive."""
    items = [size] if is_number(size) else list(size) if isinstance(size, Sequence) else []
    whole = all(is_number(item) and item == int(item) and item > 0 for item in items)
    if len(items) not in (1, 2) or not whole:
        raise refuse(
            op, argument, size, "must be a positive whole number or a pair (height, width)"
        )
    return int(items[0]), int(items[-1])


def check_fill(op: object, fill: Any) -> tuple[float, ...]:
    """Return a color of one or three numbers within 0..255; None is black, as in torchvision."""
    if fill is None:
        return (0.0,)
    items = [fill] if is_number(fill) else list(fill) if isinstance(fill, Sequence) else []
    if len(items) not in (1, 3) or not all(is_number(i) and 0 <= i <= 255 for i in items):
        raise refuse(op, "fill", fill, "must be one number or three, within 0..255")
    return tuple(float(item) for item in items)


def check_mask_fill(op: object, fill: Any) -> None:
    """Refuse a fill that is not a class number of a uint8 mask."""
    if not is_number(fill) or fill != int(fill) or not 0 <= fill <= 255:
        raise refuse(op, "mask_fill", fill, "must be a whole number within 0..255")


def check_numbers(op: object, argument: str, value: Any) -> tuple[float, ...]:
    """Return a sequence of numbers, at least one, as floats."""
    items = [] if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    if not items or not all(is_number(item) for item in items):
        raise refuse(op, argument, value, "must be a sequence of numbers, one for each channel")
    return tuple(float(item) for item in items)


def check_pair(
    op: object, argument: str, value: Any, low: float = -np.inf, high: float = np.inf
) -> tuple[float, float]:
    """Return (min, max) of a sequence of two numbers with low <= min <= max <= high."""
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2 or not all(is_number(item) for item in pair):
        raise refuse(op, argument, value, "must be a pair of numbers (min, max)")
    if not low <= pair[0] <= pair[1] <= high:
        raise refuse(op, argument, value, f"must rise and lie within [{low:g}, {high:g}]")
    return float(pair[0]), float(pair[1])


def check_probability(op: object, p: Any) -> None:
    """Refuse a probability outside [0, 1]."""
    if not is_number(p) or not 0 <= p <= 1:
        raise refuse(op, "p", p, "must be a probability between 0 and 1")
