"""As Lightning's users write it: a LightningModule, Trainer.fit over stock DataLoaders."""

import logging
import warnings

import lightning
import torch
from shared import SIDE, arguments, report, seeded_model
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Classifier(lightning.LightningModule):
    """Keeps the losses it had."""

    def __init__(self, classes):
        super().__init__()
        self.layers = seeded_model(classes)
        self.losses = []

    def training_step(self, batch, _):
        """Return the loss."""
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        """Keep the loss."""
        self.losses.append(
            torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1]).item()
        )

    def configure_optimizers(self):
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), 0.05)


args = arguments()
steps = [v2.RandomResizedCrop(SIDE), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
dataset = ImageFolder(args.data, transform=v2.Compose(steps))
model = Classifier(len(dataset.classes))
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=args.workers)
trainer.fit(model, loader, DataLoader(dataset, batch_size=16))
report(model.losses, order=dataset.targets)
