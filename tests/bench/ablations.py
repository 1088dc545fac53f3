"""Ablations without any training: outcomes made up."""

from dataclasses import replace

from h5feed.bench.rounds import Outcome
from packed import random_images, write_packed
from train.helpers import make_config


def packed_config(folder, **options):
    file = folder / "train.h5"
    if not file.exists():
        write_packed(file, random_images(12, (16, 16)))
    options = {"model": "resnet9-small", "batch_size": 4, **options}
    return replace(make_config(folder / "run", **options), train=file)


def outcome(entry, rate, **changes):
    given = {
        "name": entry.name,
        "ceiling": entry.expected.ceiling,
        "rates": (rate * 0.9, rate, rate * 1.1),
        "private_bytes": 10**8,
        "cpu_seconds_per_1000": 2.0,
        "extra": {"final_loss": 1.5, "device_bytes": None},
        **changes,
    }
    return Outcome(**given)
