"""Where boxes and keypoints are after the ops that moved their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from h5feed.augment.frame import Floats, Ints
from h5feed.augment.ops import Op, Rows, is_number, refuse

if TYPE_CHECKING:
    from h5feed.augment.plan import Plan, Stage

__all__ = [
    "Moves",
    "SanitizeBoundingBoxes",
    "chosen_moves",
    "crop_moves",
    "moved_boxes",
    "moved_keypoints",
    "stage_moves",
    "warp_moves",
]


@dataclass(frozen=True)
class SanitizeBoundingBoxes(Op):
    """Drop boxes that the ops left too small; without it, only those under one pixel are dropped.

    Named as in torchvision. The rows of other fields that belong to a box (rows_of) are dropped
    with it. It may stand anywhere in the list: boxes are judged after the last op.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import RandomResizedCrop, SanitizeBoundingBoxes
    >>> ops = [RandomResizedCrop(32), SanitizeBoundingBoxes(min_visibility=0.3)]
    >>> loader = H5Loader(H5Dataset("fields.h5", target="boxes"), 4, augment=ops)
    >>> images, boxes = next(iter(loader))
    >>> len(boxes)
    4
    """

    min_size: float = 1.0
    """Pixels that width and height must have."""
    min_area: float = 1.0
    """Square pixels."""
    min_visibility: float = 0.0
    """The part of a box, 0 to 1, that must lie inside the image."""

    def __post_init__(self) -> None:
        for name, most in (("min_size", np.inf), ("min_area", np.inf), ("min_visibility", 1)):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= most:
                raise refuse(self, name, value, f"must be a number from 0 to {most:g}")

    def join(self, plan: Plan, position: int) -> None:
        """Say what is left out."""
        plan.sanitize = self


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What one step does to positions in M images, measured from the corner of the image."""

    matrix: Floats
    """(M, 2, 3) from (x, y, 1) to (x, y); or (M, 3, 3), whose third row both are divided by."""
    low: Floats
    """(M, 2): x and y where the image's content begins; what lies before is gone."""
    high: Floats
    """(M, 2): x and y where it ends."""
    size: Floats
    """(M, 2): width and height of the image afterwards."""
    mirrored: NDArray[np.bool_]
    """(M,): left and right are swapped."""

    def points(self, points: Floats) -> Floats:
        """Return (M, P, 2) positions moved."""
        turned = np.einsum("mij,mpj->mpi", self.matrix[:, :, :2], points)
        turned = np.asarray(turned + self.matrix[:, None, :, 2])
        if self.matrix.shape[1] == 2:
            return turned
        return np.asarray(turned[..., :2] / np.maximum(turned[..., 2:], 1e-6))  # up to the horizon


def crop_moves(rows: Ints) -> Moves:
    """Return what crops do: rows (M, 12), see frame.COLUMNS."""
    y, x, h, w, rh, rw, py, px, oh, ow = rows[:, :10].astype(np.float64).T
    scale_x, scale_y = rw / w, rh / h
    mirror_x, mirror_y = (rows[:, 10] & 1) > 0, (rows[:, 10] & 2) > 0
    matrix = np.zeros((len(rows), 2, 3))
    matrix[:, 0, 0], matrix[:, 0, 2] = scale_x, px - x * scale_x
    matrix[:, 1, 1], matrix[:, 1, 2] = scale_y, py - y * scale_y
    low = np.stack([np.maximum(px, 0), np.maximum(py, 0)], axis=1)
    high = np.stack([np.minimum(px + rw, ow), np.minimum(py + rh, oh)], axis=1)
    for axis, (mirror, size) in enumerate(((mirror_x, ow), (mirror_y, oh))):
        matrix[mirror, axis] *= -1
        matrix[mirror, axis, 2] += size[mirror]
        turned = size - high[:, axis], size - low[:, axis]
        low[:, axis] = np.where(mirror, turned[0], low[:, axis])
        high[:, axis] = np.where(mirror, turned[1], high[:, axis])
    size = np.stack([ow, oh], axis=1)
    return Moves(matrix=matrix, low=low, high=high, size=size, mirrored=mirror_x ^ mirror_y)


def warp_moves(rows: Rows, size: Floats) -> Moves:
    """Return what warps do: rows (M, 6) or (M, 9), see warp.WarpOp, of images `size` (M, 2)."""
    maps = _homogeneous(rows.reshape(len(rows), -1, 3))
    corner = np.eye(3)
    corner[:2, 2] = 0.5  # from pixel centres to positions measured from the corner
    matrix = corner @ np.linalg.inv(maps) @ np.linalg.inv(corner)
    mirrored, nothing = np.linalg.det(matrix) < 0, np.zeros_like(size)
    if rows.shape[1] == 6:
        matrix = matrix[:, :2]
    return Moves(matrix=matrix, low=nothing, high=size, size=size, mirrored=mirrored)


def stage_moves(stages: Sequence[Stage], rows: Sequence[Rows], size: Floats) -> list[Moves]:
    """Return what each step does to M images of `size` (M, 2); rows: (M, columns) per stage."""
    found: list[Moves] = []
    for stage, part in zip(stages, rows, strict=True):
        moves = stage.moves(part, size) or []
        for move in [moves] if isinstance(moves, Moves) else moves:
            found.append(move)
            size = move.size
    return found


def chosen_moves(lists: Sequence[Sequence[Moves]], chosen: Ints, size: Floats) -> list[Moves]:
    """Return what happens to M images of which each has one of `lists`, `chosen` (M,) says which.

    A list that has no more steps leaves its images as they are.
    """
    sizes, every = [size] * len(lists), np.arange(len(chosen))
    made = []
    for step in range(max(map(len, lists))):
        moves = [
            moves[step] if step < len(moves) else _still(size)
            for moves, size in zip(lists, sizes, strict=True)
        ]
        sizes = [move.size for move in moves]
        picked = {
            name: np.stack([getattr(move, name) for move in moves])[chosen, every]
            for name in ("low", "high", "size", "mirrored")
        }
        maps = np.stack([_homogeneous(move.matrix) for move in moves])[chosen, every]
        made.append(Moves(matrix=maps, **picked))
    return made


def _homogeneous(matrix: Floats) -> Floats:
    maps = np.zeros((len(matrix), 3, 3))
    maps[:, 2, 2] = 1
    maps[:, : matrix.shape[1]] = matrix
    return maps


def _still(size: Floats) -> Moves:
    maps, nothing = np.tile(np.eye(3), (len(size), 1, 1)), np.zeros_like(size)
    return Moves(matrix=maps, low=nothing, high=size, size=size, mirrored=nothing[:, 0] > 0)


def _moves(stages: Sequence[Stage], rows: Sequence[Rows], item: Ints, sizes: Ints) -> list[Moves]:
    """Return what each step does to the images `item` (M,); sizes: (B, 2) as stored."""
    parts = [part[item] for part in rows]
    return stage_moves(stages, parts, sizes[item][:, ::-1].astype(np.float64))


def moved_boxes(
    plan: Plan, rows: Sequence[Rows], boxes: Floats, item: Ints, sizes: Ints
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return boxes (M, 4) of left, top, right and bottom after all steps, and which are left (M,).

    A box that is turned becomes the one around it; each step clips it to what it leaves of the
    image. rows: a view's, per stage. item: (M,) which image of the batch each box is in. sizes:
    (B, 2) stored height and width.
    """
    boxes = boxes.astype(np.float64)
    seen = np.ones(len(boxes))
    for move in _moves(plan.all_stages, rows, item, sizes):
        corners = move.points(boxes[:, [[0, 1], [2, 1], [2, 3], [0, 3]]])
        low, high = corners.min(axis=1), corners.max(axis=1)
        before = np.prod(high - low, axis=1)
        low, high = np.clip(low, move.low, move.high), np.clip(high, move.low, move.high)
        after = np.prod(high - low, axis=1)
        seen *= np.divide(after, before, out=np.zeros_like(before), where=before > 0)
        boxes = np.concatenate([low, high], axis=1)
    wanted, sides = plan.sanitize, boxes[:, 2:] - boxes[:, :2]
    left = (sides >= wanted.min_size).all(axis=1) & (seen >= wanted.min_visibility)
    return boxes, left & (np.prod(sides, axis=1) >= wanted.min_area)


def moved_keypoints(
    plan: Plan,
    rows: Sequence[Rows],
    points: Floats,
    item: Ints,
    sizes: Ints,
    swap: Sequence[int] = (),
) -> Floats:
    """Return keypoints (M, K, 3) of x, y and visibility after all steps.

    Those outside the image are zeros, as COCO marks what is not labelled; in mirrored images
    they change places as `swap` says.
    """
    points = points.astype(np.float64)
    places, seen = points[..., :2], points[..., 2:]
    mirrored = np.zeros(len(points), bool)
    for move in _moves(plan.all_stages, rows, item, sizes):
        places = move.points(places)
        inside = (places >= move.low[:, None]) & (places < move.high[:, None])
        seen = seen * inside.all(axis=2, keepdims=True)
        mirrored ^= move.mirrored
    points = np.where(seen > 0, np.concatenate([places, seen], axis=2), 0)
    if len(swap):
        points[mirrored] = points[mirrored][:, list(swap)]
    return np.asarray(points)
