"""Consecutive crops, resizes and flips of a batch, folded into one box and one resize per image."""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AUTO_FACTOR",
    "COLUMNS",
    "Antialias",
    "Floats",
    "Frame",
    "Interpolation",
    "Ints",
    "PaddingMode",
    "Shapes",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Antialias = bool | Literal["auto"]
Interpolation = Literal["bilinear", "bicubic"]
PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]

AUTO_FACTOR: Final = 1.5
"""antialias="auto" antialiases an image whose crop shrinks by more than this along an axis.

There plain bilinear lies 37 dB (median of photos, 224x224) from the antialiased result, no further
than JPEG quality 90 (36.0) or yuv420 (37.8) lie from the pixels; at 1.14 (256 to 224) it is 43 dB,
at 2.5 29 dB.
"""

COLUMNS: Final = ("y", "x", "h", "w", "rh", "rw", "py", "px", "oh", "ow", "flip", "antialias")
"""Columns of a crop's parameters, int32 (B, 12), all in pixels.

y, x, h, w: the box read from the image given. rh, rw: the size it is resized to. py, px: where
the resized box lies in the output (negative: it sticks out; positive: fill before it). oh, ow:
the output. flip, of the output: 1 left-right, 2 upside-down, 3 both. antialias: 0 or 1.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """How large the images of a batch are between two steps, all int64, in pixels."""

    actual: Ints
    """(B, 2) height, width in memory."""
    boxes: Ints
    """(B, 4) top, left, height, width of the image in memory: less than all of a letterbox."""
    true: Ints
    """(B, 2) height, width of that box unsqueezed; crops are drawn in these."""

    @classmethod
    def stored(cls, stored: Ints, source: Ints, boxes: Ints | None) -> "Shapes":
        """Images as a file holds them: stored and source sizes (B, 2), letterbox boxes (B, 4)."""
        actual, source = stored.astype(np.int64), source.astype(np.int64)
        inside = _all_of(actual) if boxes is None else boxes.astype(np.int64)
        return cls(actual=actual, boxes=inside, true=_true_sizes(inside[:, 2:], source))

    @classmethod
    def whole(cls, sizes: Ints) -> "Shapes":
        """Images in their own proportions that fill their memory."""
        return cls(actual=sizes, boxes=_all_of(sizes), true=sizes)


def _all_of(sizes: Ints) -> Ints:
    boxes = np.zeros((len(sizes), 4), np.int64)
    boxes[:, 2:] = sizes
    return boxes


def _true_sizes(stored: Ints, source: Ints) -> Ints:
    """Return int64 (B, 2): the size each image has at its stored resolution, unsqueezed.

    The source's proportions, scaled so that nothing stored is lost: a 375x500 photo stored as
    256x256 counts as 256x341, as torchvision's Resize(256) would have made it. Within one pixel
    of the stored size it is the stored size: an image in its own proportions stays itself.
    """
    if np.array_equal(stored, source):
        return stored
    scale = stored / source
    scale = np.maximum(scale[:, :1], scale[:, 1:])
    true = np.maximum((source * scale + 1e-6).astype(np.int64), stored)
    off = true - stored  # never negative
    return np.where((off[:, :1] <= 1) & (off[:, 1:] <= 1), stored, true)


class Frame:
    """Where each image of a batch is, as seen by the next op.

    A box `base` (B, 4) of the image given is seen as if resized to `space` (B, 2), and of that
    the `window` (B, 4: top, left, height, width) is the image so far; `flip_x`, `flip_y` (B)
    apply last.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._before = shapes
        self.base = shapes.boxes
        self.space = shapes.true
        self.window = _all_of(self.space)
        self.flip_x = np.zeros(len(self.base), bool)
        self.flip_y = np.zeros(len(self.base), bool)
        self.sized = False  # an op has asked for a size; until then the image's own is right
        self.resized = False  # `space` is what a resize op asked for, to be followed exactly
        self._cut = False  # the window is not all of `space`

    @property
    def height(self) -> Ints:
        """Height of each image so far, int64 (B)."""
        return self.window[:, 2]

    @property
    def width(self) -> Ints:
        """Width of each image so far, int64 (B)."""
        return self.window[:, 3]

    def crop(self, top: Ints, left: Ints, height: Ints | int, width: Ints | int) -> None:
        """Cut a box out of the image so far; it may reach outside (there the fill shows)."""
        top = np.where(self.flip_y, self.height - top - height, top)
        left = np.where(self.flip_x, self.width - left - width, left)
        window = np.empty_like(self.window)
        window[:, 0] = self.window[:, 0] + top
        window[:, 1] = self.window[:, 1] + left
        window[:, 2] = height
        window[:, 3] = width
        self.window = window
        self.sized = self._cut = True

    def resize(self, height: Ints | int, width: Ints | int) -> None:
        """Resize the image so far."""
        if self._cut:
            self.base = self._boxes(self.window[:, :2], self.window[:, :2] + self.window[:, 2:])
        space = np.empty_like(self.space)
        space[:, 0] = height
        space[:, 1] = width
        self.space = space
        self.window = _all_of(space)
        self.sized = self.resized = True
        self._cut = False

    def flip(self, x: NDArray[np.bool_] | bool, y: NDArray[np.bool_] | bool) -> None:
        """Mirror the images marked in `x` left-right and those in `y` upside-down."""
        self.flip_x = self.flip_x ^ x
        self.flip_y = self.flip_y ^ y

    def finish(
        self,
        antialias: Antialias,
        *,
        interpolation: Interpolation = "bilinear",
        padding_mode: PaddingMode = "constant",
    ) -> NDArray[np.int32]:
        """Return the parameters of the one resize that does it all: int32 (B, 12), see COLUMNS."""
        out = np.zeros((len(self.base), len(COLUMNS)), np.int32)
        if not self.sized:  # the image as it is in memory, squeezed or letterboxed
            out[:, 2:4] = out[:, 4:6] = out[:, 8:10] = self._before.actual
        elif not self._cut:
            out[:, :4] = self.base
            out[:, 4:6] = out[:, 8:10] = self.space
        else:
            self._write_cut(out, padding_mode)
        if self.flip_x.any() or self.flip_y.any():
            out[:, 10] = self.flip_x + 2 * self.flip_y
        if interpolation == "bicubic":  # torchvision's antialiased one is softer, also enlarging
            out[:, 11] = antialias is not False
        else:
            out[:, 11] = _shrinks(out, antialias)
        return out

    def _write_cut(self, out: NDArray[np.int32], padding_mode: PaddingMode) -> None:
        """Write the columns of images that are a part of `space`, or reach outside it."""
        low, size = self.window[:, :2], self.window[:, 2:]
        inner_low = np.clip(low, 0, self.space - 1)
        inner_high = np.maximum(np.minimum(low + size, self.space), inner_low + 1)
        out[:, :4] = self._boxes(inner_low, inner_high)
        out[:, 4:6] = inner_high - inner_low
        out[:, 6:8] = inner_low - low
        out[:, 8:10] = size
        whole = np.zeros(len(out), bool)
        if self.resized:
            whole = self._whole(inner_low, inner_high)
        if padding_mode not in ("constant", "edge"):
            # what is mirrored in the padding must be at hand
            reach = np.maximum(inner_low - low, low + size - inner_high)
            whole |= (reach >= inner_high - inner_low).any(axis=1)
        if padding_mode != "constant":
            whole |= ((low + size <= 0) | (low >= self.space)).any(axis=1)
        if whole.any():
            out[whole, :4] = self.base[whole]
            out[whole, 4:6] = self.space[whole]
            out[whole, 6:8] = -low[whole]

    def shapes(self) -> Shapes:
        """Return what the images are afterwards."""
        if self.sized:
            return Shapes.whole(self.window[:, 2:])
        before, boxes = self._before, self._before.boxes.copy()
        for axis, flips in ((0, self.flip_y), (1, self.flip_x)):
            mirrored = before.actual[:, axis] - boxes[:, axis] - boxes[:, 2 + axis]
            boxes[:, axis] = np.where(flips, mirrored, boxes[:, axis])
        return Shapes(actual=before.actual, boxes=boxes, true=before.true)

    def _whole(self, low: Ints, high: Ints) -> NDArray[np.bool_]:
        """Mark (B) the images to resize whole and cut afterwards: a crop that follows a resize."""
        scaled = (self.base[:, 2:] != self.space).any(axis=1)
        cut = ((low > 0) | (high < self.space)).any(axis=1)
        return np.asarray(scaled & cut)

    def _boxes(self, low: Ints, high: Ints) -> Ints:
        """Map corners in `space` to whole-pixel boxes of the image given, int64 (B, 4)."""
        extent = self.base[:, 2:]
        if np.array_equal(extent, self.space):
            return np.concatenate([self.base[:, :2] + low, high - low], axis=1)
        scale = extent / self.space
        # floor(x + 1/2), not rint: boxes of one size stay so wherever they lie
        first = np.floor(low * scale + 0.5).astype(np.int64)
        length = np.floor(high * scale + 0.5).astype(np.int64) - first
        length = np.clip(length, 1, extent)
        first = np.minimum(first, extent - length)
        return np.concatenate([self.base[:, :2] + first, length], axis=1)


def _shrinks(params: NDArray[np.int32], antialias: Antialias) -> NDArray[np.bool_] | bool:
    """Mark the images to antialias: without shrinking both filters are the same."""
    if antialias is False:
        return False
    factor = AUTO_FACTOR if antialias == "auto" else 1.0
    h, w, rh, rw = params[:, 2], params[:, 3], params[:, 4], params[:, 5]
    return np.asarray((h > factor * rh) | (w > factor * rw))
