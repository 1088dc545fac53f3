"""Segmentation: images and masks from one file, cropped, flipped and rotated together.

pack-h5 scenes scenes.h5 --masks masks
python examples/segmentation.py scenes.h5
"""

import argparse

import torch
import torchvision
from torch.nn.functional import cross_entropy

from h5feed import H5Dataset, H5Loader
from h5feed.augment import (
    ColorJitter,
    Normalize,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    ToDtype,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
VOID = 255
"""What masks hold where a crop reaches beyond its image: the loss leaves it out."""


def main(given: list[str] | None = None) -> float:
    """Train, print a line for each epoch, and return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenes")
    parser.add_argument("--classes", type=int, default=None, help="otherwise the largest number")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--crop", type=int, default=192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(given)

    torch.manual_seed(0)
    ds = H5Dataset(args.scenes, target_dtype=torch.int64, aspect="stored")
    numbers = {int(i) for _, mask in ds for i in mask.unique()} - {VOID}
    classes = max(numbers) + 1 if args.classes is None else args.classes
    loader = H5Loader(
        ds,
        args.batch_size,
        shuffle=True,
        drop_last=True,
        augment=[
            RandomAffine(degrees=10, scale=(0.8, 1.25), mask_fill=VOID),
            RandomCrop(args.crop, pad_if_needed=True, mask_fill=VOID),
            RandomHorizontalFlip(),
            ColorJitter(0.3, 0.3, 0.3),
            ToDtype(torch.float32, scale=True),
            Normalize(MEAN, STD),
        ],
        device=args.device,
    )
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=classes
    )
    model = model.to(args.device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(args.epochs):
        for images, masks in loader:
            loss = cross_entropy(model(images)["out"], masks, ignore_index=VOID)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main()
