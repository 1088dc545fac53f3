"""FFCV's DatasetWriter over a folder of images; prints the seconds it took.

Run by bench_pack.py in an interpreter that has FFCV: SOURCE OUT WORKERS SIZE
"""

import os
import sys
import time
from pathlib import Path

from ffcv.fields import IntField, RGBImageField
from ffcv.writer import DatasetWriter
from PIL import Image


class Images:
    """All JPEG files below a folder, links followed."""

    def __init__(self, source: str) -> None:
        self.paths = [
            Path(folder, name)
            for folder, _, names in sorted(os.walk(source, followlinks=True))
            for name in sorted(names)
            if name.lower().endswith((".jpg", ".jpeg"))
        ]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.open(self.paths[index]).convert("RGB"), index


def main() -> None:
    """Pack SOURCE into OUT."""
    source, out, workers, size = sys.argv[1:]
    began = time.perf_counter()
    image = RGBImageField(write_mode="raw", max_resolution=int(size))
    writer = DatasetWriter(out, {"image": image, "label": IntField()}, num_workers=int(workers))
    writer.from_indexed_dataset(Images(source), chunksize=100)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
