"""Loaders that are stopped and resumed, and readers whose file is cut."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import Case, Wrong, at_nth_event, check_manners, wait_for
from reading import command_here

from h5feed import H5Dataset, H5FeedError, H5Loader, augment

__all__ = ["resumed", "truncated"]

Sample = tuple[int, int]  # index, checksum of what was delivered
OPS: list[list[augment.Op]] = [
    [augment.RandomResizedCrop(16), augment.RandomHorizontalFlip()],
    [
        augment.RandomCrop(24, padding=4, pad_if_needed=True),
        augment.RandomHorizontalFlip(),
        augment.ToDtype(torch.float32, scale=True),
    ],
    [augment.Resize(24), augment.CenterCrop(16), augment.RandomErasing(1.0)],
]


# Resuming -------------------------------------------------------------------------------------


def resumed(case: Case) -> None:
    """Stopped anywhere, resumed with another batch size, thread count and world: the same."""
    options = {
        "shuffle": case.random.choice([True, False, "block", "shards"]),
        "augment": case.random.choice(OPS),
        "views": case.random.choice([1, 1, 2]),
        "io": case.random.choice(["map", "read"]),
        "seed": case.random.choice([0, 1, -5, 2**40]),
    }
    if case.random.random() < 0.3:
        options["indices"] = case.random.sample(range(20), case.random.randint(1, 20))
    path = case.kind().path
    epoch = case.random.choice([0, 1, 7])
    case.note(f"{path.name} {options}, {epoch=}")
    with _loader(path, 4, options) as loader:
        loader.set_epoch(epoch)
        expected = [sample for batch in loader for sample in _samples(batch)]
    if sorted(index for index, _ in expected) != sorted(
        options.get("indices", range(len(loader.dataset)))
    ):
        raise Wrong("an epoch does not bring every sample once")
    state: dict[str, Any] | None = None
    begun, known = 0, {*expected}
    for _ in range(200):
        steps, state = _hop(case, path, options, epoch, state)
        for step in steps:
            due = expected[begun : begun + len(step)]
            begun += len(step)
            same = step[: len(due)] == due
            if options["shuffle"] == "shards":  # each rank reads its own: in another order
                same = Counter(step) >= Counter(due)
            if not same or {*step} - known:
                raise Wrong(f"{len(expected)} samples resumed otherwise than in one go")
        if begun >= len(expected):
            return
    raise Wrong("200 passes do not come to the end of an epoch")


def _hop(
    case: Case, path: Path, options: dict[str, Any], epoch: int, state: dict[str, Any] | None
) -> tuple[list[list[Sample]], dict[str, Any]]:
    """Take some steps on all ranks of a world; return each step's samples, and the state."""
    world, size = case.random.choice([1, 1, 2, 3]), case.random.randint(1, 9)
    steps, fields = case.random.choice([0, 1, 2, 3, 100]), []
    for rank in range(world):
        with _loader(
            path, size, options, rank=rank, world_size=world, num_workers=case.random.randint(1, 3)
        ) as loader:
            if state is None:
                loader.set_epoch(epoch)
            else:
                loader.load_state_dict(state)
            batches = [
                list(_samples(batch)) for _, batch in zip(range(steps), loader, strict=False)
            ]
            fields.append((batches, loader.state_dict()))
    states = [made for _, made in fields]
    if any(made != states[0] for made in states):
        raise Wrong(f"ranks disagree about where they stand: {states}")
    if len({len(batches) for batches, _ in fields}) != 1:
        raise Wrong("ranks have different numbers of steps")
    case.note(f"{world=} {size=} {steps=} {states[0]}")
    ranks = [batches for batches, _ in fields]
    return [list(chain(*step)) for step in zip(*ranks, strict=True)], states[0]


def _loader(path: Path, size: int, options: dict[str, Any], **more: Any) -> H5Loader:
    return H5Loader(H5Dataset(path), size, with_index=True, **options, **more)


def _samples(batch: Any) -> Iterator[Sample]:
    images, labels, indices = batch
    views = images if isinstance(images, tuple) else (images,)
    for k, index in enumerate(indices.tolist()):
        value = 0
        for tensor in (*views, labels if torch.is_tensor(labels) else labels[0]):
            value = zlib.crc32(np.ascontiguousarray(tensor[k].numpy()).tobytes(), value)
        yield index, value


# Files that are cut under readers --------------------------------------------------------------


def truncated(case: Case) -> None:
    """Cut while it is read: a sentence from commands; SIGBUS, as documented, for loaders."""
    kind, path = case.copy()
    size = path.stat().st_size
    cut = case.random.choice([0, 1, 4096, size // 2, size - 1, size - 4096])
    program = case.random.choice(["check-h5", "show-h5"])
    args = case.random.choice([(), ("--json",)])
    if case.random.random() < 0.3:
        os.truncate(path, cut)
        if command_here(case, program, path, *args).status == 0:
            raise Wrong(f"{program} is content with a file that was cut to {cut} bytes")
        return
    number = case.random.randrange(4)
    before = lambda: at_nth_event(number, str(path), lambda: os.truncate(path, cut))  # noqa: E731
    case.run(program, path, *args, before=before if case.random.random() < 0.7 else None)
    command = case.start(program, path, *args)
    time.sleep(case.random.uniform(0, 0.05))
    os.truncate(path, cut)
    check_manners(program, command.wait())
    _read_cut(case, kind.path)


def _read_cut(case: Case, whole: Path) -> None:
    """Cut a file under a loader: it goes on or says a sentence; one that maps may die of SIGBUS."""
    io = case.random.choice(["map", "read"])
    path = case.folder / "y.h5"
    shutil.copyfile(whole, path)
    child = os.fork()
    if not child:
        faulthandler.disable()  # SIGBUS is expected here: no word of it
        with suppress(H5FeedError, OSError):
            for step, _ in enumerate(
                H5Loader(H5Dataset(path), 2, shuffle=True, augment=OPS[0], num_workers=2, io=io)
            ):
                if step == 2:
                    os.truncate(path, 5000)
        os._exit(0)
    if (status := wait_for(child, 60)) not in (0, -signal.SIGBUS if io == "map" else 0):
        raise Wrong(f"a loader whose file is cut ends with {status}")
