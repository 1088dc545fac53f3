"""A training step to try things with: made from a configuration, and put back as it was."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from h5feed.errors import UsageError
from h5feed.train.checkpoint import RandomState, Stateful, capture
from h5feed.train.config import TrainConfig
from h5feed.train.data import Data, open_data
from h5feed.train.distributed import World, join_world, under_torchrun
from h5feed.train.finetune import build_network
from h5feed.train.loaders import Batch, Loader
from h5feed.train.precision import backends, choose_precision
from h5feed.train.trainer import (
    TrainStep,
    build_step,
    choose_task,
    memory_errors_in_words,
)

__all__ = ["Trial", "endless", "kept", "open_trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A step and its data, outside of any run: nothing is saved, nothing is logged."""

    config: TrainConfig
    data: Data
    world: World
    step: TrainStep


@contextmanager
def open_trial(
    config: TrainConfig, data: Data | None = None, *, steps: int = 1000
) -> Iterator[Trial]:
    """Build what `config` says, for a schedule of `steps`, for as long as the block lasts.

    `data` takes the place of the files that `config` names. Raises UsageError for what cannot be
    trained, or for several processes.

    >>> from pathlib import Path
    >>> from h5feed.train.config import ModelConfig
    >>> model = ModelConfig(model="resnet9-small")
    >>> config = TrainConfig(train=Path("photos.h5"), batch_size=6, model=model)
    >>> with open_trial(config) as trial:
    ...     batches = endless(trial.data.train_loader(trial.data.size))
    ...     with kept(trial.step, trial.world):  # weights are as before afterwards
    ...         loss, score = trial.step(batches)
    >>> loss.isfinite().item()
    True
    """
    if config.distributed.gpus > 1 or under_torchrun():
        raise UsageError("this is tried out in one process: leave out --gpus and torchrun")
    with join_world(config.device) as world, memory_errors_in_words(config):
        precision = choose_precision(config.speed, world.device)
        data = data or open_data(config, world)
        with backends(precision, config.speed):
            net = build_network(config, data).net
            step = build_step(config, net, choose_task(config, data), world, precision, steps)
            yield Trial(config=config, data=data, world=world, step=step)


@contextmanager
def kept(step: TrainStep, world: World, *loaders: Loader) -> Iterator[None]:
    """Put everything that training changes back as it was, however the block ends.

    Weights, buffers, optimizer, schedule, scaler, average, `loaders` and the global generators;
    meanwhile a copy waits in the machine's memory. Gradients are gone afterwards.
    """
    parts: dict[str, Stateful] = {
        **step.stateful(),
        "random": RandomState(world),
        **{f"loader{number}": loader for number, loader in enumerate(loaders)},
    }
    saved = _on_host(capture(parts, {}))
    count, lr = step.count, step.lr
    try:
        yield
    finally:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        if step.scaler.is_enabled():
            # A step that broke off after unscaling left a mark that no state dict holds.
            step.scaler._per_optimizer_states.clear()
        step.optimizer.zero_grad(set_to_none=True)
        step.count, step.lr = count, lr


def _on_host(value: Any) -> Any:
    """Copy a state, its tensors into the machine's memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(item) for item in value)
    return value


def endless(loader: Loader) -> Generator[Batch]:
    """Yield `loader`'s batches from where it stands, one epoch after another.

    >>> import torch
    >>> from h5feed.train.loaders import SyntheticLoader
    >>> batches = endless(SyntheticLoader((torch.zeros(2), torch.ones(2)), batches=1))
    >>> [next(batches)[1].sum().item() for _ in range(3)]
    [2.0, 2.0, 2.0]
    """
    epoch: int = loader.state_dict()["epoch"]
    while True:
        yield from loader
        epoch += 1
        loader.set_epoch(epoch)
