"""Does packing, or our trainer, cost accuracy? CIFAR-10 both ways, same recipe, several seeds.

    python tools/accuracy_check.py CIFAR            all images; hours on a CPU, minutes on a GPU
    python tools/accuracy_check.py CIFAR --quick    4,000 images, a small network: a few minutes
    python tools/accuracy_check.py CIFAR --quick --against plain

Against `files`, the same trainer reads the class folders; against `plain`, a loop of bare torch
trains from tensors in memory. CIFAR is a folder with train/ and test/ of class folders. Each seed
gives both sides the same weights, and files the same order of images; each draws its own crops.
The difference is the mean over seeds of (packed − the other), with its 95 % interval by Student's
t.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from _torchvision import import_torchvision
from h5feed import pack
from h5feed.bench import system
from h5feed.train import TrainConfig, train
from h5feed.train.config import (
    DataConfig,
    DebugConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
)
from h5feed.train.models import build_model
from harness import link

__all__ = ["interval", "main"]

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom."""


def main(given: Sequence[str] | None = None) -> int:
    """Train both ways for each seed, and print the difference."""
    options = read_options(given)
    import_torchvision()  # for the loader of class folders
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            split: link_some(options.cifar / split, Path(scratch) / split, count)
            for split, count in (("train", options.images), ("test", options.scored))
        }
        packed = {split: Path(scratch) / f"{split}.h5" for split in folders}
        for split, folder in folders.items():
            pack(folder, packed[split], size="32")
        runs = []
        for seed in range(options.seeds):
            out = Path(scratch) / f"run{seed}"
            other = (
                plain_accuracy(folders, seed, options)
                if options.against == "plain"
                else accuracy(folders, "imagefolder", seed, options, out / "files")
            )
            scores = {
                options.against: other,
                "packed": accuracy(packed, "h5loader", seed, options, out / "packed"),
            }
            runs.append(scores)
            print(f"seed {seed}: {options.against} {other:.4f}, packed {scores['packed']:.4f}")
            if len(runs) > 1:
                report(runs, options)  # after each, so that breaking off loses one seed
    return 0


def read_options(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("cifar", type=Path, help="folder with train/ and test/")
    parser.add_argument("--quick", action="store_true", help="a short run for a CPU")
    parser.add_argument("--seeds", type=int, help="at least 2 (default: 5; quick: 3)")
    parser.add_argument("--epochs", type=int, help="(default: 16; quick: 3)")
    parser.add_argument("--images", type=int, help="to train on (default: all; quick: 4000)")
    parser.add_argument("--against", choices=("files", "plain"), default="files")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    options = parser.parse_args(given)
    quick = options.quick
    options.seeds = options.seeds or (3 if quick else 5)
    options.epochs = options.epochs or (3 if quick else 16)
    options.images = options.images or (4000 if quick else 50_000)
    options.scored = options.images // 2 if quick else 10_000
    if not 2 <= options.seeds <= len(_T95) + 1:
        parser.error(f"--seeds {options.seeds}: a spread needs 2 or more, the table ends at 10")
    return options


def link_some(source: Path, folder: Path, count: int) -> Path:
    """Link the first images of each class, `count` in all, and return `folder`."""
    classes = sorted(entry for entry in source.iterdir() if entry.is_dir())
    for entry in classes:
        for name in sorted(os.listdir(entry))[: max(1, count // len(classes))]:
            link(entry / name, folder / entry.name / name)
    return folder


def accuracy(
    splits: dict[str, Path], loader: Any, seed: int, options: argparse.Namespace, out: Path
) -> float:
    """Train once and return the accuracy after the last epoch."""
    small = options.quick
    config = TrainConfig(
        train=splits["train"],
        val=splits["test"],
        out=out,
        epochs=options.epochs,
        batch_size=64 if small else 512,
        seed=seed,
        model=ModelConfig(model=model(options)),
        loss=LossConfig(label_smoothing=0.1),
        data=DataConfig(loader=loader, size=32, crop="random-crop"),
        optim=OptimConfig(
            optimizer="sgd", lr=0.4, lr_scaling="linear", lr_batch=512, weight_decay=5e-4
        ),
        schedule=ScheduleConfig(schedule="linear", warmup=0.2),
        debug=DebugConfig(curves=False, tensorboard=False),
    )
    return train(config).val["accuracy"]


def plain_accuracy(folders: dict[str, Path], seed: int, options: argparse.Namespace) -> float:
    """Train the recipe of `accuracy` in bare torch, and return the accuracy after the last epoch.

    Shares with h5feed the network and its first weights, and nothing else.
    """
    images, labels = read_folder(folders["train"])
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    torch.manual_seed(seed)
    net = build_model(model(options), int(labels.max()) + 1)
    batch = 64 if options.quick else 512
    wanted = list(net.parameters())
    optimizer = torch.optim.SGD(
        [
            {"params": [w for w in wanted if w.ndim > 1], "weight_decay": 5e-4},
            {"params": [w for w in wanted if w.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.4 * batch / 512,
        momentum=0.9,
        nesterov=True,
    )
    total = len(images) // batch * options.epochs
    climb = round(0.2 * total)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (step + 1) / (climb + 1) if step < climb else (total - step) / (total - climb),
    )
    net.train()
    for _ in range(options.epochs):
        order = torch.randperm(len(images))
        for first in range(0, len(images) - batch + 1, batch):
            chosen = order[first : first + batch]
            outputs = net((crop_and_flip(images[chosen]) - mean) / std)
            loss = functional.cross_entropy(outputs, labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    images, labels = read_folder(folders["test"])
    net.eval()
    with torch.no_grad():
        outputs = torch.cat([net((part - mean) / std) for part in images.split(500)])
    return float((outputs.argmax(1) == labels).float().mean())


def read_folder(root: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images of class folders, float 0 to 255 (N, 3, 32, 32), and their classes (N,)."""
    found = [
        (np.asarray(Image.open(path).convert("RGB")), label)
        for label, folder in enumerate(sorted(root.iterdir()))
        for path in sorted(folder.iterdir())
    ]
    images = torch.from_numpy(np.stack([image for image, _ in found]))
    return images.permute(0, 3, 1, 2).float(), torch.tensor([label for _, label in found])


def crop_and_flip(images: torch.Tensor) -> torch.Tensor:
    """Pad by 4 black pixels, cut 32 × 32 anywhere, mirror half of them."""
    padded = functional.pad(images, (4, 4, 4, 4))
    cut = [
        padded[k, :, top : top + 32, left : left + 32]
        for k, (top, left) in enumerate(torch.randint(0, 9, (len(images), 2)).tolist())
    ]
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    made = torch.stack(cut)
    return torch.where(mirrored, made.flip(3), made)


def model(options: argparse.Namespace) -> str:
    """Return the network that is trained."""
    return "resnet9-small" if options.quick else "resnet9"


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences, and half the width of its 95 % interval."""
    count = len(differences)
    error = statistics.stdev(differences) / math.sqrt(count)
    return statistics.mean(differences), _T95[count - 2] * error


def report(runs: list[dict[str, float]], options: argparse.Namespace) -> None:
    """Print both means and their difference, and write them where asked."""
    other = options.against
    mean, half = interval([run["packed"] - run[other] for run in runs])
    other_mean = statistics.mean(run[other] for run in runs)
    packed = statistics.mean(run["packed"] for run in runs)
    verdict = "no difference to be seen" if abs(mean) <= half else "a difference"
    print(
        f"{other} {other_mean:.4f}, packed {packed:.4f}: packed − {other} = {100 * mean:+.2f} ± "
        f"{100 * half:.2f} points (95 %, {len(runs)} seeds): {verdict}",
        flush=True,
    )
    if options.json is not None:
        facts = system.machine_facts(options.cifar)
        values = {
            "runs": runs,
            "difference": mean,
            "half_width_95": half,
            f"{other}_mean": other_mean,
            "packed_mean": packed,
            "model": model(options),
            "images": options.images,
            "scored": options.scored,
            "epochs": options.epochs,
            "machine": system.describe_machine(facts),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "versions": system.versions(),
        }
        options.json.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
