"""h5feed: image folders into one plain HDF5 file, and from there into PyTorch training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from h5feed.errors import DamagedItemError, H5FeedError, H5FormatError, PackError, UsageError

if TYPE_CHECKING:
    from h5feed import augment
    from h5feed.feed.dataloader import make_dataloader
    from h5feed.feed.dataset import H5Dataset
    from h5feed.feed.loader import H5Loader
    from h5feed.feed.sampling import BlockShuffleSampler, ShardShuffleSampler, ShuffleSampler
    from h5feed.feed.tune import tune
    from h5feed.packing import pack

__all__ = [
    "BlockShuffleSampler",
    "DamagedItemError",
    "H5Dataset",
    "H5FeedError",
    "H5FormatError",
    "H5Loader",
    "PackError",
    "ShardShuffleSampler",
    "ShuffleSampler",
    "UsageError",
    "augment",
    "make_dataloader",
    "pack",
    "tune",
]
__version__ = "0.1.0"

# Imported at their first use: torch takes a second or two, and `pack-h5 --help` needs none of it.
_HOMES = {
    "BlockShuffleSampler": "h5feed.feed.sampling",
    "H5Dataset": "h5feed.feed.dataset",
    "H5Loader": "h5feed.feed.loader",
    "ShardShuffleSampler": "h5feed.feed.sampling",
    "ShuffleSampler": "h5feed.feed.sampling",
    "augment": "h5feed.augment",
    "make_dataloader": "h5feed.feed.dataloader",
    "pack": "h5feed.packing",
    "tune": "h5feed.feed.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_HOMES[name])
    value = globals()[name] = module if name == "augment" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
