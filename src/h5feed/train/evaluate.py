"""Scoring: no gradients, no dropout, every picture exactly once over all processes.

inference_mode is no_grad without version counters and view tracking (PyTorch's autograd notes).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast

from h5feed.train.distributed import World
from h5feed.train.step import Batch
from h5feed.train.tasks import Task

__all__ = ["evaluate"]


def evaluate(
    net: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    world: World,
    autocast: autocast,
    *,
    flip: bool = False,
    rounds: int = 0,
) -> tuple[float, float]:
    """Return mean loss (without label smoothing) and metric over `batches`, of all processes.

    `net` is the bare module: in DDP, processes with unlike numbers of batches would wait for
    each other. It runs in eval mode under inference_mode, and each of its modules is back in its
    own mode afterwards. With `flip`, an image's outputs are averaged with its mirror image's.
    Under FSDP, where a pass gathers the weights of all, each process makes `rounds` passes: those
    beyond its own batches count for nothing.
    """
    losses = torch.zeros((), device=world.device, dtype=torch.float64)
    scores = torch.zeros((), device=world.device, dtype=torch.float64)
    count = passes = 0

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
            scores = scores + task.score(outputs, targets)
            count += len(images)
            passes += 1
        for _ in range(passes, rounds):
            with autocast:
                compute(images)
        sums = world.add_up(torch.stack((losses, torch.full_like(losses, count))))
        loss_sum, pictures = sums.tolist()
        return loss_sum / pictures, task.value(world.add_up(scores))


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
