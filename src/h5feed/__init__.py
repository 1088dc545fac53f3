"""h5feed: image folders into one plain HDF5 file, and from there into PyTorch training."""

from h5feed import augment
from h5feed.errors import DamagedItemError, H5FeedError, H5FormatError, PackError, UsageError
from h5feed.feed import H5Dataset, H5Loader, make_dataloader, tune
from h5feed.packing import pack

__all__ = [
    "DamagedItemError",
    "H5Dataset",
    "H5FeedError",
    "H5FormatError",
    "H5Loader",
    "PackError",
    "UsageError",
    "augment",
    "make_dataloader",
    "pack",
    "tune",
]
__version__ = "0.1.0"
