"""What the trainer needs to know of its data."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from h5feed.errors import UsageError
from h5feed.train.config import TrainConfig
from h5feed.train.distributed import World
from h5feed.train.step import Batch

__all__ = ["Data", "Loader", "check_batch"]


class Loader(Protocol):
    """Batches of one process, on its device; H5Loader and whatever takes its place.

    Images are uint8 (B, 3, H, W), channels_last; targets int64 (B,), float32 (B, K), or for
    masks uint8 or int64 (B, H, W).
    """

    def __iter__(self) -> Iterator[Batch]:
        """Yield what is left of the epoch; all of it unless a state was loaded."""
        ...

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`: its own order and its own augmentation."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands: what was handed out counts, what was prefetched does not."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A set to train on, and perhaps one to score on."""

    task: str
    """What its targets are for: classification, regression or segmentation."""
    num_outputs: int
    """Classes, or targets per image."""
    mean: tuple[float, ...]
    """Of the training pixels per channel, on the scale 0 to 255."""
    std: tuple[float, ...]
    """Likewise."""
    size: int
    """Side in pixels of the images that the model sees."""
    train_loader: Callable[[int], Loader]
    """Makes the training loader for images of a given side; equal batches, no short one.

    Raises UsageError where the images are too few for a batch.
    """
    classes: tuple[str, ...] = ()
    """Their names, where they have some."""
    count: int = 0
    """Images to train on; 0 where nobody knows."""
    val_loader: Iterable[Batch] | None = None
    """This process's share of the images to score on; the last batch may be short."""


def check_batch(config: TrainConfig, world: World, images: int) -> None:
    """Raise UsageError where `images`, for all processes together, do not make one batch."""
    if config.batch_size <= images:
        return
    parts = config.speed.accumulate * world.size
    most = images - images % parts
    advice = f"take {most} or fewer" if most else f"it takes {parts} for a batch at least"
    raise UsageError(
        f"--batch-size {config.batch_size} is more than the {images} images of "
        f"{config.train}: {advice}"
    )
