"""LitData: optimized chunks read by its StreamingDataLoader.

As in its README (https://github.com/Lightning-AI/litdata, "Speed up model training" and "Optimize
images as JPEG"): ld.optimize with chunk_bytes="64MB" and its own workers; a StreamingDataset
subclass applying the transform in __getitem__; StreamingDataLoader. Its jpeg serializer decodes
to a tensor with torchvision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _common import (
    QUALITY,
    LabeledFile,
    TorchLoader,
    augmentation,
    import_torchvision,
    labeled_files,
    loader_settings,
    resized,
    serve,
)


def _raw(item: LabeledFile) -> dict[str, Any]:
    import numpy as np
    import torch

    return {"image": torch.from_numpy(np.array(resized(item[0]))), "label": item[1]}


def _jpeg(item: LabeledFile) -> dict[str, Any]:
    import litdata
    import numpy as np

    return {
        "image": litdata.Jpeg(array=np.asarray(resized(item[0])), quality=QUALITY),
        "label": item[1],
    }


def _original(item: LabeledFile) -> dict[str, Any]:
    import litdata

    return {"image": litdata.Jpeg(path=str(item[0])), "label": item[1]}


def convert(params: Mapping[str, Any]) -> dict[str, Any]:
    """Run ld.optimize."""
    import_torchvision()
    import litdata

    litdata.optimize(
        fn={"raw": _raw, "jpeg": _jpeg, "original": _original}[params["variant"]],
        inputs=labeled_files(params["source"]),
        output_dir=params["out"],
        chunk_bytes="64MB",
        num_workers=params["workers"],
    )
    return {"data": params["out"]}


class Adapter(TorchLoader):
    """StreamingDataset in a StreamingDataLoader."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        import_torchvision()
        from litdata import StreamingDataLoader, StreamingDataset

        raw = params["variant"] == "raw"
        transform = augmentation(params["crop"], pil=False)

        class Transformed(StreamingDataset):
            def __getitem__(self, index: Any) -> Any:
                sample = super().__getitem__(index)
                image = sample["image"]
                return transform(image.permute(2, 0, 1) if raw else image), sample["label"]

        dataset = Transformed(params["data"], shuffle=True)
        super().__init__(StreamingDataLoader(dataset, **loader_settings(params)), params["data"])


if __name__ == "__main__":
    serve(Adapter, convert)
