"""What every op shares: where its random numbers come from, and how its arguments are checked."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from h5feed.errors import UsageError

__all__ = [
    "Draws",
    "Floats",
    "Ints",
    "Op",
    "check_fill",
    "check_mask_fill",
    "check_numbers",
    "check_pair",
    "check_probability",
    "check_size",
    "is_number",
    "refuse",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Draws(Protocol):
    """Random numbers of a batch, a pure function of (seed, epoch, sample index, stream, column)."""

    def uniform(self, stream: int, count: int) -> Floats:
        """Return float64 (B, count) in [0, 1), a row per sample."""
        ...

    def batch_uniform(self, stream: int, count: int) -> Floats:
        """Return float64 (count,) in [0, 1) that belong to the batch as a whole."""
        ...


class Op:
    """Base of all ops. An op is a frozen dataclass; it holds arguments and no state."""


def refuse(op: object, argument: str, value: Any, wrong: str) -> UsageError:
    """Make the one error of a bad argument: op, argument, value, and what it should be."""
    return UsageError(f"{type(op).__name__}: {argument}={value!r} {wrong}")


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
    """Return a color of one or three numbers within 0..255."""
    items = [fill] if is_number(fill) else list(fill) if isinstance(fill, Sequence) else []
    if len(items) not in (1, 3) or not all(is_number(i) and 0 <= i <= 255 for i in items):
        raise refuse(op, "fill", fill, "must be one number or three, within 0..255")
    return tuple(float(item) for item in items)


def check_mask_fill(op: object, fill: Any) -> None:
    """Refuse what is no class number that a mask can hold."""
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
