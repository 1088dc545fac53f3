"""Two ways to decode on a GPU without h5feed's loaders: DALI's own, and torchvision's nvJPEG.

Both deliver uint8 (B, 3, H, W) in channels_last memory and int64 labels, as the others do. Without
a GPU they run on the CPU, which shows that they work.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from h5feed.augment import Op, Pipeline
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.order import FullShuffle
from h5feed.feed.sampling import BatchPlan, Drawing, Steps

__all__ = ["DaliFiles", "NvJpeg"]


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
        self._pixels = ds.files
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

        order = FullShuffle(len(self._pixels), self._seed, self._epoch)
        drawing = Drawing(self._pixels, self._pipeline)
        schedule = BatchPlan(order, self._steps, drawing, seed=self._seed, epoch=self._epoch)
        for step in range(len(self._steps)):
            indices, params, _ = schedule.samples(step, step + 1)[0]
            data = [
                torch.from_numpy(self._pixels.item("images", i).copy()) for i in indices.tolist()
            ]
            decoded = decode_jpeg(data, ImageReadMode.RGB, device=self._device)
            images = torch.stack(decoded).permute(0, 2, 3, 1).contiguous()
            labels = torch.from_numpy(self._pixels.labels[indices]).to(self._device)
            assert params is not None
            yield self._pipeline.run_device(params, images), labels
