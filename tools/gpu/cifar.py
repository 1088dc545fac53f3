"""CIFAR-10 to a target accuracy: seconds of training and scoring, without compilation.

What runs is the trainer's own step, schedule, average and scoring. The step is compiled and tried
first and put back; then each seed begins with new weights, and the clock runs from the whitening
of the first layer to the last scoring, reading and augmenting included.
"""

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu.speednet import SpeedNet
from h5feed import H5Dataset
from h5feed.train.config import (
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RecipeConfig,
    ScheduleConfig,
    SpeedConfig,
    TrainConfig,
)
from h5feed.train.data import Data, open_data
from h5feed.train.finetune import build_network
from h5feed.train.models import Network
from h5feed.train.precision import for_scoring
from h5feed.train.tasks import evaluate
from h5feed.train.trial import Trial, endless, kept, open_trial
from harness import wait_for

__all__ = ["recipe", "train_seeds"]

ANCHORS = "airbench 94 % in 2.6 s; hlb-CIFAR10 94 % in 6.3 s; FFCV 92.6 % in 36 s (all on one A100)"
_WARMUP_STEPS = 5
_WHITENED_BY = 5000
"""Images, as many as there."""


def recipe(train: Path, val: Path, *, epochs: int, on_gpu: bool) -> TrainConfig:
    """Return the recipe: airbench94's network, rate, momentum, decay, crop and label smoothing.

    Other than there, a plain average of the weights takes Lookahead's place, mirroring is
    random rather than alternating, and scoring sees the mirror image alone: so it takes some
    epochs more.
    """
    small = not on_gpu
    return TrainConfig(
        train=train,
        val=val,
        epochs=epochs,
        batch_size=64 if small else 1024,
        device="cuda" if on_gpu else "cpu",
        model=ModelConfig(model=f"gpu.speednet:{'small' if small else 'SpeedNet'}"),
        loss=LossConfig(label_smoothing=0.2),
        data=DataConfig(
            size=32, crop="random-crop", padding=2, residency="stream" if small else "device"
        ),
        recipe=RecipeConfig(test_flip=True, ema=0.98),
        optim=OptimConfig(
            optimizer="sgd",
            lr=1.5,
            lr_scaling="linear",
            lr_batch=1024,
            momentum=0.85,
            weight_decay=1.33e-3,
        ),
        schedule=ScheduleConfig(schedule="linear", warmup=0.23),
        speed=SpeedConfig(
            compile="off" if small else "default",
            scoring_backend="off" if small else "inductor",
        ),
    )


def train_seeds(config: TrainConfig, *, seeds: int, target: float) -> dict[str, Any]:
    """Train once for each seed; returns seconds and accuracies, by seed and on average."""
    probe = replace(config, data=replace(config.data, loader="synthetic"))
    with open_trial(probe) as trial:
        steps = len(trial.data.train_loader(32))
    with open_trial(config, steps=steps * config.epochs) as trial:
        began = time.perf_counter()
        _warm_up(trial)
        warmup = time.perf_counter() - began
        runs = [_run(trial, replace(config, seed=seed), target) for seed in range(seeds)]
    finals = [run["accuracy"] for run in runs]
    reached = [run["seconds_to_target"] for run in runs if run["seconds_to_target"] is not None]
    return {
        "runs": runs,
        "target": target,
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "model": config.model.model,
        "accuracy_mean": statistics.mean(finals),
        "accuracy_stdev": statistics.stdev(finals) if seeds > 1 else None,
        "seconds_mean": statistics.mean(run["seconds"] for run in runs),
        "reached": len(reached),
        "seconds_to_target_mean": statistics.mean(reached) if reached else None,
        "compile_and_warmup_seconds": warmup,
        "anchors": ANCHORS,
    }


def _warm_up(trial: Trial) -> None:
    """Compile training and scoring; nothing of it stays."""
    loader = trial.data.train_loader(trial.data.size)
    with kept(trial.step, trial.world, loader):
        batches = endless(loader)
        for _ in range(_WARMUP_STEPS):
            trial.step(batches)
        batches.close()
        _score(trial, trial.data)


def _run(trial: Trial, config: TrainConfig, target: float) -> dict[str, Any]:
    """Train with `config`'s seed on the compiled step, and put it back."""
    step, world = trial.step, trial.world
    data = open_data(config, world)
    loader = data.train_loader(data.size)
    fresh = build_network(config, data).net
    history: list[tuple[int, float, float]] = []
    with kept(step, world):
        wait_for(world.device)
        began = time.perf_counter()
        _whiten(fresh, config.train)
        step.net.load_state_dict(fresh.state_dict())
        if step.ema is not None:
            step.ema.load_state_dict(step.net.state_dict())
        for epoch in range(config.epochs):
            loader.set_epoch(epoch)
            batches = iter(loader)
            for _ in range(len(loader)):
                step(batches)
            accuracy = _score(trial, data)
            history.append((epoch + 1, time.perf_counter() - began, accuracy))
            print(f"seed {config.seed}: epoch {epoch + 1}, {history[-1][1]:.2f} s, {accuracy:.4f}")
    reached = next((seconds for _, seconds, accuracy in history if accuracy >= target), None)
    return {
        "seed": config.seed,
        "seconds": history[-1][1],
        "accuracy": history[-1][2],
        "seconds_to_target": reached,
        "history": history,
    }


def _whiten(net: Network, train: Path) -> None:
    """Set the first layer by some of the images."""
    ds = H5Dataset(train)
    images = torch.stack([ds[index][0] for index in range(min(len(ds), _WHITENED_BY))])
    assert isinstance(net.model, SpeedNet)
    net.model.whiten((images - net.mean) / net.std)


def _score(trial: Trial, data: Data) -> float:
    step, speed = trial.step, trial.config.speed
    assert data.val_loader is not None
    assert step.ema is not None
    with step.ema.swapped_in():
        net = for_scoring(step.net, speed.scoring_backend)
        flip = trial.config.recipe.test_flip
        scored = evaluate(net, data.val_loader, step.task, trial.world, step.autocast, flip=flip)
    return scored.metric
