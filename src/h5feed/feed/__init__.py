"""From the store to batches."""

from h5feed.feed.dataloader import make_dataloader
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.loader import H5Loader
from h5feed.feed.sampling import BlockShuffleSampler, ShuffleSampler
from h5feed.feed.tune import tune

__all__ = [
    "BlockShuffleSampler",
    "H5Dataset",
    "H5Loader",
    "ShuffleSampler",
    "make_dataloader",
    "tune",
]
