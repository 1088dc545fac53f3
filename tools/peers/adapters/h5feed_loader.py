"""h5feed itself: pack, then H5Loader; and the ceilings over the same file.

A ceiling is the packed file, cropped by cv2 in a thread pool, and nothing else. A JPEG is decoded
whole, or, by the region-decode loop, only as far as its crop needs, as H5Loader does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _common import QUALITY, SIZE, TorchLoader, serve


def convert(params: Mapping[str, Any]) -> dict[str, Any]:
    """Pack the folder: raw and jpeg at the stored square, or the files' own bytes."""
    import h5feed

    out, variant = Path(params["out"]) / "data.h5", params["variant"]
    how = {} if variant == "original" else {"size": str(SIZE), "quality": QUALITY}
    h5feed.pack(params["source"], out, store=variant, num_workers=params["workers"], **how)
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


def make(params: Mapping[str, Any]) -> Any:
    """Return the loader, or the bare loop that `params` name."""
    if not params["name"].endswith("loop"):
        return Adapter(params)
    from h5feed.bench.ceilings import CropLoop, RegionDecodeLoop

    kind = RegionDecodeLoop if params["name"] == "region-decode loop" else CropLoop
    return kind({**params, "file": params["data"]})


if __name__ == "__main__":
    serve(make, convert)
