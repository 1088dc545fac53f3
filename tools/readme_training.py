"""Run the README's three training recipes and keep what they reached.

    python tools/readme_training.py --cifar CIFAR --scenes SCENES --json benchmarks/training.json

CIFAR is a folder with train/ and test/ of class folders, SCENES one with images/ and masks/ of the
same names: every fifth is scored on, the others are trained on. Each call adds a run, so that the
seconds of several machines stand side by side; tools/pages.py compares the README with them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from h5feed import pack
from h5feed.bench import system
from harness import link

__all__ = ["RECIPES", "main"]

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {
    "samples": "--model resnet9-small --size 64 --batch-size 16 --epochs 20 --lr 0.003",
    "cifar": "--model resnet9-small --epochs 15 --batch-size 64 --optimizer sgd --lr 0.1 "
    "--weight-decay 5e-4 --schedule onecycle --warmup 0.25 --label-smoothing 0.1",
    "scenes": "--model unet --ignore-index 11 --size 128 --batch-size 8 --epochs 12 --lr 0.003",
}
"""Options of train-h5; a test finds them in the README."""


def main(given: Sequence[str] | None = None) -> int:
    """Pack, train, and add a run to the JSON file."""
    options = read_options(given)
    with tempfile.TemporaryDirectory() as scratch:
        packed = _pack_all(options.cifar, options.scenes, Path(scratch))
        run = {
            "machine": system.describe_machine(system.machine_facts(options.cifar)),
            "versions": system.versions(),
            "recipes": {
                name: {"options": RECIPES[name], **_train(RECIPES[name], *files, Path(scratch))}
                for name, files in packed.items()
            },
        }
    runs = json.loads(options.json.read_text()) if options.json.exists() else []
    options.json.write_text(json.dumps([*runs, run], indent=1) + "\n")
    return 0


def read_options(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--scenes", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args(given)


def _pack_all(cifar: Path, scenes: Path, scratch: Path) -> dict[str, tuple[Path, Path]]:
    """Pack the data of each recipe; return (train, val) of each."""
    samples = scratch / "samples.h5"
    pack(ROOT / "data_samples/images", samples)
    made = {"samples": (samples, samples)}
    sides = []
    for split, count in (("train", 500), ("test", 200)):
        for folder in sorted((cifar / split).iterdir()):
            for path in sorted(folder.iterdir())[:count]:
                link(path, scratch / split / folder.name / path.name)
        pack(scratch / split, scratch / f"{split}.h5")
        sides.append(scratch / f"{split}.h5")
    made["cifar"] = (sides[0], sides[1])
    names = sorted(path.name for path in (scenes / "images").iterdir())
    for side, some in (
        ("learn", [n for k, n in enumerate(names) if k % 5 != 4]),
        ("score", names[4::5]),
    ):
        for part in ("images", "masks"):
            for name in some:
                link(scenes / part / name, scratch / side / part / name)
        pack(scratch / side / "images", scratch / f"{side}.h5", masks=scratch / side / "masks")
    made["scenes"] = (scratch / "learn.h5", scratch / "score.h5")
    return made


def _train(options: str, train: Path, val: Path, scratch: Path) -> dict[str, Any]:
    """Run train-h5 as a user does; return its summary."""
    command = [sys.executable, "-m", "h5feed.cli.train", str(train), "--val", str(val), "--json"]
    out = ["--out", str(scratch / f"run-{train.stem}")]
    done = subprocess.run(
        [*command, *out, *shlex.split(options)], check=True, stdout=subprocess.PIPE, text=True
    )
    summary: dict[str, Any] = json.loads(done.stdout)
    return {key: value for key, value in summary.items() if key != "out"}


if __name__ == "__main__":
    raise SystemExit(main())
