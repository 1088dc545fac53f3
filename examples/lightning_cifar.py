"""Lightning: a LightningDataModule over packed files, which resumes in the middle of an epoch.

pack-h5 cifar10/train train.h5 && pack-h5 cifar10/test test.h5
python examples/lightning_cifar.py train.h5 test.h5
"""

import argparse

import lightning
import torch
import torchvision
from torch import Tensor
from torch.nn.functional import cross_entropy

from h5feed.augment import Normalize, RandomCrop, RandomHorizontalFlip, ToDtype
from h5feed.interop.lightning import H5DataModule

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Classifier(lightning.LightningModule):
    """A ResNet-18 for small images."""

    def __init__(self, classes: int, lr: float) -> None:
        super().__init__()
        self.model = torchvision.models.resnet18(num_classes=classes)
        self.model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.model.maxpool = torch.nn.Identity()
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the loss."""
        images, labels = batch
        return cross_entropy(self.model(images), labels, label_smoothing=0.1)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        """Log the accuracy."""
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Return SGD with a one-cycle schedule."""
        optimizer = torch.optim.SGD(self.parameters(), self.lr, 0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, int(self.trainer.estimated_stepping_batches)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def main(given: list[str] | None = None) -> float:
    """Train, and return the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.2)
    args = parser.parse_args(given)

    floats = [ToDtype(torch.float32, scale=True), Normalize(MEAN, STD)]
    data = H5DataModule(
        args.train,
        args.test,
        batch_size=args.batch_size,
        augment=[RandomCrop(32, padding=4), RandomHorizontalFlip(), *floats],
        eval_augment=floats,
    )
    trainer = lightning.Trainer(max_epochs=args.epochs, precision="bf16-mixed", logger=False)
    model = Classifier(10, args.lr).to(memory_format=torch.channels_last)
    trainer.fit(model, data)
    return float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    main()
