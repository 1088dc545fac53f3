"""NVIDIA DALI over packed files: the same batches as H5Loader's, on the CPU or a GPU."""

from h5feed.interop.dali.carried import CARRIED
from h5feed.interop.dali.iterator import GenericIterator
from h5feed.interop.dali.loader import DaliLoader, pipeline

__all__ = ["CARRIED", "DaliLoader", "GenericIterator", "pipeline"]
