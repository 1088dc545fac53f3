"""The loaders that are measured: how each is opened, for the batches that one trainer wants.

Two of them are no part of h5feed: DALI's own reader and decoder, and torchvision's nvJPEG. They
deliver uint8 (B, 3, H, W) in channels_last memory and int64 labels, as the others do; without a GPU
they run on the CPU, which shows that they work.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.data import Photos
from h5feed.augment import Op, Pipeline
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.loader import H5Loader
from h5feed.feed.order import FullShuffle
from h5feed.feed.sampling import BatchPlan, Drawing, Steps
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


class DaliFiles:
    """A folder of class folders by DALI's reader and "mixed" decoder, with its usual recipe.

    Args:
        folder: of class folders.
        batch_size: samples of a batch; a last one that would be short is left out.
        size: side of the crops.
        device: where batches are made.
        threads: DALI's.

    """

    def __init__(
        self, folder: Path, batch_size: int, *, size: int, device: torch.device, threads: int
    ) -> None:
        from nvidia.dali.plugin.base_iterator import LastBatchPolicy
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        made = _files_pipeline(str(folder), size, batch_size, device, threads)
        self._batches = DALIGenericIterator(
            [made],
            ["data", "label"],
            reader_name="files",
            last_batch_policy=LastBatchPolicy.DROP,
            auto_reset=True,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """DALI's reader shuffles each epoch anew by itself."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for (batch,) in self._batches:
            yield batch["data"].permute(0, 3, 1, 2), batch["label"][:, 0].long()


def _files_pipeline(
    folder: str, size: int, batch_size: int, device: torch.device, threads: int
) -> Any:
    from nvidia.dali import Pipeline, fn, types

    on_gpu = device.type == "cuda"
    made = Pipeline(
        batch_size=batch_size,
        num_threads=threads,
        device_id=torch.cuda.current_device() if on_gpu else None,
        prefetch_queue_depth=2,
    )
    with made:
        data, labels = fn.readers.file(file_root=folder, random_shuffle=True, name="files")
        images = fn.decoders.image_random_crop(
            data,
            device="mixed" if on_gpu else "cpu",
            output_type=types.RGB,
            random_area=[0.08, 1],
            random_aspect_ratio=[3 / 4, 4 / 3],
        )
        images = fn.resize(images, size=[size, size])
        images = fn.flip(images, horizontal=fn.random.coin_flip())
        made.set_outputs(images, labels.gpu() if on_gpu else labels)
    return made


class NvJpeg:
    """A packed JPEG file, decoded by torchvision on the device and cropped there by h5feed."""

    def __init__(
        self,
        ds: H5Dataset,
        batch_size: int,
        *,
        augment: Sequence[Op],
        device: torch.device,
        seed: int,
    ) -> None:
        spec = ds.files.specs["images"]
        self._files = ds.files
        self._pipeline = Pipeline(augment)
        self._pipeline.bind((spec.height, spec.width))
        self._steps = Steps(samples=len(ds), batch_size=batch_size, drop_last=True)
        self._device = device
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._steps)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        from torchvision.io import ImageReadMode, decode_jpeg

        order = FullShuffle(len(self._files), self._seed, self._epoch)
        drawing = Drawing(self._files, self._pipeline)
        plan = BatchPlan(order, self._steps, drawing, seed=self._seed, epoch=self._epoch)
        for step in range(len(self._steps)):
            indices, params, _ = plan.samples(step, step + 1)[0]
            data = [
                torch.from_numpy(self._files.item("images", i).copy()) for i in indices.tolist()
            ]
            decoded = decode_jpeg(data, ImageReadMode.RGB, device=self._device)
            images = torch.stack(decoded).permute(0, 2, 3, 1).contiguous()
            labels = torch.from_numpy(self._files.labels[indices]).to(self._device)
            assert params is not None
            yield self._pipeline.run_device(params, images), labels
