"""The loaders that are measured: how each is opened, for the batches that one trainer wants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu.data import Photos
from gpu.rivals import DaliFiles, NvJpeg
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.loader import H5Loader
from h5feed.train.data import open_data, training_ops
from h5feed.train.trial import Trial

__all__ = ["Way", "ways"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to load."""

    name: str
    open: Callable[[Trial], Any]
    """Makes the loader; ImportError and the like are told in its row."""
    threads: int | None = None
    ceiling: bool = False


def ways(photos: Photos, threads: Sequence[int], *, workers: int) -> list[Way]:
    """Return the ceiling, and every loader that there is; `workers` for those of one setting."""
    own = partial(_h5loader, photos.raw, augment_on="device")
    return [
        Way(name="synthetic", open=_synthetic, ceiling=True),
        *_by_threads("H5Loader, stream", own, threads),
        *_by_threads("H5Loader, crop on cpu", partial(own, augment_on="cpu"), threads),
        Way(name="H5Loader, compiled", open=partial(own, num_workers=2, compile=True), threads=2),
        Way(
            name="H5Loader, device", open=partial(own, num_workers=1, residency="device"), threads=1
        ),
        Way(
            name="H5Loader, pinned", open=partial(own, num_workers=1, residency="pinned"), threads=1
        ),
        *_by_threads("H5Loader, jpeg", partial(_h5loader, photos.jpeg), [workers]),
        *_by_threads("DaliLoader, raw", partial(_dali, photos.raw), [workers]),
        *_by_threads("DaliLoader, jpeg", partial(_dali, photos.jpeg), [workers]),
        *_by_threads("DALI, files", partial(_dali_files, photos.folder), [workers]),
        Way(name="torchvision nvJPEG", open=partial(_nvjpeg, photos.jpeg), threads=1),
        *_by_threads("H5Dataset, DataLoader", partial(_stock, photos.raw, "dataloader"), [workers]),
        *_by_threads(
            "ImageFolder, DataLoader", partial(_stock, photos.folder, "imagefolder"), [workers]
        ),
    ]


def _by_threads(name: str, opened: Callable[..., Any], threads: Sequence[int]) -> list[Way]:
    return [Way(name=name, open=partial(opened, num_workers=n), threads=n) for n in threads]


def _synthetic(trial: Trial) -> Any:
    return trial.data.train_loader(trial.data.size)


def _common(trial: Trial, file: Path) -> tuple[H5Dataset, dict[str, Any]]:
    """Return the file's dataset, and what all loaders of packed files are given."""
    ds, config = H5Dataset(file), trial.config
    spec = ds.files.specs["images"]
    ops = training_ops(config.data, trial.data.size, (spec.height, spec.width), dense=False)
    return ds, {
        "batch_size": config.batch_size,
        "augment": ops,
        "device": trial.world.device,
        "seed": config.seed,
    }


def _h5loader(file: Path, trial: Trial, **options: Any) -> Any:
    ds, given = _common(trial, file)
    return H5Loader(ds, shuffle=True, drop_last=True, **given, **options)


def _dali(file: Path, trial: Trial, *, num_workers: int) -> Any:
    from h5feed.interop.dali import DaliLoader

    ds, given = _common(trial, file)
    return DaliLoader(ds, shuffle=True, drop_last=True, num_workers=num_workers, **given)


def _nvjpeg(file: Path, trial: Trial) -> Any:
    ds, given = _common(trial, file)
    return NvJpeg(ds, **given)


def _dali_files(folder: Path, trial: Trial, *, num_workers: int) -> Any:
    return DaliFiles(
        folder,
        trial.config.batch_size,
        size=trial.data.size,
        device=trial.world.device,
        threads=num_workers,
    )


def _stock(source: Path, kind: Any, trial: Trial, *, num_workers: int) -> Any:
    data = replace(trial.config.data, loader=kind, workers=num_workers, size=trial.data.size)
    return open_data(replace(trial.config, train=source, data=data), trial.world).train_loader(
        trial.data.size
    )
