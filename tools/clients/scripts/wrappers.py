"""What people put around an ImageFolder: a subclass with paths, splits, subsets, concatenation."""

import os

import torch
from shared import SIDE, arguments, report, seeded_model, step
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, random_split
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2


class WithPaths(ImageFolder):
    """The usual subclass: (image, label, name), from `samples` and `loader`."""

    def __getitem__(self, index):
        path, target = self.samples[index]
        return self.transform(self.loader(path)), target, os.path.basename(path)


class Relabelled(Dataset):
    """The usual wrapper: another label, by the class's name."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label, _ = self.dataset[index]
        return image, self.dataset.class_to_idx[self.dataset.classes[-1 - label]]


args = arguments()
steps = [v2.RandomResizedCrop(SIDE), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
whole = WithPaths(args.data, transform=v2.Compose(steps))
train, val = random_split(whole, [0.75, 0.25], torch.Generator().manual_seed(0))
model = seeded_model(len(whole.classes))
losses, names = [], []
for part in (train, val, Subset(whole, range(0, len(whole), 3)), ConcatDataset([whole, val])):
    for images, labels, paths in DataLoader(part, 16, num_workers=args.workers):
        losses.append(step(model, images, labels))
        names += paths
losses += [step(model, images, labels) for images, labels in DataLoader(Relabelled(whole), 16)]
report(losses, order=names)
