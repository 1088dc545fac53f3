"""Image files into the store."""

from h5feed.packing.options import PackOptions
from h5feed.packing.run import pack, pack_with
from h5feed.packing.summary import PackSummary

__all__ = ["PackOptions", "PackSummary", "pack", "pack_with"]
