import importlib
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from h5feed import H5Dataset, UsageError
from h5feed.augment import RandomCrop, RandomHorizontalFlip
from packed import random_images, write_packed

lightning = pytest.importorskip("lightning.pytorch")
older = pytest.importorskip("pytorch_lightning")  # comes with it; both are imported: so is its base
from h5feed.interop.lightning import H5DataModule  # noqa: E402

torch.set_num_threads(1)

COUNT, BATCH = 40, 8
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and loggers


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Forty images of 8 px of one color, which is the image's number."""
    images = [np.full((8, 8, 3), number, np.uint8) for number in range(COUNT)]
    return write_packed(tmp_path_factory.mktemp("lightning") / "p.h5", images)


class Layer:
    """A linear layer that notes what it was given."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.seen, self.losses, self.scored = [], [], []

    def forward(self, images):
        return self.layer(images.float().mean((2, 3)) / 40)

    def training_step(self, batch, number):
        images, labels = batch
        assert images.shape == (BATCH, 3, 8, 8)
        self.seen.append((self.current_epoch, number, images[:, 0, 4, 4].tolist()))
        loss = torch.nn.functional.cross_entropy(self(images), labels)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _, dataloader_idx=0):
        self.scored += [100 * dataloader_idx + n for n in batch[0][:, 0, 4, 4].tolist()]

    test_step = validation_step

    def predict_step(self, batch, _):
        return batch[0][:, 0, 4, 4]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Model(Layer, lightning.LightningModule):
    """Of `import lightning`."""


class OlderModel(Layer, older.LightningModule):
    """Of `import pytorch_lightning`."""


def make_trainer(folder, package=lightning, **options):
    return package.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, "enable_checkpointing": False, **options},
    )


def fit(folder, path, *, ckpt_path=None, **options):
    torch.manual_seed(0)
    model = OlderModel() if options.get("package") is older else Model()
    data = H5DataModule(train=path, batch_size=BATCH, augment=[RandomHorizontalFlip()], seed=5)
    make_trainer(folder, **options).fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model


def epochs(model):
    """The numbers seen, by epoch."""
    found = {}
    for epoch, _, numbers in model.seen:
        found.setdefault(epoch, []).extend(numbers)
    return found


def test_every_epoch_has_every_image_once_in_an_order_of_its_own(tmp_path, path):
    found = epochs(fit(tmp_path, path))
    assert list(found) == [0, 1, 2]
    assert all(sorted(numbers) == list(range(COUNT)) for numbers in found.values())
    assert found[0] != found[1] != found[2]


def test_validation_testing_and_prediction_keep_the_order(tmp_path, path):
    model = Model()
    data = H5DataModule(path, path, path, path, batch_size=BATCH)
    trainer = make_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(model, datamodule=data)
    assert model.scored == list(range(COUNT))
    model.scored.clear()
    trainer.test(model, datamodule=data)
    assert model.scored == list(range(COUNT))
    predicted = trainer.predict(model, datamodule=data)
    assert torch.cat(predicted).tolist() == list(range(COUNT))
    assert data.datasets["train"].classes == ["cat", "dög"]


@pytest.mark.parametrize(
    ("package", "steps"),  # in mid-epoch, at an epoch's end, in mid-epoch
    [(lightning, 7), (lightning, 10), (lightning, 12), (older, 7)],
    ids=["7", "10", "12", "pytorch_lightning"],
)
def test_a_checkpoint_goes_on_exactly(tmp_path, path, package, steps):
    whole = fit(tmp_path, path, package=package)
    cut = fit(
        tmp_path,
        path,
        package=package,
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[
            package.callbacks.ModelCheckpoint(
                dirpath=tmp_path, every_n_train_steps=steps, filename="at"
            )
        ],
    )
    rest = fit(tmp_path, path, package=package, ckpt_path=tmp_path / "at.ckpt")
    assert cut.losses + rest.losses == whole.losses
    assert cut.seen + rest.seen == whole.seen


def test_an_epochs_end_checkpoint_begins_the_next_epoch(tmp_path, path):
    whole = fit(tmp_path, path)
    saving = lightning.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="end")
    cut = fit(tmp_path, path, max_epochs=2, enable_checkpointing=True, callbacks=[saving])
    rest = fit(tmp_path, path, ckpt_path=tmp_path / "end.ckpt")
    assert cut.losses + rest.losses == whole.losses


def test_options_reach_the_loader(path):
    data = H5DataModule(
        path, path, batch_size=4, augment=[RandomCrop(6)], eval_augment=[RandomCrop(4)],
        num_workers=3, prefetch=5, seed=9,
    )  # fmt: skip
    data.setup()
    train, val = data.train_dataloader(), data.val_dataloader()
    assert (train.num_workers, train.prefetch, train.seed) == (3, 5, 9)
    assert next(iter(train))[0].shape == (4, 3, 6, 6)
    assert next(iter(val))[0].shape == (4, 3, 4, 4)
    assert data.test_dataloader() == data.predict_dataloader() == []


def test_several_sets_are_scored_each_by_itself(tmp_path, path):
    ds = H5Dataset(path)
    for sets in ({"all": path, "some": Subset(ds, [3, 1])}, [ds, Subset(ds, [3, 1])]):
        model = Model()
        data = H5DataModule(path, val=sets, batch_size=BATCH)
        trainer = make_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0)
        trainer.fit(model, datamodule=data)
        assert model.scored == [*range(COUNT), 103, 101]


def test_one_file_serves_training_and_validation(path):
    data = H5DataModule(
        path, path, batch_size=8, eval_batch_size=3, indices={"train": range(32), "val": [39, 38]}
    )
    data.setup()
    train, val = data.train_dataloader(), data.val_dataloader()
    assert sorted(n for images, _ in train for n in images[:, 0, 0, 0].tolist()) == [*range(32)]
    assert [images[:, 0, 0, 0].tolist() for images, _ in val] == [[39, 38]]


def test_masks_come_as_the_dataset_says(tmp_path):
    images, masks = random_images(8, (8, 8)), [np.full((8, 8, 1), 3, np.uint8)] * 8
    path = write_packed(tmp_path / "m.h5", images, masks=masks)
    data = H5DataModule(H5Dataset(path, target_dtype=torch.int64), batch_size=4)
    data.setup()
    _, masks = next(iter(data.train_dataloader()))
    assert masks.dtype == torch.int64
    assert masks.shape == (4, 8, 8)


def test_options_of_training_alone_leave_scoring_alone(path):
    options = {
        "shuffle": True,
        "drop_last": False,
        "repeats": 2,
        "on_error": "skip",
        "keys": ("x", "y"),
    }
    data = H5DataModule(path, path, batch_size=16, **options)
    data.setup()
    train, val = data.train_dataloader(), data.val_dataloader()
    assert (train.state_dict()["order"], len(train)) == ("full, 2 times", 3)
    assert val.state_dict()["order"] == "none"
    assert list(next(iter(val))) == ["x", "y"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_worker": 3},
            "num_worker=3 is not an option of H5DataModule: give those of H5Loader",
        ),
        (
            {"rank": 0},
            "rank=0 is not an option of H5DataModule: give those of H5Loader (ranks are L",
        ),
        ({"indices": {"train": [0], "vall": [1]}}, "indices={'vall': ...} is for one set of tr"),
        ({"val": {"a": "b"}, "indices": {"val": [1]}}, "indices={'val': ...} is for one set of"),
        ({"train": {"a": "a.h5"}}, "train={'a': 'a.h5'} is several sets, and one is trained on:"),
    ],
)
def test_a_wrong_argument_is_one_sentence(options, message):
    with pytest.raises(UsageError) as caught:
        H5DataModule(**options)
    assert message in str(caught.value)


def test_without_lightning_the_extra_is_named(monkeypatch):
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "h5feed.interop.lightning")
    module = importlib.import_module("h5feed.interop.lightning")
    assert issubclass(module.H5DataModule, older.LightningDataModule)
    monkeypatch.delitem(sys.modules, "h5feed.interop.lightning")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ImportError, match=r'lightning is not installed.*"h5feed\[lightning\]"'):
        importlib.import_module("h5feed.interop.lightning")
