"""From the store to batches."""

from h5feed.feed.dataloader import make_dataloader
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.loader import H5Loader
from h5feed.feed.tune import tune

__all__ = ["H5Dataset", "H5Loader", "make_dataloader", "tune"]
