"""A list of ops as the steps that a pipeline takes, and how these are carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from h5feed.augment.cpu import (
    SMALL,
    Image,
    Scratch,
    are_windows,
    copy_windows,
    crop_image,
    crop_images,
    crop_mask,
    nv12_boxes,
    raw_boxes,
)
from h5feed.augment.device import crop_batch, kernel_dtype, nv12_batch
from h5feed.augment.floats import FloatStage
from h5feed.augment.frame import (
    COLUMNS,
    Antialias,
    Floats,
    Frame,
    Interpolation,
    Ints,
    PaddingMode,
    Shapes,
)
from h5feed.augment.geometry import AxisOp
from h5feed.augment.mixing import MixOp, mix_images
from h5feed.augment.ops import CpuStep, Draws, ImageOp, Op, Rows
from h5feed.augment.places import (
    Moves,
    SanitizeBoundingBoxes,
    chosen_moves,
    crop_moves,
    stage_moves,
)
from h5feed.errors import UsageError

if TYPE_CHECKING:
    import torch

    from h5feed.augment.choice import ChoiceOp

__all__ = ["ChoiceStage", "CropStage", "Kernel", "Plan", "Stage", "run_batch", "stream"]

_TOGETHER = 16  # small images converted to floats by one call; their bytes stay in the L1 cache


def stream(position: int, view: int) -> int:
    """Return the random stream of the op at this position of the list, for this view."""
    return view << 16 | position


class Kernel(Protocol):
    """Makes image i of a chunk from what is stored of it, or the part from (top, left) on."""

    def __call__(self, i: int, src: Image, out: Image, top: int = 0, left: int = 0) -> None:
        """Write into `out` (H, W, C), a row of a batch slot."""
        ...


class OpStage:
    """An ImageOp at its place in the list."""

    def __init__(self, op: ImageOp, position: int) -> None:
        self.op = op
        self._position = position
        self.columns, self.resamples = op.columns, op.resamples
        self.size_after = op.size_after
        self.cpu, self.mask, self.device = op.cpu, op.mask, op.device
        self.moves = op.moves

    def draw(self, draws: Draws, view: int, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return the parameters (B, columns) of a batch, and what its images become."""
        u = draws.uniform(stream(self._position, view), self.op.uniforms)
        return self.op.draw(u, shapes)


class CropStage:
    """Consecutive axis-aligned ops."""

    columns = len(COLUMNS)
    resamples = True

    def __init__(self, antialias: Antialias) -> None:
        self._default: Antialias = antialias
        self.nv12 = False
        self.ops: list[tuple[int, AxisOp]] = []
        self.fill: tuple[float, ...] = (0.0,)
        self.mask_fill = 0
        self.padding_mode: PaddingMode = "constant"
        self.interpolation: Interpolation = "bilinear"

    def accepts(self, op: AxisOp) -> bool:
        """Whether `op` folds with the ops so far, fill and all."""
        if op.resizes:
            return all(before.padding_color is None for _, before in self.ops)
        return op.padding_color is None or not any(before.crops for _, before in self.ops)

    def add(self, position: int, op: AxisOp) -> None:
        """Append the op at this position of the pipeline's list."""
        self.ops.append((position, op))
        if op.padding_color is not None:
            self.fill, self.mask_fill = op.padding_color, op.mask_fill
            self.padding_mode = op.padding_mode
        if op.resizes:
            self.interpolation = op.interpolation

    @property
    def antialias(self) -> Antialias:
        """The setting of the last op that says one; else the pipeline's."""
        said = [op.antialias for _, op in self.ops if op.antialias is not None]
        return said[-1] if said else self._default

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return what all the ops make of it."""
        for _, op in self.ops:
            size = op.size_after(size)
        return size

    def draw(self, draws: Draws, view: int, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return int32 (B, 12) rows, see frame.COLUMNS."""
        frame = Frame(shapes)
        for position, op in self.ops:
            op.fold(frame, op.uniform(draws, stream(position, view)))
        rows = frame.finish(
            self.antialias, interpolation=self.interpolation, padding_mode=self.padding_mode
        )
        return rows, frame.shapes()

    def boxes(self, rows: Sequence[list[int]], images: Iterable[Image]) -> Iterator[Image]:
        """Give of each stored image what its row reads, (h, w, C), until the next is asked for."""
        return (nv12_boxes if self.nv12 else raw_boxes)(rows, images)

    def crop(self, rows: Rows) -> CpuStep:
        """Return the step that makes image i of the chunk from its box."""
        listed, fill, made = rows.tolist(), self.fill, Scratch()
        interpolation, padding_mode = self.interpolation, self.padding_mode

        def step(i: int, box: Image, out: Image | None) -> Image:
            row = listed[i]
            image = made(row[8], row[9], box.shape[2]) if out is None else out
            crop_image(row, box, image, fill, interpolation, padding_mode)
            return image

        return step

    def cpu(self, rows: Rows) -> CpuStep:
        """Return the step that crops image i of the chunk."""
        listed, crop = rows[:, :4].tolist(), self.crop(rows)

        def step(i: int, src: Image, out: Image | None) -> Image:
            y, x, h, w = listed[i]
            return crop(i, src[y : y + h, x : x + w], out)

        return step

    def mask(self, rows: Rows) -> CpuStep:
        """Return the step that crops mask i of the chunk."""
        listed, made, fill = rows.tolist(), Scratch(), self.mask_fill
        padding_mode = self.padding_mode

        def step(i: int, src: Image, out: Image | None) -> Image:
            row = listed[i]
            y, x, h, w = row[:4]
            image = made(row[8], row[9]) if out is None else out
            crop_mask(row, src[y : y + h, x : x + w], image, fill, padding_mode)
            return image

        return step

    def moves(self, rows: Rows, size: Floats) -> Moves:
        """Return where boxes and keypoints go."""
        return crop_moves(rows)

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return the crops (B, 3, *size), rounded."""
        kind = kernel_dtype(images.device)
        images = nv12_batch(images, kind) if self.nv12 else images.to(kind)
        made = crop_batch(rows, images, size, self.fill, self.interpolation, self.padding_mode)
        return made.round()


class ChoiceStage:
    """Of each image one of several lists of stages; see choice.ChoiceOp.

    A row: the number of its list, then the rows of all lists, drawn as if each were chosen.
    """

    def __init__(self, op: ChoiceOp, position: int, lists: Sequence[Sequence[Stage]]) -> None:
        self.op, self._position, self.lists = op, position, lists
        self.columns: int = 1 + sum(stage.columns for stages in lists for stage in stages)
        self.resamples: bool = any(stage.resamples for stages in lists for stage in stages)

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return the (height, width) that all lists give; None where they differ."""
        sizes = set()
        for stages in self.lists:
            made = size
            for stage in stages:
                made = stage.size_after(made)
            sizes.add(made)
        return sizes.pop() if len(sizes) == 1 else None

    def draw(self, draws: Draws, view: int, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return rows (B, columns), and what images become."""
        chosen = self.op.choose(draws.uniform(stream(self._position, view), 1)[:, 0])
        rows, after = [chosen[:, None].astype(np.float64)], []
        for stages in self.lists:
            made = shapes
            for stage in stages:
                part, made = stage.draw(draws, view, made)
                rows.append(part)
            after.append(made)
        every = np.arange(len(chosen))

        def pick(name: str) -> Ints:
            return np.stack([getattr(one, name) for one in after])[chosen, every]

        became = Shapes(actual=pick("actual"), boxes=pick("boxes"), true=pick("true"))
        return np.concatenate(rows, axis=1), became

    def _parts(self, rows: Any) -> Iterator[list[tuple[Stage, Any]]]:
        """Give of each list its stages and their rows."""
        begin = 1
        for stages in self.lists:
            parts = []
            for stage in stages:
                part = rows[:, begin : begin + stage.columns]
                if isinstance(stage, CropStage) and isinstance(part, np.ndarray):
                    part = part.astype(np.int32)
                parts.append((stage, part))
                begin += stage.columns
            yield parts

    def cpu(self, rows: Rows) -> CpuStep:
        """Return the step that changes image i of the chunk as its list does."""
        lists = []
        for parts in self._parts(rows):
            resampling = [k for k, (stage, _) in enumerate(parts) if stage.resamples]
            steps = [stage.cpu(part) for stage, part in parts]
            lists.append((steps, resampling[-1] if resampling else -1))
        return _one_of(rows, lists)

    def mask(self, rows: Rows) -> CpuStep | None:
        """Return the step that moves mask i of the chunk as its list does."""
        lists = []
        for parts in self._parts(rows):
            made = [stage.mask(part) for stage, part in parts]
            steps = [step for step in made if step is not None]
            lists.append((steps, len(steps) - 1))
        return _one_of(rows, lists) if any(steps for steps, _ in lists) else None

    def moves(self, rows: Rows, size: Floats) -> list[Moves]:
        """Return where boxes and keypoints go, step by step."""
        lists = zip(self.lists, self._parts(rows), strict=True)
        made = [stage_moves(stages, [part for _, part in parts], size) for stages, parts in lists]
        return chosen_moves(made, rows[:, 0].astype(np.int64), size)

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return the images (B, C, *size), each as its list made it."""
        import torch

        chosen, images = rows[:, 0, None, None, None], images.float()
        result = images
        for number, parts in enumerate(self._parts(rows)):
            made = images
            for stage, part in parts:
                shape = stage.size_after((made.shape[2], made.shape[3]))
                assert shape is not None
                made = stage.device(part, made, shape)
            made = made.float()
            result = made if number == 0 else torch.where(chosen == number, made, result)
        return result


def _one_of(rows: Rows, lists: Sequence[tuple[list[CpuStep], int]]) -> CpuStep:
    """Return the step that takes of each image its list's steps; one of them may write `out`."""
    chosen = rows[:, 0].astype(np.int64).tolist()

    def step(i: int, src: Image, out: Image | None) -> Image:
        steps, direct = lists[chosen[i]]
        image = src
        for k, one in enumerate(steps):
            image = one(i, image, out if k == direct else None)
        if out is not None and image is not out:
            out[...] = image
            return out
        return image

    return step


Stage = CropStage | OpStage | ChoiceStage


class Plan:
    """What a list of ops comes to: stages on bytes, then floats, stages on floats, then a mix.

    Ops add themselves (Op.join) by `add`, `fold`, or by setting `channels`, `floats` or `mix`.
    """

    def __init__(
        self, ops: Sequence[Op], antialias: Antialias, *, begin: int = 0, channels: int = 3
    ) -> None:
        self._antialias: Antialias = antialias
        self.first = CropStage(antialias)  # always there, for it takes the stored images
        self.stages: list[Stage] = [self.first]
        self.floats: FloatStage | None = None
        self.after: list[Stage] = []
        self.mix: tuple[int, MixOp] | None = None
        self.channels = channels
        self.sanitize = SanitizeBoundingBoxes()
        for position, op in enumerate(ops, begin):
            if not isinstance(op, Op):
                raise UsageError(f"augment holds {op!r}, which is not an op of h5feed.augment")
            if self.mix is not None:
                raise UsageError(f"{self.mix[1]!r} works on whole batches: put it last")
            op.join(self, position)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the output."""
        import torch

        return torch.uint8 if self.floats is None else self.floats.dtype

    @property
    def all_stages(self) -> list[Stage]:
        """Stages on bytes, then those on floats."""
        return self.stages + self.after

    def leaves(self) -> Iterator[CropStage | OpStage]:
        """Give all stages, those of choices too."""
        waiting = self.all_stages[::-1]
        while waiting:
            stage = waiting.pop()
            if isinstance(stage, ChoiceStage):
                waiting += [one for stages in stage.lists for one in stages][::-1]
            else:
                yield stage

    def add(self, op: ImageOp, position: int) -> None:
        """Append a step of its own."""
        if self.floats is not None and op.takes_floats:
            self.after.append(OpStage(op, position))
        else:
            self.check_takes(op)
            self.stages.append(OpStage(op, position))

    def choose(self, op: ChoiceOp, position: int) -> None:
        """Append a choice among lists of ops."""
        self.check_takes(op)
        lists = []
        for number, ops in enumerate(op.lists):
            begin = (position + 1) << 48 | number << 32  # seeds of their own, see `stream`
            plan = Plan(ops, self._antialias, begin=begin, channels=self.channels)
            lists.append(plan.stages if plan.first.ops else plan.stages[1:])
        self.stages.append(ChoiceStage(op, position, lists))

    def fold(self, op: AxisOp, position: int) -> None:
        """Append a crop, resize or flip to the last step where that takes it, or a new one."""
        self.check_takes(op)
        last = self.stages[-1]
        if not isinstance(last, CropStage) or not last.accepts(op):
            last = CropStage(self._antialias)
            self.stages.append(last)
        last.add(position, op)

    def check_takes(self, op: Op) -> None:
        """Raise UsageError for an op on bytes after ToDtype, or one on colors after Grayscale."""
        if self.floats is not None:
            raise UsageError(f"{op!r} works on bytes: put it before ToDtype")
        if self.channels == 1 and getattr(op, "needs_color", False):
            raise UsageError(f"{op!r} works on colors: put it before Grayscale")

    def check_moves(self, what: str) -> None:
        """Raise UsageError for an op that moves masks, and says nothing of boxes and keypoints."""
        for stage in self.leaves():
            if isinstance(stage, OpStage):
                kind = type(stage.op)
                if kind.mask is not ImageOp.mask and kind.moves is ImageOp.moves:
                    raise UsageError(
                        f"{stage.op!r} moves masks and does not say where {what} go: give it a "
                        "method moves(rows, size), as h5feed.augment.ImageOp describes"
                    )

    def kernel(self, rows: Sequence[Rows]) -> Kernel:
        """Return the function that makes the images of a chunk, whose rows are given per stage.

        Of RGB images: NV12 goes through `run`.
        """
        make, listed = self._maker(rows), rows[0][:, :4].tolist()

        def kernel(i: int, src: Image, out: Image, top: int = 0, left: int = 0) -> None:
            y, x, h, w = listed[i]
            y, x = y - top, x - left
            make(i, src[y : y + h, x : x + w], out)

        return kernel

    def _maker(self, rows: Sequence[Rows]) -> Callable[[int, Image, Image], object]:
        """Return the function that makes image i of a chunk from its box."""
        first = self.first.crop(rows[0])
        on_bytes, on_floats = self._steps(rows)
        to_float = self.floats.cpu() if self.floats is not None else None
        if to_float is None and not on_bytes:
            return first
        direct = max(k for k, stage in enumerate(self.stages) if stage.resamples)
        if to_float is not None:
            direct = -1  # the bytes go to scratch memory, the floats to the row

        def make(i: int, box: Image, out: Image) -> None:
            image = first(i, box, None if direct else out)
            for k, step in enumerate(on_bytes, 1):
                image = step(i, image, out if k == direct else None)
            if to_float is not None:
                to_float(image, out)
                for step in on_floats:
                    step(i, out, None)

        return make

    def _steps(self, rows: Sequence[Rows]) -> tuple[list[CpuStep], list[CpuStep]]:
        """Return the steps on bytes after the first, and those on floats, for a chunk's rows."""
        steps = [stage.cpu(part) for stage, part in zip(self.all_stages[1:], rows[1:], strict=True)]
        middle = len(self.stages) - 1
        return steps[:middle], steps[middle:]

    def run(self, rows: Sequence[Rows], images: Iterable[Image], out: Image) -> None:
        """Make the images of a chunk, as they are stored, into `out` (n, H, W, C), one by one."""
        first, listed = self.first, rows[0].tolist()
        boxes = first.boxes(listed, images)
        if len(self.all_stages) == 1 and self.floats is None:
            crop_images(listed, boxes, out, first.fill, first.interpolation, first.padding_mode)
            return
        make = self._maker(rows)
        for i, (box, image) in enumerate(zip(boxes, out, strict=True)):
            make(i, box, image)

    def run_fixed(self, rows: Sequence[Rows], field: Image, indices: Ints, out: Image) -> None:
        """Make images `indices` (n) of a field (N, H, W, C) or (N, lines, W) into `out`, as `run`.

        Small ones many at a time.
        """
        height, width = field.shape[1:3]
        small = field[0].nbytes <= SMALL and not any(stage.resamples for stage in self.stages[1:])
        if not small or self.first.nv12 or not are_windows(rows[0], height, width):
            self.run(rows, map(field.__getitem__, indices.tolist()), out)
            return
        on_bytes, on_floats = self._steps(rows)
        images = out if self.floats is None else np.empty((len(out), *out.shape[1:3], 3), np.uint8)
        copy_windows(rows[0], field, indices, images, self.first.fill, self.first.padding_mode)
        for step in on_bytes:
            for i, image in enumerate(images):
                step(i, image, None)
        if self.floats is not None:
            to_float = self.floats.cpu()
            for i in range(0, len(out), _TOGETHER):
                some = slice(i, i + _TOGETHER)
                to_float(_tall(images[some]), _tall(out[some]))
            for step in on_floats:
                for i, image in enumerate(out):
                    step(i, image, None)

    def run_masks(self, rows: Sequence[Rows], masks: Sequence[Image], out: Image) -> None:
        """Make masks (h, w, 1) into `out` (n, H, W, 1)."""
        made = [stage.mask(part) for stage, part in zip(self.all_stages, rows, strict=True)]
        steps = [step for step in made if step is not None]
        for i, src in enumerate(masks):
            mask = src[..., 0]
            for step in steps:
                mask = step(i, mask, out[i, ..., 0] if step is steps[-1] else None)


def _tall(images: Image) -> Image:
    """Return images (n, H, W, C) one below the other, (n*H, W, C)."""
    return images.reshape(-1, *images.shape[2:])


def run_batch(
    plan: Plan, packed: torch.Tensor, batch: torch.Tensor, sizes: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return images (B, C, H, W), channels_last, from uint8 (B, h, w, 3) or NV12 (B, h*3//2, w).

    packed: Params.packed on the device. sizes: (height, width) after each stage. Nothing here
    depends on values or asks for one, so torch.compile takes it whole.
    """
    import torch

    images = batch if plan.first.nv12 else batch.permute(0, 3, 1, 2)
    begin = 0
    for number, (stage, size) in enumerate(zip(plan.all_stages, sizes, strict=True)):
        if number == len(plan.stages) and plan.floats is not None:
            images = plan.floats.device(images)
        images = stage.device(packed[:, begin : begin + stage.columns], images, size)
        begin += stage.columns
    if plan.floats is not None and not plan.after:
        images = plan.floats.device(images)
    if plan.mix is not None:
        images = mix_images(images, packed[0, begin:])
        images = images if plan.floats is not None else images.round()
    return images.to(plan.dtype, memory_format=torch.channels_last)
