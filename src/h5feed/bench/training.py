"""bench-h5 train: what each loader leaves of the speed that the model could train at.

The ceiling is the same model fed with one batch that is on the device already. From the time t of
a step with a real loader, and t_synthetic without one:

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
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
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
from h5feed.store.read import read_index
from h5feed.train.config import read_config
from h5feed.train.models import build_model
from h5feed.train.trial import endless, open_trial

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
    index = read_index(file)
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
    spec = index.extents["images"].spec
    if spec.encoding != "original":
        options |= {"size": (spec.height, spec.width), "any_size": True}
    return options | {"background": tuple(options["background"])}


def break_even_epochs(
    pack_seconds: float, images: int, unpacked_rate: float, packed_rate: float
) -> float | None:
    """Return after how many epochs packing has paid for itself; None: never."""
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
    count = len(read_index(file))
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
    pixels = PackedFiles([file])
    options = options.for_file(pixels)
    ((_, workers),) = settings(options, len(pixels))
    model = given.chosen(options.where)
    params = {"model": model, "outputs": max(len(pixels.classes), 2)}
    schedule = replace(options.schedule, cold=0.0)
    with tempfile.TemporaryDirectory(prefix="bench-h5-") as small:
        among = _trained(params, stored_side(pixels))
        taking_part, left_out = entries(among, pixels, options, workers, Path(small))
        outcomes = run(taking_part, schedule, tell)
    known = facts(file, options) | {"model": model} | _break_even(file, options, outcomes)
    title = (
        f"Training {model} on {len(pixels):,} images "
        f"({pixels.specs['images'].encoding}), crop {crop_in_words(pixels, options)}, batches of "
        f"{options.batch}, {workers} workers, on {options.where}"
    )
    return report_of(title, outcomes, left_out, known, len(pixels), kind="training")


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


class _Step:
    """A training step: forward, loss, backward, SGD. Channels last; bfloat16 on a GPU."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        name, outputs = params["model"], params["outputs"]
        self.device = torch.device(params["device"])
        model = tiny(outputs) if name == "tiny" else build_model(name, outputs)
        self.model = model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.outputs = outputs
        self._memory = torch.empty(0, device=self.device)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Train on one batch: (B, 3, H, W) uint8 or float in 0…1, labels (B,)."""
        with self._precision():
            outputs = self.model(self._floats(images))
        # Labels of any kind cost the same: unlabeled images and masks count as class 0.
        wanted = labels if labels.ndim == 1 and not labels.is_floating_point() else None
        target = torch.zeros(len(images), dtype=torch.int64, device=self.device)
        if wanted is not None:
            target = wanted.to(self.device, torch.int64).clamp(0, self.outputs - 1)
        loss = nn.functional.cross_entropy(outputs.float(), target)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def _floats(self, images: Tensor) -> Tensor:
        """Return the batch as channels_last floats in 0…1, bytes in memory used again.

        Fresh memory would cost a CPU as much as the rest of the step: 10,000 page faults, 20 of
        35 ms, in one process and not in the next; a GPU's allocator gives the same again.
        """
        if images.dtype != torch.uint8:
            return images.contiguous(memory_format=torch.channels_last)
        if self._memory.shape != images.shape:
            self._memory = torch.empty(
                images.shape, device=self.device, memory_format=torch.channels_last
            )
        return self._memory.copy_(images).div_(255)

    def _precision(self) -> AbstractContextManager[Any]:
        if self.device.type != "cuda":
            return nullcontext()
        return torch.autocast("cuda", torch.bfloat16)


def _inner(params: Mapping[str, Any]) -> Any:
    module, _, attribute = params["inner"].partition(":")
    return getattr(importlib.import_module(module), attribute)(params)


class Trained:
    """A loader's subject with a training step behind it."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.inner = _inner(params)
        self.step = _Step(params)
        self.dtype, self.layout = self.inner.dtype, self.inner.layout
        self.note, self.files = self.inner.note, self.inner.files

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield each batch once the model was trained on it."""
        for images, labels in self.inner.epoch():
            self.step(images, labels)
            yield images, labels

    def synchronize(self) -> None:
        """Wait for the device."""
        self.inner.synchronize()

    def close(self) -> None:
        """Close the loader."""
        self.inner.close()


class Synthetic:
    """The ceiling: the same batch again and again, already on the device."""

    dtype = "uint8"
    layout = "NCHW"
    note = "one batch, already on the device"

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.step = _Step(params)
        self.files = [params["file"]]
        shape = (params["batch_size"], 3, params["crop"], params["crop"])
        device = self.step.device
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        # As the model wants it: a ceiling that rearranged its pixels first would be none.
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, params["outputs"], shape[:1], device=device)

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Train on the batch, endlessly."""
        while True:
            self.step(self.images, self.labels)
            yield self.images, self.labels

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)

    def close(self) -> None:
        """There is nothing to close."""


_AVERAGED = 5
"""The last fifth of the counted steps makes the final loss."""


class TrainerSteps:
    """Trains from `params["config"]` (a config.json), and yields each batch once it was used.

    `params["final_steps"]`: after how many steps the loss is looked at, for all rows alike; 0
    for never.
    Built when the first batch is asked for, so that rows compile one after another and share
    what the compiler keeps on the disk.
    """

    dtype = "uint8"
    layout = "NCHW"
    note = ""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._config = read_config(Path(params["config"]))
        self._final_steps: int = params["final_steps"]
        self._stack = ExitStack()
        self._trial: Any = None
        self._losses: list[Tensor] = []
        self._steps = 0
        self.files = [str(self._config.train)]

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of one epoch, each after the step made with it."""
        if self._trial is None:
            self._trial = self._stack.enter_context(open_trial(self._config))
            self._loader = self._trial.data.train_loader(self._trial.data.size)
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

    def _train(self, batch: Any) -> None:
        loss, _ = self._trial.step(iter((batch,)))
        self._steps += 1
        if self._steps <= self._final_steps:
            self._losses.append(loss)
        if self._steps % self._config.debug.log_every == 0:
            loss.item()

    def _give_back(self) -> None:
        """Leave the GPU's memory to the next row; weights and optimizer state stay."""
        if self._trial.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._trial is not None and self._trial.world.device.type == "cuda":
            torch.cuda.synchronize(self._trial.world.device)

    def extra(self) -> dict[str, Any]:
        """Return the final loss, making the steps that are missing to it, and the GPU's peak."""
        batches = endless(self._loader)
        while self._steps < self._final_steps:
            self._train(next(batches))
        batches.close()
        last = self._losses[-max(1, self._final_steps // _AVERAGED) :]
        device = self._trial.world.device
        cuda = device.type == "cuda"
        return {
            "final_loss": torch.stack(last).mean().item() if last else None,
            "device_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        }

    def close(self) -> None:
        """Let the trainer go."""
        self._stack.close()
