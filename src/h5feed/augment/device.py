"""Kernels of any device, for a whole batch: no loop, no host sync, and compiled on request."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from h5feed.augment.frame import Interpolation, PaddingMode

if TYPE_CHECKING:
    import torch

__all__ = ["CompiledBatch", "crop_batch", "kernel_dtype", "nv12_batch", "per_channel"]


def kernel_dtype(device: torch.device) -> torch.dtype:
    """float16 on CUDA: its products add up in float32, and 11 bits hold 0..255 within 1/16."""
    import torch

    return torch.float16 if device.type == "cuda" else torch.float32


def per_channel(values: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    """Return `values` as (1, n, 1, 1) of the type and device of `like`.

    Filled in on the device: torch.tensor(values, device=...) would wait for it.
    """
    import torch

    made = [like.new_full((1, 1, 1, 1), float(value)) for value in values]
    return torch.cat(made, dim=1)


def _axis_weights(
    columns: tuple[torch.Tensor, ...],
    in_size: int,
    out_size: int,
    interpolation: Interpolation,
    padding: PaddingMode,
) -> torch.Tensor:
    """Return float32 (B, out_size, in_size): the share of each input pixel in each output pixel.

    columns: float32 (B, 1, 1) each: the box's begin and length, its resized length, its place in
    the output, and two flags, flip and antialias. Rows sum to 1, or to 0 where the output
    shows the fill. The triangle filter and its half-pixel centres are torch's
    (aten/native/UpSample.h); one pixel wide it is plain bilinear, borders clamped to the box, as
    cv2.resize has it.
    """
    import torch

    begin, length, resized, place, flip, antialias = columns
    i = torch.arange(out_size, device=begin.device, dtype=torch.float32).view(1, -1, 1)
    i = torch.where(flip > 0, out_size - 1 - i, i) - place
    if padding != "constant":
        i = _mirrored(i, resized, padding)
    inside = (i >= 0) & (i < resized)
    j = torch.arange(in_size, device=begin.device, dtype=torch.float32).view(1, 1, -1) - begin
    scale = length / resized
    width = torch.where(antialias > 0, scale.clamp(min=1), 1.0)
    center = scale * (i + 0.5) - 0.5
    if interpolation == "bicubic":
        weights = _cubic_weights(j, center, width, length, antialias)
    else:
        weights = (1 - (j - center).abs() / width).clamp(min=0)
    weights = weights * ((j >= 0) & (j < length) & inside)
    return weights / weights.sum(dim=2, keepdim=True).clamp(min=1e-6)


def _mirrored(i: torch.Tensor, length: torch.Tensor, padding: PaddingMode) -> torch.Tensor:
    """Return which of `length` pixels shows at `i`, which may lie outside."""
    import torch

    if padding == "edge":
        return torch.minimum(i.clamp(min=0), length - 1)
    if padding == "reflect":
        i = torch.remainder(i, (2 * length - 2).clamp(min=1))
        return torch.minimum(i, 2 * length - 2 - i)
    i = torch.remainder(i, 2 * length)
    return torch.minimum(i, 2 * length - 1 - i)


def _cubic_weights(
    j: torch.Tensor,
    center: torch.Tensor,
    width: torch.Tensor,
    length: torch.Tensor,
    antialias: torch.Tensor,
) -> torch.Tensor:
    """Return (B, out, in) weights of Keys's cubic, of -1/2 antialiased and -3/4 else, as torch has.

    Plain, pixels outside the box are those at its edge; antialiased, they do not count.
    """
    import torch

    a = torch.where(antialias > 0, -0.5, -0.75)

    def share(at: torch.Tensor) -> torch.Tensor:
        x = ((at - center) / width).abs()
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))

    plain = antialias <= 0
    before, behind = share(-1 - 0 * j) + share(-2 - 0 * j), share(length) + share(length + 1)
    weights = share(j) + torch.where(plain & (j == 0), before, 0.0)
    return weights + torch.where(plain & (j == length - 1), behind, 0.0)


def crop_batch(
    rows: torch.Tensor,
    images: torch.Tensor,
    size: tuple[int, int],
    fill: tuple[float, ...] = (0.0,),
    interpolation: Interpolation = "bilinear",
    padding: PaddingMode = "constant",
) -> torch.Tensor:
    """Return float (B, C, *size) of 0..255, unrounded, from float images (B, C, h, w).

    A resize, antialiased or not, is a weighted sum along each axis. So each image gets two
    small matrices made from its row of parameters, which crop, resize, flip and pad in one
    pass. The shapes depend on nothing random: torch.compile sees one graph.

    rows: float32 (B, 12) crop parameters on the device, see frame.COLUMNS. fill: the color
    around the image, one number or C. The products have the type of `images`.
    """
    import torch

    batch, channels, height, width = images.shape
    y, x, h, w, rh, rw, py, px, _, _, flip, antialias = rows[:, :, None, None].unbind(1)
    upside_down, left_right = torch.div(flip, 2, rounding_mode="floor"), flip % 2
    vertical, across = (y, h, rh, py, upside_down, antialias), (x, w, rw, px, left_right, antialias)
    down = _axis_weights(vertical, height, size[0], interpolation, padding)
    along = _axis_weights(across, width, size[1], interpolation, padding)
    # (B, H, C*W): one product per image for all channels, without copies of the weights
    tall = images.transpose(1, 2).reshape(batch, height, channels * width)
    made = torch.bmm(down.to(images.dtype), tall).view(batch, size[0] * channels, width)
    made = torch.bmm(made, along.to(images.dtype).transpose(1, 2))
    made = made.view(batch, size[0], channels, size[1]).transpose(1, 2)
    if interpolation == "bicubic":
        made = made.clamp(0, 255)
    shown = (down.sum(2) > 0)[:, None, :, None] & (along.sum(2) > 0)[:, None, None, :]
    return torch.where(shown, made, per_channel(fill, made))


"""Columns are converted in multiples of this: cv2's vector loop (AVX-512) leaves the rest of each
row to scalar code, 80 us for 190 columns where 192 take 10."""


def nv12_batch(batch: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float RGB (B, 3, h, w), whole numbers 0..255, from uint8 NV12 (B, h*3//2, w)."""
    import torch

    height, width = batch.shape[1] * 2 // 3, batch.shape[2]
    # ITU-R BT.601-7, limited range, as cv2's COLOR_YUV2RGB_NV12 has it
    luma = (batch[:, :height].float() - 16).clamp(min=0) * 1.164383
    chroma = batch[:, height:].reshape(-1, height // 2, width // 2, 2).float() - 128
    chroma = chroma.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    u, v = chroma.unbind(3)
    rgb = [luma + 1.596027 * v, luma - 0.812968 * v - 0.391762 * u, luma + 2.017232 * u]
    return torch.stack(rgb, dim=1).round().clamp(0, 255).to(dtype)


class CompiledBatch:
    """A function of tensors, compiled at its first call; as it is, with one warning, if that fails.

    A batch of another length compiles once more, then for any length. Thread-safe.
    """

    def __init__(self, run: Callable[..., torch.Tensor], backend: str = "inductor") -> None:
        import torch

        assert isinstance(run, FunctionType)
        # Code of its own: dynamo counts compilations by code, and after eight it gives up.
        own = FunctionType(run.__code__.replace(), run.__globals__, run.__name__)
        self._plain = run
        self._run: Any = torch.compile(own, fullgraph=True, backend=backend)
        self._lock = threading.Lock()  # or each of several threads would compile
        self.error: str | None = None
        """Why it runs uncompiled, if it does."""

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Return what the function returns."""
        with self._lock:
            if self.error is None:
                try:
                    made: torch.Tensor = self._run(*arguments)
                    return made
                except Exception as ex:
                    self._give_up(ex)
        plain: torch.Tensor = self._plain(*arguments)
        return plain

    def _give_up(self, ex: Exception) -> None:
        reason = " ".join(str(ex).split("\n")[:2])  # dynamo's first line may only say who raised
        self.error = f"{type(ex).__name__}: {reason}"
        warnings.warn(
            f"torch.compile cannot make kernels of these ops ({self.error}); they run uncompiled",
            stacklevel=2,
        )
