"""Everything there is to measure with a GPU, in one command; a small run of it all without one.

    python tools/gpu_run.py --photos DIR --cifar DIR        all parts, into benchmarks/*.json
    python tools/gpu_run.py --parts loaders cifar           some of them, on images it draws
    python tools/gpu_run.py --tables [--readme README.md]   tables and PNGs from the JSON files

loaders   ResNet-18 and ResNet-50 at 224 px in bf16, channels_last, compiled: the synthetic ceiling,
          and each loader beside it
alone     the loaders without a model: how they scale with threads, and where Python bounds them
ops       the device's pass over a batch, as torch runs it and compiled
ablation  train-h5 ablate on ResNet-18
cifar     CIFAR-10 to 94 %, several seeds

Each part prints how long it took; give --parts one at a time where a command's time is limited.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu import cifar, tables
from gpu.data import prepare_cifar, prepare_photos
from gpu.loaders import ways
from gpu.loading import measure_loaders
from gpu.ops import measure_ops
from h5feed.bench import system
from h5feed.bench.ablate import AblateOptions, ablate
from h5feed.bench.report import as_dict as ablation_dict
from h5feed.store import read_index
from h5feed.system import available_cores
from h5feed.train.config import DataConfig, LossConfig, ModelConfig, SpeedConfig, TrainConfig
from pages import put_into

__all__ = ["main"]

PARTS = ("loaders", "alone", "ops", "ablation", "cifar")


TINY = "h5feed.bench.training:tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is."""

    models: tuple[str, ...]
    images: int
    stored: int
    """Side of the packed images."""
    side: int
    """Side of the images that the model sees."""
    batch_size: int
    outputs: int
    threads: tuple[int, ...]
    workers: int
    seconds: float
    repeats: int
    cifar_images: int
    """Drawn, where no --cifar is given."""
    cifar_epochs: int
    seeds: int
    tricks: tuple[str, ...] = ()
    """Only those; all when empty."""
    ops: tuple[str, ...] = ()
    """Only those lists of ops; all when empty."""


FULL = Scale(
    models=("torchvision:resnet18", "torchvision:resnet50"),
    images=16384,
    stored=256,
    side=224,
    batch_size=256,
    outputs=1000,
    threads=(1, 2, 4, 8, 16),
    workers=min(16, available_cores()),
    seconds=2.0,
    repeats=3,
    cifar_images=50000,
    cifar_epochs=16,
    seeds=5,
)
SMALL = Scale(
    models=(TINY,),
    images=48,
    stored=32,
    side=32,
    batch_size=8,
    outputs=100,
    threads=(1, 2),
    workers=1,
    seconds=0.05,
    repeats=1,
    cifar_images=160,
    cifar_epochs=1,
    seeds=2,
    tricks=("packed file", "H5Loader", "fused optimizer"),
    ops=("padded crop, flip", "the same from NV12"),
)


def main(given: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for, or make tables of what was measured before."""
    options = read_options(given)
    if options.tables:
        return make_tables(options)
    scale = FULL if options.on_gpu else SMALL
    if not options.on_gpu:
        print("no GPU: a small run on the CPU, which shows that everything works, not how fast")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        options.scratch = options.scratch or Path(scratch)
        options.scratch.mkdir(parents=True, exist_ok=True)
        for part in options.parts:
            began = time.perf_counter()
            RUNS[part](options, scale)
            print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
    return 0


def read_options(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--photos", type=Path, help="folder of class folders; otherwise drawn")
    parser.add_argument("--cifar", type=Path, help="folder with train/ and test/; otherwise drawn")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="for the JSON files")
    parser.add_argument("--scratch", type=Path, help="keeps packed files for the next call")
    parser.add_argument("--models", nargs="+", help="instead of ResNet-18 and ResNet-50")
    parser.add_argument("--cifar-epochs", type=int, help="instead of the usual number")
    parser.add_argument("--seeds", type=int, help="instead of the usual number")
    parser.add_argument("--target", type=float, default=0.94, help="accuracy on CIFAR-10")
    parser.add_argument("--no-leave-one-out", action="store_true", help="ablation: half the time")
    parser.add_argument("--tables", action="store_true", help="print tables of --out, draw PNGs")
    parser.add_argument("--readme", type=Path, help="with --tables: put them between its marks")
    options = parser.parse_args(given)
    options.on_gpu = torch.cuda.is_available()
    return options


def make_tables(options: argparse.Namespace) -> int:
    """Print the tables, draw the plots, and put the tables into the README."""
    text = tables.markdown(options.out)
    if not text:
        raise SystemExit(f"--out {options.out} holds no results of gpu_run.py: run it first")
    print(text)
    for path in tables.draw(options.out):
        print(f"drew {path}")
    if options.readme is not None:
        put_into(options.readme, "gpu_run", text)
    return 0


def run_loaders(options: argparse.Namespace, scale: Scale) -> None:
    """Every loader with every model."""
    for model in options.models or scale.models:
        title = f"Training {model} at {scale.side} px, batches of {scale.batch_size}" + (
            ", bf16, channels_last, compiled" if options.on_gpu else ""
        )
        name = f"loaders-{model.rpartition(':')[2]}"
        write_rows(options, scale, name, title, model=model)


def run_alone(options: argparse.Namespace, scale: Scale) -> None:
    """The loaders without a model."""
    title = f"Loaders alone, crops of {scale.side} px, batches of {scale.batch_size}"
    write_rows(options, scale, "alone", title, model=None)


def write_rows(
    options: argparse.Namespace, scale: Scale, name: str, title: str, *, model: str | None
) -> None:
    """Measure all loaders, with a model or without, and write the result."""
    photos = prepare_photos(options.photos, options.scratch, count=scale.images, side=scale.stored)
    config = training_config(photos.raw, model or TINY, scale, on_gpu=options.on_gpu)
    taking = ways(photos, scale.threads, workers=scale.workers)
    rows = measure_loaders(
        config,
        [way for way in taking if model or not way.ceiling],
        images=len(read_index(photos.raw)),
        seconds=scale.seconds,
        repeats=scale.repeats,
        trains=model is not None,
    )
    write(options, name, {"kind": "loaders", "title": title, "rows": rows}, photos.drawn)


def run_ops(options: argparse.Namespace, scale: Scale) -> None:
    """The ops on the device, eager and compiled."""
    rows = measure_ops(
        stored=scale.stored,
        side=scale.side,
        batch_size=scale.batch_size,
        repeats=50 if options.on_gpu else 3,
        device=torch.device("cuda" if options.on_gpu else "cpu"),
        only=scale.ops,
    )
    title = f"Ops on a batch of {scale.batch_size} images of {scale.stored} px, on the device"
    write(options, "ops", {"kind": "ops", "title": title, "rows": rows}, drawn=True)


def run_ablation(options: argparse.Namespace, scale: Scale) -> None:
    """What each trick is worth."""
    photos = prepare_photos(options.photos, options.scratch, count=scale.images, side=scale.stored)
    model = (options.models or scale.models)[0]
    config = training_config(photos.raw, model, scale, on_gpu=options.on_gpu)
    settings = AblateOptions(
        images=photos.folder,
        seconds=scale.seconds,
        repeats=scale.repeats,
        final_steps=30 if options.on_gpu else 2,
        leave_one_out=not options.no_leave_one_out and options.on_gpu,
        only=scale.tricks,
    )
    found = ablate(config, settings, lambda text: print(text, flush=True))
    write(options, "ablation", {"kind": "ablation", "ablation": ablation_dict(found)}, photos.drawn)


def run_cifar(options: argparse.Namespace, scale: Scale) -> None:
    """CIFAR-10 to the target."""
    train, val, drawn = prepare_cifar(options.cifar, options.scratch, count=scale.cifar_images)
    epochs = options.cifar_epochs or scale.cifar_epochs
    config = cifar.recipe(train, val, epochs=epochs, on_gpu=options.on_gpu)
    found = cifar.train_seeds(config, seeds=options.seeds or scale.seeds, target=options.target)
    title = f"CIFAR-10, {found['model']}, {epochs} epochs, batches of {found['batch_size']}"
    write(options, "cifar", {"kind": "cifar", "title": title, **found}, drawn)


RUNS: dict[str, Callable[[argparse.Namespace, Scale], None]] = {
    "loaders": run_loaders,
    "alone": run_alone,
    "ops": run_ops,
    "ablation": run_ablation,
    "cifar": run_cifar,
}


def training_config(file: Path, model: str, scale: Scale, *, on_gpu: bool) -> TrainConfig:
    """Return the training that loaders are measured with."""
    return TrainConfig(
        train=file,
        batch_size=scale.batch_size,
        device="cuda" if on_gpu else "cpu",
        model=ModelConfig(model=model),
        loss=LossConfig(num_outputs=scale.outputs),
        data=DataConfig(size=scale.side, crop="random-resized"),
        speed=SpeedConfig(compile="default" if on_gpu else "off"),
    )


def write(options: argparse.Namespace, name: str, values: dict[str, Any], drawn: bool) -> None:
    """Write one result with the machine and versions it belongs to."""
    facts = system.machine_facts(options.out)
    versions = system.versions() | system.versions(("timm", "nvidia-dali-cuda120"))
    words = system.describe_machine(facts)
    if options.on_gpu:
        versions |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        gpu = torch.cuda.get_device_properties(0)
        words += f", {gpu.name} ({gpu.total_memory / 1e9:.0f} GB)"
    values |= {
        "machine": words,
        "facts": {"machine": facts, "versions": versions, "drawn": drawn, "gpu": options.on_gpu},
    }
    path = options.out / f"{'gpu' if options.on_gpu else 'cpu'}-{name}.json"
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1) + "\n")
    print(f"wrote {path}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
