"""NVIDIA DALI over packed files: the same batches as H5Loader's, on the CPU or a GPU."""

from h5feed.interop.dali.loader import DaliLoader, GenericIterator, pipeline
from h5feed.interop.dali.parts import SUPPORTED_OPS

__all__ = ["SUPPORTED_OPS", "DaliLoader", "GenericIterator", "pipeline"]
