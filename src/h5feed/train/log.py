"""What is known of a run: read from the device seldom, shown, and written into its folder."""

import csv
import io
import json
import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h5feed.disk import replaced
from h5feed.errors import H5FeedError, UsageError
from h5feed.optional import require
from h5feed.progress import Progress
from h5feed.system import held_memory
from h5feed.train.config import TrainConfig, write_config
from h5feed.train.distributed import World
from h5feed.train.loaders import Batch
from h5feed.train.tasks import Scored, Task

__all__ = [
    "BEST",
    "CONFUSION",
    "CURVES",
    "LAST",
    "METRICS",
    "PER_CLASS",
    "PREDICTIONS",
    "LossError",
    "Meter",
    "MetricsLog",
    "Recorder",
    "Summary",
    "check_folder",
    "class_name",
    "kept_checkpoints",
    "memory_mb",
    "read_metrics",
]


class LossError(H5FeedError):
    """The loss became NaN or infinite.

    >>> from h5feed.errors import H5FeedError
    >>> issubclass(LossError, H5FeedError)
    True
    """


@dataclass(slots=True, kw_only=True)
class Summary:
    """How a run went.

    >>> summary = Summary(out=Path("run"), metric="accuracy", val={"loss": 0.4, "accuracy": 0.9})
    >>> summary.val[summary.metric]
    0.9
    """

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
        if scored.per_class is not None:
            self._log.write_per_class(scored.per_class, self._classes)
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


METRICS, CURVES = "metrics.jsonl", "curves.png"
CONFUSION, PREDICTIONS, PER_CLASS = "confusion.png", "predictions.png", "per_class.csv"
LAST, BEST = "last.pt", "best.pt"


def check_folder(config: TrainConfig) -> None:
    """Raise UsageError where --out cannot become this run's folder; nothing in it is changed.

    Where it holds a run already, --resume or --overwrite has to be given.
    """
    out = config.out
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file: name a folder")
    if config.overwrite and not config.resume:
        return
    saved, logged = (out / LAST).exists(), bool(read_metrics(out / METRICS))
    if (saved or logged) and not config.resume:
        go_on = "go on with --resume, " if saved else ""
        raise UsageError(
            f"--out {out} holds a run already: {go_on}replace it with --overwrite, or name another "
            "folder"
        )


def class_name(classes: Sequence[str], number: int) -> str:
    """Return the name of a class, or its number where it has none.

    >>> class_name(("cat", "dog"), 1), class_name((), 1)
    ('dog', '1')
    """
    return classes[number] if number < len(classes) else str(number)


def kept_checkpoints(out: Path) -> list[Path]:
    """Return the checkpoints that --keep-last kept in `out`, the oldest first."""
    return sorted(out.glob("step-" + "[0-9]" * 8 + ".pt"))


class MetricsLog:
    """metrics.jsonl, one line per reading, and the same for TensorBoard and Weights & Biases.

    Each line has `kind` ("train" or "val"), `step`, `epoch` and the values' names. Only the main
    process writes.
    """

    def __init__(self, config: TrainConfig, world: World, *, step: int) -> None:
        """`step` is where the run continues, 0 for a new one. Nothing is written yet."""
        self._config, self._step = config, step
        self._path = config.out / METRICS if world.is_main else None
        self._boards: list[TensorBoard | WandB] = []
        if config.debug.wandb and world.is_main:
            require("wandb", "wandb")  # missed now, and not after the first step

    def begin(self) -> None:
        """Make the folder this run's: delete what an older run left, and write config.json.

        Call it when the first step is done, so that a run that cannot start costs nothing. In a
        resumed run everything logged after `step` is deleted, because it will be logged again.
        """
        if self._path is None:
            return
        config, out = self._config, self._config.out
        try:
            # What was asked of this call alone would, read back, replace a run unasked.
            write_config(replace(config, resume=False, overwrite=False), out / "config.json")
            kept: list[dict[str, Any]] = []
            if config.resume:
                kept = [line for line in read_metrics(self._path) if line["step"] <= self._step]
            with replaced(self._path) as file:
                file.write("".join(json.dumps(line) + "\n" for line in kept).encode())
            if not config.resume:
                for name in (LAST, BEST, CURVES, CONFUSION, PREDICTIONS, PER_CLASS):
                    # Last of all: after a full disk the run can still be resumed.
                    (out / name).unlink(missing_ok=True)
            for path in kept_checkpoints(out):
                if not config.resume or int(path.stem.removeprefix("step-")) > self._step:
                    path.unlink()
        except OSError as ex:
            said = f"--out {out} could not be written: {ex.strerror}"
            raise H5FeedError(f"{said}. Make room, or name another folder") from ex
        if config.debug.tensorboard:
            with suppress(ImportError):  # on by default, but optional
                self._boards.append(TensorBoard(out, self._step))
        if config.debug.wandb:
            self._boards.append(WandB(config))

    def write_per_class(self, columns: Mapping[str, Tensor], classes: Sequence[str]) -> None:
        """Replace per_class.csv by what a scoring found, a line for each class.

        `columns` are (C,) each, a count and then shares, of which the cells of NaN stay empty.
        """
        if self._path is None:
            return
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(["class", *columns])
        rows = torch.stack(tuple(columns.values()), 1).tolist()
        for number, (count, *shares) in enumerate(rows):
            cells = ["" if math.isnan(share) else f"{share:.4f}" for share in shares]
            lines.writerow([class_name(classes, number), round(count), *cells])
        try:
            with replaced(self._path.with_name(PER_CLASS)) as file:
                file.write(text.getvalue().encode())
        except OSError as ex:
            raise H5FeedError(
                f"{self._path.with_name(PER_CLASS)} could not be written: {ex.strerror}. Make "
                "room, and go on with --resume"
            ) from ex

    def write(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        """Append one line, at once on disk; H5FeedError where the disk is full."""
        if self._path is None:
            return
        try:
            with self._path.open("a") as file:
                entry = {"kind": kind, "step": step, "epoch": epoch, **values}
                file.write(json.dumps(entry) + "\n")
        except OSError as ex:
            raise H5FeedError(
                f"{self._path} could not be written: {ex.strerror}. Make room, and go on with "
                "--resume"
            ) from ex
        for board in self._boards:
            board.write(step, {f"{kind}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        """Finish what TensorBoard and Weights & Biases were given."""
        for board in self._boards:
            board.close()


class TensorBoard:
    """TensorBoard's files, in the folder tensorboard of a run."""

    def __init__(self, out: Path, step: int) -> None:
        """`step` is where the run continues. Raises ImportError without TensorBoard."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a value to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, of the project that --wandb names; ImportError without it."""

    def __init__(self, config: TrainConfig) -> None:
        """With --resume, the run there whose id is in the file wandb-run of the folder goes on."""
        wandb = require("wandb", "wandb")
        path, known = config.out / "wandb-run", None
        if config.resume and path.exists():
            known = path.read_text().strip()
        self._run: Any = wandb.init(
            project=config.debug.wandb,
            name=config.out.resolve().name,
            dir=str(config.out),
            config=json.loads(json.dumps(asdict(config), default=str)),
            id=known,
            resume="allow",
        )
        # Steps of our own: its counter only rises, and would drop what a resumed run makes again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        path.write_text(f"{self._run.id}\n")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a value to each curve."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Send what is left, and end the run there."""
        self._run.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; without the last one if a kill cut it short.

    Raises UsageError for another line that is none of ours.

    >>> with Path("metrics.jsonl").open("w") as file:
    ...     print('{"kind": "train", "step": 20, "epoch": 0, "loss": 1.5}', file=file)
    >>> read_metrics(Path("metrics.jsonl"))
    [{'kind': 'train', 'step': 20, 'epoch': 0, 'loss': 1.5}]
    """
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").split("\n")[:-1]
    return [_entry(path, number, line) for number, line in enumerate(lines, 1)]


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not (isinstance(entry, dict) and isinstance(entry.get("step"), int) and "kind" in entry):
        raise UsageError(
            f"line {number} of {path} is not what train-h5 writes ({line[:40]!r}): take that line "
            "out of the file"
        )
    return entry


def memory_mb(device: torch.device) -> float:
    """Megabytes that this process holds now: of the GPU at its highest, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return (held_memory() or 0) / 1e6  # None outside Linux
