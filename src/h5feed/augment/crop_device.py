"""Crop, resize and flip a whole batch on any device: two matrix products, no loop, no host sync.

A bilinear resize, antialiased or not, is a weighted sum along each axis. So each image gets two
small matrices made from its row of parameters, which crop, resize, flip and pad in one pass. The
shapes depend on nothing random: torch.compile sees one graph.
"""

from collections.abc import Iterable

import torch

__all__ = ["crop_batch", "per_channel"]


def per_channel(values: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    """Return `values` as (1, n, 1, 1) of the type and device of `like`.

    Filled in on the device: torch.tensor(values, device=...) would wait for it.
    """
    made = [like.new_full((1, 1, 1, 1), float(value)) for value in values]
    return torch.cat(made, dim=1)


def _axis_weights(columns: tuple[torch.Tensor, ...], in_size: int, out_size: int) -> torch.Tensor:
    """Return float32 (B, out_size, in_size): the share of each input pixel in each output pixel.

    columns: float32 (B, 1, 1) each: the box's begin and length, its resized length, its place in
    the output, and two flags, flip and antialias. Rows sum to 1, or to 0 where the output
    shows the fill. The triangle filter and its half-pixel centres are torch's
    (aten/native/UpSample.h); one pixel wide it is plain bilinear, borders clamped to the box, as
    cv2.resize has it.
    """
    begin, length, resized, place, flip, antialias = columns
    i = torch.arange(out_size, device=begin.device, dtype=torch.float32).view(1, -1, 1)
    i = torch.where(flip > 0, out_size - 1 - i, i) - place
    inside = (i >= 0) & (i < resized)
    j = torch.arange(in_size, device=begin.device, dtype=torch.float32).view(1, 1, -1) - begin
    scale = length / resized
    width = torch.where(antialias > 0, scale.clamp(min=1), 1.0)
    center = scale * (i + 0.5) - 0.5
    weights = (1 - (j - center).abs() / width).clamp(min=0)
    weights = weights * ((j >= 0) & (j < length) & inside)
    return weights / weights.sum(dim=2, keepdim=True).clamp(min=1e-6)


def crop_batch(
    rows: torch.Tensor,
    images: torch.Tensor,
    size: tuple[int, int],
    fill: tuple[float, ...] = (0.0,),
) -> torch.Tensor:
    """Return float (B, C, *size) of 0..255, unrounded, from float images (B, C, h, w).

    rows: float32 (B, 12) crop parameters on the device, see frame.COLUMNS. fill: the color
    around the image, one number or C. The products have the type of `images`.
    """
    batch, channels, height, width = images.shape
    y, x, h, w, rh, rw, py, px, _, _, flip, antialias = rows[:, :, None, None].unbind(1)
    upside_down, left_right = torch.div(flip, 2, rounding_mode="floor"), flip % 2
    down = _axis_weights((y, h, rh, py, upside_down, antialias), height, size[0])
    along = _axis_weights((x, w, rw, px, left_right, antialias), width, size[1])
    # (B, H, C*W): one product per image for all channels, without copies of the weights
    tall = images.transpose(1, 2).reshape(batch, height, channels * width)
    made = torch.bmm(down.to(images.dtype), tall).view(batch, size[0] * channels, width)
    made = torch.bmm(made, along.to(images.dtype).transpose(1, 2))
    made = made.view(batch, size[0], channels, size[1]).transpose(1, 2)
    shown = (down.sum(2) > 0)[:, None, :, None] & (along.sum(2) > 0)[:, None, None, :]
    return torch.where(shown, made, per_channel(fill, made))
