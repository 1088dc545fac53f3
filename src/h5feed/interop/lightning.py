"""A LightningDataModule over packed files: batches by H5Loader, resumed by Lightning itself."""

from collections.abc import Sequence
from typing import Any

from h5feed.augment import Op
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.files import FilePath
from h5feed.feed.loader import H5Loader
from h5feed.feed.options import AugmentOn
from h5feed.optional import require

__all__ = ["H5DataModule"]

_DataModule: Any = require("lightning.pytorch", "lightning").LightningDataModule

Files = FilePath | Sequence[FilePath]


class H5DataModule(_DataModule):  # type: ignore[misc]
    """Packed files for Lightning: `Trainer(...).fit(model, datamodule=H5DataModule("train.h5"))`.

    Batches come from one H5Loader per stage, on the strategy's device already and shared among
    its processes. The training loader's state is part of Lightning's checkpoints: with
    `ckpt_path`, exactly the batches that were left come, in mid-epoch too.
    """

    def __init__(
        self,
        train: Files | None = None,
        val: Files | None = None,
        test: Files | None = None,
        predict: Files | None = None,
        *,
        batch_size: int = 128,
        augment: Sequence[Op] = (),
        eval_augment: Sequence[Op] = (),
        augment_on: AugmentOn = "auto",
        num_workers: int | str = "auto",
        prefetch: int = 2,
        seed: int = 0,
    ) -> None:
        """`train` to `predict` are what H5Dataset takes; `batch_size` is of each process.

        `augment` is for training, `eval_augment` for everything else. The rest is H5Loader's.
        """
        super().__init__()
        self.batch_size = batch_size
        self._files = {"train": train, "val": val, "test": test, "predict": predict}
        self._augment = {"train": augment, "val": eval_augment}
        self._options: dict[str, Any] = {
            "augment_on": augment_on,
            "num_workers": num_workers,
            "prefetch": prefetch,
            "seed": seed,
        }
        self.datasets: dict[str, H5Dataset] = {}
        """The opened files by stage, after `setup`."""
        self._training: H5Loader | None = None
        self._resumed: dict[str, Any] = {}

    def setup(self, stage: str | None = None) -> None:
        """Open the files; Lightning calls it in each process."""
        for name, files in self._files.items():
            if files is not None and name not in self.datasets:
                self.datasets[name] = H5Dataset(files)

    def train_dataloader(self) -> H5Loader | list[Any]:
        """Return the shuffled loader; an empty list when there is no such file, as for the rest."""
        loader = self._loader("train")
        if isinstance(loader, H5Loader):
            self._training = loader
            if self._resumed:
                loader.load_state_dict(self._resumed)
                self._resumed = {}
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Return where the training loader stands; Lightning puts it into its checkpoints."""
        return {} if self._training is None else self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for the training loader that Lightning asks for next.

        Lightning hands a loader its state itself too, but not after every kind of checkpoint.
        """
        self._resumed = state_dict

    def val_dataloader(self) -> H5Loader | list[Any]:
        """Return the loader for validation."""
        return self._loader("val")

    def test_dataloader(self) -> H5Loader | list[Any]:
        """Return the loader for testing."""
        return self._loader("test")

    def predict_dataloader(self) -> H5Loader | list[Any]:
        """Return the loader for predicting; its batches are (images, labels) as everywhere."""
        return self._loader("predict")

    def _loader(self, name: str) -> H5Loader | list[Any]:
        if name not in self.datasets:
            return []
        training = name == "train"
        return H5Loader(
            self.datasets[name],
            self.batch_size,
            shuffle=training,
            drop_last=training,
            augment=self._augment["train" if training else "val"],
            device="cpu" if self.trainer is None else self.trainer.strategy.root_device,
            **self._options,
        )
