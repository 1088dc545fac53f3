"""torchvision: ImageFolder, decoded by PIL, the way most training code is written.

ImageFolder + transforms + DataLoader as in torchvision's reference training scripts
(https://github.com/pytorch/vision/blob/main/references/classification/train.py). The raw variant
is a DatasetFolder of .npy files.
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


class Adapter(TorchLoader):
    """ImageFolder (or a folder of .npy files) in a DataLoader."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        from torch.utils.data import DataLoader

        datasets = import_torchvision().datasets
        raw = params["variant"] == "raw"
        transform = augmentation(params["crop"], pil=not raw)
        if raw:
            dataset = datasets.DatasetFolder(params["data"], _npy, (".npy",), transform)
        else:
            dataset = datasets.ImageFolder(params["data"], transform)
        super().__init__(
            DataLoader(dataset, shuffle=True, **loader_settings(params)), params["data"]
        )
        self.note = "DatasetFolder of .npy files" if raw else ""


if __name__ == "__main__":
    serve(Adapter, write_folder)
