"""h5feed: a packed file read by H5Loader, crops made by CPU threads; in h5feed's own Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _common import QUALITY, SIZE, TorchLoader, serve


def convert(params: Mapping[str, Any]) -> dict[str, Any]:
    """Pack the folder: raw and jpeg at the stored square, or the files' own bytes."""
    import h5feed

    out, variant = Path(params["out"]) / "data.h5", params["variant"]
    if variant == "original":
        h5feed.pack(params["source"], out, store="original", num_workers=params["workers"])
    else:
        h5feed.pack(
            params["source"],
            out,
            store=variant,
            size=str(SIZE),
            quality=QUALITY,
            num_workers=params["workers"],
        )
    return {"data": str(out)}


class Adapter(TorchLoader):
    """H5Loader with h5feed's own ops."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        import h5feed

        ops = (
            h5feed.augment.RandomResizedCrop(params["crop"]),
            h5feed.augment.RandomHorizontalFlip(),
        )
        loader = h5feed.H5Loader(
            h5feed.H5Dataset(params["data"]),
            params["batch_size"],
            shuffle=True,
            augment=ops,
            num_workers=params["workers"],
        )
        super().__init__(loader, params["data"])

    def close(self) -> None:
        """End the loader's threads."""
        self.loader.close()


if __name__ == "__main__":
    serve(Adapter, convert)
