"""Not a rival: the ceiling. h5feed's packed file, cropped by cv2 in a thread pool, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _common import serve


def make(params: Mapping[str, Any]) -> Any:
    """Return the bare crop loop over the file that the h5feed adapter packed."""
    from h5feed.bench.ceilings import Kernel

    return Kernel({**params, "file": params["data"]})


def convert(_: Mapping[str, Any]) -> dict[str, Any]:
    """There is nothing to convert."""
    return {}


if __name__ == "__main__":
    serve(make, convert)
