"""FFCV: a .beton file read by numba-compiled pipelines.

Pipeline as in FFCV's ImageNet example and documentation (https://docs.ffcv.io/ffcv_examples/
cifar10.html, https://docs.ffcv.io/performance_guide.html): RandomResizedCropRGBImageDecoder,
RandomHorizontalFlip, ToTensor, ToTorchImage; os_cache=True and OrderOption.RANDOM for a dataset
that fits into memory. max_resolution keeps the aspect, so it stores fewer pixels than a square.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from _common import QUALITY, SIZE, TorchLoader, labeled_files, serve
from PIL import Image

NOTES = {
    "raw": f"longest side {SIZE}: about 0.75 of a square's pixels",
    "jpeg": f"longest side {SIZE}: about 0.75 of a square's pixels",
    "original": f"cannot keep the source's bytes: encoded anew at quality {QUALITY}",
}


class _IndexedFiles:
    """Indexed dataset of (PIL image, label) for FFCV's writer."""

    def __init__(self, source: str) -> None:
        self.images = labeled_files(source)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.images[index]
        return Image.open(path).convert("RGB"), label


def convert(params: Mapping[str, Any]) -> dict[str, Any]:
    """Write a .beton file with FFCV's own writer and its own worker processes."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    out = Path(params["out"]) / "data.beton"
    image = RGBImageField(
        write_mode="raw" if params["variant"] == "raw" else "jpg",
        max_resolution=None if params["variant"] == "original" else params.get("size", SIZE),
        jpeg_quality=QUALITY,
    )
    writer = DatasetWriter(
        str(out), {"image": image, "label": IntField()}, num_workers=params["workers"]
    )
    began = time.perf_counter()
    writer.from_indexed_dataset(_IndexedFiles(params["source"]))
    written = {"data": str(out), "writing_seconds": time.perf_counter() - began}
    return written | _stored_pixels(str(out))


def _stored_pixels(data: str) -> dict[str, float]:
    from ffcv.reader import Reader

    metadata = Reader(data).metadata["f0"]
    sizes = metadata["height"].astype(float) * metadata["width"]
    return {"pixels": float(sizes.mean())}


class Adapter(TorchLoader):
    """ffcv.loader.Loader."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        from ffcv.fields import decoders
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import (
            RandomHorizontalFlip,
            RandomTranslate,
            Squeeze,
            ToTensor,
            ToTorchImage,
        )

        image: list[Any] = [decoders.SimpleRGBImageDecoder(), RandomHorizontalFlip()]
        if padding := params.get("padding"):  # its CIFAR-10 pipeline
            image.append(RandomTranslate(padding=padding))
        else:
            size = (params["crop"], params["crop"])
            image[0] = decoders.RandomResizedCropRGBImageDecoder(size)
        loader = Loader(
            params["data"],
            batch_size=params["batch_size"],
            num_workers=params["workers"],
            order=OrderOption.RANDOM,
            os_cache=True,
            drop_last=params.get("drop_last", False),
            pipelines={
                "image": [*image, ToTensor(), ToTorchImage()],
                "label": [decoders.IntDecoder(), ToTensor(), Squeeze()],
            },
        )
        super().__init__(loader, params["data"])
        self.note = NOTES[params["variant"]]

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield (images, labels) of one epoch; an epoch left early ends its thread."""
        iterator = iter(self.loader)
        try:
            yield from iterator
        finally:
            iterator.close()


if __name__ == "__main__":
    serve(Adapter, convert)
