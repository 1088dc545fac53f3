"""WebDataset: tar shards, batched inside the workers.

As in its documentation (https://github.com/webdataset/webdataset, README): ShardWriter;
WebDataset(shardshuffle=100).shuffle(1000).decode("pil").to_tuple().map_tuple().batched() and a
WebLoader with batch_size=None. The raw variant stores .npy members.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _common import TorchLoader, augmentation, jpeg, labeled_files, resized, serve

PER_SHARD = 500


def _npy(path: Path) -> bytes:
    import numpy as np

    out = io.BytesIO()
    np.save(out, np.asarray(resized(path)))
    return out.getvalue()


def convert(params: Mapping[str, Any]) -> dict[str, Any]:
    """Write shards of 500 images with ShardWriter, which has no workers of its own."""
    import webdataset

    variant = params["variant"]
    encode = {"raw": _npy, "jpeg": jpeg, "original": Path.read_bytes}[variant]
    suffix = "npy" if variant == "raw" else "jpg"
    with webdataset.ShardWriter(f"{params['out']}/%06d.tar", maxcount=PER_SHARD) as sink:
        for number, (path, label) in enumerate(labeled_files(params["source"])):
            sink.write({"__key__": f"{number:08d}", suffix: encode(path), "cls": label})
    return {"data": params["out"]}


def _tensor(pixels: Any) -> Any:
    import torch

    return torch.from_numpy(pixels).permute(2, 0, 1)


def _same(value: Any) -> Any:
    return value


class Adapter(TorchLoader):
    """WebLoader over shuffled shards."""

    note = "shuffled within a buffer of 1,000"

    def __init__(self, params: Mapping[str, Any]) -> None:
        import webdataset

        raw = params["variant"] == "raw"
        transform = augmentation(params["crop"], pil=not raw)
        dataset = (
            webdataset.WebDataset(
                sorted(map(str, Path(params["data"]).glob("*.tar"))), shardshuffle=100
            )
            .shuffle(1000)
            .decode(*(() if raw else ("pil",)))
            .to_tuple("npy" if raw else "jpg", "cls")
        )
        if raw:
            dataset = dataset.map_tuple(_tensor, _same)
        dataset = dataset.map_tuple(transform, _same).batched(params["batch_size"])
        loader = webdataset.WebLoader(
            dataset, batch_size=None, num_workers=params["workers"], persistent_workers=True
        )
        super().__init__(loader, params["data"])


if __name__ == "__main__":
    serve(Adapter, convert)
