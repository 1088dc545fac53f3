"""Loaders that are stopped, resumed, left half-way, written into, and robbed of their files."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import Case, Wrong, at_nth_event, check_manners, wait_for
from reading import command_here
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

from h5feed import H5Dataset, H5FeedError, H5Loader, augment, make_dataloader, pack

__all__ = ["leaks", "replaced", "resumed", "soak", "truncated", "written"]

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
    path = case.material.kinds[case.random.choice(sorted(case.material.kinds))].path
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
    found: list[Sample] = []
    for _ in range(200):
        more, state = _hop(case, path, options, epoch, state)
        found += more
        if len(found) >= len(expected):
            break
    if found[: len(expected)] != expected or {*found[len(expected) :]} - {*expected}:
        raise Wrong(f"{len(expected)} samples resumed otherwise than in one go")


def _hop(
    case: Case, path: Path, options: dict[str, Any], epoch: int, state: dict[str, Any] | None
) -> tuple[list[Sample], dict[str, Any]]:
    """Take some steps on all ranks of a world; return their samples in order, and the state."""
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
    return [s for step in zip(*ranks, strict=True) for batch in step for s in batch], states[0]


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


# Leaks ----------------------------------------------------------------------------------------


def leaks(case: Case) -> None:
    """Loaders and datasets made, used, broken off and dropped: no thread, file or mapping stays."""
    path = case.material.kinds[case.random.choice(sorted(case.material.kinds))].path
    use = case.random.choice(
        [_whole_epoch, _broken_off, _never_begun, _raising, _dataset_alone, _two_passes]
    )
    case.note(f"{path.name} {use.__name__}")
    use(path)
    before = _held(path)
    for _ in range(case.random.randint(3, 15)):
        use(path)
    until = time.monotonic() + 30
    while (grown := _grown(before, after := _held(path))) and time.monotonic() < until:
        time.sleep(0.01)
    if grown:
        raise Wrong(f"threads, descriptors and mappings grew from {before} to {after}")


def soak(case: Case) -> None:
    """Many epochs of one loader: neither memory nor slots grow after the first few."""
    path = case.material.kinds[case.random.choice(sorted(case.material.kinds))].path
    ops = case.random.choice(OPS)
    with H5Loader(
        H5Dataset(path), case.random.randint(1, 9), shuffle=True, augment=ops, num_workers=2
    ) as loader:
        for _ in range(15):
            _drain(loader)
        before = _resident()
        for _ in range(40):
            _drain(loader)
        grown = _resident() - before
        if (slots := loader.stats()["slots"]) > 10:
            raise Wrong(f"{slots} slots for two batches in the making and one delivered")
        if grown > 64 << 20:
            raise Wrong(f"40 epochs of some 100 kB took {grown >> 20} MiB that were not given back")


def _drain(loader: Any) -> None:
    for _ in loader:
        pass


def _whole_epoch(path: Path) -> None:
    with H5Loader(H5Dataset(path), 4, shuffle=True, augment=OPS[0]) as loader:
        _drain(loader)


def _broken_off(path: Path) -> None:
    for _ in H5Loader(H5Dataset(path), 4, shuffle=True, augment=OPS[0]):
        break


def _never_begun(path: Path) -> None:
    iter(H5Loader(H5Dataset(path), 4, shuffle=True, augment=OPS[0], num_workers=3))


def _raising(path: Path) -> None:
    def refuse(label: Any) -> Any:
        raise RuntimeError("no")

    try:
        _drain(H5Loader(H5Dataset(path, target_transform=refuse), 4, shuffle=True, augment=OPS[0]))
    except RuntimeError:
        return
    raise Wrong("an error of target_transform was lost")


def _two_passes(path: Path) -> None:
    loader = H5Loader(H5Dataset(path), 4, shuffle=True, augment=OPS[0])
    for _ in zip(loader, loader, strict=False):
        pass


def _dataset_alone(path: Path) -> None:
    ds = H5Dataset(path)
    for index in range(len(ds)):
        ds[index]


def _held(path: Path) -> tuple[int, int, int]:
    """Return how many threads, descriptors and mappings of `path` this process has."""
    gc.collect()
    mapped = Path("/proc/self/maps").read_text().count(str(path))
    return threading.active_count(), len(os.listdir("/proc/self/fd")), mapped


def _grown(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    return any(now > was for now, was in zip(after, before, strict=True))


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# Writing in place -----------------------------------------------------------------------------


def written(case: Case) -> None:
    """Images that the caller or a transform writes into: next time, the file's bytes."""
    kind = case.material.kinds[case.random.choice(sorted(case.material.kinds))]
    expected = [image.clone() for image, _ in H5Dataset(kind.path)]
    write = case.random.choice([_zero, _noise, _box, _through_numpy, _through_view])
    ds = H5Dataset(kind.path)
    wrap = case.random.choice([_plain, _subset, _split, _chain])
    case.note(f"{kind.name} {write.__name__} {wrap.__name__}")
    wrapped, order = wrap(case, ds)
    for _ in range(case.random.randint(2, 4)):
        for at, index in enumerate(order):
            image = wrapped[at][0]
            if not torch.equal(image, expected[index]):
                raise Wrong(f"item {index} is not the file's any more: it was written into before")
            if case.random.random() < 0.6:
                write(case, image)
            del image
    transform = H5Dataset(
        kind.path, lambda image: write(case, image), output="tensor", aspect="stored"
    )
    for _ in make_dataloader(transform, 1, shuffle=True, num_workers=0):
        pass
    again = H5Dataset(kind.path)
    for index, image in enumerate(expected):
        if not torch.equal(again[index][0], image) or not torch.equal(ds[index][0], image):
            raise Wrong(f"item {index} is not the file's after a transform wrote into it")


def _plain(case: Case, ds: H5Dataset) -> tuple[Dataset[Any], list[int]]:
    return ds, list(range(len(ds)))


def _subset(case: Case, ds: H5Dataset) -> tuple[Dataset[Any], list[int]]:
    order = case.random.choices(range(len(ds)), k=20)
    return Subset(ds, order), order


def _split(case: Case, ds: H5Dataset) -> tuple[Dataset[Any], list[int]]:
    part = random_split(ds, [len(ds) - 10, 10])[0]
    return part, list(part.indices)


def _chain(case: Case, ds: H5Dataset) -> tuple[Dataset[Any], list[int]]:
    return ConcatDataset([ds, ds]), [*range(len(ds)), *range(len(ds))]


def _zero(case: Case, image: torch.Tensor) -> torch.Tensor:
    return image.zero_()


def _noise(case: Case, image: torch.Tensor) -> torch.Tensor:
    return image.random_(0, 256)


def _box(case: Case, image: torch.Tensor) -> torch.Tensor:
    image[..., 3:9, 2:7] = 7
    return image


def _through_numpy(case: Case, image: torch.Tensor) -> torch.Tensor:
    image.numpy()[..., ::2] = 1
    return image


def _through_view(case: Case, image: torch.Tensor) -> torch.Tensor:
    image.flatten()[:] = 255 - image.flatten()
    return image


# Files that change under readers ----------------------------------------------------------------


def replaced(case: Case) -> None:
    """Opened beside another that replaces the file by rename: one file or the other, never both."""
    path = case.folder / "x.h5"
    kinds = [
        case.material.kinds[name] for name in ("raw", "crop", "pad", "jpeg", "masks", "targets")
    ]
    files = [_relabelled(case, case.random.choice(kinds).path, number) for number in range(2)]
    shutil.copyfile(files[0], path)
    truths = [_truth(file) for file in files]
    done = threading.Event()
    swapper = threading.Thread(target=_swap, args=(files, path, done))
    swapper.start()
    try:
        for _ in range(case.random.randint(10, 40)):
            door = case.random.choice([_open_dataset, _open_loader])
            if door(path) not in truths:
                raise Wrong(f"{door.__name__} gave labels of one file with images of another")
    finally:
        done.set()
        swapper.join()
    if case.random.random() < 0.5:
        ds = H5Dataset(path)
        path.unlink()
        if _contents(ds) not in truths:
            raise Wrong("a file that was deleted while open gives other items")


def _swap(files: list[Path], path: Path, done: threading.Event) -> None:
    number = 0
    while not done.is_set():
        number += 1
        other = path.with_name("next.h5")
        shutil.copyfile(files[number % 2], other)
        other.replace(path)


def _relabelled(case: Case, path: Path, number: int) -> Path:
    """Copy a file with its images in another order: pixels tell which file they are of."""
    made = case.folder / f"file{number}.h5"
    ds = H5Dataset(path, output="numpy")
    items = [
        (np.roll(image, number * 3, 0) ^ (number * 85), index * 2 + number)
        for index, (image, _) in enumerate(ds)
    ]
    items = [
        (np.broadcast_to(image.reshape(*image.shape[:2], -1), (*image.shape[:2], 3)), n)
        for image, n in items
    ]
    pack(items, made, size=32, store=case.random.choice(["raw", "yuv420", "jpeg"]))
    return made


Truth = list[Sample]


def _truth(path: Path) -> Truth:
    return _contents(H5Dataset(path))


def _contents(ds: H5Dataset) -> Truth:
    found = []
    for index in range(len(ds)):
        image, label = ds[index]
        found.append((int(label), zlib.crc32(np.ascontiguousarray(image.numpy()).tobytes())))
    return found


def _open_dataset(path: Path) -> Truth:
    return _contents(H5Dataset(path))


def _open_loader(path: Path) -> Truth:
    found = []
    with H5Loader(H5Dataset(path), 8, shuffle=False, num_workers=2) as loader:
        for images, labels in loader:
            for image, label in zip(images, labels.tolist(), strict=True):
                found.append((label, zlib.crc32(np.ascontiguousarray(image.numpy()).tobytes())))
    return found


def truncated(case: Case) -> None:
    """Cut while it is read: a sentence from commands; SIGBUS, as documented, for loaders."""
    kind = case.material.kinds[case.random.choice(sorted(case.material.kinds))]
    path = case.folder / "x.h5"
    shutil.copyfile(kind.path, path)
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
