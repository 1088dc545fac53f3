"""What is learned and how it is scored: a loss, and scores that add up over batches and processes.

Scoring has no gradients and no dropout, and sees every image exactly once over all processes.
inference_mode is no_grad without version counters and view tracking (PyTorch's autograd notes).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.nn import functional

from h5feed.errors import UsageError
from h5feed.train.config import LossConfig
from h5feed.train.distributed import World
from h5feed.train.loaders import Batch
from h5feed.train.models import load_function
from h5feed.train.tricks import modes_kept

__all__ = [
    "Scored",
    "Task",
    "average_precision",
    "class_columns",
    "evaluate",
    "make_task",
    "ratio",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One kind of learning.

    `loss(outputs, targets)` is a mean over the batch, a scalar. `score(outputs, targets)` is a
    1-D tensor on the device that is summed over batches and processes before `value` makes one
    number of it: nothing waits for the device until then. Counts are int64: float32 ends at 2**24.

    A task of your own, counting how many outputs are too high:

    >>> def too_high(outputs, targets):
    ...     found = (outputs > targets).sum()
    ...     return torch.stack((found, torch.full_like(found, targets.numel())))
    >>> task = Task(
    ...     name="levels",
    ...     loss=functional.l1_loss,
    ...     score=too_high,
    ...     value=ratio,
    ...     metric="share too high",
    ...     higher_is_better=False,
    ... )
    >>> task.value(task.score(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.5])))
    0.5
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor], float]
    metric: str
    """What `value` returns, as it is logged."""
    higher_is_better: bool = True
    num_classes: int = 0
    """Of targets that are classes, which mixup needs; 0 for others."""
    dense: bool = False
    """Whether outputs and targets are images, which a mirrored image mirrors."""
    val_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """The loss that scoring states, without what only helps to learn; None for `loss`."""
    confusion: Callable[[Tensor, Tensor], Tensor] | None = None
    """Images (pixels, where dense) by true and by likeliest class, int64 (classes · classes,),
    summed as a score is; None where there are no classes, or too many for a table."""
    also: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    """Further metrics of scoring, by name: each a score of two numbers, a part and a whole."""
    whole: Callable[[Tensor, Tensor], tuple[float, Mapping[str, Tensor]]] | None = None
    """For a metric that no sum over batches gives: what scoring takes in the place of `value`, and
    columns of per_class.csv, of all outputs and targets together (on the CPU)."""
    num_outputs: int = 0
    """Outputs that `loss` needs of each image (of each pixel, where dense); 0 for any."""

    def check(self, outputs: Tensor, images: Tensor) -> None:
        """Raise UsageError where `outputs` for `images` have not the shape that `loss` needs."""
        if not self.num_outputs:
            return
        wanted = (len(images), self.num_outputs, *(images.shape[2:] if self.dense else ()))
        if tuple(outputs.shape) != wanted:
            raise UsageError(
                f"--model returns outputs of shape {tuple(outputs.shape)}, and {self.name} of "
                f"{self.num_outputs} outputs needs {wanted}: wrap the model in a function that "
                "brings them into that shape, and name that as --model module:function"
            )


def make_task(kind: str, config: LossConfig, num_outputs: int) -> Task:
    """Return the task named `kind`: one of ours, or what module:function returns.

    A function is called with `config` and the number of outputs. Raises UsageError when there
    is no such task.

    >>> task = make_task("classification", LossConfig(), num_outputs=3)
    >>> outputs, labels = torch.eye(3), torch.tensor([0, 1, 1])
    >>> task.value(task.score(outputs, labels))
    0.666...
    """
    if ":" in kind:
        task = load_function(kind, "--task")(config, num_outputs)
        if not isinstance(task, Task):
            raise UsageError(f"--task {kind} returned {type(task).__name__}, not a Task")
        return task
    if kind not in _TASKS:
        raise UsageError(f"--task {kind!r} is not one of {', '.join(_TASKS)}, module:function")
    if config.loss != "auto" and kind not in _TASKS_OF[config.loss]:
        others = " and ".join(_TASKS_OF[config.loss])
        raise UsageError(
            f"--loss {config.loss} is for {others}, and the task is {kind}: leave it out"
        )
    return _TASKS[kind](config, num_outputs)


def _classification(config: LossConfig, num_outputs: int) -> Task:
    loss = partial(functional.cross_entropy, label_smoothing=config.label_smoothing)
    val_loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    if config.loss == "bce":
        loss = partial(_bce, config.label_smoothing, config.bce_target_thresh)
        val_loss = partial(_bce, 0.0, None)
    return Task(
        name="classification",
        loss=loss,
        val_loss=val_loss,
        score=_hits,
        value=ratio,
        metric="accuracy",
        confusion=_table_of(-100, num_outputs),  # which cross_entropy leaves out
        also={"top5": _hits_of_five} if num_outputs > 5 else {},
        num_classes=num_outputs,
        num_outputs=num_outputs,
    )


def _bce(smoothing: float, threshold: float | None, outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy, the mean over images and classes, of class numbers or shares (B, C).

    Smoothing takes that share of each target and spreads it over all classes, before the
    threshold, as timm's BinaryCrossEntropy does.
    """
    if not targets.is_floating_point():
        targets = functional.one_hot(targets, outputs.shape[1])
    targets = targets.to(outputs.dtype) * (1 - smoothing) + smoothing / outputs.shape[1]
    if threshold is not None:
        targets = targets.gt(threshold).to(outputs.dtype)
    return functional.binary_cross_entropy_with_logits(outputs, targets)


def _multi_label(config: LossConfig, num_outputs: int) -> Task:
    return Task(
        name="multi-label",
        loss=partial(_bce, config.label_smoothing, config.bce_target_thresh),
        val_loss=partial(_bce, 0.0, None),
        score=_histograms,
        value=_binned_map,
        metric="mAP",
        whole=_ranked,
        also={"f1": _agreement},
        num_classes=num_outputs,
        num_outputs=num_outputs,
    )


_BINS = 200
"""Steps of the probabilities by which training states its mAP; scoring's is exact."""


def _histograms(outputs: Tensor, targets: Tensor) -> Tensor:
    """Count images by class, probability and truth: int64 (classes · _BINS · 2,)."""
    classes = outputs.shape[1]
    bins = (outputs.float().sigmoid() * _BINS).long().clamp(0, _BINS - 1)
    columns = torch.arange(classes, device=outputs.device)
    cell = ((columns * _BINS + bins) * 2 + (targets >= 0.5).long()).flatten()
    empty = torch.zeros(classes * _BINS * 2, dtype=torch.int64, device=outputs.device)
    return empty.scatter_add_(0, cell, torch.ones_like(cell))


def _binned_map(score: Tensor) -> float:
    table = score.cpu().double().numpy().reshape(-1, _BINS, 2)[:, ::-1]
    return _mean_of_classes(_precision(table[..., 1], table.sum(2)))


def _precision(positive: NDArray[Any], every: NDArray[Any]) -> NDArray[np.float64]:
    """Return the average precision (...,) from counts (..., G) of images by falling score."""
    found = positive.cumsum(-1)
    shares = found / np.maximum(every.cumsum(-1), 1)
    with np.errstate(invalid="ignore"):
        result: NDArray[np.float64] = (positive * shares).sum(-1) / found[..., -1]
    return result


def _mean_of_classes(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def average_precision(
    scores: NDArray[np.float32], targets: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Return each class's average precision, float64 (C,), of scores and 0 or 1 (N, C).

    The sum over falling thresholds of precision times what the recall gains, without interpolation,
    equal scores being one threshold: scikit-learn's and torchmetrics' definition. NaN for a class
    that no image has.

    >>> scores = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.3]], np.float32)
    >>> average_precision(scores, np.array([[1, 0], [0, 0], [1, 0]], np.float32)).round(3)
    array([0.833,   nan])
    """
    found = np.empty(scores.shape[1])
    for number, (column, truth) in enumerate(zip(scores.T, targets.T, strict=True)):
        groups = np.unique(-column, return_inverse=True)[1]
        found[number] = _precision(np.bincount(groups, weights=truth), np.bincount(groups))
    return found


def _ranked(outputs: Tensor, targets: Tensor) -> tuple[float, Mapping[str, Tensor]]:
    """Return the mAP, and what is to be said of each class, from logits and 0 or 1 (N, C)."""
    scores = average_precision(outputs.numpy(), targets.numpy())
    said, truth = outputs > 0, targets >= 0.5
    hits = (said & truth).sum(0).double()
    true, predicted = truth.sum(0).double(), said.sum(0).double()
    return _mean_of_classes(scores), {
        "images": true,
        "average_precision": torch.from_numpy(scores),
        "precision": hits / predicted,
        "recall": hits / true,
        "f1": 2 * hits / (true + predicted),
    }


def _agreement(outputs: Tensor, targets: Tensor) -> Tensor:
    """Twice the labels that are both true and predicted; the true ones and the predicted ones."""
    said, truth = outputs > 0, targets >= 0.5
    return torch.stack((2 * (said & truth).sum(), said.sum() + truth.sum()))


def _hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Images whose likeliest class is the true (or, mixed, the strongest) one; images."""
    truth = targets.argmax(1) if targets.is_floating_point() else targets
    hits = (outputs.argmax(1) == truth).sum()
    return torch.stack((hits, torch.full_like(hits, len(truth))))


def _hits_of_five(outputs: Tensor, targets: Tensor) -> Tensor:
    """Images whose true class is among the five likeliest; images."""
    hits = (outputs.topk(5, 1).indices == targets[:, None]).sum()
    return torch.stack((hits, torch.full_like(hits, len(targets))))


_LARGEST_TABLE = 2000
"""Classes: 32 MB of counts. Of more, nobody reads a table."""


def _table_of(ignored: int, classes: int) -> Callable[[Tensor, Tensor], Tensor] | None:
    return partial(_confusion, ignored, classes) if classes <= _LARGEST_TABLE else None


def ratio(score: Tensor) -> float:
    """Return the first of two numbers divided by the second; 0 of nothing.

    >>> ratio(torch.tensor([3, 4]))
    0.75
    """
    part, whole = score.tolist()
    return float(part / max(whole, 1))


def _regression(config: LossConfig, num_outputs: int) -> Task:
    return Task(
        name="regression",
        loss=lambda outputs, targets: functional.mse_loss(outputs.float(), targets),
        score=_deviations,
        value=ratio,
        metric="mean absolute error",
        higher_is_better=False,
        num_outputs=num_outputs,
    )


def _deviations(outputs: Tensor, targets: Tensor) -> Tensor:
    total = (outputs.float() - targets).abs().sum()
    return torch.stack((total, torch.full_like(total, targets.numel())))


def _segmentation(config: LossConfig, num_outputs: int) -> Task:
    return Task(
        name="segmentation",
        loss=partial(_pixel_loss, config.ignore_index, config.label_smoothing),
        val_loss=partial(_pixel_loss, config.ignore_index, 0.0),
        score=partial(_confusion, config.ignore_index, num_outputs),
        value=_mean_iou,
        metric="mean IoU",
        confusion=_table_of(config.ignore_index, num_outputs),
        dense=True,
        num_outputs=num_outputs,
    )


def _pixel_loss(
    ignore_index: int, label_smoothing: float, outputs: Tensor, targets: Tensor
) -> Tensor:
    return functional.cross_entropy(
        outputs,
        targets.long(),  # masks come as uint8: an eighth of the bytes
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )


def _confusion(ignore_index: int, classes: int, outputs: Tensor, targets: Tensor) -> Tensor:
    """Images or pixels by true and by likeliest class, int64 (classes · classes,).

    By scatter_add rather than bincount, which waits for the device to learn its length.
    """
    counted = (targets != ignore_index).flatten()
    cell = targets.flatten().long().clamp(max=classes - 1) * classes + outputs.argmax(1).flatten()
    empty = torch.zeros(classes * classes, dtype=torch.int64, device=outputs.device)
    return empty.scatter_add_(0, cell, counted.long())


def _mean_iou(score: Tensor) -> float:
    """Mean over classes that occur of intersection by union (Everingham et al. 2010)."""
    table = score.cpu().double().view(round(len(score) ** 0.5), -1)
    shared = table.diagonal()
    union = table.sum(0) + table.sum(1) - shared
    return float((shared / union)[union > 0].mean())


_TASKS: dict[str, Callable[[LossConfig, int], Task]] = {
    "classification": _classification,
    "multi-label": _multi_label,
    "regression": _regression,
    "segmentation": _segmentation,
}
_TASKS_OF = {
    "cross-entropy": ("classification", "segmentation"),
    "bce": ("classification", "multi-label"),
}
"""The tasks that a loss of the user's choice is for."""


_DRAWN = 6
"""Images of a scoring that are kept to be drawn, where each pixel has a class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a scoring found, of all processes together."""

    loss: float
    """Mean over the images, without label smoothing."""
    metric: float
    """The task's."""
    also: Mapping[str, float]
    """The task's further metrics, by name."""
    confusion: Tensor | None
    """Images or pixels by true (rows) and likeliest (columns) class, on the CPU."""
    per_class: Mapping[str, Tensor] | None = None
    """What is said of each class, float64 (C,) by column, how many there are first."""
    drawn: tuple[Tensor, Tensor, Tensor] | None
    """For dense tasks the first few images, their masks and predicted masks, on the CPU."""


def evaluate(
    net: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    world: World,
    autocast: autocast,
    *,
    flip: bool = False,
    rounds: int = 0,
) -> Scored:
    """Score `batches`, of all processes.

    `net` is the bare module: in DDP, processes with unlike numbers of batches would wait for
    each other. It runs in eval mode under inference_mode, and each of its modules is back in its
    own mode afterwards. With `flip`, an image's outputs are averaged with its mirror image's.
    Under FSDP, where a pass gathers the weights of all, each process makes `rounds` passes: those
    beyond its own batches count for nothing.

    >>> from h5feed.train.config import LossConfig
    >>> task = make_task("classification", LossConfig(), num_outputs=2)
    >>> batches = [(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]))]
    >>> world = World(rank=0, size=1, device=torch.device("cpu"))
    >>> evaluate(nn.Identity(), batches, task, world, autocast("cpu", enabled=False)).metric
    0.75
    """
    # Apple's GPUs have no float64.
    exact = torch.float32 if world.device.type == "mps" else torch.float64
    losses = torch.zeros((), device=world.device, dtype=exact)
    # A scalar yields to the dtype of what is added to it, unless that is of a lesser kind.
    scores = torch.zeros((), device=world.device, dtype=torch.int64)
    also = dict.fromkeys(task.also, scores)
    table, drawn, count, passes = scores, None, 0, 0
    kept: list[tuple[Tensor, Tensor]] = []

    def summand(score: Tensor) -> Tensor:
        return score.to(exact) if score.is_floating_point() else score

    def compute(images: Tensor) -> Tensor:
        outputs: Tensor = net(images)
        if flip:
            # A copy: CUDA graphs write the second pass over the first.
            outputs = (outputs.clone() + _mirrored(net(images.flip(3)), task)) / 2
        return outputs

    # FSDP trains in the memory that it gathers weights into here: no inference tensors then.
    with torch.no_grad() if rounds else torch.inference_mode(), modes_kept(net):
        net.eval()
        for images, targets in batches:
            with autocast:
                outputs = compute(images)
                loss = (task.val_loss or task.loss)(outputs, targets)
            losses += loss * len(images)
            scores = scores + summand(task.score(outputs, targets))
            for name, measure in task.also.items():
                also[name] = also[name] + summand(measure(outputs, targets))
            if task.whole is not None:
                kept.append((outputs.float().clone(), targets.clone()))  # memory is used again
            if task.confusion is not None:
                table = table + summand(task.confusion(outputs, targets))
            if task.dense and drawn is None:
                found = outputs[:_DRAWN].argmax(1).cpu()
                drawn = (images[:_DRAWN].cpu(), targets[:_DRAWN].cpu(), found)
            count += len(images)
            passes += 1
        for _ in range(passes, rounds):
            with autocast:
                compute(images)
        sums = world.add_up(torch.stack((losses, torch.full_like(losses, count))))
        loss_sum, scored_images = sums.tolist()
        metric = task.value(world.add_up(scores))
        confusion = None if task.confusion is None else _square(world.add_up(table))
        per_class: Mapping[str, Tensor] | None = None
        if confusion is not None:
            per_class = class_columns(confusion, dense=task.dense)
        if task.whole is not None:
            metric, per_class = task.whole(*_together(kept, world))
        return Scored(
            loss=loss_sum / scored_images,
            metric=metric,
            also={name: ratio(world.add_up(score)) for name, score in also.items()},
            confusion=confusion,
            per_class=per_class,
            drawn=drawn,
        )


def _together(kept: list[tuple[Tensor, Tensor]], world: World) -> tuple[Tensor, Tensor]:
    """Return the outputs and targets of all processes, on the CPU."""
    mine = [torch.cat(column).cpu() for column in zip(*kept, strict=True)] if kept else None
    parts = [part for part in world.gather(mine) if part is not None]
    outputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    return outputs, targets


def class_columns(confusion: Tensor, *, dense: bool) -> dict[str, Tensor]:
    """Return what is to be said of each class, float64 (C,) by column.

    `confusion` are images (pixels, where `dense`) by true and by predicted class, (C, C); classes
    that neither occur nor are predicted have NaN for shares.

    >>> class_columns(torch.tensor([[3, 1], [0, 4]]), dense=False)["recall"].tolist()
    [0.75, 1.0]
    """
    found, true = confusion.diagonal().double(), confusion.sum(1).double()
    predicted = confusion.sum(0).double()
    shares = {"precision": found / predicted, "recall": found / true}
    if dense:
        return {"pixels": true, **shares, "iou": found / (true + predicted - found)}
    return {"images": true, **shares, "f1": 2 * found / (true + predicted)}


def _square(table: Tensor) -> Tensor:
    return table.cpu().view(round(len(table) ** 0.5), -1)


def _mirrored(outputs: Tensor, task: Task) -> Tensor:
    return outputs.flip(3) if task.dense else outputs
