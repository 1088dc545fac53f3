"""bench-h5: ways to load one file, and bare work beside them, measured in turn.

`CompareOptions` says how, `contestants` who takes part, and `compare` gives a report for each
setting: one, or with `sweep` one for every number of workers and batch size.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from h5feed import H5Dataset
from h5feed.bench import ceilings, subjects, system
from h5feed.bench.measure import Expectation
from h5feed.bench.report import OURS, Comparison
from h5feed.bench.rounds import LONGEST_WINDOW, Entry, Outcome, Schedule, run
from h5feed.errors import UsageError
from h5feed.feed.files import PackedFiles
from h5feed.system import available_cores

__all__ = [
    "CompareOptions",
    "Contestant",
    "compare",
    "contestants",
    "crop_in_words",
    "entries",
    "facts",
    "report_of",
    "settings",
    "stored_side",
]

_USUAL_BATCH = 256
_SMALLEST_BATCH = 64
_USUAL_CROP, _SMALLEST_CROP = 224, 8


def stored_side(files: PackedFiles) -> int | None:
    """Return the short side that images are stored at, in pixels; None: each its own."""
    spec = files.specs["images"]
    return min(spec.height, spec.width) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What is compared, and for how long."""

    images: Path | None = None
    """The folder that FILE was packed from: measured as it is used today."""
    batch_size: int | None = None
    """Images per batch; otherwise 256, or down to 64 for a small set and with --quick.
    Never more than FILE holds."""
    crop: int | None = None
    """Side of the random crop that every loader makes; otherwise 224, or the stored images'
    short side where that is less."""
    workers: int | None = None
    """Worker processes or threads of each loader; otherwise one per core, at most 8."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where batches are delivered; auto: a GPU if there is one."""
    seconds: float = 1.5
    """Length of a timed window."""
    repeats: int = 3
    """Windows per loader; they take turns."""
    quick: bool = False
    """A first look in under 20 seconds: two short windows, small batches, no cold runs."""
    no_cold: bool = False
    """Leave out the cold runs, which ask the kernel to drop FILE and DIR from its cache."""
    sweep: bool = False
    """Measure several worker counts and batch sizes (many times as long), and H5Loader's threads
    beside its processes."""
    only: tuple[str, ...] = ()
    """Measure only loaders whose name contains one of these."""

    def check(self) -> None:
        """Raise UsageError for a value out of range."""
        least_of = {
            "batch_size": 1,
            "crop": _SMALLEST_CROP,
            "workers": 1,
            "repeats": 1,
            "seconds": 0.05,
        }
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and not value >= least:  # NaN is not
                raise UsageError(f"{name}={value} is too small: give {least} or more")
        if self.seconds > LONGEST_WINDOW:
            raise UsageError(
                f"seconds={self.seconds} is too large: give {LONGEST_WINDOW:g} or less"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device=cuda, but torch sees no GPU here: give cpu")

    @property
    def batch(self) -> int:
        """Images per batch where nothing is known of the set."""
        return self.batch_size or (_SMALLEST_BATCH if self.quick else _USUAL_BATCH)

    @property
    def side(self) -> int:
        """Side of the crop where nothing is known of the file."""
        return self.crop or _USUAL_CROP

    def for_file(self, files: PackedFiles) -> CompareOptions:
        """Return these options with the batch size and the crop that a file's images ask for."""
        side = min(self.side, stored_side(files) or self.side)
        crop = self.crop or max(side, _SMALLEST_CROP)
        return replace(self.for_set_of(len(files)), crop=crop)

    def for_set_of(self, count: int) -> CompareOptions:
        """Return these options with a batch size that `count` images fill several times, if any."""
        size = self.batch
        while (
            self.batch_size is None and _SMALLEST_BATCH < size > count // Comparison.SMOKE_BATCHES
        ):
            size //= 2
        return replace(self, batch_size=min(size, count))

    @property
    def where(self) -> str:
        """The device that `device` means here."""
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    @property
    def schedule(self) -> Schedule:
        """Times of one comparison."""
        if self.quick:
            return Schedule(seconds=0.2, repeats=2, settle=0.0, verify=0.0)
        cold = 0.0 if self.no_cold else 4.0
        return Schedule(seconds=self.seconds, repeats=self.repeats, cold=cold)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A subject of ours and when it takes part."""

    name: str
    factory: str
    """module:attribute of what makes it."""
    ceiling: bool = False
    takes_part: Callable[[PackedFiles, CompareOptions], str | None] = lambda _files, _options: None
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


def _needs_plain_pixels(files: PackedFiles, _: CompareOptions) -> str | None:
    spec = files.specs["images"]
    if not files.is_single:
        return "the usual code opens one file, and this is a set of shards"
    if spec.encoding == "raw" and spec.is_fixed:
        return None
    return f"the usual code reads arrays of pixels, and this file stores {spec.encoding}"


def _needs_one_size(files: PackedFiles, options: CompareOptions) -> str | None:
    spec = files.specs["images"]
    if spec.fit == "keep" or spec.encoding == "original":
        return "a device crops images of one size, and this file's have many"
    if options.quick and options.where == "cpu":
        return "slow where the device is the CPU: leave out --quick to see it"
    return None


def _needs_threads(_: PackedFiles, options: CompareOptions) -> str | None:
    """Show one engine by itself in a sweep, or where it is asked for."""
    return None if options.sweep or any("threads" in name for name in options.only) else ""


def _needs_processes(_: PackedFiles, options: CompareOptions) -> str | None:
    if not options.sweep and not any("processes" in name for name in options.only):
        return ""
    return None if sys.platform == "linux" else "worker processes need Linux"


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


def _needs_stored_size(files: PackedFiles, options: CompareOptions) -> str | None:
    if files.specs["images"].encoding == "original":
        return "this file stores the source files as they are"
    return _NOT_QUICK if options.quick else None


def _first(
    *conditions: Callable[[PackedFiles, CompareOptions], str | None],
) -> Callable[[PackedFiles, CompareOptions], str | None]:
    """Return the condition that all `conditions` hold."""

    def reason(files: PackedFiles, options: CompareOptions) -> str | None:
        said = (condition(files, options) for condition in conditions)
        return next((text for text in said if text is not None), None)

    return reason


def _needs_classes(files: PackedFiles, _: CompareOptions) -> str | None:
    return None if len(files.classes) else "ImageFolder needs class folders"


def _bounds(*encodings: str) -> Callable[[PackedFiles, CompareOptions], str | None]:
    """Return the condition of a ceiling that bounds the work on these encodings only."""
    return lambda files, _: None if files.specs["images"].encoding in encodings else ""


def _needs_plain_copies(files: PackedFiles, options: CompareOptions) -> str | None:
    if not files.specs["images"].is_fixed:
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
        Contestant(OURS, f"{_SUBJECTS}:LoaderOnCpu"),
        Contestant(f"{OURS}, threads", f"{_SUBJECTS}:LoaderOfThreads", False, _needs_threads),
        Contestant(f"{OURS}, processes", f"{_SUBJECTS}:LoaderOfProcesses", False, _needs_processes),
        Contestant(
            "H5Loader, crop on device", f"{_SUBJECTS}:LoaderOnDevice", False, _needs_one_size
        ),
        Contestant("DaliLoader", f"{_SUBJECTS}:LoaderByDali", False, _needs_dali),
        Contestant("bare crop loop", f"{_CEILINGS}:CropLoop", True, _bounds("raw", "yuv420")),
        Contestant("region-decode loop", f"{_CEILINGS}:RegionDecodeLoop", True, _bounds("jpeg")),
        Contestant("whole-decode loop", f"{_CEILINGS}:CropLoop", True, _bounds("jpeg", "original")),
        Contestant("memcpy", f"{_CEILINGS}:CopyLoop", True, _needs_plain_copies),
    )


def small_items(files: PackedFiles) -> npt.NDArray[np.int64]:
    """Return which items the folder of small JPEGs holds: all, or evenly spaced ones."""
    count = min(len(files), MOST_SMALL)
    return np.arange(count, dtype=np.int64) * len(files) // count


def write_small(file: Path, out: Path, threads: int) -> None:
    """Write `small_items` as JPEG files of quality 90 below `out`, in a folder per label."""
    dataset = H5Dataset(str(file), output="numpy", aspect="stored")
    labels = _plain_labels(dataset.files)

    def write(index: int) -> None:
        pixels, label = dataset[index][0], 0 if labels is None else int(labels[index])
        folder = out / f"{label:06}"
        folder.mkdir(exist_ok=True, parents=True)
        Image.fromarray(pixels).save(folder / f"{index:09}.jpg", quality=90)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, small_items(dataset.files).tolist()))


def _plain_labels(files: PackedFiles) -> npt.NDArray[Any] | None:
    if not files.label_shape and "masks" not in files.specs:
        return files.labels
    return None


def _expectation(files: PackedFiles, options: CompareOptions, one: Contestant) -> Expectation:
    items = small_items(files) if one.reads == "small" else np.arange(len(files))
    labels = _plain_labels(files)
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


def _check_images(files: PackedFiles, images: Path) -> None:
    """The folder must be the one that was packed: the same images on both sides."""
    missing = [key for key in files.keys() if not (images / key).is_file()]  # noqa: SIM118
    if missing:
        raise UsageError(
            f"images={images} lacks {len(missing)} of the {len(files)} images of the file "
            f"(first: {missing[0]}): give the folder it was packed from"
        )


def _measurable(
    among: Sequence[Contestant], files: PackedFiles, options: CompareOptions
) -> tuple[list[Contestant], list[str]]:
    """Those of `among` who can be measured, and why the others cannot."""
    chosen = [c for c in among if not options.only or any(o in c.name for o in options.only)]
    if not chosen:
        names = ", ".join(repr(one.name) for one in among)
        raise UsageError(f"only={list(options.only)} matches no loader: give a part of {names}")
    reasons = [(one, one.takes_part(files, options)) for one in chosen]
    left_out = [f"{one.name}: {reason}" for one, reason in reasons if reason]
    return [one for one, reason in reasons if reason is None], left_out


def entries(
    among: Sequence[Contestant],
    files: PackedFiles,
    options: CompareOptions,
    workers: int,
    small: Path,
) -> tuple[list[Entry], list[str]]:
    """Return the entries of those of `among` who take part, and who does not with the reason.

    `small` is an empty folder: JPEGs of the stored size are written there if somebody reads them.

    Raises:
        UsageError: `options.images` is another folder, or `options.only` matches nobody.
    """
    taking_part, left_out = _measurable(among, files, options)
    folder: tuple[str, ...] = ()
    if options.images is not None:
        _check_images(files, options.images)
        folder = tuple(str(options.images / key) for key in files.keys())  # noqa: SIM118
    params = {
        "file": files.paths[0],
        "images": str(options.images) if options.images else None,
        "small": str(small),
        "workers": workers,
        "batch_size": options.batch,
        "crop": options.side,
        "device": options.where,
    }
    if any(one.reads == "small" for one in taking_part):
        write_small(Path(files.paths[0]), small, max(workers, 1))
    read = {"file": (files.paths[0],), "folder": folder, "small": (str(small),)}
    return [
        Entry(
            name=one.name,
            command=(sys.executable, "-m", "h5feed.bench.process", one.factory),
            params=params | one.params,
            expected=_expectation(files, options, one),
            files=read[one.reads],
            cold=not one.ceiling,
        )
        for one in taking_part
    ], left_out


Tell = Callable[[str], None]


def facts(file: Path, options: CompareOptions) -> dict[str, Any]:
    """Return all that is needed to measure again: machine, versions, options."""
    versions = system.versions()
    if options.where == "cuda":
        versions["GPU"] = torch.cuda.get_device_name()
    named = asdict(options)
    named |= {"batch_size": options.batch, "crop": options.side}
    named["images"] = options.images and options.images.name  # no path of this machine
    return {
        "machine": system.machine_facts(file),
        "versions": versions,
        "options": named,
        "schedule": asdict(options.schedule),
    }


def _disk_outcome(file: Path, count: int) -> Iterable[Outcome]:
    rate = ceilings.disk_rate(file)
    if rate is not None:
        per_image = file.stat().st_size / count
        note = f"{rate / 1e6:,.0f} MB/s, file evicted, 8 threads"
        yield Outcome(name="disk, cold", ceiling=True, rates=(rate / per_image,), note=note)


def crop_in_words(files: PackedFiles, options: CompareOptions) -> str:
    """Return "224²", and that it is enlarged where less is stored."""
    stored = stored_side(files)
    enlarged = stored is not None and stored < options.side
    return f"{options.side}²" + (f" (enlarged: stored at {stored})" if enlarged else "")


def _one(file: Path, options: CompareOptions, workers: int, tell: Tell) -> Comparison:
    """Measure one setting."""
    files = PackedFiles([file])
    with tempfile.TemporaryDirectory(prefix="bench-h5-") as small:
        among = contestants(stored_side(files))
        taking_part, left_out = entries(among, files, options, workers, Path(small))
        known = facts(file, options) | _python_facts(file, taking_part, options, workers, tell)
        outcomes = run(taking_part, options.schedule, tell)
    if options.schedule.cold:
        outcomes += _disk_outcome(file, len(files))
    title = (
        f"{len(files):,} images ({files.specs['images'].encoding}), random crop to "
        f"{crop_in_words(files, options)} and flip, batches of {options.batch}, "
        f"{workers} workers, on {options.where}"
    )
    return report_of(title, outcomes, left_out, known, len(files))


def _python_facts(
    file: Path, taking_part: Sequence[Entry], options: CompareOptions, workers: int, tell: Tell
) -> dict[str, Any]:
    """Return what says how many cores the figure of H5Loader is good for, where it takes part."""
    if not any(one.name == OURS for one in taking_part):
        return {}
    tell("what Python takes for an image")
    spent = ceilings.python_seconds(file, subjects.crop_ops(options.side), options.batch)
    return {"python_seconds": spent, "workers": workers}


def report_of(
    title: str,
    outcomes: Sequence[Outcome],
    left_out: Sequence[str],
    known: dict[str, Any],
    images: int,
    kind: Literal["loading", "training"] = "loading",
) -> Comparison:
    """Return the report of what `facts` and the outcomes say."""
    return Comparison(
        title=title,
        kind=kind,
        outcomes=tuple(outcomes),
        images=images,
        batch_size=known["options"]["batch_size"],
        machine=system.describe_machine(known["machine"]),
        facts=known,
        left_out=tuple(left_out),
    )


def settings(options: CompareOptions, count: int) -> list[tuple[CompareOptions, int]]:
    """Return (options, workers) of every comparison on a set: one, or with `sweep` many."""
    cores = available_cores()
    if not options.sweep:
        return [(options, options.workers or min(cores, 8))]
    counts = [n for n in (1, 2, 4, 8, 16, 32) if n <= cores]
    sizes = sorted({min(64, count), options.batch})
    return [(replace(options, batch_size=size), n) for size in sizes for n in counts]


def compare(
    file: Path, options: CompareOptions, tell: Tell = lambda _: None
) -> Sequence[Comparison]:
    """Measure `file` and return a report per setting (one, unless `sweep`).

    Raises:
        UsageError: A wrong option, or a folder that is not the file's source.
        SubjectError: A loader failed, or did not deliver what it should.
    """
    options.check()
    files = PackedFiles([file])
    options = options.for_file(files)
    return [_one(file, given, workers, tell) for given, workers in settings(options, len(files))]
