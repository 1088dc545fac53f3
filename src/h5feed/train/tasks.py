"""What is learned and how it is scored: a loss, and scores that add up over batches and processes.

Scoring has no gradients and no dropout, and sees every image exactly once over all processes.
inference_mode is no_grad without version counters and view tracking (PyTorch's autograd notes).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
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
    "regression": _regression,
    "segmentation": _segmentation,
}


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
        return Scored(
            loss=loss_sum / scored_images,
            metric=task.value(world.add_up(scores)),
            also={name: ratio(world.add_up(score)) for name, score in also.items()},
            confusion=None if task.confusion is None else _square(world.add_up(table)),
            drawn=drawn,
        )


def _square(table: Tensor) -> Tensor:
    return table.cpu().view(round(len(table) ** 0.5), -1)


def _mirrored(outputs: Tensor, task: Task) -> Tensor:
    return outputs.flip(3) if task.dense else outputs
