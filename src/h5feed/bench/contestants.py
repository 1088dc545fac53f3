"""Who takes part in bench-h5, and what is expected of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5feed import H5Dataset
from h5feed.bench import subjects
from h5feed.bench.measure import Expectation
from h5feed.bench.options import CompareOptions
from h5feed.bench.rounds import Entry
from h5feed.errors import UsageError
from h5feed.feed.files import PackedFiles

__all__ = ["Contestant", "contestants", "entries"]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A subject of ours and when it takes part."""

    name: str
    factory: str
    """module:attribute of what makes it."""
    ceiling: bool = False
    takes_part: Callable[[PackedFiles, CompareOptions], str | None] = lambda _pixels, _options: None
    """Why it cannot be measured, or None; "" where there is nothing to measure or to say."""
    params: dict[str, Any] = field(default_factory=dict)
    """What its factory needs beyond what all get."""

    reads: Literal["file", "folder", "small"] = "file"
    """The packed file, the source files, or JPEGs of the stored size made for this."""


MOST_SMALL = 5000
"""JPEGs of the stored size: more would take minutes to write, and warm ones tell no more."""
_NOT_QUICK = "left out of a quick look"


def _needs_folder(_: PackedFiles, options: CompareOptions) -> str | None:
    return None if options.images else "give --images DIR to measure the folder of files as well"


def _needs_plain_pixels(pixels: PackedFiles, _: CompareOptions) -> str | None:
    spec = pixels.specs["images"]
    if spec.encoding == "raw" and spec.is_fixed:
        return None
    return f"the usual code reads arrays of pixels, and this file stores {spec.encoding}"


def _needs_one_size(pixels: PackedFiles, options: CompareOptions) -> str | None:
    spec = pixels.specs["images"]
    if spec.fit == "keep" or spec.encoding == "original":
        return "a device crops images of one size, and this file's have many"
    if options.quick and options.where == "cpu":
        return "slow where the device is the CPU: leave out --quick to see it"
    return None


def _needs_dali(_: PackedFiles, options: CompareOptions) -> str | None:
    try:
        installed = find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # not even `nvidia`
        installed = False
    if not installed:
        return 'NVIDIA DALI is not installed: pip install "h5feed[dali]"'
    return _NOT_QUICK if options.quick else None


def _needs_torchvision(_: PackedFiles, options: CompareOptions) -> str | None:
    if subjects.imagefolder_class() is None:
        return "torchvision is not installed, or was built for another torch"
    return _NOT_QUICK if options.quick else None


def _needs_stored_size(pixels: PackedFiles, options: CompareOptions) -> str | None:
    if pixels.specs["images"].encoding == "original":
        return "this file stores the source files as they are"
    return _NOT_QUICK if options.quick else None


def _first(
    *conditions: Callable[[PackedFiles, CompareOptions], str | None],
) -> Callable[[PackedFiles, CompareOptions], str | None]:
    """Return the condition that all `conditions` hold."""

    def reason(pixels: PackedFiles, options: CompareOptions) -> str | None:
        said = (condition(pixels, options) for condition in conditions)
        return next((text for text in said if text is not None), None)

    return reason


def _needs_classes(pixels: PackedFiles, _: CompareOptions) -> str | None:
    return None if len(pixels.classes) else "ImageFolder needs class folders"


def _bounds(*encodings: str) -> Callable[[PackedFiles, CompareOptions], str | None]:
    """Return the condition of a ceiling that bounds the work on these encodings only."""
    return lambda pixels, _: None if pixels.specs["images"].encoding in encodings else ""


def _needs_plain_copies(pixels: PackedFiles, options: CompareOptions) -> str | None:
    if not pixels.specs["images"].is_fixed:
        return "images have different sizes in bytes"
    return _NOT_QUICK if options.quick else None


_SUBJECTS = "h5feed.bench.subjects"
FOLDER = f"{_SUBJECTS}:Folder"
_TENSORS = f"{_SUBJECTS}:FolderOfTensors"
_CEILINGS = "h5feed.bench.ceilings"


def contestants(side: int | None = None) -> tuple[Contestant, ...]:
    """Return our subjects and the ceilings, today's way first; `side` is what is stored, in px."""
    small = "small JPEGs" if side is None else f"{side}-px JPEGs"
    folder = "ImageFolder" if subjects.imagefolder_class() else "Pillow folder"
    return (
        Contestant(f"{folder} + DataLoader", FOLDER, False, _needs_folder, reads="folder"),
        Contestant(
            "torchvision v2 on tensors",
            _TENSORS,
            False,
            _first(_needs_folder, _needs_torchvision, _needs_classes),
            reads="folder",
        ),
        Contestant(
            f"folder of {small}",
            f"{_SUBJECTS}:FolderOfSmall",
            False,
            _needs_stored_size,
            reads="small",
        ),
        Contestant(
            f"{small}, v2 on tensors",
            _TENSORS,
            False,
            _first(_needs_stored_size, _needs_torchvision),
            params={"tensors_of": "small"},
            reads="small",
        ),
        Contestant("h5py, the usual way", f"{_SUBJECTS}:UsualH5py", False, _needs_plain_pixels),
        Contestant("H5Dataset + DataLoader", f"{_SUBJECTS}:SwappedIn"),
        Contestant("make_dataloader(H5Dataset)", f"{_SUBJECTS}:ReadyMade"),
        Contestant("H5Loader", f"{_SUBJECTS}:LoaderOnCpu"),
        Contestant(
            "H5Loader, crop on device", f"{_SUBJECTS}:LoaderOnDevice", False, _needs_one_size
        ),
        Contestant("DaliLoader", f"{_SUBJECTS}:LoaderByDali", False, _needs_dali),
        Contestant("bare crop loop", f"{_CEILINGS}:Kernel", True, _bounds("raw", "yuv420")),
        Contestant("region-decode loop", f"{_CEILINGS}:RegionKernel", True, _bounds("jpeg")),
        Contestant("whole-decode loop", f"{_CEILINGS}:Kernel", True, _bounds("jpeg", "original")),
        Contestant("memcpy", f"{_CEILINGS}:Gather", True, _needs_plain_copies),
    )


def small_items(pixels: PackedFiles) -> npt.NDArray[np.int64]:
    """Return which items the folder of small JPEGs holds: all, or evenly spaced ones."""
    count = min(len(pixels), MOST_SMALL)
    return np.arange(count, dtype=np.int64) * len(pixels) // count


def write_small(file: Path, out: Path, threads: int) -> None:
    """Write `small_items` as JPEG files of quality 90 below `out`, in a folder per label."""
    dataset = H5Dataset(str(file), output="numpy", aspect="stored")
    labels = _plain_labels(dataset.pixels)

    def write(index: int) -> None:
        pixels, label = dataset[index][0], 0 if labels is None else int(labels[index])
        folder = out / f"{label:06}"
        folder.mkdir(exist_ok=True, parents=True)
        Image.fromarray(pixels).save(folder / f"{index:09}.jpg", quality=90)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, small_items(dataset.pixels).tolist()))


def _plain_labels(pixels: PackedFiles) -> npt.NDArray[Any] | None:
    if pixels.labels.ndim == 1 and "masks" not in pixels.specs:
        return pixels.labels
    return None


def _expectation(pixels: PackedFiles, options: CompareOptions, one: Contestant) -> Expectation:
    items = small_items(pixels) if one.reads == "small" else np.arange(len(pixels))
    labels = _plain_labels(pixels)
    counts = None
    if labels is not None:
        counts = tuple(sorted(np.unique(labels[items], return_counts=True)[1].tolist()))
    return Expectation(
        images=len(items),
        batch_size=options.batch,
        height=options.side,
        width=options.side,
        label_counts=counts,
        ceiling=one.ceiling,
    )


def _check_images(pixels: PackedFiles, images: Path) -> None:
    """The folder must be the one that was packed: the same images on both sides."""
    missing = [key for key in pixels.keys() if not (images / key).is_file()]  # noqa: SIM118
    if missing:
        raise UsageError(
            f"images={images} lacks {len(missing)} of the {len(pixels)} images of the file "
            f"(first: {missing[0]}): give the folder it was packed from"
        )


def _measurable(
    among: Sequence[Contestant], pixels: PackedFiles, options: CompareOptions
) -> tuple[list[Contestant], list[str]]:
    """Those of `among` who can be measured, and why the others cannot."""
    chosen = [c for c in among if not options.only or any(o in c.name for o in options.only)]
    if not chosen:
        names = ", ".join(repr(one.name) for one in among)
        raise UsageError(f"only={list(options.only)} matches no loader: give a part of {names}")
    reasons = [(one, one.takes_part(pixels, options)) for one in chosen]
    left_out = [f"{one.name}: {reason}" for one, reason in reasons if reason]
    return [one for one, reason in reasons if reason is None], left_out


def entries(
    among: Sequence[Contestant],
    pixels: PackedFiles,
    options: CompareOptions,
    workers: int,
    small: Path,
) -> tuple[list[Entry], list[str]]:
    """Return the entries of those of `among` who take part, and who does not with the reason.

    `small` is an empty folder: JPEGs of the stored size are written there if somebody reads them.

    Raises:
        UsageError: `options.images` is another folder, or `options.only` matches nobody.
    """
    taking_part, left_out = _measurable(among, pixels, options)
    folder: tuple[str, ...] = ()
    if options.images is not None:
        _check_images(pixels, options.images)
        folder = tuple(str(options.images / key) for key in pixels.keys())  # noqa: SIM118
    params = {
        "file": pixels.paths[0],
        "images": str(options.images) if options.images else None,
        "small": str(small),
        "workers": workers,
        "batch_size": options.batch,
        "crop": options.side,
        "device": options.where,
    }
    if any(one.reads == "small" for one in taking_part):
        write_small(Path(pixels.paths[0]), small, max(workers, 1))
    files = {"file": (pixels.paths[0],), "folder": folder, "small": (str(small),)}
    return [
        Entry(
            name=one.name,
            command=(sys.executable, "-m", "h5feed.bench.host", one.factory),
            params=params | one.params,
            expected=_expectation(pixels, options, one),
            files=files[one.reads],
            cold=not one.ceiling,
        )
        for one in taking_part
    ], left_out
