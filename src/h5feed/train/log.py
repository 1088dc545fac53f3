"""A run's folder: its configuration, its metrics, and nothing of an older run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from h5feed.errors import UsageError
from h5feed.train.config import TrainConfig
from h5feed.train.configfile import write_config
from h5feed.train.distributed import World

__all__ = ["LAST", "METRICS", "MetricsLog", "memory_mb", "open_run", "read_metrics"]

METRICS = "metrics.jsonl"
LAST, BEST = "last.pt", "best.pt"


def open_run(config: TrainConfig, world: World) -> Path:
    """Make the run's folder ready and return it; all processes call it together.

    Raises UsageError where it holds a run already and neither --resume nor --overwrite is given.
    """
    out = config.out
    begun = (out / LAST).exists() or bool(read_metrics(out / METRICS))
    if begun and not (config.resume or config.overwrite):
        raise UsageError(
            f"--out {out} holds a run already: go on with --resume, replace it with --overwrite, "
            "or name another folder"
        )
    world.gather(None)  # nobody writes before everybody has looked
    if world.is_main:
        out.mkdir(parents=True, exist_ok=True)
        if not config.resume:
            for name in (METRICS, LAST, BEST):
                (out / name).unlink(missing_ok=True)
        # What was asked of this call alone would, read back, replace a run unasked.
        write_config(replace(config, resume=False, overwrite=False), out / "config.json")
    return out


class MetricsLog:
    """metrics.jsonl, one line per reading, and TensorBoard's files where it is installed.

    Each line has `kind` ("train" or "val"), `step`, `epoch` and the values' names. Steps after
    `step`, which a resumed run makes again, are taken out first. Only the main process writes.
    """

    def __init__(self, out: Path, world: World, *, step: int, tensorboard: bool) -> None:
        self._path = out / METRICS if world.is_main else None
        self._board: Any = None
        if self._path is None:
            return
        kept = [line for line in read_metrics(self._path) if line["step"] <= step]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        if tensorboard:
            self._board = _summary_writer(out, step)

    def write(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        """Append one line, at once on disk."""
        if self._path is None:
            return
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, "epoch": epoch, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Finish TensorBoard's file."""
        if self._board is not None:
            self._board.close()


def _summary_writer(out: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; without the last one if a kill cut it short."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def memory_mb(device: torch.device) -> float:
    """Megabytes that this process holds now: of the GPU at its highest, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no such file outside Linux
        return 0.0
    return pages * 4096 / 1e6
