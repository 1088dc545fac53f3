"""The device's pass over a batch, without a loader: as torch runs it, and compiled."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from h5feed.augment import (
    ColorJitter,
    GaussianBlur,
    Normalize,
    Op,
    Pipeline,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToDtype,
)
from h5feed.feed.random import SeededDraws
from harness import in_turns, wait_for

__all__ = ["measure_ops"]


def measure_ops(
    *,
    stored: int,
    side: int,
    batch_size: int,
    repeats: int,
    device: torch.device,
    only: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return milliseconds a batch of each list of ops, eager and compiled, and how they differ."""
    small = [RandomCrop(stored, padding=stored // 8), RandomHorizontalFlip()]
    crop = [RandomResizedCrop(side), RandomHorizontalFlip()]
    floats = [
        ToDtype(torch.bfloat16, scale=True),
        Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    strong = [RandomAffine(15, interpolation="bilinear"), ColorJitter(0.4, 0.4, 0.4, 0.1)]
    lists: dict[str, tuple[list[Op], str]] = {
        "padded crop, flip": (small, "raw"),
        "resized crop, flip": (crop, "raw"),
        "resized crop, flip, bfloat16": ([*crop, *floats], "raw"),
        "the same from NV12": ([*crop, *floats], "yuv420"),
        "affine, jitter and blur as well": ([*crop, *strong, GaussianBlur(9), *floats], "raw"),
    }
    rows = []
    for name in only or lists:
        ops, encoding = lists[name]
        print(f"ops: {name}", flush=True)
        rows.append({"name": name} | _measure(ops, encoding, stored, batch_size, repeats, device))
    return rows


def _measure(
    ops: list[Op], encoding: str, stored: int, batch_size: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    pipeline = Pipeline(ops)
    pipeline.bind((stored, stored), encoding=encoding)
    sizes = np.full((batch_size, 2), stored)
    params = pipeline.draw(SeededDraws(0, 0, np.arange(batch_size)), sizes, sizes * [3, 4])
    shape = (stored * 3 // 2, stored) if encoding == "yuv420" else (stored, stored, 3)
    batch = torch.randint(0, 256, (batch_size, *shape), dtype=torch.uint8).to(device)

    def run() -> torch.Tensor:
        return pipeline.run_device(params, batch)

    expected, eager = run(), _milliseconds(run, repeats, device)
    kernels = pipeline.compile_device()
    began = time.perf_counter()
    off = (run().float() - expected.float()).abs()
    wait_for(device)
    first = time.perf_counter() - began
    return {
        "eager_ms": eager,
        "compiled_ms": None if kernels.error else _milliseconds(run, repeats, device),
        "compile_seconds": first,
        "most_off": off.max().item(),
        "error": kernels.error,
    }


def _milliseconds(run: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Return the median time of a run; the device is waited for, so its launches count as well."""

    def timed() -> float:
        wait_for(device)
        began = time.perf_counter()
        run()
        wait_for(device)
        return time.perf_counter() - began

    return 1000 * statistics.median(in_turns({"run": timed}, repeats)["run"])
