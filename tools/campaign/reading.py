"""Everything that can be done with a packed file, by every door; and what that may answer."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from cases import PROGRAMS, Case, Result, Wrong, check_manners

from h5feed import H5Dataset, H5FeedError, H5Loader, augment, make_dataloader

__all__ = ["Refused", "command_here", "refusals", "use"]


class Refused(Exception):
    """A door refused the file, in one sentence."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an error that h5feed raises by its own decision into Refused; leave all others."""
    try:
        yield
    except (H5FeedError, OSError) as ex:
        text = str(ex)
        if not text.isprintable() or len(text) > 2000:
            raise Wrong(f"an error is not a printable sentence: {text[:2000]!r}") from ex
        raise Refused(text) from ex


def use(case: Case, path: Path, doors: int = 2) -> None:
    """Use a file by some doors: each may refuse it in one sentence, and do nothing worse."""
    for door in case.random.sample([_dataset, _loader, _dataloader, _check, _show, _sheet], doors):
        case.note(door.__name__)
        try:
            with refusals():
                door(case, path)
        except Refused as ex:
            case.note(f"refused: {ex}")


def command_here(case: Case, program: str, *args: object) -> Result:
    """Run a command in this process, which is much quicker than in one of its own."""
    out, err = io.StringIO(), io.StringIO()
    words = [str(arg) for arg in args]
    case.note(f"{program} {' '.join(words)}")
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = PROGRAMS[program](words)
        except SystemExit as ex:
            status = ex.code if isinstance(ex.code, int) else 1
    result = Result(status=status, out=out.getvalue(), err=err.getvalue())
    check_manners(program, result)
    return result


def _dataset(case: Case, path: Path) -> None:
    options = {
        "output": case.random.choice(["tensor", "numpy", "pil"]),
        "aspect": case.random.choice(["stored", "source"]),
    }
    ds = H5Dataset(path, **options)
    _columns(ds)
    _each(ds, lambda i: ds[i])


def _each(ds: H5Dataset, get: Callable[[int], Any]) -> None:
    """Read every item: one that is refused does not spare the next."""
    for index in range(min(len(ds), 64)):
        try:
            with refusals():
                get(index)
        except Refused:
            pass


def _columns(ds: H5Dataset) -> None:
    for name in ("classes", "class_to_idx", "targets", "samples", "imgs"):
        if hasattr(ds, name):
            len(getattr(ds, name))
    repr(ds)


def _loader(case: Case, path: Path) -> None:
    ops = case.random.choice(
        [
            [],
            [augment.RandomResizedCrop(16), augment.RandomHorizontalFlip()],
            [
                augment.Resize(24),
                augment.CenterCrop(16),
                augment.ToDtype(torch.float32, scale=True),
            ],
            [augment.RandomCrop(24, padding=4, pad_if_needed=True)],
        ]
    )
    with H5Loader(
        H5Dataset(path),
        case.random.choice([1, 5, 16]),
        augment=ops,
        shuffle=case.random.choice([True, False, "block", "shards"]),
        on_error=case.random.choice(["raise", "skip"]),
        views=case.random.choice([1, 2]),
        io=case.random.choice(["map", "read"]),
    ) as loader:
        for _ in zip(range(64), loader, strict=False):
            pass
        loader.stats()


def _dataloader(case: Case, path: Path) -> None:
    ds = H5Dataset(path)
    for _ in zip(range(64), make_dataloader(ds, 4, shuffle=True, num_workers=0), strict=False):
        pass


def _check(case: Case, path: Path) -> None:
    command_here(case, "check-h5", path, *case.random.choice([(), ("--json",)]))


def _show(case: Case, path: Path) -> None:
    command_here(case, "show-h5", path, *case.random.choice([(), ("--json",), ("--stats",)]))


def _sheet(case: Case, path: Path) -> None:
    command_here(case, "show-h5", path, "--sheet", case.folder / "sheet.png")
