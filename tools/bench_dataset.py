"""What H5Dataset and make_dataloader are worth, against what they replace.

    python tools/bench_dataset.py imagefolder FILE.h5 PHOTOS   the one-line swap, FILE.h5 of
                                    pack-h5 --fit keep: PIL at least 2.4x, v2 tensors at least 4x
    python tools/bench_dataset.py loader FILE.h5               make_dataloader against a stock one
    python tools/bench_dataset.py workers FILE.h5              what workers="auto" rests on
    python tools/bench_dataset.py collate FILE.h5              stacking (H, W, C) or (C, H, W)
    python tools/bench_dataset.py policies FILE.h5 [--json FILE]   RandAugment and its kin: H5Loader
                                    against v2 tensors in a stock DataLoader, at least 2x

Otherwise FILE.h5 is `pack-h5 PHOTOS FILE.h5`. Subjects take turns within a run, so that whatever
else the machine does hits all of them; medians over the rounds. Warm cache.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sized
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, default_collate

from _torchvision import import_torchvision
from h5feed import H5Loader
from h5feed.bench.system import describe_machine, machine_facts, versions
from h5feed.feed.dataloader import auto_workers, collate, make_dataloader
from h5feed.feed.dataset import H5Dataset
from h5feed.system import available_cores
from harness import in_turns, spread

import_torchvision()
from torchvision.datasets import ImageFolder  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

AUGMENT = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])
AUGMENT_PIL = v2.Compose([v2.PILToTensor(), AUGMENT])
PIL_AUGMENT = v2.Compose([AUGMENT, v2.PILToTensor()])
BATCH = 64
PACKAGES = ("h5feed", "torch", "torchvision", "numpy", "opencv-python-headless")


def main() -> None:
    """Run the part that was asked for and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("file", help="packed by pack-h5")
    parser.add_argument("photos", nargs="?", help="the folder it was packed from")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--items", type=int, default=1000, help="per subject and round")
    parser.add_argument("--json", type=Path, help="policies: write what was measured to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    PARTS[options.part](options)


def compare_imagefolder(options: argparse.Namespace) -> None:
    """The same stock DataLoader and transform over ImageFolder (Pillow) and over H5Dataset.

    Once on PIL images, as scripts have it, and once on tensors, as torchvision's v2 are fastest.
    """
    stock = partial(
        DataLoader, batch_size=BATCH, num_workers=options.workers, persistent_workers=True
    )
    pairs: dict[str, tuple[Sized, Sized]] = {
        "PIL": (
            ImageFolder(options.photos, PIL_AUGMENT),
            H5Dataset(options.file, PIL_AUGMENT),
        ),
        "v2 tensors": (
            ImageFolder(options.photos, AUGMENT_PIL),
            H5Dataset(options.file, AUGMENT, output="tensor", aspect="source"),
        ),
    }
    for name, (folder, packed) in pairs.items():
        race(
            {
                f"ImageFolder, {name}": stock(folder, sampler=draws(folder, options)),
                f"H5Dataset, {name}": stock(packed, sampler=draws(packed, options)),
            },
            options,
            f"ImageFolder, {name}",
        )


def compare_loader(options: argparse.Namespace) -> None:
    """make_dataloader against a DataLoader with nothing but the same number of workers."""
    subjects: dict[str, Iterable[Any]] = {}
    for name, transform in (("whole images", None), ("RandomResizedCrop + flip", AUGMENT)):
        packed = H5Dataset(options.file, transform, output="tensor", aspect="stored")
        subjects[f"stock, {name}"] = DataLoader(
            packed, BATCH, sampler=draws(packed, options), num_workers=options.workers
        )
        subjects[f"made, {name}"] = make_dataloader(
            packed, BATCH, sampler=draws(packed, options), num_workers=options.workers
        )
    race(subjects, options, f"stock, {name}")


def compare_workers(options: argparse.Namespace) -> None:
    """Every number of workers up to twice the cores; and what "auto" would take."""
    for name, transform in (("whole images", None), ("RandomResizedCrop + flip", AUGMENT)):
        packed = H5Dataset(options.file, transform, output="tensor", aspect="stored")
        loaders: dict[str, Iterable[Any]] = {
            f"{name}, workers={workers}": make_dataloader(
                packed, BATCH, sampler=draws(packed, options), num_workers=workers
            )
            for workers in range(2 * available_cores() + 1)
        }
        race(loaders, options, next(iter(loaders)))
        print(f'workers="auto" takes {auto_workers(packed, BATCH)}\n')


def compare_collate(options: argparse.Namespace) -> None:
    """Microseconds an image to make a batch of views, on one thread."""
    torch.set_num_threads(1)
    packed = H5Dataset(options.file, aspect="stored")
    samples = packed.__getitems__(range(BATCH))
    views = [image for image, _ in samples]
    reused = torch.stack([view.permute(1, 2, 0) for view in views])
    subjects: dict[str, Callable[[], Any]] = {
        "default_collate": lambda: default_collate(samples),
        "h5feed's collate": lambda: collate(samples),
        "the same into a reused batch": lambda: torch.stack(
            [view.permute(1, 2, 0) for view in views], out=reused
        ),
        "(C, H, W) into a reused batch": lambda: torch.stack(
            views, out=reused.view(BATCH, *views[0].shape)
        ),
    }
    timed = {name: partial(_microseconds, work) for name, work in subjects.items()}
    for name, found in in_turns(timed, 10 * options.rounds).items():
        print(f"{name:40} {statistics.median(found):8.1f} µs an image")


def compare_policies(options: argparse.Namespace) -> None:
    """H5Loader against a stock DataLoader with v2's transforms on tensors, of one packed file.

    Both read uint8 pixels, so nothing is decoded; both antialias, and have as many workers.
    """
    rows = []
    for name, theirs in (
        ("RandAugment(2, 9)", v2.RandAugment(2, 9)),
        ("TrivialAugmentWide", v2.TrivialAugmentWide()),
        ("AutoAugment", v2.AutoAugment()),
    ):
        transform = v2.Compose([AUGMENT, theirs])
        stock = H5Dataset(options.file, transform, output="tensor", aspect="stored")
        ds = H5Dataset(options.file)
        workers = {"num_workers": options.workers}
        beside = DataLoader(
            stock, BATCH, sampler=draws(stock, options), persistent_workers=True, **workers
        )
        with H5Loader(
            ds, BATCH, sampler=draws(ds, options), augment=transform, antialias=True, **workers
        ) as ours:
            found = race({f"v2, {name}": beside, f"H5Loader, {name}": ours}, options, f"v2, {name}")
        other, mine = found.values()
        rows.append(
            {
                "what": f"RandomResizedCrop + flip + {name}",
                "ratio": statistics.median(a / b for a, b in zip(mine, other, strict=True)),
                "least": 2.0,
                "images_per_second": statistics.median(mine),
                "other_per_second": statistics.median(other),
                "rounds": {"ours": mine, "other": other},
            }
        )
    if options.json:
        facts = machine_facts(Path(options.file).parent)
        where = {
            "command": "python tools/bench_dataset.py policies FILE.h5 --json FILE",
            "machine": describe_machine(facts),
            "facts": facts,
            "versions": versions(PACKAGES),
            "threads": options.workers,
            "repeats": options.rounds,
            "items": options.items,
            "batch_size": BATCH,
        }
        options.json.write_text(json.dumps({**where, "rows": rows}, indent=1) + "\n")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "imagefolder": compare_imagefolder,
    "loader": compare_loader,
    "workers": compare_workers,
    "collate": compare_collate,
    "policies": compare_policies,
}


def _microseconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / BATCH * 1e6


def draws(dataset: Sized, options: argparse.Namespace) -> RandomSampler:
    """As many random items as a round takes, whatever the dataset's length."""
    return RandomSampler(dataset, replacement=True, num_samples=options.items)


def race(
    subjects: dict[str, Iterable[Any]], options: argparse.Namespace, base: str
) -> dict[str, list[float]]:
    """Print images a second of each subject, medians, ranges and ratios to `base`; return them."""

    def rate(loader: Iterable[Any]) -> float:
        start = time.perf_counter()
        for _ in loader:
            pass
        return options.items / (time.perf_counter() - start)

    turns = {name: partial(rate, loader) for name, loader in subjects.items()}
    found = in_turns(turns, options.rounds)
    ground = statistics.median(found[base])
    for name, rates in found.items():
        ratio = statistics.median(rates) / ground
        print(f"{name:40} {spread(rates):>30} img/s  {ratio:5.2f}x", flush=True)
    return found


if __name__ == "__main__":
    main()
