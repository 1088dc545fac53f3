"""Samplers that read a dataset's targets: weighted by class, subsets, shares of two ranks."""

import torch
from shared import SIDE, arguments, report, seeded_model, step
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

args = arguments()
steps = [v2.Resize(SIDE), v2.CenterCrop(SIDE), v2.ToImage(), v2.ToDtype(torch.float32, True)]
dataset = ImageFolder(args.data, v2.Compose(steps))
counts = torch.bincount(torch.tensor(dataset.targets))
weights = [1.0 / counts[label].item() for _, label in dataset.samples]
model = seeded_model(len(dataset.classes))
losses = []
for sampler in (
    WeightedRandomSampler(weights, 32),
    SubsetRandomSampler([i for i, label in enumerate(dataset.targets) if label < 2]),
    *(DistributedSampler(dataset, num_replicas=2, rank=rank, seed=3) for rank in (0, 1)),
):
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=args.workers)
    losses += [step(model, images, labels) for images, labels in loader]
report(losses, order=dataset.targets)
