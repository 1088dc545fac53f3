"""RandomApply and RandomChoice: ops that happen to some images, or one of several to each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from h5feed.augment.color import Grayscale
from h5feed.augment.frame import Floats, Ints
from h5feed.augment.geometry import AxisOp
from h5feed.augment.mixing import MixOp
from h5feed.augment.ops import ImageOp, Op, check_numbers, check_probability, refuse

if TYPE_CHECKING:
    from h5feed.augment.plan import Plan

__all__ = ["ChoiceOp", "RandomApply", "RandomChoice"]


class ChoiceOp(Op):
    """Base: each image goes through one of several lists of ops."""

    def join(self, plan: Plan, position: int) -> None:
        """Become the next step."""
        plan.choose(self, position)

    @property
    @abstractmethod
    def lists(self) -> Sequence[Sequence[Op]]:
        """The lists of ops; an empty one leaves an image as it is."""

    @abstractmethod
    def choose(self, u: Floats) -> Ints:
        """Return which of the lists each image takes, (B,), from uniforms (B,)."""


@dataclass(frozen=True)
class RandomApply(ChoiceOp):
    """Do all of some ops to an image, with probability `p`, or none of them.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import ColorJitter, RandomApply, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), RandomApply([ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    transforms: Sequence[Op]
    """Ops that change images one by one, bytes to bytes."""
    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", _checked(self, _listed(self, self.transforms)))
        check_probability(self, self.p)

    @property
    def lists(self) -> Sequence[Sequence[Op]]:
        """None, and all of them."""
        return (), self.transforms

    def choose(self, u: Floats) -> Ints:
        """Mark the images whose uniform lies below p."""
        return (u < self.p).astype(np.int64)


@dataclass(frozen=True)
class RandomChoice(ChoiceOp):
    """Do one of several ops to each image.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import GaussianBlur, Grayscale, RandomChoice, RandomSolarize
    >>> one = RandomChoice([Grayscale(3), RandomSolarize(128, p=1), GaussianBlur(5)])
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=[one])))
    >>> images.shape
    torch.Size([4, 3, 64, 64])
    """

    transforms: Sequence[Op | Sequence[Op]]
    """Ops that change images one by one, bytes to bytes; or lists of them, all done in turn."""
    p: Sequence[float] | None = None
    """How probable each is, by whatever they add up to; None makes them equally so."""

    def __post_init__(self) -> None:
        given = _listed(self, self.transforms)
        made = tuple(_checked(self, one if isinstance(one, Sequence) else [one]) for one in given)
        ones = tuple(one[0] if len(one) == 1 else one for one in made)
        object.__setattr__(self, "transforms", ones)
        if self.p is not None:
            p = check_numbers(self, "p", self.p)
            if len(p) != len(given) or min(p) < 0 or sum(p) <= 0:
                wrong = f"must be {len(given)} numbers, none below 0, one for each of transforms"
                raise refuse(self, "p", self.p, wrong)
            object.__setattr__(self, "p", p)

    @property
    def lists(self) -> Sequence[Sequence[Op]]:
        """Each of them."""
        return [(one,) if isinstance(one, Op) else one for one in self.transforms]

    def choose(self, u: Floats) -> Ints:
        """Return which it is, by where the uniform falls among the probabilities."""
        bounds = np.cumsum(self.p or [1.0] * len(self.transforms))
        return np.searchsorted(bounds[:-1] / bounds[-1], u, side="right")


def _listed(op: ChoiceOp, given: Any) -> Sequence[Any]:
    if not isinstance(given, Sequence) or not given:
        raise refuse(op, "transforms", given, "must be a list of ops of h5feed.augment, of one on")
    return given


def _checked(op: ChoiceOp, given: Sequence[Any]) -> tuple[Op, ...]:
    """Return the ops, once each of them is known to change one image, bytes to bytes."""
    for one in given:
        if isinstance(one, MixOp):
            raise refuse(op, "transforms", list(given), "mixes whole batches: use MixUpOrCutMix")
        grays = isinstance(one, Grayscale) and one.num_output_channels == 1
        if grays or not isinstance(one, (ImageOp, AxisOp, ChoiceOp)):
            wrong = f"holds {one!r}, which is not an op that makes one image of bytes of another"
            raise refuse(op, "transforms", list(given), wrong)
    return tuple(given)
