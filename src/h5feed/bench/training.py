"""bench-h5 train: what each loader leaves of the speed that the model could train at.

The step is the trainer's own. The ceiling is the same step fed with one batch that is on the device
already. From the time t of a step with a real loader, and t_synthetic without one:

    accelerator utilization  AU = total_compute_time / total_benchmark_running_time
                                = t_synthetic / t          (MLPerf Storage's definition [1])
    input-bound share        1 − t_synthetic / t

The first steps are left out, as there. On a CPU the loader and the model compete for the same
cores, so that what a loader computes counts as waiting, too. Packing pays for itself after
seconds_to_pack / (seconds per epoch from the folder − seconds per epoch packed) epochs.

[1] https://github.com/mlcommons/storage/blob/main/Submission_guidelines.md
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from h5feed.bench.compare import (
    CompareOptions,
    Contestant,
    contestants,
    crop_in_words,
    entries,
    facts,
    report_of,
    settings,
    stored_side,
)
from h5feed.bench.report import Comparison
from h5feed.bench.rounds import Outcome, run
from h5feed.errors import UsageError
from h5feed.feed.files import PackedFiles
from h5feed.packing.run import pack
from h5feed.train.config import ModelConfig, OptimConfig, SpeedConfig, TrainConfig, read_config
from h5feed.train.data import Data
from h5feed.train.loaders import Batch, SyntheticLoader, random_batch
from h5feed.train.trial import Trial, endless, open_trial

__all__ = [
    "Synthetic",
    "TrainOptions",
    "Trained",
    "TrainerSteps",
    "break_even_epochs",
    "seconds_to_pack",
    "tiny",
    "train",
]

Tell = Callable[[str], None]
_SAMPLE = 256  # images packed to learn how long packing takes
_TRAINED = "h5feed.bench.training:Trained"
_ENDLESS = sys.maxsize  # batches of a synthetic epoch: its end would cost something


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What is trained."""

    model: str = "auto"
    """tiny, a model of train-h5 (resnet18, …), torchvision:NAME, timm:NAME or module:function.
    auto: tiny on a CPU, resnet18 on a GPU."""

    def chosen(self, device: str) -> str:
        """Return the model that `model` means on `device`."""
        if self.model != "auto":
            return self.model
        return "resnet18" if device == "cuda" else "tiny"


def _trained(params: dict[str, Any], side: int | None) -> tuple[Contestant, ...]:
    """Each loader with a model behind it, and the synthetic ceiling."""
    loaders = tuple(
        replace(one, factory=_TRAINED, params=one.params | params | {"inner": one.factory})
        for one in contestants(side)
        if not one.ceiling
    )
    synthetic = Contestant(
        "synthetic batches", "h5feed.bench.training:Synthetic", ceiling=True, params=params
    )
    return (*loaders, synthetic)


def seconds_to_pack(file: Path, images: Path) -> float | None:
    """Pack a sample of `images` with the file's own options and return seconds for all of it.

    None where the file was packed with options that a sample cannot repeat (a manifest, masks).
    """
    index = PackedFiles([file])
    options = dict(index.provenance.get("options", {}))
    if options.pop("manifest", None) or options.pop("masks", None) or not options:
        return None
    step = max(len(index) // _SAMPLE, 1)
    keys = [index.key(i) for i in range(0, len(index), step)]
    with tempfile.TemporaryDirectory() as scratch:
        for key in keys:
            link = Path(scratch, "images", key)
            link.parent.mkdir(parents=True, exist_ok=True)
            os.symlink((images / key).resolve(), link)
        start = time.perf_counter()
        pack(Path(scratch, "images"), Path(scratch, "sample.h5"), **_repeatable(index, options))
        return (time.perf_counter() - start) * len(index) / len(keys)


def _repeatable(index: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options as `pack` takes them, with the size that "auto" came to."""
    spec = index.specs["images"]
    if spec.encoding != "original":
        options |= {"size": (spec.height, spec.width), "any_size": True}
    return options | {"background": tuple(options["background"])}


def break_even_epochs(
    pack_seconds: float, images: int, unpacked_rate: float, packed_rate: float
) -> float | None:
    """Return after how many epochs packing has paid for itself; None: never.

    >>> break_even_epochs(40.0, 1000, unpacked_rate=100.0, packed_rate=500.0)
    5.0
    """
    saved = images / unpacked_rate - images / packed_rate
    return pack_seconds / saved if saved > 0 else None


def _break_even(file: Path, options: CompareOptions, outcomes: list[Outcome]) -> dict[str, Any]:
    """What packing costs and when it is earned back, if the folder was measured."""
    if options.images is None:
        return {}
    rates = {o.name: o.rate for o in outcomes if not o.ceiling and o.rate}
    today = rates.get(next(one.name for one in contestants() if one.reads == "folder"))
    seconds = seconds_to_pack(file, options.images)
    if seconds is None or today is None:
        return {}
    count = len(PackedFiles([file]))
    return {
        "pack_seconds": seconds,
        "break_even_epochs": {
            name: break_even_epochs(seconds, count, today, rate)
            for name, rate in rates.items()
            if rate != today
        },
    }


def train(
    file: Path, options: CompareOptions, given: TrainOptions, tell: Tell = lambda _: None
) -> Comparison:
    """Train with every loader in turn and return the report.

    Raises:
        UsageError: A wrong option.
        SubjectError: A loader or the model failed.
    """
    options.check()
    if options.sweep:
        raise UsageError("sweep is for loaders alone: leave it out with train")
    files = PackedFiles([file])
    options = options.for_file(files)
    ((_, workers),) = settings(options, len(files))
    model = given.chosen(options.where)
    params = {"model": model, "outputs": max(len(files.classes), 2)}
    schedule = replace(options.schedule, cold=0.0)
    with tempfile.TemporaryDirectory(prefix="bench-h5-") as small:
        among = _trained(params, stored_side(files))
        taking_part, left_out = entries(among, files, options, workers, Path(small))
        outcomes = run(taking_part, schedule, tell)
    known = facts(file, options) | {"model": model} | _break_even(file, options, outcomes)
    title = (
        f"Training {model} on {len(files):,} images "
        f"({files.specs['images'].encoding}), crop {crop_in_words(files, options)}, batches of "
        f"{options.batch}, {workers} workers, on {options.where}"
    )
    return report_of(title, outcomes, left_out, known, len(files), kind="training")


def tiny(num_outputs: int) -> nn.Module:
    """Return a model for CPUs: patches of 8 × 8, two strided convolutions.

    Two cores train it at about as many images a second as one GPU a ResNet-50: so the loaders
    matter as much as they would there.
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, 8, stride=8),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_outputs),
    )


class _TrainingSubject:
    """Batches, each handed on once the trainer has made a step with it."""

    dtype = "uint8"
    layout = "NCHW"
    note = ""
    trial: Trial | None = None

    def __init__(self) -> None:
        self.files: list[str] = []
        self._stack = ExitStack()

    def open(self, config: TrainConfig, data: Data | None = None) -> Trial:
        """Build the trainer's step; it lasts until `close`."""
        self.trial = self._stack.enter_context(open_trial(config, data))
        return self.trial

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.trial is not None and self.trial.world.device.type == "cuda":
            torch.cuda.synchronize(self.trial.world.device)

    def close(self) -> None:
        """Let the trainer go."""
        self._stack.close()


def _open_made_up(subject: _TrainingSubject, params: Mapping[str, Any]) -> Trial:
    """Open a trainer that asks no file what it holds: any batch can be made a step with."""
    name, on_gpu = params["model"], params["device"] != "cpu"
    config = TrainConfig(
        train=Path(params["file"]),
        batch_size=params["batch_size"],
        device=params["device"],
        model=ModelConfig(model="h5feed.bench.training:tiny" if name == "tiny" else name),
        optim=OptimConfig(optimizer="sgd", lr=1e-3),
        speed=SpeedConfig(precision="bf16" if on_gpu else "fp32"),
    )
    size, count, outputs = params["crop"], params["batch_size"], params["outputs"]
    device = torch.device(params["device"])
    batch = random_batch("classification", outputs, count, size, 0, device)
    data = Data(
        task="classification",
        num_outputs=outputs,
        mean=(0.0,) * 3,
        std=(255.0,) * 3,
        size=size,
        train_loader=lambda _: SyntheticLoader(batch, _ENDLESS),
    )
    return subject.open(config, data)


class Trained(_TrainingSubject):
    """A loader's subject with the trainer's step behind it."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self._outputs = params["outputs"]
        self._trial = _open_made_up(self, params)
        module, _, attribute = params["inner"].partition(":")
        self.inner = getattr(importlib.import_module(module), attribute)(params)
        self.dtype, self.layout = self.inner.dtype, self.inner.layout
        self.note, self.files = self.inner.note, self.inner.files

    def epoch(self) -> Iterator[Batch]:
        """Yield each batch once the model was trained on it."""
        for images, labels in self.inner.epoch():
            self._trial.step(iter(((images, self._targets(images, labels)),)))
            yield images, labels

    def _targets(self, images: Tensor, labels: Tensor) -> Tensor:
        """Labels of any kind cost the same: unlabeled images and masks count as class 0."""
        if labels.ndim == 1 and not labels.is_floating_point():
            return labels.to(images.device, torch.int64).clamp(0, self._outputs - 1)
        return torch.zeros(len(images), dtype=torch.int64, device=images.device)

    def close(self) -> None:
        """Close the loader."""
        self.inner.close()
        super().close()


class Synthetic(_TrainingSubject):
    """The ceiling: the same batch again and again, already on the device."""

    note = "one batch, already on the device"

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self.files = [params["file"]]
        trial = _open_made_up(self, params)
        self._step, self._loader = trial.step, trial.data.train_loader(trial.data.size)

    def epoch(self) -> Iterator[Batch]:
        """Train on the batch, endlessly."""
        for batch in self._loader:
            self._step(iter((batch,)))
            yield batch


_AVERAGED = 5
"""The last fifth of the counted steps makes the final loss."""


class TrainerSteps(_TrainingSubject):
    """Trains from `params["config"]` (a config.json), and yields each batch once it was used.

    `params["final_steps"]`: after how many steps the loss is looked at, for all rows alike; 0
    for never.
    Built when the first batch is asked for, so that rows compile one after another and share
    what the compiler keeps on the disk.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self._config = read_config(Path(params["config"]))
        self._final_steps: int = params["final_steps"]
        self._losses: list[Tensor] = []
        self._steps = 0
        self.files = [str(self._config.train)]

    def epoch(self) -> Iterator[Batch]:
        """Yield the batches of one epoch, each after the step made with it."""
        if self.trial is None:
            trial = self.open(self._config)
            self._loader = trial.data.train_loader(trial.data.size)
            self._epoch = 0
        else:
            self._epoch += 1
            self._loader.set_epoch(self._epoch)
        try:
            for batch in self._loader:
                self._train(batch)
                yield batch
        finally:
            self._give_back()

    def _train(self, batch: Batch) -> None:
        assert self.trial is not None
        loss, _ = self.trial.step(iter((batch,)))
        self._steps += 1
        if self._steps <= self._final_steps:
            self._losses.append(loss)
        if self._steps % self._config.debug.log_every == 0:
            loss.item()

    def _give_back(self) -> None:
        """Leave the GPU's memory to the next row; weights and optimizer state stay."""
        if self.trial is not None and self.trial.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def extra(self) -> dict[str, Any]:
        """Return the final loss, making the steps that are missing to it, and the GPU's peak."""
        batches = endless(self._loader)
        while self._steps < self._final_steps:
            self._train(next(batches))
        batches.close()
        last = self._losses[-max(1, self._final_steps // _AVERAGED) :]
        peak = None
        if self.trial is not None and self.trial.world.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.trial.world.device)
        return {
            "final_loss": torch.stack(last).mean().item() if last else None,
            "device_bytes": peak,
        }
