"""torchvision v2: decode_image to a tensor, transforms on uint8 tensors.

What torchvision's documentation calls the fast way ("Performance considerations":
https://docs.pytorch.org/vision/stable/transforms.html#performance-considerations): v2
transforms, tensors instead of PIL images, uint8, bilinear.
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


def _decode(path: str) -> Any:
    from torchvision.io import ImageReadMode, decode_image, read_file

    return decode_image(read_file(path), mode=ImageReadMode.RGB)


class Adapter(TorchLoader):
    """ImageFolder with a tensor decoder in a DataLoader."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        from torch.utils.data import DataLoader

        datasets = import_torchvision().datasets
        if params["variant"] == "raw":
            raise ValueError("decodes encoded files only; see torchvision (PIL) for .npy files")
        transform = augmentation(params["crop"], pil=False)
        dataset = datasets.ImageFolder(params["data"], transform, loader=_decode)
        super().__init__(
            DataLoader(dataset, shuffle=True, **loader_settings(params)), params["data"]
        )


if __name__ == "__main__":
    serve(Adapter, write_folder)
