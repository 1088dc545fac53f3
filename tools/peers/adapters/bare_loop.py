"""Not a rival: the ceilings. h5feed's packed file, cropped by cv2 in a thread pool, nothing else.

A JPEG is decoded whole, or, where the ceiling is called region-decode loop, only as far as its
crop needs, which is what H5Loader does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _common import serve


def make(params: Mapping[str, Any]) -> Any:
    """Return the bare loop over the file that the h5feed adapter packed."""
    from h5feed.bench.ceilings import CropLoop, RegionDecodeLoop

    kind = RegionDecodeLoop if params["name"] == "region-decode loop" else CropLoop
    return kind({**params, "file": params["data"]})


def convert(_: Mapping[str, Any]) -> dict[str, Any]:
    """There is nothing to convert."""
    return {}


if __name__ == "__main__":
    serve(make, convert)
