"""SPDL: a pipeline of threads around FFmpeg's decoders.

As in its documentation (https://facebookresearch.github.io/spdl, "Building and Running
Pipeline" and the image_dataloading example): PipelineBuilder, demux_image, decode_packets,
convert_frames. Its examples only resize; here an FFmpeg filter per image does the same
RandomResizedCrop and flip as everybody else's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from _common import LabeledFile, TorchLoader, labeled_files, serve, write_folder


def random_filter(crop: int) -> str:
    """Draw area 8–100 % and aspect 3/4–4/3 of the image and say it in FFmpeg's language."""
    area, aspect = random.uniform(0.08, 1), math.exp(random.uniform(-1, 1) * math.log(4 / 3))
    size = rf"w=min(iw\,sqrt({area * aspect:.4f}*iw*ih)):h=min(ih\,sqrt({area / aspect:.4f}*iw*ih))"
    place = f"x=(iw-ow)*{random.random():.4f}:y=(ih-oh)*{random.random():.4f}"
    flip = ",hflip" if random.random() < 0.5 else ""
    return f"crop={size}:{place}:exact=1,scale={crop}:{crop}:flags=bilinear{flip},format=rgb24"


class Adapter(TorchLoader):
    """spdl.pipeline with as many threads as workers."""

    layout = "NHWC"
    note = "builds an FFmpeg filter per image; its own examples only resize"

    def __init__(self, params: Mapping[str, Any]) -> None:
        if params["variant"] == "raw":
            raise ValueError("decodes encoded images; has no reader of raw pixels of its own")
        super().__init__(None, params["data"])
        self.params = params
        self.images = labeled_files(params["data"])
        # The pipeline only logs what a stage raises: without FFmpeg it would deliver nothing.
        self._decode(self.images[0])

    def _decode(self, item: LabeledFile) -> tuple[Any, int]:
        import spdl.io

        packets = spdl.io.demux_image(str(item[0]))
        frames = spdl.io.decode_packets(packets, filter_desc=random_filter(self.params["crop"]))
        return frames, item[1]

    @staticmethod
    def _batch(items: list[tuple[Any, int]]) -> tuple[Any, Any]:
        import spdl.io
        import torch

        buffer = spdl.io.convert_frames([frames for frames, _ in items])
        return spdl.io.to_torch(buffer), torch.tensor([label for _, label in items])

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield (images, labels) of one epoch."""
        from spdl.pipeline import PipelineBuilder

        order = random.sample(self.images, len(self.images))
        workers = self.params["workers"]
        pipeline = (
            PipelineBuilder()
            .add_source(order)
            .pipe(self._decode, concurrency=workers)
            .aggregate(self.params["batch_size"])
            .pipe(self._batch)
            .add_sink(2)
            .build(num_threads=workers)
        )
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()


if __name__ == "__main__":
    serve(Adapter, write_folder)
