"""torchvision: ImageFolder in a DataLoader, decoded by PIL, or to tensors for its v2 transforms.

PIL is how most training code is written: ImageFolder + transforms + DataLoader as in torchvision's
reference training scripts
(https://github.com/pytorch/vision/blob/main/references/classification/train.py); the raw variant
is a DatasetFolder of .npy files. Tensors are what its documentation calls the fast way:
decode_image, v2 transforms on uint8, bilinear
(https://docs.pytorch.org/vision/stable/transforms.html#performance-considerations).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _common import (
    TorchLoader,
    augmentation,
    import_torchvision,
    loader_settings,
    serve,
    write_folder,
)


def _npy(path: str) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.load(path)).permute(2, 0, 1)


def _decode(path: str) -> Any:
    from torchvision.io import ImageReadMode, decode_image, read_file

    return decode_image(read_file(path), mode=ImageReadMode.RGB)


class Adapter(TorchLoader):
    """ImageFolder (or a folder of .npy files) in a DataLoader."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        from torch.utils.data import DataLoader

        datasets = import_torchvision().datasets
        raw, tensors = params["variant"] == "raw", params["name"].endswith("tensors")
        transform = augmentation(params["crop"], pil=not raw and not tensors)
        if raw:
            dataset = datasets.DatasetFolder(params["data"], _npy, (".npy",), transform)
            self.note = "DatasetFolder of .npy files"
        elif tensors:
            dataset = datasets.ImageFolder(params["data"], transform, loader=_decode)
        else:
            dataset = datasets.ImageFolder(params["data"], transform)
        loader = DataLoader(dataset, shuffle=True, **loader_settings(params))
        super().__init__(loader, params["data"])


if __name__ == "__main__":
    serve(Adapter, write_folder)
