"""Where the images of a loader lie while it runs: what was asked for, or what fits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, get_args

from h5feed.errors import UsageError
from h5feed.feed.device import Lane
from h5feed.feed.source import Pixels
from h5feed.system import available_memory

__all__ = ["Residency", "choose_residency"]

Residency = Literal["stream", "device", "pinned", "auto"]

_OF_DEVICE = 0.25  # of its free memory: the model and its activations come later
_OF_HOST = 0.5  # of the memory that is free: page-locked pages can't be given to anyone else


def choose_residency(
    asked: Residency,
    pixels: Pixels,
    lane: Lane,
    *,
    augment_on: str,
    free_host: Callable[[], int | None] = available_memory,
) -> tuple[Residency, str]:
    """Return "stream", "device" or "pinned", and why.

    Raises UsageError for what is none of them, or cannot be with these files or `augment_on`.
    """
    if asked not in get_args(Residency):
        raise UsageError(f"residency={asked!r} is none of {', '.join(get_args(Residency))}")
    if asked == "stream":
        return asked, "as asked"
    obstacle = _obstacle(pixels, augment_on)
    if asked != "auto":
        if obstacle is not None:
            raise UsageError(f'residency="{asked}": {obstacle[0]}; {obstacle[1]}')
        return asked, "as asked"
    if obstacle is not None:
        return "stream", obstacle[0]
    if lane.device.type == "cpu":
        return "stream", "batches stay on the CPU"
    return _by_size(pixels, lane, free_host() or 0)


def _obstacle(pixels: Pixels, augment_on: str) -> tuple[str, str] | None:
    """Return why a device cannot gather these images, and what to do; None if it can."""
    spec = pixels.specs["images"]
    if not spec.is_fixed:
        return (
            f"a device gathers images of one size in bytes, and store={spec.encoding}, "
            f"fit={spec.fit} has many",
            'pack with --store raw or yuv420 and a --fit other than keep, or use residency="stream"'
            + (" (DaliLoader decodes JPEG on a GPU)" if spec.is_encoded else ""),
        )
    if augment_on == "cpu":
        return (
            'augment_on="cpu" needs the images in the loader\'s threads',
            'leave augment_on out, or use residency="stream"',
        )
    return None


def _by_size(pixels: Pixels, lane: Lane, host: int) -> tuple[Residency, str]:
    size = len(pixels) * pixels.specs["images"].item_bytes
    free = lane.free_bytes()
    if size <= _OF_DEVICE * free:
        return "device", f"{_gb(size)} of {_gb(free)} that are free on {lane.device}"
    copies = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each process keeps its own
    wanted = size * copies
    each = f" in each of {copies} processes" if copies > 1 else ""
    if wanted <= _OF_HOST * host:
        return "pinned", f"{_gb(size)}{each}: too much for {lane.device}, but not for the host"
    return "stream", f"{_gb(size)}{each}: too much for {lane.device} and for the host's memory"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
