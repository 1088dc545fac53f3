"""What the small benchmarks share: subjects that take turns, files made once, a rival's process."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import h5feed
from h5feed.bench.measure import Expectation, Subject, whole_epochs
from h5feed.bench.process import Remote
from h5feed.store import Columns, images_spec, write_file

__all__ = [
    "Window",
    "copies",
    "ffcv",
    "ffcv_process",
    "filled_once",
    "in_turns",
    "link",
    "of_subject",
    "packed",
    "run_code",
    "spread",
    "synthetic",
    "version_of",
    "wait_for",
]

_FFCV = Path(__file__).parent / "peers/adapters/ffcv_loader.py"
Window = Callable[[float], tuple[float, float]]
"""Runs whole epochs for about so many seconds: images per second, and CPU seconds per image."""
_Found = TypeVar("_Found")


def in_turns(subjects: Mapping[str, Callable[[], _Found]], rounds: int) -> dict[str, list[_Found]]:
    """Return what each subject's call gave, one per round, after a round that is not counted.

    A B C, A B C: whatever else the machine does hits all of them.
    """
    found: dict[str, list[_Found]] = {name: [] for name in subjects}
    for turn in range(rounds + 1):
        for name, measure in subjects.items():
            value = measure()
            if turn:
                found[name].append(value)
    return found


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Say the median of `values`, and from where to where they go."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def of_subject(subject: Subject) -> Window:
    """Return the window of a subject of h5feed.bench in this process."""
    any_length = Expectation(images=0, batch_size=1, height=0, width=0, ceiling=True)

    def window(seconds: float) -> tuple[float, float]:
        found = whole_epochs(subject, any_length, seconds=seconds)
        return _together([rate for rate, _ in found], [cpu for _, cpu in found])

    return window


def ffcv_process(python: str) -> Remote:
    """Start the adapter of tools/peers in an interpreter that has FFCV."""
    return Remote([python, str(_FFCV)])


def ffcv(
    python: str, source: Path, work: Path, *, batch_size: int, workers: int, **params: Any
) -> Window:
    """Return the window of FFCV over a folder of class folders; its process lives as long as this.

    `params` are the adapter's: variant, size, and crop or padding.
    """
    remote, out = ffcv_process(python), work / f"{source.name}-{params['variant']}"
    common = {"source": str(source), "out": str(out), "workers": workers, **params}
    if not (out / "data.beton").exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        remote.ask({"do": "convert", "params": common}, timeout=3600)
    expected = Expectation(
        images=sum(path.is_file() for path in source.rglob("*")),
        batch_size=batch_size,
        height=params.get("crop", params["size"]),
        width=params.get("crop", params["size"]),
    )
    data = {"data": str(out / "data.beton"), "batch_size": batch_size, "drop_last": True}
    remote.ask({"do": "open", "params": common | data, "expected": asdict(expected)})

    def window(seconds: float) -> tuple[float, float]:
        found = remote.ask({"do": "epochs", "seconds": seconds})
        return _together(found["rates"], found["cpu_per_image"])

    return window


def _together(rates: Sequence[float], cpu: Sequence[float]) -> tuple[float, float]:
    """Images per second and CPU per image of epochs of one length, taken together."""
    return statistics.harmonic_mean(rates), statistics.mean(cpu)


def version_of(python: str, package: str) -> str | None:
    """Return the version of a package that another interpreter has; None where it has none."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def run_code(code: str, *arguments: Any) -> Any:
    """Run Python code that prints one line of JSON, in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


@contextmanager
def filled_once(folder: Path) -> Iterator[Path | None]:
    """Yield a folder to fill, which is called `folder` once it is full; None if that is there.

    What an interrupted run began is thus never taken for the whole.
    """
    if folder.is_dir():
        yield None
        return
    new = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    new.rename(folder)


def copies(images: Path, out: Path, times: int) -> Path:
    """Return a folder with every file of `images` `times` times: real copies, so cold is cold."""
    with filled_once(out) as new:
        for path in images.rglob("*") if new is not None else ():
            for number in range(times if path.is_file() else 0):
                name = f"{path.stem}-{number}{path.suffix}"
                copy = new / path.parent.relative_to(images) / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
    return out


def link(source: Path, place: Path) -> None:
    """Make `place`, in a folder that need not be there yet, a link to `source`."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(source.resolve())


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked to; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def packed(source: Path, out: Path, **options: Any) -> Path:
    """Return `out`, packed from `source` if it is not there."""
    if not out.exists():
        h5feed.pack(source, out, **options)
    return out


def synthetic(out: Path, count: int, side: int, *, random: bool = False) -> Path:
    """Return `out`: `count` raw items of side x side pixels, with ImageNet-like labels and keys."""
    if out.exists():
        return out
    spec = images_spec("raw", side, side, "stretch")
    key = b"n01440764/n01440764_00000.JPEG"
    columns = Columns(
        labels=np.arange(count) * 1000 // count,
        classes=tuple(f"n{number:08}" for number in range(1000)),
        key_bytes=np.frombuffer(key * count, np.uint8),
        key_offsets=np.arange(count + 1) * len(key),
        source_shapes=np.tile(np.int32([375, 500]), (count, 1)),
        crc32=np.zeros(count, np.uint32),
    )
    write_file(out, [spec], columns, {"images": _pixels(count * spec.item_bytes, random)})
    return out


def _pixels(size: int, random: bool) -> Iterator[bytes]:
    block = os.urandom(1 << 24) if random else bytes(1 << 24)
    while size > 0:
        yield block[:size]
        size -= len(block)
