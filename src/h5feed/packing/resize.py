"""From an image's own size to the stored one: which size, which part, which filter."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5feed.errors import PackError, UsageError
from h5feed.jpeg import MAX_JPEG_SIDE
from h5feed.packing.decode import NOT_AN_IMAGE, TOO_LARGE, DecodeError, read_size
from h5feed.packing.items import ImageSource
from h5feed.packing.options import PackOptions
from h5feed.packing.sources import DatasetSource
from h5feed.progress import Progress
from h5feed.store.layout import MAX_ITEM_PIXELS, FieldSpec

__all__ = [
    "MAX_AUTO_SIZE",
    "Box",
    "Geometry",
    "auto_size",
    "check_size",
    "fit_image",
    "fit_mask",
    "plan_geometry",
    "resize_mask",
    "resize_rgb",
    "stored_size",
]

UInt8 = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""Top, left, height, width in pixels."""

MAX_AUTO_SIZE = 512
_SAMPLED_ITEMS = 100
_HEAD_BYTES = 64 << 10


def stored_size(
    source: ImageSource | DatasetSource, options: PackOptions, *, progress: bool = False
) -> tuple[int, int] | None:
    """Return (height, width) in pixels, or None where images keep their own size.

    `auto` looks at every k-th image, 2,000 files at most: of 1.28 million headers it needs
    seconds instead of an hour on a cold disk, and the median hardly moves.
    """
    if options.store == "original":
        return None
    if options.size != "auto":
        return check_size(options.size, any_size=options.any_size)
    with Progress(None, "reading sizes", show=progress, brief=True) as bar:
        sides = []
        for side in _short_sides(source, options):
            sides.append(side)
            bar.advance()
    if not sides:
        raise PackError("size=auto: not one image of those looked at can be read; check SRC")
    side = auto_size(sides)
    return side, side


def _short_sides(source: ImageSource | DatasetSource, options: PackOptions) -> Iterator[int]:
    if isinstance(source, DatasetSource):
        for index in _sample(len(source), _SAMPLED_ITEMS):
            try:
                yield min(source.load(index)[0].shape[:2])
            except DecodeError:
                continue
        return
    for index in _sample(len(source), source.sampled):
        try:
            yield min(_read_size(source, index, options.max_pixels))
        except (DecodeError, OSError):
            continue


def _sample(count: int, most: int) -> range:
    return range(0, count, max(1, -(-count // most)))


def _read_size(source: ImageSource, index: int, max_pixels: int) -> tuple[int, int]:
    head = source.read(index, max_pixels=max_pixels, most=_HEAD_BYTES)
    try:
        return read_size(head, max_pixels=max_pixels)
    except DecodeError as ex:
        # A TIFF's directory may lie at the end, a JPEG's behind a large thumbnail.
        if len(head) < _HEAD_BYTES or ex.reason in (NOT_AN_IMAGE, TOO_LARGE):
            raise
    return read_size(source.read(index, max_pixels=max_pixels), max_pixels=max_pixels)


def auto_size(short_sides: Iterable[int]) -> int:
    """Return the power of two nearest to the median short side, at most 512.

    Nearest in pixels, a tie to the smaller: photos of 375 give 256, which costs a quarter of the
    bytes of 512 and enlarges nothing.
    """
    median = statistics.median(short_sides)
    size = 1
    while size < MAX_AUTO_SIZE and 2 * median > 3 * size:
        size *= 2
    return size


def check_size(size: str | int | tuple[int, int], *, any_size: bool = False) -> tuple[int, int]:
    """Return (height, width) from 256, "256", "192x256" or (192, 256); UsageError otherwise."""
    if isinstance(size, str):
        parts = size.lower().split("x")
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise _no_size(size)
        sides = tuple(int(part) for part in parts)
    else:
        sides = (size,) if isinstance(size, int) else tuple(size)
    if len(sides) == 1:
        sides *= 2
    if len(sides) != 2 or min(sides) < 1:
        raise _no_size(size)
    if not any_size and any(side & (side - 1) for side in sides):
        raise UsageError(
            f"size={size!r} is not a power of two: take {_neighbours(sides)}, "
            "or allow it with --any-size"
        )
    if max(sides) > MAX_JPEG_SIDE or sides[0] * sides[1] > MAX_ITEM_PIXELS:
        raise UsageError(
            f"size={size!r} is too large: give at most {MAX_JPEG_SIDE} a side and "
            f"{MAX_ITEM_PIXELS} pixels in all"
        )
    return sides[0], sides[1]


def _no_size(size: object) -> UsageError:
    return UsageError(f"size={size!r} is not a size: give auto, S or HxW, such as 256 or 192x256")


def _neighbours(sides: tuple[int, ...]) -> str:
    lower = [1 << (side.bit_length() - 1) for side in sides]
    upper = [1 << (side - 1).bit_length() for side in sides]
    return " or ".join(str(a) if a == b else f"{a}x{b}" for a, b in (lower, upper))


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How one image becomes a stored one: resize it all, cut a window, lay it on a canvas."""

    resized: tuple[int, int]
    """Height and width of the whole image after the resize."""
    window: Box
    """The part of the resized image that is kept."""
    canvas: tuple[int, int]
    """Height and width that are stored."""
    offset: tuple[int, int]
    """Top and left of the window on the canvas."""

    @property
    def box(self) -> Box:
        """Where on the canvas the image lies."""
        return (*self.offset, *self.window[2:])


def plan_geometry(height: int, width: int, spec: FieldSpec) -> Geometry:
    """Return the geometry that `spec.fit` gives an image of `height` × `width` pixels.

    In yuv420 all that can be chosen is even: a kept long side is rounded down, and so are the
    size and the place of the image in a letterbox. Raises DecodeError for an image so
    narrow that its short side at the stored size would make it absurdly long.
    """
    target = (spec.height, spec.width)
    step = 2 if spec.encoding == "yuv420" else 1
    if spec.fit == "crop":
        resized = _cover(height, width, target)
        # torchvision's CenterCrop rounds half to even, and so does Python.
        top, left = (round((r - t) / 2) for r, t in zip(resized, target, strict=True))
        return Geometry(resized=resized, window=(top, left, *target), canvas=target, offset=(0, 0))
    if spec.fit == "pad":
        resized = _contain(height, width, target, step)
        top, left = ((t - r) // 2 // step * step for t, r in zip(target, resized, strict=True))
        window = (0, 0, *resized)
        return Geometry(resized=resized, window=window, canvas=target, offset=(top, left))
    if spec.fit == "keep":
        resized = _cover(height, width, target)
        target = (resized[0] // step * step, resized[1] // step * step)
    return Geometry(resized=target, window=(0, 0, *target), canvas=target, offset=(0, 0))


def _cover(height: int, width: int, target: tuple[int, int]) -> tuple[int, int]:
    """Return the least size of the same aspect that covers `target`.

    The side that juts out is cut off to a whole number as torchvision's Resize does it:
    int(S · long / short).
    """
    if target[0] * width >= target[1] * height:
        resized = target[0], int(target[0] * width / height)
    else:
        resized = int(target[1] * height / width), target[1]
    if resized[0] * resized[1] > MAX_ITEM_PIXELS or max(resized) > MAX_JPEG_SIDE:
        raise DecodeError(
            TOO_LARGE, f"{height}x{width} would be resized to {resized[0]}x{resized[1]}"
        )
    return resized


def _contain(height: int, width: int, target: tuple[int, int], step: int) -> tuple[int, int]:
    """Return the greatest size of the same aspect within `target`, in multiples of `step`."""
    if target[0] * width >= target[1] * height:
        return max(step, round(target[1] * height / width) // step * step), target[1]
    return target[0], max(step, round(target[0] * width / height) // step * step)


def resize_rgb(pixels: UInt8, height: int, width: int) -> UInt8:
    """Resize RGB uint8 (H, W, 3) by antialiased bilinear, within 1 of Pillow's BILINEAR.

    torch's uint8 channels-last kernel: 112 µs from 500 × 375 to 256 × 256 on one thread, where
    Pillow takes 740. It runs on the calling thread.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    import torch  # here: it takes a second, and only resizing needs it

    pixels = np.require(pixels, requirements=("C", "W"))  # torch warns of read-only memory
    # The batch axis must come first: added after the permute it hides from torch that the
    # memory is channels-last, and the result is in planes, at three times the cost.
    batch = torch.from_numpy(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    small = torch.nn.functional.interpolate(
        batch, (height, width), mode="bilinear", antialias=True, align_corners=False
    )
    return np.ascontiguousarray(small[0].permute(1, 2, 0).numpy())


def resize_mask(mask: UInt8, height: int, width: int) -> UInt8:
    """Resize class numbers uint8 (H, W) to the nearest pixel, exactly as Pillow's NEAREST."""
    if mask.shape == (height, width):
        return mask
    rows, columns = _nearest(mask.shape[0], height), _nearest(mask.shape[1], width)
    small: UInt8 = mask[rows[:, None], columns]
    return small


def _nearest(old: int, new: int) -> npt.NDArray[np.intp]:
    """Return the old pixel at the center of each new one, added up as Pillow does it.

    A center on the border of two pixels falls to either by the rounding of the running sum
    (Pillow's ImagingScaleAffine), so another formula gives other pixels.
    """
    steps = np.full(new, old / new)
    steps[0] /= 2
    return np.minimum(steps.cumsum().astype(np.intp), old - 1)


def fit_image(
    pixels: UInt8, spec: FieldSpec, *, background: tuple[int, int, int] = (255, 255, 255)
) -> tuple[UInt8, Box]:
    """Return the stored image, uint8 (h, w, 3), and the image's box on it.

    `background` fills what fit="pad" leaves empty; elsewhere the box is the whole image.
    """
    plan = plan_geometry(pixels.shape[0], pixels.shape[1], spec)
    return _place(resize_rgb(pixels, *plan.resized), plan, background), plan.box


def fit_mask(mask: UInt8, images: FieldSpec, *, fill: int = 0) -> UInt8:
    """Return the stored mask, uint8 (h, w, 1), in the geometry of its image.

    `images` is the images' spec, not the masks': what yuv420 rounds holds for both.
    """
    plan = plan_geometry(mask.shape[0], mask.shape[1], images)
    return _place(resize_mask(mask, *plan.resized)[..., None], plan, (fill,))


def _place(pixels: UInt8, plan: Geometry, fill: tuple[int, ...]) -> UInt8:
    top, left, height, width = plan.window
    part = pixels[top : top + height, left : left + width]
    if plan.canvas == (height, width):
        return np.ascontiguousarray(part)
    canvas = np.empty((*plan.canvas, pixels.shape[2]), np.uint8)
    canvas[:] = fill
    top, left = plan.offset
    canvas[top : top + height, left : left + width] = part
    return canvas
