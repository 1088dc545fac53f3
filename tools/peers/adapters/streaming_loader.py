"""MosaicML Streaming: MDS shards read from a local folder.

As in its quick start (https://docs.mosaicml.com/projects/streaming/en/stable/getting_started/
quick_start.html) and its CIFAR-10 example: MDSWriter; a StreamingDataset whose __getitem__ applies
the transform, shuffle=True, batch_size given to the dataset and to the DataLoader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _common import (
    SIZE,
    TorchLoader,
    augmentation,
    import_torchvision,
    labeled_files,
    loader_settings,
    resized,
    serve,
)


def convert(params: Mapping[str, Any]) -> dict[str, Any]:
    """Write MDS shards with one MDSWriter, which has no workers of its own."""
    import_torchvision()
    import numpy as np
    from PIL import Image
    from streaming import MDSWriter

    variant = params["variant"]
    image = f"ndarray:uint8:{SIZE},{SIZE},3" if variant == "raw" else "jpeg"
    with MDSWriter(out=params["out"], columns={"image": image, "label": "int"}) as out:
        for path, label in labeled_files(params["source"]):
            # The jpeg encoding copies the bytes of an opened JPEG file and encodes anything else.
            stored = Image.open(path) if variant == "original" else resized(path)
            out.write({"image": np.asarray(stored) if variant == "raw" else stored, "label": label})
    return {"data": params["out"]}


class Adapter(TorchLoader):
    """StreamingDataset in a DataLoader."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        import_torchvision()
        import torch
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory
        from torch.utils.data import DataLoader

        raw = params["variant"] == "raw"
        transform = augmentation(params["crop"], pil=not raw)
        clean_stale_shared_memory()

        class Transformed(StreamingDataset):
            def __getitem__(self, index: int) -> Any:
                sample = super().__getitem__(index)
                image = sample["image"]
                ready = torch.from_numpy(image).permute(2, 0, 1) if raw else image.convert("RGB")
                return transform(ready), sample["label"]

        dataset = Transformed(local=params["data"], shuffle=True, batch_size=params["batch_size"])
        super().__init__(DataLoader(dataset, **loader_settings(params)), params["data"])
        if params["variant"] == "jpeg":
            self.note = "its jpeg encoder's quality is 75"


if __name__ == "__main__":
    serve(Adapter, convert)
