"""RandomHorizontalFlip and RandomVerticalFlip."""

from dataclasses import dataclass
from typing import ClassVar

from h5feed.augment.crops import AxisOp
from h5feed.augment.frame import Frame
from h5feed.augment.ops import Floats, check_probability

__all__ = ["RandomHorizontalFlip", "RandomVerticalFlip"]


@dataclass(frozen=True)
class RandomHorizontalFlip(AxisOp):
    """Mirror left-right with probability `p`."""

    p: float = 0.5
    uniforms: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_probability(self, self.p)

    def fold(self, frame: Frame, u: Floats) -> None:
        """Flip the images whose uniform lies below p."""
        frame.flip(u[:, 0] < self.p, False)


@dataclass(frozen=True)
class RandomVerticalFlip(AxisOp):
    """Mirror upside-down with probability `p`."""

    p: float = 0.5
    uniforms: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_probability(self, self.p)

    def fold(self, frame: Frame, u: Floats) -> None:
        """Flip the images whose uniform lies below p."""
        frame.flip(False, u[:, 0] < self.p)
