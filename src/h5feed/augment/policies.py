"""RandAugment, TrivialAugmentWide, AutoAugment, AugMix: each image changed by some of many changes.

What happens to an image in one turn is a row of seven numbers: which change (_KINDS), and how much
of it, or the map of a warp. The changes are those of the ops that have them for themselves: warp,
color and tone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from h5feed.augment.color import (
    adjust_brightness,
    adjust_brightness_batch,
    adjust_contrast,
    adjust_contrast_batch,
    adjust_saturation,
    adjust_saturation_batch,
)
from h5feed.augment.cpu import Image, Scratch
from h5feed.augment.frame import Floats, Ints, Shapes
from h5feed.augment.ops import (
    CpuStep,
    ImageOp,
    Rows,
    below,
    check_fill,
    is_number,
    plain,
    refuse,
)
from h5feed.augment.places import Moves, warp_moves
from h5feed.augment.tone import (
    adjust_sharpness,
    adjust_sharpness_batch,
    autocontrast,
    autocontrast_batch,
    equalize,
    equalize_batch,
    invert,
    invert_batch,
    posterize,
    posterize_batch,
    solarize,
    solarize_batch,
)
from h5feed.augment.warp import (
    WarpInterpolation,
    affine_maps,
    check_warp,
    true_sizes,
    warp,
    warp_batch,
    warped,
)

if TYPE_CHECKING:
    import torch

__all__ = ["AugMix", "AutoAugment", "PolicyOp", "RandAugment", "TrivialAugmentWide"]

_TURN: Final = 7
"""Columns of a turn."""

_STILL, _WARP, _FIRST = 0, 1, 2
_KINDS: Final[Mapping[str, tuple[Any, Any]]] = {
    "Brightness": (adjust_brightness, adjust_brightness_batch),
    "Color": (adjust_saturation, adjust_saturation_batch),
    "Contrast": (adjust_contrast, adjust_contrast_batch),
    "Sharpness": (adjust_sharpness, adjust_sharpness_batch),
    "Posterize": (posterize, posterize_batch),
    "Solarize": (solarize, solarize_batch),
    "AutoContrast": (autocontrast, autocontrast_batch),
    "Equalize": (equalize, equalize_batch),
    "Invert": (invert, invert_batch),
}
"""Changes of an image and of a batch by one number; a turn's first number counts them from 2 on.
It is 0 for none, and 1 for a warp."""

_ON_IMAGES: Final = [one for one, _ in _KINDS.values()]
_ON_BATCHES: Final = [batch for _, batch in _KINDS.values()]

_WARPS: Final = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
_NAMES: Final = ("Identity", *_WARPS, *_KINDS)
"""torchvision's, by which policies choose."""
_NUMBER: Final = {name: number for number, name in enumerate(_NAMES)}
_KIND: Final = np.array(
    [_STILL, *[_WARP] * len(_WARPS), *range(_FIRST, _FIRST + len(_KINDS))], np.float64
)
_SIGNED: Final = np.array([name in (*_WARPS, *tuple(_KINDS)[:4]) for name in _NAMES])

Space = Mapping[str, tuple[float, float]]
"""What each change may be: its magnitude in the first and in the last bin."""


def _space(
    shear: float, shift: float, turn: float, factor: float, bits: tuple[float, float]
) -> Space:
    return {
        "Identity": (0, 0),
        **dict.fromkeys(("ShearX", "ShearY"), (0, shear)),
        **dict.fromkeys(("TranslateX", "TranslateY"), (0, shift)),
        "Rotate": (0, turn),
        **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), (0, factor)),
        "Posterize": bits,
        "Solarize": (1, 0),
        **dict.fromkeys(("AutoContrast", "Equalize"), (0, 0)),
    }


_USUAL: Final = _space(0.3, 150 / 331, 30, 0.9, (8, 4))
"""Of RandAugment, and AutoAugment's with Invert: shifts are shares of width and height."""
_WIDE: Final = _space(0.99, 32, 135, 0.99, (8, 2))
"""Of TrivialAugmentWide: shifts are pixels."""
_MIXED: Final = _space(0.3, 1 / 3, 30, 0.9, (4, 0))
"""Of AugMix."""


class _Changes:
    """The changes of a space, each in so many bins."""

    def __init__(self, space: Space, bins: int, *, relative: bool = True) -> None:
        self.numbers = np.array([_NUMBER[name] for name in space])
        self._relative = relative
        self._table = np.zeros((len(_NAMES), bins), np.float32)
        for name, (first, last) in space.items():
            self._table[_NUMBER[name]] = _evenly(first, last, bins)
        self._table[_NUMBER["Posterize"]] = np.rint(self._table[_NUMBER["Posterize"]])

    def turn(self, number: Ints, bin_: Ints, negative: NDArray[np.bool_], shapes: Shapes) -> Floats:
        """Return rows (B, 7) of the changes `number` (B,) of _NAMES in their bins (B,)."""
        size = value = self._table[number, bin_].astype(np.float64)
        value = np.where(negative & _SIGNED[number], -size, size)
        rows = np.zeros((len(number), _TURN))
        rows[:, 0] = _KIND[number]
        rows[:, 1] = _arguments(number, value)
        turned = np.flatnonzero(rows[:, 0] == _WARP)
        if len(turned):
            some = Shapes(
                actual=shapes.actual[turned], boxes=shapes.boxes[turned], true=shapes.true[turned]
            )
            rows[turned, 1:] = self._maps(number[turned], value[turned], some)
        return rows

    def _maps(self, number: Ints, value: Floats, shapes: Shapes) -> Floats:
        """Return (B, 6) maps, as torchvision's policies call its affine and rotate."""
        true = true_sizes(shapes)[:, ::-1]  # width, height
        extent = true if self._relative else 1.0
        along = np.stack([number == _NUMBER["TranslateX"], number == _NUMBER["TranslateY"]], axis=1)
        shift = np.where(along, np.trunc((value[:, None] * extent).astype(np.float32)), 0)
        sheared = np.stack([number == _NUMBER["ShearX"], number == _NUMBER["ShearY"]], axis=1)
        shear = np.where(sheared, np.degrees(np.arctan(value))[:, None], 0)
        center = np.where(sheared.any(axis=1, keepdims=True), 0, true / 2)
        clockwise = np.where(number == _NUMBER["Rotate"], -value, 0)
        return affine_maps(shapes, clockwise, shift, np.ones(len(value)), shear, center)


def _evenly(first: float, last: float, count: int) -> NDArray[np.float32]:
    """Return `count` float32 numbers from `first` to `last`, rounded where torch.linspace does."""
    first, last = float(np.float32(first)), float(np.float32(last))
    step = float(np.float32((last - first) / (count - 1)))
    k = np.arange(count)
    made = np.where(k < count // 2, first + step * k, last - step * (count - 1 - k))
    return made.astype(np.float32)


def _arguments(number: Ints, value: Floats) -> Floats:
    """Return what the changes' functions take: a factor about 1, bits, a level of 0..255."""
    factor = (number >= _NUMBER["Brightness"]) & (number <= _NUMBER["Sharpness"])
    return np.where(number == _NUMBER["Solarize"], 255 * value, np.where(factor, 1 + value, value))


class _Images:
    """A thread's memory for an image on its way through turns."""

    def __init__(self, interpolation: WarpInterpolation, fill: tuple[float, ...]) -> None:
        self._interpolation: WarpInterpolation = interpolation
        self._fill, self._made = fill, Scratch()

    def run(self, turns: Rows, src: Image, out: Image | None) -> Image:
        """Return uint8 (H, W, C) changed by turns (T, 7), in `out` where given; `src` is used up.

        Of a mask (H, W), which has no tones, only the warps are done.
        """
        image, warps = src, int((turns[:, 0] == _WARP).sum())
        for row in turns:
            kind = int(row[0])
            if kind == _WARP:
                warps -= 1
                if out is not None and not warps:  # the last one writes where it is wanted
                    other = out
                else:
                    other = self._made(*src.shape) if image is src else src
                warp(image, row[1:], other, self._interpolation, self._fill)
                image = other
            elif kind and image.ndim == 3:
                _ON_IMAGES[kind - _FIRST](image, float(row[1]))
        if out is not None and image is not out:
            out[...] = image
            return out
        return image


def _turns_batch(
    rows: torch.Tensor,
    images: torch.Tensor,
    kinds: Sequence[int],
    interpolation: WarpInterpolation,
    fill: tuple[float, ...],
) -> torch.Tensor:
    """Return float32 images (B, C, H, W) changed by rows (B, T*7), each turn by one of `kinds`."""
    import torch

    for begin in range(0, rows.shape[1], _TURN):
        turn = rows[:, begin : begin + _TURN]
        kind, value = turn[:, 0, None, None, None], turn[:, 1, None, None, None]
        turned = warp_batch(turn[:, 1:], images, interpolation, fill)
        changed = torch.where(kind == _WARP, turned, images)
        for number in kinds:
            made = _ON_BATCHES[number - _FIRST](images, value)
            changed = torch.where(kind == number, made, changed)
        images = changed
    return images


class PolicyOp(ImageOp):
    """Base of the policies: `turns` times in a row, an image takes one of the space's changes."""

    resamples: ClassVar[bool] = True
    needs_color: ClassVar[bool] = True
    space: ClassVar[Space] = _USUAL
    interpolation: WarpInterpolation
    fill: float | Sequence[float] | None
    mask_fill: int

    @property
    def turns(self) -> int:
        """How many changes an image takes."""
        return 1

    @property
    def columns(self) -> int:  # type: ignore[override]
        """Seven for each turn: the kind of change, and its number or the six of its map."""
        return self.turns * _TURN

    @property
    def kinds(self) -> list[int]:
        """Which changes there are besides warps, as rows number them."""
        return [_FIRST + k for k, name in enumerate(_KINDS) if name in self.space]

    def drawn(self, u: Floats, shapes: Shapes) -> Rows:
        """Return rows (B, columns) from uniforms (B, uniforms)."""
        raise NotImplementedError

    def draw(self, u: Floats, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return rows, and what images become: one that is warped fills its letterbox."""
        rows = self.drawn(u, shapes)
        turned = (rows[:, ::_TURN] == _WARP).any(axis=1)
        return rows, warped(shapes, true_sizes(shapes), turned)

    def _steps(self, rows: Rows, images: _Images) -> CpuStep:
        turns = rows.reshape(len(rows), self.turns, _TURN)
        return lambda i, src, out: images.run(turns[i], src, out)

    def cpu(self, rows: Rows) -> CpuStep:
        """Return the step that changes image i of the chunk."""
        return self._steps(rows, _Images(self.interpolation, check_fill(self, self.fill)))

    def mask(self, rows: Rows) -> CpuStep | None:
        """Return the step that warps mask i of the chunk."""
        return self._steps(rows, _Images("nearest", (float(self.mask_fill),)))

    def moves(self, rows: Rows, size: Floats) -> list[Moves]:
        """Return where boxes and keypoints go, turn by turn."""
        made = []
        for begin in range(0, rows.shape[1], _TURN):
            turn = rows[:, begin : begin + _TURN]
            still = np.array([1.0, 0, 0, 0, 1, 0])
            maps = np.where(turn[:, :1] == _WARP, turn[:, 1:], still)
            made.append(warp_moves(maps, size))
        return made

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return the images (B, C, *size) changed."""
        fill = check_fill(self, self.fill)
        return _turns_batch(rows, images.float(), self.kinds, self.interpolation, fill)


def _check_bins(op: ImageOp, bins: Any) -> None:
    if not isinstance(bins, int) or bins < 2:
        raise refuse(op, "num_magnitude_bins", bins, "must be a whole number from 2 on")


@dataclass(frozen=True)
class RandAugment(PolicyOp):
    """Change each image `num_ops` times, by one of 14 changes at one magnitude (arXiv 1909.13719).

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import RandAugment, RandomHorizontalFlip, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), RandomHorizontalFlip(), RandAugment(2, 9)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    num_ops: int = 2
    """Changes of an image, one after the other."""
    magnitude: int = 9
    """0 to num_magnitude_bins - 1."""
    num_magnitude_bins: int = 31
    interpolation: WarpInterpolation = "nearest"
    fill: float | Sequence[float] | None = None
    """Color outside an image that was moved, 0..255; None is black."""
    mask_fill: int = 0
    """Class number outside the masks, 0..255; such as the loss's ignore_index."""

    def __post_init__(self) -> None:
        check_warp(self)
        _check_bins(self, self.num_magnitude_bins)
        if not isinstance(self.num_ops, int) or self.num_ops < 0:
            raise refuse(self, "num_ops", self.num_ops, "must be a whole number, not below 0")
        if self.magnitude not in range(self.num_magnitude_bins):
            wrong = f"must be a whole number from 0 to {self.num_magnitude_bins - 1}"
            raise refuse(self, "magnitude", self.magnitude, wrong)

    @property
    def turns(self) -> int:
        """`num_ops`."""
        return self.num_ops

    @property
    def uniforms(self) -> int:  # type: ignore[override]
        """Two a turn: which change, and its sign."""
        return 2 * self.num_ops

    def drawn(self, u: Floats, shapes: Shapes) -> Rows:
        """Return rows from which changes they are and their signs."""
        changes = _Changes(self.space, self.num_magnitude_bins)
        bins = np.full(len(u), self.magnitude)
        made = [np.zeros((len(u), 0))]
        for which, sign in u.reshape(len(u), -1, 2).transpose(1, 2, 0):
            number = changes.numbers[below(which, np.array(len(self.space)))]
            made.append(changes.turn(number, bins, sign <= 0.5, shapes))
        return np.concatenate(made, axis=1)


@dataclass(frozen=True)
class TrivialAugmentWide(PolicyOp):
    """Change each image once, by one of 14 changes at any magnitude (arXiv 2103.10158).

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import RandomResizedCrop, TrivialAugmentWide
    >>> ops = [RandomResizedCrop(48), TrivialAugmentWide()]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    num_magnitude_bins: int = 31
    interpolation: WarpInterpolation = "nearest"
    fill: float | Sequence[float] | None = None
    """Color outside an image that was moved, 0..255; None is black."""
    mask_fill: int = 0
    """Class number outside the masks, 0..255; such as the loss's ignore_index."""
    uniforms: ClassVar[int] = 3
    space: ClassVar[Space] = _WIDE

    def __post_init__(self) -> None:
        check_warp(self)
        _check_bins(self, self.num_magnitude_bins)

    def drawn(self, u: Floats, shapes: Shapes) -> Rows:
        """Return rows from which change it is, its magnitude and its sign."""
        changes = _Changes(self.space, self.num_magnitude_bins, relative=False)
        number = changes.numbers[below(u[:, 0], np.array(len(self.space)))]
        bins = below(u[:, 1], np.array(self.num_magnitude_bins))
        return changes.turn(number, bins, u[:, 2] <= 0.5, shapes)


Policy = Literal["imagenet", "cifar10", "svhn"]


@dataclass(frozen=True)
class AutoAugment(PolicyOp):
    """Change each image by one of 25 pairs of changes that were found to help (arXiv 1805.09501).

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import AutoAugment, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), AutoAugment("imagenet")]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    policy: Policy = "imagenet"
    """The data set on which they were found."""
    interpolation: WarpInterpolation = "nearest"
    fill: float | Sequence[float] | None = None
    """Color outside an image that was moved, 0..255; None is black."""
    mask_fill: int = 0
    """Class number outside the masks, 0..255; such as the loss's ignore_index."""
    uniforms: ClassVar[int] = 5
    space: ClassVar[Space] = {**_USUAL, "Invert": (0, 0)}

    def __post_init__(self) -> None:
        check_warp(self)
        plain(self, policy=self.policy)
        if self.policy not in get_args(Policy):
            wrong = f"is none of {', '.join(get_args(Policy))}"
            raise refuse(self, "policy", self.policy, wrong)

    @property
    def turns(self) -> int:
        """A pair."""
        return 2

    def drawn(self, u: Floats, shapes: Shapes) -> Rows:
        """Return rows from which pair it is, and of both whether they happen, and their signs."""
        changes = _Changes(self.space, 10)
        number, p, bins = (np.array(part) for part in _POLICIES[self.policy])
        pair = below(u[:, 0], np.array(len(number)))
        made = []
        for k in range(2):
            happens = u[:, 1 + 2 * k] < p[pair, k]
            which = np.where(happens, number[pair, k], _NUMBER["Identity"])
            made.append(changes.turn(which, bins[pair, k], u[:, 2 + 2 * k] <= 0.5, shapes))
        return np.concatenate(made, axis=1)


def _read_policy(text: str) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
    """Return for all pairs the changes' numbers, their probabilities and their bins of ten."""
    pairs = [[change.split() for change in line.split(", ")] for line in text.split("; ")]
    return (
        [[_NUMBER[change[0]] for change in pair] for pair in pairs],
        [[float(change[1]) for change in pair] for pair in pairs],
        [[int(change[2]) if len(change) > 2 else 0 for change in pair] for pair in pairs],
    )


_POLICIES: Final = {
    "imagenet": _read_policy(
        "Posterize 0.4 8, Rotate 0.6 9; Solarize 0.6 5, AutoContrast 0.6; Equalize 0.8, "
        "Equalize 0.6; Posterize 0.6 7, Posterize 0.6 6; Equalize 0.4, Solarize 0.2 4; Equalize "
        "0.4, Rotate 0.8 8; Solarize 0.6 3, Equalize 0.6; Posterize 0.8 5, Equalize 1; Rotate "
        "0.2 3, Solarize 0.6 8; Equalize 0.6, Posterize 0.4 6; Rotate 0.8 8, Color 0.4 0; "
        "Rotate 0.4 9, Equalize 0.6; Equalize 0, Equalize 0.8; Invert 0.6, Equalize 1; Color "
        "0.6 4, Contrast 1 8; Rotate 0.8 8, Color 1 2; Color 0.8 8, Solarize 0.8 7; Sharpness "
        "0.4 7, Invert 0.6; ShearX 0.6 5, Equalize 1; Color 0.4 0, Equalize 0.6; Equalize 0.4, "
        "Solarize 0.2 4; Solarize 0.6 5, AutoContrast 0.6; Invert 0.6, Equalize 1; Color 0.6 4, "
        "Contrast 1 8; Equalize 0.8, Equalize 0.6"
    ),
    "cifar10": _read_policy(
        "Invert 0.1, Contrast 0.2 6; Rotate 0.7 2, TranslateX 0.3 9; Sharpness 0.8 1, Sharpness "
        "0.9 3; ShearY 0.5 8, TranslateY 0.7 9; AutoContrast 0.5, Equalize 0.9; ShearY 0.2 7, "
        "Posterize 0.3 7; Color 0.4 3, Brightness 0.6 7; Sharpness 0.3 9, Brightness 0.7 9; "
        "Equalize 0.6, Equalize 0.5; Contrast 0.6 7, Sharpness 0.6 5; Color 0.7 7, TranslateX "
        "0.5 8; Equalize 0.3, AutoContrast 0.4; TranslateY 0.4 3, Sharpness 0.2 6; Brightness "
        "0.9 6, Color 0.2 8; Solarize 0.5 2, Invert 0; Equalize 0.2, AutoContrast 0.6; Equalize "
        "0.2, Equalize 0.6; Color 0.9 9, Equalize 0.6; AutoContrast 0.8, Solarize 0.2 8; "
        "Brightness 0.1 3, Color 0.7 0; Solarize 0.4 5, AutoContrast 0.9; TranslateY 0.9 9, "
        "TranslateY 0.7 9; AutoContrast 0.9, Solarize 0.8 3; Equalize 0.8, Invert 0.1; "
        "TranslateY 0.7 9, AutoContrast 0.9"
    ),
    "svhn": _read_policy(
        "ShearX 0.9 4, Invert 0.2; ShearY 0.9 8, Invert 0.7; Equalize 0.6, Solarize 0.6 6; "
        "Invert 0.9, Equalize 0.6; Equalize 0.6, Rotate 0.9 3; ShearX 0.9 4, AutoContrast 0.8; "
        "ShearY 0.9 8, Invert 0.4; ShearY 0.9 5, Solarize 0.2 6; Invert 0.9, AutoContrast 0.8; "
        "Equalize 0.6, Rotate 0.9 3; ShearX 0.9 4, Solarize 0.3 3; ShearY 0.8 8, Invert 0.7; "
        "Equalize 0.9, TranslateY 0.6 6; Invert 0.9, Equalize 0.6; Contrast 0.3 3, Rotate 0.8 "
        "4; Invert 0.8, TranslateY 0 2; ShearY 0.7 6, Solarize 0.4 8; Invert 0.6, Rotate 0.8 4; "
        "ShearY 0.3 7, TranslateX 0.9 3; ShearX 0.1 6, Invert 0.6; Solarize 0.7 2, TranslateY "
        "0.6 7; ShearY 0.8 4, Invert 0.8; ShearX 0.7 9, TranslateY 0.8 3; ShearY 0.8 5, "
        "AutoContrast 0.7; ShearX 0.7 2, Invert 0.1"
    ),
}
"""The paper's: "change probability bin, change probability bin; …"."""


@dataclass(frozen=True)
class AugMix(ImageOp):
    """Blend each image with what chains of changes make of it (arXiv 1912.02781).

    Boxes, keypoints and masks stay where they are: they are those of the image itself.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import AugMix, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), AugMix()]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    severity: int = 3
    """1 to 10: a change's magnitude is one of the first so many of ten bins."""
    mixture_width: int = 3
    """Chains."""
    chain_depth: int = -1
    """Changes of a chain; below 1 it is drawn, 1 to 3."""
    alpha: float = 1.0
    """Of the distributions (Dirichlet, Beta) from which the shares of the blend are drawn."""
    all_ops: bool = True
    """Take brightness, color, contrast and sharpness among the changes."""
    interpolation: WarpInterpolation = "bilinear"
    fill: float | Sequence[float] | None = None
    """Color outside an image that was moved, 0..255; None is black."""
    needs_color: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_warp(self)
        if self.severity not in range(1, 11):
            raise refuse(self, "severity", self.severity, "must be a whole number from 1 to 10")
        if not isinstance(self.mixture_width, int) or self.mixture_width < 1:
            raise refuse(self, "mixture_width", self.mixture_width, "must be at least 1")
        if not isinstance(self.chain_depth, int):
            raise refuse(self, "chain_depth", self.chain_depth, "must be a whole number")
        if not is_number(self.alpha) or self.alpha <= 0:
            raise refuse(self, "alpha", self.alpha, "must be positive")

    @property
    def space(self) -> Space:
        """Which changes there are."""
        without = {"Identity"}
        if not self.all_ops:
            without |= {"Brightness", "Color", "Contrast", "Sharpness"}
        return {name: ends for name, ends in _MIXED.items() if name not in without}

    @property
    def _depth(self) -> int:
        return self.chain_depth if self.chain_depth > 0 else 3

    @property
    def columns(self) -> int:  # type: ignore[override]
        """The image's share, the chains' shares, and the turns of each chain."""
        return 1 + self.mixture_width * (1 + self._depth * _TURN)

    @property
    def uniforms(self) -> int:  # type: ignore[override]
        """Those of the shares; of each chain its depth, and of each turn change, bin and sign."""
        return self._share_uniforms + self.mixture_width * (1 + self._depth * 3)

    @property
    def _share_uniforms(self) -> int:
        return (2 + self.mixture_width) * (1 + 3 * _TRIES)

    def draw(self, u: Floats, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return rows, and that images keep their places."""
        changes = _Changes(self.space, 10)
        count = self._share_uniforms
        drawn = u[:, :count].reshape(len(u), 2 + self.mixture_width, -1)
        own, rest = np.hsplit(_dirichlet(drawn[:, :2], self.alpha), 2)
        made = [own, _dirichlet(drawn[:, 2:], self.alpha) * rest]
        for chain in u[:, count:].reshape(len(u), self.mixture_width, -1).transpose(1, 2, 0):
            depth = 1 + below(chain[0], np.array(3)) if self.chain_depth <= 0 else self.chain_depth
            for turn, (which, bin_, sign) in enumerate(chain[1:].reshape(self._depth, 3, -1)):
                number = changes.numbers[below(which, np.array(len(changes.numbers)))]
                number = np.where(turn < np.asarray(depth), number, _NUMBER["Identity"])
                bins = below(bin_, np.array(self.severity))
                made.append(changes.turn(number, bins, sign <= 0.5, shapes))
        return np.concatenate(made, axis=1), shapes

    def cpu(self, rows: Rows) -> CpuStep:
        """Return the step that blends image i of the chunk with its chains, in place."""
        width, images = self.mixture_width, _Images(self.interpolation, self._color)
        shares = rows[:, : 1 + width].astype(np.float32)
        turns = rows[:, 1 + width :].reshape(len(rows), width, self._depth, _TURN)
        copy = Scratch()

        def step(i: int, src: Image, out: Image | None) -> Image:
            mixed = np.multiply(src, shares[i, 0], dtype=np.float32)
            for share, chain in zip(shares[i, 1:], turns[i], strict=True):
                image = copy(*src.shape)
                image[...] = src
                mixed += np.multiply(images.run(chain, image, None), share, dtype=np.float32)
            mixed += np.float32(_ROUNDED)
            np.copyto(src, mixed, casting="unsafe")
            return src

        return step

    @property
    def _color(self) -> tuple[float, ...]:
        return check_fill(self, self.fill)

    def on_device(self, rows: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Blend a batch."""
        width, every = self.mixture_width, self._depth * _TURN
        kinds = [_FIRST + k for k, name in enumerate(_KINDS) if name in self.space]
        mixed = images * rows[:, 0, None, None, None]
        for k in range(width):
            begin = 1 + width + k * every
            chain = rows[:, begin : begin + every]
            made = _turns_batch(chain, images, kinds, self.interpolation, self._color)
            mixed = mixed + made * rows[:, 1 + k, None, None, None]
        return (mixed + _ROUNDED).clamp(0, 255).floor()


_ROUNDED: Final = 1 / 256
"""Added before a blend is rounded down, so that shares that add up to 0.9999999 lose no level."""


_TRIES: Final = 6
"""Of drawing from a Gamma distribution; one fails once in twenty times at most."""


def _dirichlet(u: Floats, alpha: float) -> Floats:
    """Return (B, n) shares that add up to 1, drawn from a Dirichlet of `alpha` for each.

    From uniforms (B, n, 1 + 3 * _TRIES), by Gammas of alpha + 1 and a power of a uniform (Marsaglia
    and Tsang, "A simple method for generating gamma variables", 2000), in logarithms, because those
    of a small alpha have no other numbers.
    """
    first, second, third = 1 - u[..., 1:].reshape(*u.shape[:2], 3, _TRIES).transpose(2, 0, 1, 3)
    d = alpha + 2 / 3
    x = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    v = np.maximum(1 + x / np.sqrt(9 * d), 1e-9) ** 3
    taken = np.log(third) < 0.5 * x**2 + d - d * v + d * np.log(v)
    taken[..., -1] = True
    v = np.take_along_axis(v, taken.argmax(axis=2)[..., None], axis=2)[..., 0]
    logs = np.log(v) + np.log(1 - u[..., 0]) / alpha
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))
