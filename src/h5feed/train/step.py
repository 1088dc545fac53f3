"""One optimizer step: some parts of a batch forward and backward, then the weights move once.

Accumulating parts, gradients set to None, and keeping the host from waiting are in PyTorch's
Performance Tuning Guide (pytorch.org/tutorials/recipes/recipes/tuning_guide.html); the order
unscale, clip, step, update is that of its notes on automatic mixed precision.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from h5feed.train.checkpoint import Stateful
from h5feed.train.config import TrainConfig
from h5feed.train.distributed import last_only
from h5feed.train.ema import Ema
from h5feed.train.mix import mix_batch
from h5feed.train.optim import clip_gradients, gradient_norm
from h5feed.train.tasks import Task

__all__ = ["Batch", "TrainStep"]

Batch = tuple[Tensor, Tensor]


@dataclass(slots=True, kw_only=True)
class TrainStep:
    """What moves when the weights move.

    Nothing in a call waits for the device, except in fp16 with an optimizer that is not fused:
    torch's scaler then reads whether gradients overflowed.
    """

    config: TrainConfig
    model: nn.Module
    """As it is called: perhaps compiled, perhaps in DDP."""
    net: nn.Module
    """The bare module inside."""
    task: Task
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: GradScaler
    autocast: autocast
    ema: Ema | None
    rank: int = 0
    count: int = 0
    """Optimizer steps done."""
    lr: float = 0.0
    """Learning rate of the last of them; of the head, with --layer-decay."""
    grad_norm: Tensor | None = None
    """Norm of its gradient before clipping, a scalar on the device, where it was measured."""

    def __call__(self, batches: Iterator[Batch], *, measure: bool = False) -> tuple[Tensor, Tensor]:
        """Take `--accumulate` parts from `batches`, and make one step of the mean gradient.

        Returns the parts' mean loss (a scalar) and summed score, on the device, without graph.
        With `measure`, the gradient's norm is left in `grad_norm`.
        """
        parts = self.config.speed.accumulate
        totals = [self._backward(next(batches), part, parts) for part in range(parts)]
        self._move(measure=measure)
        loss = torch.stack([loss for loss, _ in totals]).sum()
        score = torch.stack([score for _, score in totals]).sum(0)
        return loss, score

    def stateful(self) -> dict[str, Stateful]:
        """Return everything that a step changes and a checkpoint holds, by name."""
        parts: dict[str, Stateful] = {
            "net": self.net,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }
        return parts if self.ema is None else {**parts, "ema": self.ema}

    def _backward(self, batch: Batch, part: int, parts: int) -> tuple[Tensor, Tensor]:
        images, targets = self._prepare(batch, part)
        with last_only(self.model, last=part == parts - 1):
            with self.autocast:
                outputs = self.model(images)
                self.task.check(outputs, images)
                loss = self.task.loss(outputs, targets) / parts
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), self.task.score(outputs.detach(), targets)

    def _prepare(self, batch: Batch, part: int) -> Batch:
        images, targets = batch
        recipe = self.config.recipe
        if recipe.mixup or recipe.cutmix:
            seed = (self.config.seed, self.count, part, self.rank)
            images, targets = mix_batch(images, targets, recipe, self.task.num_classes, seed)
        layout = torch.channels_last if self.config.speed.channels_last else torch.contiguous_format
        return images.contiguous(memory_format=layout), targets

    def _move(self, *, measure: bool) -> None:
        optim = self.config.optim
        if measure or optim.clip_norm or optim.clip_value:
            self.scaler.unscale_(self.optimizer)
        self.grad_norm = gradient_norm(self.net) if measure else None
        clip_gradients(self.net, optim)
        self.lr = float(max(self.schedule.get_last_lr()))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=optim.set_to_none)
        if self.ema is not None:
            self.ema.update(self.count)
        self.count += 1
