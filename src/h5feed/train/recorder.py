"""What is known of a run while it goes on: read from the device seldom, shown and written."""

import math
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from h5feed.errors import H5FeedError
from h5feed.progress import Progress
from h5feed.train.config import TrainConfig
from h5feed.train.distributed import World
from h5feed.train.evaluate import Scored
from h5feed.train.log import LAST, MetricsLog, memory_mb
from h5feed.train.step import Batch
from h5feed.train.tasks import Task

__all__ = ["LossError", "Meter", "Recorder", "Summary"]


class LossError(H5FeedError):
    """The loss became NaN or infinite."""


@dataclass(slots=True, kw_only=True)
class Summary:
    """How a run went."""

    out: Path
    """Its folder."""
    metric: str
    """Name of the task's metric."""
    steps: int = 0
    """Optimizer steps done, those before a resume included."""
    train: dict[str, float] = field(default_factory=dict)
    """The last reading of the training loss and what goes with it."""
    val: dict[str, float] = field(default_factory=dict)
    """The last scoring: loss and metric."""
    best: float | None = None
    """The best metric of all scorings."""
    seconds: float = 0.0
    """Of training and scoring, without what came before the first step."""


class Meter:
    """Loss and score since the last reading, as sums that stay on the device."""

    def __init__(self, task: Task, world: World) -> None:
        self._task, self._world = task, world
        self.steps = 0
        self._loss: Tensor | None = None
        self._score: Tensor | None = None

    def add(self, loss: Tensor, score: Tensor) -> None:
        """Count a step by device tensors without graph; does not wait for the device."""
        self.steps += 1
        self._loss = loss if self._loss is None else self._loss + loss
        self._score = score if self._score is None else self._score + score

    def loss(self) -> float:
        """Wait for the device; return the mean loss of all processes."""
        assert self._loss is not None
        mean = self._loss / (self.steps * self._world.size)
        return float(self._world.add_up(mean))

    def read(self) -> tuple[float, float]:
        """Wait for the device; return mean loss and metric of all processes, and start anew."""
        assert self._score is not None
        loss = self.loss()
        metric = self._task.value(self._world.add_up(self._score))
        self.steps, self._loss, self._score = 0, None, None
        return loss, metric


class Recorder:
    """Shows a run on a progress line and writes its metrics, on the main process alone."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        world: World,
        *,
        done: int,
        total: int,
        best: float | None,
        classes: Sequence[str] = (),
    ) -> None:
        """`done` and `total` are optimizer steps, `best` the best metric before them."""
        self._config, self._task, self._world = config, task, world
        self._epochs, self._classes = config.epochs, classes
        self.last_scored: Scored | None = None
        self._meter = Meter(task, world)
        self._log = MetricsLog(config, world, step=done)
        self._begun = False
        self._progress = Progress(
            total * config.batch_size,
            "train",
            show=world.is_main,
            done=done * config.batch_size,
        )
        self._waited = 0.0
        self._began = self._read = time.perf_counter()
        self.summary = Summary(out=config.out, metric=task.metric, steps=done, best=best)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.summary.seconds = time.perf_counter() - self._began
        self._progress.close()
        self._log.close()

    def say(self, text: str) -> None:
        """Show one line."""
        self._progress.say(text)

    def waiting(self, batches: Iterable[Batch]) -> Generator[Batch]:
        """Yield from `batches`, counting the seconds until each is there."""
        source = iter(batches)
        while True:
            began = time.perf_counter()
            batch = next(source, None)
            self._waited += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def add(self, loss: Tensor, score: Tensor) -> None:
        """Count a step without waiting for the device; the first one begins the run's folder."""
        self._begin()
        self._meter.add(loss, score)
        self._progress.advance(self._config.batch_size)

    def _begin(self) -> None:
        if not self._begun:
            self._log.begin()
            self._begun = True

    def report(self, step: int, epoch: int, lr: float, grad_norm: Tensor | None = None) -> None:
        """Read, write and show the steps since the last report, if any.

        `lr` and `grad_norm` are the last step's; a norm that overflowed is left out. Raises
        LossError when their loss is not a number; in all processes alike.
        """
        steps = self._meter.steps
        if not steps:
            return
        loss, metric = self._meter.read()
        self._check(loss, step, epoch)
        seconds = time.perf_counter() - self._read
        values = {
            "loss": loss,
            self._task.metric: metric,
            "lr": lr,
            "images_per_s": steps * self._config.batch_size / seconds,
            "data_wait": min(1.0, self._waited / seconds),
            "memory_mb": memory_mb(self._world.device),
        }
        if grad_norm is not None and math.isfinite(norm := grad_norm.item()):
            values["grad_norm"] = norm
        self._log.write("train", step, epoch, values)
        self._progress.note(self._note(epoch, values))
        self.summary.steps, self.summary.train = step, values
        self._resume_clock()

    def scored(self, step: int, epoch: int, scored: Scored) -> bool:
        """Write and show a scoring; returns whether its metric is better than all before.

        NaN is not. A run that was resumed in its scoring begins its folder with it.
        """
        self._begin()
        self.last_scored = scored
        loss, metric = scored.loss, scored.metric
        self.summary.val = {"loss": loss, self._task.metric: metric, **scored.also}
        self._log.write("val", step, epoch, self.summary.val)
        if scored.confusion is not None:
            self._log.write_per_class(scored.confusion, self._classes, dense=self._task.dense)
        further = "".join(f", {name} {value:.4f}" for name, value in scored.also.items())
        trained = self.summary.train  # nothing where a resumed run begins with a scoring
        loss_of_training = f"train loss {trained['loss']:.4f}, " if trained else ""
        self._progress.say(
            f"epoch {epoch + 1} of {self._epochs}: {loss_of_training}"
            f"val loss {loss:.4f}, val {self._task.metric} {metric:.4f}{further}"
        )
        self._resume_clock()
        if math.isnan(metric):
            return False
        best = self.summary.best
        if best is not None and not math.isnan(best):
            is_better = metric > best if self._task.higher_is_better else metric < best
            if not is_better:
                return False
        self.summary.best = metric
        return True

    def check_loss(self, step: int, epoch: int) -> None:
        """Raise LossError, as `report` does, and leave the steps to the next report."""
        if self._meter.steps:
            self._check(self._meter.loss(), step, epoch)

    def _check(self, loss: float, step: int, epoch: int) -> None:
        if not math.isfinite(loss):
            raise LossError(self._what_broke(f"loss is {loss}", step, epoch))

    def check_weights(self, finite: bool, step: int, epoch: int) -> None:
        """Raise LossError unless the weights about to be saved are `finite`."""
        if not finite:
            raise LossError(self._what_broke("a weight is NaN or infinite", step, epoch))

    def _resume_clock(self) -> None:
        self._waited, self._read = 0.0, time.perf_counter()

    def _note(self, epoch: int, values: dict[str, float]) -> str:
        return (
            f"epoch {epoch + 1}/{self._epochs}, loss {values['loss']:.4f}, "
            f"{self._task.metric} {values[self._task.metric]:.3f}, "
            f"waiting for data {values['data_wait']:.0%}, {values['memory_mb']:,.0f} MB"
        )

    def _what_broke(self, what: str, step: int, epoch: int) -> str:
        last = self._config.out / LAST
        kept = f"the last good checkpoint is {last}" if last.exists() else "nothing was saved yet"
        return (
            f"{what} at step {step} (epoch {epoch + 1}): {kept}. A smaller --lr, --clip-norm 1, or "
            "with fp16 --precision bf16 may cure it; --debug anomaly shows where it begins"
        )
