"""FFCV over a folder of images, measured on demand. Run by an interpreter that has FFCV.

    python ffcv_subject.py SOURCE BETON RAW_OR_JPG LONGEST_SIDE BATCH_SIZE WORKERS CROP

Writes BETON if it is not there. Then for every line on stdin, a number of seconds, one line of
JSON on stdout: images per second over whole epochs of at least that time, and CPU seconds per
image. CROP 0 is FFCV's
CIFAR-10 pipeline: flip and translate by 4. Set up as FFCV's documentation says: OrderOption.RANDOM,
os_cache, batches_ahead as it is, no conversion beyond ToTensor.
"""

import json
import os
import sys
import time
from pathlib import Path

from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import (
    IntDecoder,
    RandomResizedCropRGBImageDecoder,
    SimpleRGBImageDecoder,
)
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, RandomTranslate, ToTensor
from ffcv.writer import DatasetWriter
from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png")


class Images:
    """All images below a folder."""

    def __init__(self, source: str) -> None:
        self.paths = [
            Path(folder, name)
            for folder, _, names in sorted(os.walk(source))
            for name in sorted(names)
            if name.lower().endswith(SUFFIXES)
        ]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.open(self.paths[index]).convert("RGB"), index


def write(source: str, out: str, mode: str, longest: int, workers: int) -> None:
    """Write the .beton file."""
    image = RGBImageField(write_mode=mode, max_resolution=longest, jpeg_quality=90)
    fields = {"image": image, "label": IntField()}
    writer = DatasetWriter(out + ".partial", fields, num_workers=workers)
    writer.from_indexed_dataset(Images(source), chunksize=100)
    Path(out + ".partial").rename(out)


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # FFCV prints progress
    source, beton, mode, *numbers = sys.argv[1:]
    longest, batch_size, workers, crop = map(int, numbers)
    if not Path(beton).exists():
        write(source, beton, mode, longest, workers)
    if crop:
        image = [RandomResizedCropRGBImageDecoder((crop, crop)), RandomHorizontalFlip()]
    else:
        image = [SimpleRGBImageDecoder(), RandomHorizontalFlip(), RandomTranslate(padding=4)]
    loader = Loader(
        beton,
        batch_size=batch_size,
        num_workers=workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"image": [*image, ToTensor()], "label": [IntDecoder(), ToTensor()]},
    )
    for line in sys.stdin:
        count, cpu, began = 0, time.process_time(), time.perf_counter()
        while (elapsed := time.perf_counter() - began) < float(line):
            for images, _ in loader:
                count += len(images)
        spent = (time.process_time() - cpu) / count
        print(json.dumps([count / elapsed, spent]), file=answers, flush=True)


if __name__ == "__main__":
    main()
