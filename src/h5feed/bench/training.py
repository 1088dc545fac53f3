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

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from h5feed.bench.compare import crop_in_words, facts, report_of, settings
from h5feed.bench.contestants import Contestant, contestants, entries
from h5feed.bench.options import CompareOptions, stored_side
from h5feed.bench.outcomes import Outcome
from h5feed.bench.report import Report
from h5feed.bench.rounds import run
from h5feed.errors import UsageError
from h5feed.feed.files import PackedFiles
from h5feed.packing.run import pack
from h5feed.store.read import read_index

__all__ = ["TrainOptions", "break_even_epochs", "seconds_to_pack", "train"]

Tell = Callable[[str], None]
_SAMPLE = 256  # images packed to learn how long packing takes
_TRAINED = "h5feed.bench.trained:Trained"


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
        "synthetic batches", "h5feed.bench.trained:Synthetic", ceiling=True, params=params
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
) -> Report:
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
