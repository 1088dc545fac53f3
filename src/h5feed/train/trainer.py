"""The trainer, to be read and copied: from a whole run down to one optimizer step.

`train` sets the stage, `Trainer.run` is the loop, and a call of `TrainStep` is one step: some
parts of a batch forward and backward, then the weights move once. Below them is what builds them
from a configuration.

Accumulating parts, gradients set to None, and keeping the host from waiting are in PyTorch's
Performance Tuning Guide (pytorch.org/tutorials/recipes/recipes/tuning_guide.html); the order
unscale, clip, step, update is that of its notes on automatic mixed precision. channels_last is its
tutorial "Channels Last Memory Format"; torch.compile is Ansel et al. 2024
(doi:10.1145/3620665.3640366).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from h5feed.errors import H5FeedError, UsageError
from h5feed.system import is_out_of_memory
from h5feed.train.checkpoint import (
    RandomState,
    Saver,
    ScoringCut,
    Signals,
    Stateful,
    save_signal_ignored,
    weights_are_finite,
)
from h5feed.train.config import TrainConfig
from h5feed.train.data import Data, open_data
from h5feed.train.debug import check_gradients, debugging
from h5feed.train.distributed import (
    World,
    check_fsdp,
    join_world,
    last_only,
    start,
    under_torchrun,
)
from h5feed.train.finetune import build_network
from h5feed.train.loaders import Batch
from h5feed.train.log import Recorder, Summary, check_folder
from h5feed.train.optim import (
    clip_gradients,
    go_to_step,
    gradient_norm,
    make_optimizer,
    make_schedule,
)
from h5feed.train.plots import draw_curves, draw_scored
from h5feed.train.precision import (
    backends,
    check_backend,
    choose_precision,
    for_scoring,
    make_autocast,
    make_scaler,
)
from h5feed.train.recipes import described
from h5feed.train.tasks import Task, evaluate, make_task
from h5feed.train.tricks import Ema, EpochLoaders, find_blocks, image_size, mix_batch

__all__ = [
    "TrainStep",
    "Trainer",
    "build_step",
    "choose_task",
    "memory_errors_in_words",
    "prepare",
    "train",
]


def train(config: TrainConfig, data: Data | None = None) -> Summary:
    """Train as `config` says, in one process or several, and return how it went.

    `data` takes the place of the files that `config` names. Writes config.json, metrics.jsonl,
    checkpoints and curves.png into `config.out`. Raises UsageError for what cannot be trained,
    and LossError when the loss becomes NaN; the last good checkpoint is kept then. Signals are
    obeyed after the step they come in, or with several processes at the next --log-every: SIGUSR1
    saves, Ctrl-C and SIGTERM save and raise KeyboardInterrupt or SystemExit(143).

    >>> from pathlib import Path
    >>> from h5feed.train.config import DebugConfig, ModelConfig
    >>> config = TrainConfig(
    ...     train=Path("photos.h5"),
    ...     val=Path("photos.h5"),
    ...     epochs=2,
    ...     batch_size=6,
    ...     model=ModelConfig(model="resnet9-small"),
    ...     debug=DebugConfig(curves=False, tensorboard=False),
    ... )
    >>> summary = train(config)
    >>> summary.steps, sorted(summary.val)
    (4, ['accuracy', 'loss'])
    >>> sorted(path.name for path in config.out.iterdir())
    ['best.pt', 'config.json', 'last.pt', 'metrics.jsonl', 'per_class.csv']
    """
    if config.distributed.gpus > 1 and not under_torchrun():
        with save_signal_ignored():
            return start(train, config, config.distributed.gpus)
    with save_signal_ignored(), join_world(config.device) as world, memory_errors_in_words(config):
        precision = choose_precision(config.speed, world.device)
        check_folder(config)
        data = data or open_data(config, world)
        with (
            backends(precision, config.speed),
            debugging(config.debug.debug, config.out, world.device) as after_step,
        ):
            trainer = prepare(config, data, world, precision)
            recorder = trainer.recorder
            if world.is_main:
                config.out.mkdir(parents=True, exist_ok=True)
            if config.debug.debug == "gradcheck":
                batches = data.train_loader(data.size)
                check_gradients(trainer.step.net, trainer.step.task, next(iter(batches)))
            with recorder, trainer.signals:
                trainer.run(after_step)
        if world.is_main and config.debug.curves:
            try:
                draw_curves(config.out, recorder.summary.metric)
                if (scored := recorder.last_scored) is not None:
                    draw_scored(config.out, scored, data.classes, config.loss.ignore_index)
            except ImportError as ex:
                recorder.say(f"no curves.png: {ex}")
        return recorder.summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A run that is ready to go: `run` trains from where it stands to its last epoch."""

    config: TrainConfig
    data: Data
    world: World
    loaders: EpochLoaders
    step: "TrainStep"
    saver: Saver
    signals: Signals
    recorder: Recorder
    epoch: int
    """The one to begin with; all its steps may be done, and its scoring not."""
    steps_per_epoch: int

    def run(self, after_step: Callable[[], None]) -> None:
        """Train every epoch's batches, score after each epoch, and save."""
        config, step = self.config, self.step

        for epoch in range(self.epoch, config.epochs):
            end = (epoch + 1) * self.steps_per_epoch

            batches = self.recorder.waiting(self.loaders.at(epoch))
            while step.count < end:
                coming = step.count + 1
                to_save = _is_due(config.debug.save_every, coming) and coming < end
                measure = _is_due(config.debug.log_every, coming) or to_save or coming == end
                # Forward, backward, optimizer; waits for nothing.
                loss, score = step(batches, measure=measure)
                self.recorder.add(loss, score)
                after_step()
                if due := _is_due(config.debug.log_every, step.count):
                    self.report(epoch)
                asked = self.signals.agree(now=due or step.count == end)
                if asked or to_save:
                    self.save(epoch)
                    self.signals.obey()
            batches.close()

            self.report(epoch)
            try:
                is_best = self.score(epoch)
            except ScoringCut:
                self.signals.agree(now=True)
                self.save(epoch)
                self.signals.obey()
                raise  # never reached: what cuts the scoring ends the run
            if epoch + 1 < config.epochs:
                self.loaders.at(epoch + 1)  # what is saved now goes on with the next epoch
            self.save(epoch, best=is_best, done=True)
            if self.signals.agree(now=True):
                self.signals.obey()

    def report(self, epoch: int) -> None:
        """Read the losses since the last report: the only moment that waits for the device."""
        self.recorder.report(self.step.count, epoch, self.step.lr, self.step.grad_norm)

    def score(self, epoch: int) -> bool:
        """Score the averaged weights, or the weights; returns whether they are the best so far."""
        if self.data.val_loader is None:
            return False
        step, speed = self.step, self.config.speed
        rounds = self.world.most(self.data.val_loader) if self.config.distributed.fsdp else 0
        with step.ema.swapped_in() if step.ema is not None else nullcontext():
            self.world.align(step.net)
            scored = evaluate(
                for_scoring(step.net, speed.scoring_backend, speed.compile),
                self.signals.scoring(self.data.val_loader),
                step.task,
                self.world,
                step.autocast,
                flip=self.config.recipe.test_flip,
                rounds=rounds,
            )
        return self.recorder.scored(step.count, epoch, scored)

    def save(self, epoch: int, *, best: bool = False, done: bool = False) -> None:
        """Save the run in or, where it is `done`, after `epoch`; NaN in it is an error."""
        if self.step.grad_norm is None:  # a signal, off the rhythm: the next reading counts these
            self.recorder.check_loss(self.step.count, epoch)
        else:
            self.report(epoch)
        broken = self.world.highest(not weights_are_finite(self.step.net))
        self.recorder.check_weights(not broken, self.step.count, epoch)
        progress = {
            "step": self.step.count,
            "epoch": epoch + 1 if done else epoch,
            "best": self.recorder.summary.best,
        }
        self.saver.save(progress, best=best)


def _is_due(every: int, step: int) -> bool:
    """Whether something done `every` steps comes after `step`; never when `every` is 0."""
    return every > 0 and step % every == 0


@dataclass(slots=True, kw_only=True)
class TrainStep:
    """One optimizer step, to be called again and again, and everything that it changes.

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
        speed, recipe, optim = self.config.speed, self.config.recipe, self.config.optim
        layout = torch.channels_last if speed.channels_last else torch.contiguous_format
        losses, scores = [], []
        for part in range(speed.accumulate):
            images, targets = next(batches)
            if recipe.mixup or recipe.cutmix:
                seed = (self.config.seed, self.count, part, self.rank)
                images, targets = mix_batch(images, targets, recipe, self.task.num_classes, seed)
            images = images.contiguous(memory_format=layout)
            with last_only(self.model, last=part == speed.accumulate - 1):
                with self.autocast:
                    outputs = self.model(images)
                    self.task.check(outputs, images)
                    loss = self.task.loss(outputs, targets) / speed.accumulate
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            scores.append(self.task.score(outputs.detach(), targets))
            del images, targets, outputs, loss  # the next part and the optimizer want the memory

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
        return torch.stack(losses).sum(), torch.stack(scores).sum(0)

    def stateful(self) -> dict[str, Stateful]:
        """Return everything that a step changes and a checkpoint holds, by name."""
        parts: dict[str, Stateful] = {
            "net": self.net,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }
        return parts if self.ema is None else {**parts, "ema": self.ema}


def prepare(config: TrainConfig, data: Data, world: World, precision: str) -> Trainer:
    """Build everything, at its beginning or, with --resume, where the last checkpoint left it."""
    task = choose_task(config, data)
    _check(config, data, task)
    check_fsdp(config, world, precision)
    check_backend(config.speed.scoring_backend, world.device)
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
        "size": config.data.val_size or data.size,  # that it is to be used at
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
    for note in (*built.notes, *described(config.recipe.recipe)):
        recorder.say(note)
    return Trainer(
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


def build_step(
    config: TrainConfig, net: nn.Module, task: Task, world: World, precision: str, total_steps: int
) -> TrainStep:
    """Put `net` on its device, and everything around it that moves it.

    One step of any network, outside of any run:

    >>> from pathlib import Path
    >>> from h5feed.train.models import Network, build_model
    >>> config = TrainConfig(train=Path("photos.h5"))
    >>> net = Network(build_model("resnet9-small", 2), mean=(120,) * 3, std=(60,) * 3)
    >>> world = World(rank=0, size=1, device=torch.device("cpu"))
    >>> task = make_task("classification", config.loss, 2)
    >>> step = build_step(config, net, task, world, "fp32", total_steps=100)
    >>> images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    >>> loss, score = step(iter([(images, torch.tensor([0, 1, 0, 1]))]))
    >>> loss.shape, score[1].item(), step.count
    (torch.Size([]), 4, 1)
    """
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
