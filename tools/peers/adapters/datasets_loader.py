"""Hugging Face datasets: Arrow files, images decoded by PIL on access.

As in its documentation (https://huggingface.co/docs/datasets/image_process and /use_with_pytorch):
an Image feature, with_transform for augmentation on the fly, a DataLoader around it; original
files through the imagefolder builder. The raw variant is an Array3D feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from _common import (
    SIZE,
    TorchLoader,
    augmentation,
    import_torchvision,
    jpeg,
    labeled_files,
    loader_settings,
    resized,
    serve,
)


def _rows(files: list[Any], variant: str) -> Iterator[dict[str, Any]]:
    import numpy as np

    for path, label in files:
        image = np.asarray(resized(path)) if variant == "raw" else {"bytes": jpeg(path)}
        yield {"image": image, "label": label}


def convert(params: Mapping[str, Any]) -> dict[str, Any]:
    """Write Arrow files; the imagefolder builder copies original files into them."""
    import_torchvision()
    from datasets import Array3D, Dataset, Features, Image, Value, load_dataset

    variant = params["variant"]
    cache = f"{params['out']}/cache"
    if variant == "original":
        data = load_dataset(
            "imagefolder",
            # Named, not found: it would take a class folder like "bullet_train" for a split.
            data_files={"train": f"{params['source']}/*/*"},
            split="train",
            drop_labels=False,
            cache_dir=cache,
        )
    else:
        image = Array3D((SIZE, SIZE, 3), "uint8") if variant == "raw" else Image()
        data = Dataset.from_generator(
            _rows,
            features=Features({"image": image, "label": Value("int64")}),
            gen_kwargs={"files": labeled_files(params["source"]), "variant": variant},
            num_proc=params["workers"],
            cache_dir=cache,
        )
    out = f"{params['out']}/data"
    data.save_to_disk(out)
    return {"data": out}


class Adapter(TorchLoader):
    """A dataset with a transform in a DataLoader."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        import_torchvision()
        import torch
        from datasets import load_from_disk
        from torch.utils.data import DataLoader

        raw = params["variant"] == "raw"
        transform = augmentation(params["crop"], pil=not raw)

        def apply(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            images = [transform(image.convert("RGB")) for image in rows["image"]]
            return {"image": images, "label": rows["label"]}

        def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
            images = [transform(row["image"].permute(2, 0, 1)) for row in rows]
            return {
                "image": torch.stack(images),
                "label": torch.tensor([row["label"] for row in rows]),
            }

        dataset = load_from_disk(params["data"])
        if raw:  # with_transform would hand over lists of Python ints: 7 images a second
            settings = loader_settings(params) | {"collate_fn": collate}
            dataset = dataset.with_format(
                "torch", columns=["image"], output_all_columns=True, dtype=torch.uint8
            )
        else:
            settings = loader_settings(params)
            dataset = dataset.with_transform(apply)
        loader = DataLoader(dataset, shuffle=True, **settings)
        super().__init__(loader, params["data"])

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield (images, labels) of one epoch."""
        for batch in self.loader:
            yield batch["image"], batch["label"]


if __name__ == "__main__":
    serve(Adapter, convert)
