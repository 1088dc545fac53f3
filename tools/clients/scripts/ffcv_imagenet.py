"""After ffcv-imagenet's train_imagenet.py: the resolution grows with the epochs, one dataset."""

import torch
from shared import arguments, report, seeded_model, step
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

args = arguments()
dataset = ImageFolder(args.data)
loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=args.workers)
model = seeded_model(len(dataset.classes))
losses = []
for resolution in (32, 40, 48):
    dataset.transform = v2.Compose(
        [
            v2.RandomResizedCrop(resolution, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    losses += [step(model, images, labels) for images, labels in loader]
report(losses, order=dataset.targets)
