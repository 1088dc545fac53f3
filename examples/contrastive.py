"""Contrastive learning after SimCLR (Chen et al. 2020): two views of each image in every batch.

pack-h5 images train.h5
python examples/contrastive.py train.h5
python examples/contrastive.py train.h5 --small-crops 6  # multi-crop (Caron et al. 2020)
"""

import argparse

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from h5feed import H5Dataset, H5Loader
from h5feed.augment import (
    ColorJitter,
    GaussianBlur,
    Normalize,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToDtype,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def contrast(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Return the NT-Xent loss of two views' features (B, D): each should find the other."""
    features = normalize(torch.cat([first, second]), dim=1)
    alike = features @ features.T / temperature
    alike.fill_diagonal_(float("-inf"))
    count = len(first)
    partner = torch.arange(2 * count, device=alike.device).roll(count)
    return cross_entropy(alike, partner)


def main(given: list[str] | None = None) -> float:
    """Train, print a line for each epoch, and return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--small-crops", type=int, default=0)
    parser.add_argument("--small-size", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(given)

    torch.manual_seed(0)
    changes = [
        RandomHorizontalFlip(),
        ColorJitter(0.8, 0.8, 0.8, 0.2),
        RandomGrayscale(p=0.2),
        GaussianBlur(9, sigma=(0.1, 2.0)),
        ToDtype(torch.float32, scale=True),
        Normalize(MEAN, STD),
    ]
    share = 0.25 if args.small_crops else 0.08  # of the image that a large crop has at least
    large = [RandomResizedCrop(args.size, scale=(share, 1.0)), *changes]
    small = [RandomResizedCrop(args.small_size, scale=(0.05, share)), *changes]
    loader = H5Loader(
        H5Dataset(args.train),
        args.batch_size,
        shuffle=True,
        drop_last=True,
        views=[large, large, *[small] * args.small_crops],
        device=args.device,
    )
    backbone = torchvision.models.get_model(args.model, num_classes=128)
    backbone.fc = nn.Sequential(
        nn.Linear(backbone.fc.in_features, 512), nn.ReLU(), nn.Linear(512, 128)
    )
    backbone = backbone.to(args.device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(backbone.parameters(), 1e-3, weight_decay=1e-4)
    for epoch in range(args.epochs):
        for views, _ in loader:
            first, second, *others = map(backbone, views)
            loss = contrast(first, second, args.temperature)
            for other in others:
                loss = loss + contrast(first, other, args.temperature) / len(others)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main()
