"""A LightningDataModule over packed files: batches by H5Loader, resumed by Lightning itself."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.utils.data import Dataset

from h5feed.augment import Op
from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.files import FilePath
from h5feed.feed.loader import H5Loader
from h5feed.optional import require

__all__ = ["H5DataModule"]


def _data_modules() -> tuple[Any, ...]:
    """Return the LightningDataModule of lightning, of pytorch_lightning, or of both.

    They are two classes, and each Trainer wants its own: that of the package which the program
    has imported, of both where it has both.
    """
    names = ("lightning.pytorch", "pytorch_lightning")
    packages: list[Any] = [sys.modules[name] for name in names if sys.modules.get(name)]
    if not packages and find_spec("lightning") is None and find_spec("pytorch_lightning"):
        packages = [import_module("pytorch_lightning")]
    packages = packages or [require("lightning.pytorch", "lightning")]
    return tuple(package.LightningDataModule for package in packages)


_DataModule: Any = type("_DataModule", _data_modules(), {})

Files = FilePath | Sequence[FilePath] | Dataset[Any]
"""What H5Dataset takes, or what H5Loader does."""
Several = Files | Sequence[Dataset[Any]] | Mapping[str, Files]
"""One of them; or several, each scored by itself."""

_OF_TRAINING = ("shuffle", "drop_last", "sampler", "views", "weights", "repeats")
"""Options of H5Loader that are for training alone."""
_OURS = ("ds", "batch_size", "augment", "indices", "rank", "world_size")
_OPTIONS = frozenset(inspect.signature(H5Loader.__init__).parameters) - {*_OURS, "self", "stock"}


class H5DataModule(_DataModule):  # type: ignore[misc]
    """Packed files for Lightning: `Trainer(...).fit(model, datamodule=H5DataModule("train.h5"))`.

    Batches come from one H5Loader per stage, on the strategy's device already and shared among
    its processes. The training loader's state is part of Lightning's checkpoints: with
    `ckpt_path`, exactly the batches that were left come, in mid-epoch too.

    It is a LightningDataModule of `lightning` and of `pytorch_lightning`, whichever the program
    has imported before this module.

    Args:
        train: what H5Dataset takes (a file, a pattern, a sequence of files), or a dataset that
            H5Loader takes: an H5Dataset, which says what its targets are (masks with
            `target_dtype=torch.int64`), or a Subset or ConcatDataset of some.
        val: the same; or several sets, as a dict of them by name, or a list of datasets:
            `validation_step` gets their number as `dataloader_idx`.
        test: as `val`.
        predict: as `val`; batches are (images, labels) as everywhere.
        batch_size: samples of a batch, of each process.
        eval_batch_size: the same where nothing is trained; None is `batch_size`.
        augment: for training, as H5Loader takes it.
        eval_augment: for everything else.
        indices: the samples to take, by stage: {"train": [...], "val": [...]}, so that one file
            serves both.
        options: H5Loader's, for all stages; shuffle (True), drop_last (True), sampler, weights,
            repeats and views for training alone. `device` is the strategy's unless it is given.

    Raises UsageError for an argument that is wrong.

    """

    def __init__(
        self,
        train: Files | None = None,
        val: Several | None = None,
        test: Several | None = None,
        predict: Several | None = None,
        *,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        augment: Sequence[Op] | Callable[..., Any] = (),
        eval_augment: Sequence[Op] | Callable[..., Any] = (),
        indices: Mapping[str, Sequence[int]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self._given: dict[str, Any] = {"train": train, "val": val, "test": test, "predict": predict}
        self._augment = {True: augment, False: eval_augment}
        self._indices = dict(indices or {})
        self._options = options
        self._check()
        self.datasets: dict[str, Any] = {}
        """The opened datasets by stage, after `setup`; where there are several, a list."""
        self._training: H5Loader | None = None
        self._resumed: dict[str, Any] = {}

    def _check(self) -> None:
        for name in self._options:
            if name not in _OPTIONS:
                raise UsageError(
                    f"{name}={self._options[name]!r} is not an option of H5DataModule: give those "
                    "of H5Loader (ranks are Lightning's), or train, val, test, predict, "
                    "batch_size, eval_batch_size, augment, eval_augment, indices"
                )
        for name in self._indices:
            if name not in self._given or _are_several(self._given[name]):
                raise UsageError(
                    f"indices={{{name!r}: ...}} is for one set of train, val, test or predict; "
                    "give several as torch.utils.data.Subset(H5Dataset(path), indices)"
                )
        if _are_several(self._given["train"]):
            raise UsageError(
                f"train={self._given['train']!r} is several sets, and one is trained on: give a "
                "sequence of files, or torch.utils.data.ConcatDataset"
            )

    def setup(self, stage: str | None = None) -> None:
        """Open the files; Lightning calls it in each process."""
        for name, given in self._given.items():
            if given is not None and name not in self.datasets:
                sets = given.values() if isinstance(given, Mapping) else given
                several = _are_several(given)
                self.datasets[name] = [_opened(one) for one in sets] if several else _opened(given)

    def train_dataloader(self) -> H5Loader | list[Any]:
        """Return the shuffled loader; an empty list when there is no such file, as for the rest."""
        if "train" not in self.datasets:
            return []
        self._training = self._loader(self.datasets["train"], "train")
        if self._resumed:
            self._training.load_state_dict(self._resumed)
            self._resumed = {}
        return self._training

    def state_dict(self) -> dict[str, Any]:
        """Return where the training loader stands; Lightning puts it into its checkpoints."""
        return {} if self._training is None else self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for the training loader that Lightning asks for next.

        Lightning hands a loader its state itself too, but not after every kind of checkpoint.
        """
        self._resumed = state_dict

    def val_dataloader(self) -> H5Loader | list[Any]:
        """Return the loader for validation, or one for each set."""
        return self._loaders("val")

    def test_dataloader(self) -> H5Loader | list[Any]:
        """Return the loader for testing, or one for each set."""
        return self._loaders("test")

    def predict_dataloader(self) -> H5Loader | list[Any]:
        """Return the loader for predicting, or one for each set."""
        return self._loaders("predict")

    def _loaders(self, name: str) -> H5Loader | list[Any]:
        found = self.datasets.get(name, [])
        if isinstance(found, list):
            return [self._loader(dataset, name) for dataset in found]
        return self._loader(found, name)

    def _loader(self, dataset: Any, name: str) -> H5Loader:
        training = name == "train"
        options = {"device": self._device(), **self._options}
        if training:
            options = {"shuffle": "sampler" not in options, "drop_last": True, **options}
        else:
            options = {k: v for k, v in options.items() if k not in _OF_TRAINING}
        return H5Loader(
            dataset,
            self.batch_size if training else self.eval_batch_size,
            augment=self._augment[training],
            indices=self._indices.get(name),
            **options,
        )

    def _device(self) -> Any:
        return "cpu" if self.trainer is None else self.trainer.strategy.root_device


def _are_several(given: Any) -> bool:
    if isinstance(given, Mapping):
        return True
    return isinstance(given, (list, tuple)) and any(isinstance(one, Dataset) for one in given)


def _opened(given: Any) -> Any:
    return given if isinstance(given, Dataset) else H5Dataset(given)
