"""From a configuration to a run that is ready to go.

channels_last is PyTorch's tutorial "Channels Last Memory Format"; torch.compile is Ansel et al.
2024 (doi:10.1145/3620665.3640366).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from h5feed.errors import H5FeedError, UsageError
from h5feed.system import is_out_of_memory
from h5feed.train.checkpoint import RandomState
from h5feed.train.compiled import check_backend
from h5feed.train.config import ModelConfig, TrainConfig
from h5feed.train.data import Data
from h5feed.train.distributed import World, check_fsdp
from h5feed.train.ema import Ema
from h5feed.train.epochs import EpochLoaders, image_size
from h5feed.train.models import (
    Network,
    Weights,
    build_model,
    fit_weights,
    freeze,
    frozen_norms,
    head_names,
    pretrained_weights,
    read_weights,
)
from h5feed.train.optim import make_optimizer
from h5feed.train.precision import make_autocast, make_scaler
from h5feed.train.recompute import checkpoint_blocks, find_blocks
from h5feed.train.recorder import Recorder
from h5feed.train.saver import Saver, Signals
from h5feed.train.schedule import go_to_step, make_schedule
from h5feed.train.step import TrainStep
from h5feed.train.surgery import drop_biases
from h5feed.train.tasks import Task, make_task

__all__ = [
    "BuiltNetwork",
    "Run",
    "build_network",
    "build_step",
    "choose_task",
    "memory_errors_in_words",
    "prepare",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the loop needs."""

    config: TrainConfig
    data: Data
    world: World
    loaders: EpochLoaders
    step: TrainStep
    saver: Saver
    signals: Signals
    recorder: Recorder
    epoch: int
    """The one to begin with; all its steps may be done, and its scoring not."""
    steps_per_epoch: int


def prepare(config: TrainConfig, data: Data, world: World, precision: str) -> Run:
    """Build everything, at its beginning or, with --resume, where the last checkpoint left it."""
    task = choose_task(config, data)
    _check(config, data, task)
    check_fsdp(config, world, precision)
    check_backend(config.speed.compile_backend, world.device)
    size_of = partial(image_size, config.recipe.progressive, data.size, config.epochs)
    loaders = EpochLoaders(data.train_loader, size_of)
    steps_per_epoch = len(loaders) // config.speed.accumulate
    total = steps_per_epoch * config.epochs
    built = build_network(config, data, fresh=not config.resume)
    step = build_step(config, built.net, task, world, precision, total)
    parts = {"loaders": loaders, **step.stateful(), "random": RandomState(world)}
    del parts["schedule"]  # a function of the step, which --epochs may stretch
    facts: dict[str, Any] = {
        "model": config.model.model,
        "num_outputs": data.num_outputs,
        "size": data.size,
        "dropped_biases": built.dropped_biases,
        "steps_per_epoch": steps_per_epoch,
    }
    saver = Saver(config, world, parts, facts)
    progress: dict[str, Any] = {"step": 0, "epoch": 0, "best": None}
    if config.resume:
        progress = saver.resume()
    step.count = progress["step"]
    if step.count > total:
        raise UsageError(
            f"--epochs {config.epochs} is less than the {step.count / steps_per_epoch:.3g} that "
            f"the run in {config.out} has done: resume with as many or more"
        )
    go_to_step(step.schedule, step.count)
    recorder = Recorder(
        config,
        task,
        world,
        done=step.count,
        total=total,
        best=progress["best"],
        classes=data.classes,
    )
    for note in built.notes:
        recorder.say(note)
    return Run(
        config=config,
        data=data,
        world=world,
        loaders=loaders,
        step=step,
        saver=saver,
        signals=Signals(world),
        recorder=recorder,
        epoch=progress["epoch"],
        steps_per_epoch=steps_per_epoch,
    )


@contextmanager
def memory_errors_in_words(config: TrainConfig) -> Iterator[None]:
    """Raise H5FeedError, in one sentence, where memory runs out in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as ex:
        if not is_out_of_memory(ex):
            raise
        said = str(ex).partition("\n")[0] or "the machine has no more"
        raise H5FeedError(
            f"out of memory with --batch-size {config.batch_size} ({said}): try --accumulate "
            f"{2 * config.speed.accumulate}, --grad-checkpointing or --precision bf16; "
            "train-h5 find-batch finds what fits"
        ) from ex


def choose_task(config: TrainConfig, data: Data) -> Task:
    """Return what is learned: the user's own task, or the one that the data is for."""
    wanted = config.loss.task
    return make_task(wanted if ":" in wanted else data.task, config.loss, data.num_outputs)


def _check(config: TrainConfig, data: Data, task: Task) -> None:
    if config.recipe.progressive > data.size:
        raise UsageError(
            f"--progressive {config.recipe.progressive} starts above the full size, which is "
            f"{data.size} px: start smaller, or set --size"
        )
    if (config.recipe.mixup or config.recipe.cutmix) and not task.num_classes:
        raise UsageError(
            f"--mixup and --cutmix mix class labels, and the task is {task.name}: leave them out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltNetwork:
    """A network, on the CPU, and what was done to it that its name does not say."""

    net: Network
    dropped_biases: list[str]
    """Layers that lost their bias."""
    notes: list[str]
    """One sentence each, for people."""


def build_network(config: TrainConfig, data: Data, *, fresh: bool = True) -> BuiltNetwork:
    """Build the network on the CPU, from the seed and the weights that it begins with.

    Those are left out unless it is `fresh`: a resumed run has its own. H5FeedError where they
    cannot be had, UsageError where they do not fit.
    """
    wanted, outputs = config.model, data.num_outputs
    torch.manual_seed(config.seed)
    model = build_model(wanted.model, outputs, drop_path=wanted.drop_path)
    dropped: list[str] = []
    notes: list[str] = []
    mean: Sequence[float] = data.mean
    std: Sequence[float] = data.std
    head: frozenset[str] = frozenset()
    if wanted.pretrained or wanted.init is not None or wanted.freeze:
        head = head_names(wanted.model, outputs, model)
    weights = _first_weights(wanted, outputs, fresh=fresh)
    if weights is not None:
        notes.append(fit_weights(model, weights, head))
        dropped += weights.dropped_biases
        mean, std = weights.mean or mean, weights.std or std
    if wanted.drop_biases:
        dropped += drop_biases(model, torch.randn(2, 3, data.size, data.size))
    if dropped:
        notes.append(
            f"dropped {len(dropped)} biases that a batch norm follows: {', '.join(dropped)}"
        )
    net = Network(model, mean, std)
    if wanted.freeze:
        frozen = freeze(model, wanted.freeze, head)
        net.keep_in_eval_mode(frozen_norms(model))
        notes.append(
            f"--freeze {wanted.freeze}: {len(frozen)} of {len(list(model.parameters()))} weight "
            f"tensors are frozen, and {len(net.frozen_norms)} batch norms keep their statistics"
        )
    if wanted.grad_checkpointing:
        checkpoint_blocks(model)
    return BuiltNetwork(net=net, dropped_biases=dropped, notes=notes)


def _first_weights(wanted: ModelConfig, outputs: int, *, fresh: bool) -> Weights | None:
    if wanted.init is not None and fresh:
        return read_weights(wanted.init)
    return pretrained_weights(wanted.model, outputs) if wanted.pretrained and fresh else None


def build_step(
    config: TrainConfig, net: nn.Module, task: Task, world: World, precision: str, total_steps: int
) -> TrainStep:
    """Put `net` on its device, and everything around it that moves it."""
    net = world.synchronize_norms(net, config.distributed)
    if config.distributed.fsdp and world.size > 1:
        # Not channels_last: fully_shard takes contiguous weights alone.
        called = net = world.share_out(net, find_blocks(net).values())
    else:
        net = net.to(world.device)
        if config.speed.channels_last:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        called = world.wrap(net, config.distributed, parts=config.speed.accumulate)
    if config.speed.compile != "off":
        called = torch.compile(called, mode=config.speed.compile)  # type: ignore[assignment]
    optimizer = make_optimizer(net, replace(config.optim, lr=config.peak_lr))
    torch.manual_seed(config.seed + world.rank)  # dropout: another mask in each process
    return TrainStep(
        config=config,
        model=called,
        net=net,
        task=task,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config.schedule, config.peak_lr, total_steps),
        scaler=make_scaler(precision, world.device),
        autocast=make_autocast(precision, world.device),
        ema=Ema(net, config.recipe.ema) if config.recipe.ema else None,
        rank=world.rank,
    )
