"""Image files into the store."""

from h5feed.packing.options import PackOptions
from h5feed.packing.run import PackSummary, pack, pack_with

__all__ = ["PackOptions", "PackSummary", "pack", "pack_with"]
