"""After pytorch/examples' imagenet/main.py: train and validation folders, transforms in line."""

import torch
import torch.utils.data
import torchvision.transforms as transforms
from shared import SIDE, arguments, report, seeded_model, step
from torchvision import datasets

args = arguments()
normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])

train_dataset = datasets.ImageFolder(
    args.data,
    transforms.Compose(
        [
            transforms.RandomResizedCrop(SIDE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            normalize,
        ]
    ),
)

val_dataset = datasets.ImageFolder(
    args.data,
    transforms.Compose(
        [transforms.Resize(56), transforms.CenterCrop(SIDE), transforms.ToTensor(), normalize]
    ),
)

train_loader = torch.utils.data.DataLoader(
    train_dataset, batch_size=16, shuffle=True, num_workers=args.workers
)
val_loader = torch.utils.data.DataLoader(
    val_dataset, batch_size=16, shuffle=False, num_workers=args.workers
)
model = seeded_model(len(train_dataset.class_to_idx))
losses = [step(model, images, target) for images, target in train_loader]
with torch.no_grad():
    scored = [
        torch.nn.functional.cross_entropy(model(images), target).item()
        for images, target in val_loader
    ]
report(losses + scored, order=[label for _, label in val_dataset.samples])
