"""What is learned: a loss, and a score that adds up over batches and processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from h5feed.errors import UsageError
from h5feed.train.config import LossConfig
from h5feed.train.models import load_function

__all__ = ["Task", "make_task", "ratio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One kind of learning.

    `loss(outputs, targets)` is a mean over the batch, a scalar. `score(outputs, targets)` is a
    1-D tensor on the device that is summed over batches and processes before `value` makes one
    number of it: nothing waits for the device until then. Counts are int64: float32 ends at 2**24.
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor], float]
    metric: str
    """What `value` returns, as it is logged."""
    higher_is_better: bool = True
    num_classes: int = 0
    """Of targets that are class numbers, which mixup needs; 0 for others."""
    dense: bool = False
    """Whether outputs and targets are images, which a mirrored image mirrors."""
    val_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """The loss that scoring states, without what only helps to learn; None for `loss`."""
    confusion: Callable[[Tensor, Tensor], Tensor] | None = None
    """Images (pixels, where dense) by true and by likeliest class, int64 (classes · classes,),
    summed as a score is; None where there are no classes, or too many for a table."""
    also: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    """Further metrics of scoring, by name: each a score of two numbers, a part and a whole."""
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
    """
    if ":" in kind:
        task = load_function(kind, "--task")(config, num_outputs)
        if not isinstance(task, Task):
            raise UsageError(f"--task {kind} returned {type(task).__name__}, not a Task")
        return task
    if config.loss != "cross-entropy" and kind != "classification":
        raise UsageError(f"--loss {config.loss} is for classification, and the task is {kind}")
    if kind not in _TASKS:
        raise UsageError(f"--task {kind!r} is not one of {', '.join(_TASKS)}, module:function")
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
    """Return the first of two numbers divided by the second; 0 of nothing."""
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
    "regression": _regression,
    "segmentation": _segmentation,
}
