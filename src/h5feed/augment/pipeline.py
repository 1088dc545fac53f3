"""A list of ops as one machine: draws the parameters of a batch, and applies them anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h5feed.augment.cpu import Image
from h5feed.augment.device import CompiledBatch
from h5feed.augment.floats import row_dtype
from h5feed.augment.frame import AUTO_FACTOR, Antialias, Floats, Ints, Shapes
from h5feed.augment.mixing import mix_labels, mix_rows
from h5feed.augment.ops import Draws, Op, Rows
from h5feed.augment.places import moved_boxes, moved_keypoints
from h5feed.augment.plan import CropStage, Kernel, Plan, run_batch, stream
from h5feed.augment.translate import from_torchvision
from h5feed.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["Params", "Pipeline"]

_HOW_TO_END = "end with CenterCrop(size), RandomResizedCrop(size) or Resize((height, width))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """The parameters of a batch, or of a part of one (`params[a:b]`)."""

    views: tuple[tuple[Rows, ...], ...]
    """`views[v][s]`: rows (B, columns) of stage s for view v."""
    mix: Floats | None
    """How the batch is mixed, float64 (6,), see mixing; None where it is not."""
    ragged: bool
    """Whether images differ in size between two stages, which only the CPU can follow."""

    def __len__(self) -> int:
        return len(self.views[0][0])

    def __getitem__(self, part: slice) -> Params:
        return replace(self, views=tuple(tuple(rows[part] for rows in view) for view in self.views))

    def packed(self, view: int = 0) -> torch.Tensor:
        """Return a view's rows side by side, then the mix in every row: float32 (B, columns).

        All that a device needs, in one small transfer.
        """
        import torch

        columns = list(self.views[view])
        if self.mix is not None:
            columns.append(np.broadcast_to(self.mix, (len(self), len(self.mix))))
        return torch.from_numpy(np.concatenate(columns, axis=1, dtype=np.float32))


class Pipeline:
    """Ops in their order.

    antialias: True is torchvision's antialiased bilinear, False plain bilinear, "auto" antialiases
    an image whose crop shrinks by more than frame.AUTO_FACTOR. views: how many
    differently drawn outputs each image gives; or in place of `ops` the ops of each view, whose
    sizes may differ. `bind` first, then `draw` per batch, then a kernel.

    >>> from h5feed.augment import CenterCrop, Pipeline, RandomResizedCrop
    >>> Pipeline([RandomResizedCrop(224)]).bind((256, 256))
    (224, 224)
    >>> Pipeline([CenterCrop(32)]).bind(None)  # stored images may have any size
    (32, 32)
    >>> Pipeline(views=[[RandomResizedCrop(224)], *[[RandomResizedCrop(96)]] * 6]).views
    7
    """

    def __init__(
        self,
        ops: Sequence[Op] = (),
        *,
        antialias: Antialias = "auto",
        views: int | Sequence[Sequence[Op]] = 1,
    ) -> None:
        if antialias not in (True, False, "auto"):
            raise UsageError(f'antialias={antialias!r} must be True, False or "auto"')
        self._given = _ops_of_views(from_torchvision(ops), views)
        self.views = len(self._given)
        self._antialias: Antialias = antialias
        self._bound: dict[str, Any] = {}
        shared = {id(ops): ops for ops in self._given}  # [local_ops] * 6 has one plan
        self.ops: tuple[Op, ...] = tuple(op for ops in shared.values() for op in ops)
        """All there are, those of several views once."""
        plans = {key: Plan(ops, antialias) for key, ops in shared.items()}
        self.plans: tuple[Plan, ...] = tuple(plans[id(ops)] for ops in self._given)
        """What the ops of each view come to."""
        self._sizes: list[list[tuple[int, int] | None]] = []
        self._num_classes: int | None = None
        self._run_batch: Callable[..., torch.Tensor] = run_batch
        for plan in self.plans:
            if plan.mix is not None and self.views > 1:
                raise UsageError(
                    f"{plan.mix[1]!r} mixes labels: use it with views=1, not {self.views}"
                )
            if plan.dtype != self.out_dtype:
                raise UsageError(
                    f"views={list(map(list, self._given))!r} makes {self.out_dtype} of one view "
                    f"and {plan.dtype} of another: end all of them in ToDtype and Normalize, or "
                    "none"
                )

    @property
    def plan(self) -> Plan:
        """What the ops of the first view come to."""
        return self.plans[0]

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of every output image of the first view."""
        return self.out_shapes[0]

    @property
    def out_shapes(self) -> list[tuple[int, int, int]]:
        """(height, width, channels) of every output image of each view; known after `bind`."""
        assert self._sizes, "bind() has not been called"
        made = []
        for sizes, plan in zip(self._sizes, self.plans, strict=True):
            assert sizes[-1] is not None
            made.append((*sizes[-1], plan.channels))
        return made

    @property
    def out_dtype(self) -> torch.dtype:
        """The type of the output, of all views."""
        return self.plan.dtype

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """Numpy's type for a batch slot that `run_cpu` fills (bfloat16 lies in uint16)."""
        return row_dtype(self.out_dtype)

    @property
    def uses_batch(self) -> bool:
        """Whether an op mixes the images of a batch (MixUp, CutMix), and the labels with them."""
        return self.plan.mix is not None

    @property
    def only_crops(self) -> bool:
        """Whether bytes are cropped, resized and flipped, and nothing else happens to them."""
        return all(len(plan.all_stages) == 1 for plan in self.plans)

    def may_antialias(self, largest: tuple[int, int]) -> bool:
        """Whether images of up to `largest` (height, width) may need the antialiased kernel."""
        return any(
            stage.antialias is True
            or (stage.antialias == "auto" and (k > 0 or _shrinks(largest, made)))
            for plan, made in zip(self.plans, self.out_shapes, strict=True)
            for k, stage in enumerate(plan.leaves())
            if isinstance(stage, CropStage)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _bound, (self._given, self._antialias, self._bound)

    def bind(
        self,
        field_hw: tuple[int, int] | None,
        *,
        encoding: str = "raw",
        num_classes: int | None = None,
    ) -> tuple[int, int]:
        """Return the (height, width) of every output image, for images stored in one size or not.

        Of the first view, where they have several.

        encoding: what the images given will be, "raw" for RGB or "yuv420" for NV12. num_classes:
        of labels that are class numbers, for MixUp and CutMix. Raises UsageError where the
        ops would leave images of several sizes.
        """
        self._bound = {"field_hw": field_hw, "encoding": encoding, "num_classes": num_classes}
        self._num_classes = num_classes
        made = []
        for ops, plan in zip(self._given, self.plans, strict=True):
            plan.first.nv12 = encoding == "yuv420"
            made.append([size := field_hw])
            for stage in plan.all_stages:
                made[-1].append(size := stage.size_after(size))
            if size is None:
                raise UsageError(
                    f"augment={ops!r} leaves images of several sizes, which make no batch:"
                    f" {_HOW_TO_END}"
                )
        self._sizes = [sizes[1:] for sizes in made]
        return self.out_shape[:2]

    def draw(
        self,
        draws: Draws,
        stored: NDArray[Any],
        source: NDArray[Any],
        boxes: NDArray[Any] | None = None,
    ) -> Params:
        """Return the parameters of a batch.

        stored, source: (B, 2) heights and widths; with fit="crop" the source is the stored size
        (what was cut off is gone). boxes: (B, 4) of fit="pad".
        """
        first = Shapes.stored(stored, source, boxes)
        drawn = [self._draw_view(draws, view, first) for view in range(self.views)]
        mix = None
        if self.plan.mix is not None:
            position, op = self.plan.mix
            mix = op.draw(draws.batch_uniform(stream(position, 0), 3), self.out_shape[:2])
        return Params(
            views=tuple(rows for rows, _ in drawn),
            mix=mix,
            ragged=any(ragged for _, ragged in drawn),
        )

    def _draw_view(self, draws: Draws, view: int, shapes: Shapes) -> tuple[tuple[Rows, ...], bool]:
        """Return the rows of every stage, and whether images have several sizes on the way."""
        made, ragged = [], False
        wrong = np.zeros(0, bool)
        for stage, size in zip(self.plans[view].all_stages, self._sizes[view], strict=True):
            rows, shapes = stage.draw(draws, view, shapes)
            made.append(rows)
            wrong = (shapes.actual != (size or 0)).any(axis=1)
            ragged |= bool(wrong.any())
        if wrong.any():
            height, width = shapes.actual[wrong][0]
            raise UsageError(
                f"augment={self._given[view]!r} makes images of several sizes, one of "
                f"{height}x{width}:"
                f" {_HOW_TO_END}"
            )
        return tuple(made), ragged

    def source_rows(self, params: Params) -> NDArray[np.int64]:
        """Return int64 (B, 4): top, left, height, width of what all views read of each image."""
        boxes = np.stack([view[0][:, :4] for view in params.views]).astype(np.int64)
        low = boxes[:, :, :2].min(axis=0)
        high = (boxes[:, :, :2] + boxes[:, :, 2:]).max(axis=0)
        return np.concatenate([low, high - low], axis=1)

    def kernel(self, params: Params, k0: int, count: int, *, view: int = 0) -> Kernel:
        """Return the function that makes images k0 … k0+count-1 of a batch, for one thread.

        Of RGB images. Unlike `run_cpu` it can do with a part of an image, of no less than
        `source_rows`.
        """
        return self.plans[view].kernel(self._rows(params, k0, count, view))

    def _rows(self, params: Params, k0: int, count: int, view: int) -> list[Rows]:
        return [rows[k0 : k0 + count] for rows in params.views[view]]

    def run_cpu(
        self, params: Params, k0: int, images: Iterable[Image], out: Image, *, view: int = 0
    ) -> None:
        """Write images k0, k0+1, … of a batch, made from n `images`, into `out` (n, H, W, C).

        Each image: uint8 (h, w, 3), or NV12 (h*3//2, w) where bound so; it may be gone when the
        next one comes. out: C-contiguous. Thread-safe.
        """
        self.plans[view].run(self._rows(params, k0, len(out), view), images, out)

    def run_fixed(
        self,
        params: Params,
        k0: int,
        field: Image,
        indices: NDArray[np.int64],
        out: Image,
        *,
        view: int = 0,
    ) -> None:
        """Write images k0, k0+1, … of a batch, made from `field[indices]`, into `out` (n, H, W, C).

        field: a whole field of one size, uint8 (N, h, w, 3), or NV12 (N, h*3//2, w) where bound
        so. As `run_cpu`, but many times faster for small images. Thread-safe.
        """
        rows = self._rows(params, k0, len(indices), view)
        self.plans[view].run_fixed(rows, field, indices, out)

    def run_mask(
        self, params: Params, k0: int, masks: Sequence[Image], out: Image, *, view: int = 0
    ) -> None:
        """Write masks into `out` (n, H, W, 1): the images' geometry, nearest.

        Padding is each op's `mask_fill`.
        masks[i]: uint8 (h, w, 1), of its image's stored size. Thread-safe.
        """
        self.plans[view].run_masks(self._rows(params, k0, len(masks), view), masks, out)

    def move_boxes(
        self, params: Params, boxes: Floats, item: Ints, sizes: Ints, *, view: int = 0
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return boxes (M, 4) in the images that the ops make, and which are left (M,).

        boxes: left, top, right and bottom in stored pixels. item: (M,) which image of the batch
        each is in. sizes: (B, 2) stored heights and widths. A box that is turned becomes the one
        around it; `SanitizeBoundingBoxes` says which are left.
        """
        return moved_boxes(self.plans[view], params.views[view], boxes, item, sizes)

    def move_keypoints(
        self,
        params: Params,
        points: Floats,
        item: Ints,
        sizes: Ints,
        *,
        swap: Sequence[int] = (),
        view: int = 0,
    ) -> Floats:
        """Return keypoints (M, K, 3) of x, y and visibility in the images that the ops make.

        Those outside are zeros. swap: which one each becomes in a mirrored image.
        """
        return moved_keypoints(self.plans[view], params.views[view], points, item, sizes, swap)

    def mix_rows(self, params: Params, rows: Image) -> None:
        """Mix the images of a whole batch (B, H, W, C) of slot memory in place, once all are made.

        For `uses_batch`; `run_device` has it done already.
        """
        if params.mix is not None:
            mix_rows(rows, params.mix, self.out_dtype)

    def mix_labels(self, params: Params, labels: torch.Tensor) -> torch.Tensor:
        """Return float32 (B, K) targets of a mixed batch; other labels as they are."""
        if params.mix is None or self.plan.mix is None:
            return labels
        classes = self.plan.mix[1].num_classes or self._num_classes
        mixed = mix_labels(labels, float(params.mix[0]), classes)
        smoothing = getattr(self.plan.mix[1], "label_smoothing", 0.0)
        return mixed if not smoothing else mixed * (1 - smoothing) + smoothing / mixed.shape[1]

    def compile_device(self) -> CompiledBatch:
        """Have `run_device` use kernels that torch.compile makes at its first call; return them."""
        self._run_batch = made = CompiledBatch(run_batch)
        return made

    def run_device(self, params: Params, batch: torch.Tensor, *, view: int = 0) -> torch.Tensor:
        """Return a batch (B, C, H, W), channels_last, made on the device that holds `batch`.

        batch: uint8 (B, h, w, 3), or NV12 (B, h*3//2, w) where bound so.
        """
        if params.ragged:
            raise UsageError(
                f'augment_on="device" with augment={self.ops!r} meets images of several sizes'
                ' between two ops: put a crop of fixed size first, or use augment_on="cpu"'
            )
        packed = params.packed(view)
        if batch.device.type == "cuda":
            packed = packed.pin_memory()
        sizes = [size for size in self._sizes[view] if size is not None]
        there = packed.to(batch.device, non_blocking=True)
        return self._run_batch(self.plans[view], there, batch, sizes)


def _ops_of_views(ops: tuple[Op, ...], views: int | Sequence[Any]) -> tuple[tuple[Op, ...], ...]:
    """Return the ops of each view; the same tuple where they were given as the same list."""
    if isinstance(views, int):
        if views < 1:
            raise UsageError(f"views={views} must be at least 1")
        return (ops,) * views
    if isinstance(views, str) or not isinstance(views, Sequence) or not len(views):
        raise UsageError(
            f"views={views!r} is neither a number nor a list of the ops of each view, such as "
            "[global_ops, global_ops, *[local_ops] * 6]"
        )
    if ops:
        raise UsageError(
            f"augment={list(ops)!r} and a list of views both say what happens to images: put all "
            "of it into the lists of views"
        )
    made = {id(view): from_torchvision(view) for view in views}
    return tuple(made[id(view)] for view in views)


def _shrinks(largest: tuple[int, int], made: tuple[int, int, int]) -> bool:
    return max(largest[0] / made[0], largest[1] / made[1]) > AUTO_FACTOR


def _bound(
    ops_of_views: tuple[tuple[Op, ...], ...], antialias: Antialias, bound: dict[str, Any]
) -> Pipeline:
    """Make a pipeline again that was pickled: it is its ops, and what it was bound to."""
    made = Pipeline(antialias=antialias, views=ops_of_views)
    if bound:
        made.bind(**bound)
    return made
