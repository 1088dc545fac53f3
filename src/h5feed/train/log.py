"""A run's folder: its configuration, its metrics, and nothing of an older run."""

import csv
import io
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h5feed.disk import replaced
from h5feed.errors import H5FeedError, UsageError
from h5feed.optional import require
from h5feed.train.config import TrainConfig
from h5feed.train.configfile import write_config
from h5feed.train.distributed import World

__all__ = [
    "BEST",
    "CONFUSION",
    "CURVES",
    "LAST",
    "METRICS",
    "PER_CLASS",
    "PREDICTIONS",
    "MetricsLog",
    "check_folder",
    "class_name",
    "kept_checkpoints",
    "memory_mb",
    "read_metrics",
]

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
    """Return the name of a class, or its number where it has none."""
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
        """`step` is the one that is gone on from, 0 for a new run. Nothing is written yet."""
        self._config, self._step = config, step
        self._path = config.out / METRICS if world.is_main else None
        self._boards: list[TensorBoard | WandB] = []
        if config.debug.wandb and world.is_main:
            require("wandb", "wandb")  # missed now, and not after the first step

    def begin(self) -> None:
        """Make the folder this run's: what an older one left goes, config.json is written.

        To be called when the first step is done, so that a run that cannot be begun costs
        nothing. Of a resumed run, what was logged and kept after `step`, which it makes again, is
        taken out.
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
                    # Last of all: a full disk leaves what can be gone on with.
                    (out / name).unlink(missing_ok=True)
            for path in kept_checkpoints(out):
                if not config.resume or int(path.stem.removeprefix("step-")) > self._step:
                    path.unlink()
        except OSError as ex:
            said = f"--out {out} could not be written: {ex.strerror}"
            raise H5FeedError(f"{said}. Make room, or name another folder") from ex
        if config.debug.tensorboard:
            with suppress(ImportError):  # on by default, and needed by nobody
                self._boards.append(TensorBoard(out, self._step))
        if config.debug.wandb:
            self._boards.append(WandB(config))

    def write_per_class(self, confusion: Tensor, classes: Sequence[str], *, dense: bool) -> None:
        """Replace per_class.csv by what a scoring found, a line for each class.

        `confusion` are images (pixels, where `dense`) by true and by predicted class, (C, C);
        classes that neither occur nor are predicted have no share, and their cells stay empty.
        """
        if self._path is None:
            return
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        found, true = confusion.diagonal().double(), confusion.sum(1).double()
        predicted = confusion.sum(0).double()
        last = found / (true + predicted - found) if dense else 2 * found / (true + predicted)
        lines.writerow(
            ["class", "pixels", "precision", "recall", "iou"]
            if dense
            else ["class", "images", "precision", "recall", "f1"]
        )
        shares = torch.stack((found / predicted, found / true, last), 1).tolist()
        for number, (count, row) in enumerate(zip(true.tolist(), shares, strict=True)):
            cells = ["" if math.isnan(share) else f"{share:.4f}" for share in row]
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
        """`step` is the one that is gone on from. Raises ImportError without TensorBoard."""
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
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no such file outside Linux
        return 0.0
    return pages * 4096 / 1e6
