"""Scoring: no gradients, no dropout, every image exactly once over all processes.

inference_mode is no_grad without version counters and view tracking (PyTorch's autograd notes).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast

from h5feed.train.distributed import World
from h5feed.train.step import Batch
from h5feed.train.tasks import Task, ratio

__all__ = ["Scored", "evaluate"]

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
    with torch.no_grad() if rounds else torch.inference_mode(), _eval_mode(net):
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


@contextmanager
def _eval_mode(net: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
