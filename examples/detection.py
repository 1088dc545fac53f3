"""Detection: boxes move with their images, and a torchvision detector takes them as they come.

pack-h5 coco/train2017 train.h5 --annotations coco/annotations/instances_train2017.json --fit pad
python examples/detection.py train.h5
"""

import argparse

import torch
import torchvision

from h5feed import H5Dataset, H5Loader
from h5feed.augment import (
    ColorJitter,
    RandomHorizontalFlip,
    RandomResizedCrop,
    SanitizeBoundingBoxes,
    ToDtype,
)


def main(given: list[str] | None = None) -> float:
    """Train, print a line every few steps, and return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train")
    parser.add_argument("--model", default="retinanet_resnet50_fpn_v2")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(given)

    torch.manual_seed(0)
    ds = H5Dataset(args.train, target=("boxes", "box_labels"))
    loader = H5Loader(
        ds,
        args.batch_size,
        shuffle=True,
        drop_last=True,
        augment=[
            RandomResizedCrop(args.size, scale=(0.3, 1.0)),
            RandomHorizontalFlip(),
            ColorJitter(0.2, 0.2, 0.2),
            SanitizeBoundingBoxes(min_size=4, min_visibility=0.2),
            ToDtype(torch.float32, scale=True),
        ],
        device=args.device,
    )
    model = torchvision.models.get_model(
        args.model,
        weights=None,
        weights_backbone=None,
        num_classes=len(ds.classes),
        min_size=args.size,
        max_size=args.size,
    ).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    step = 0
    while step < args.steps:
        for images, target in loader:
            targets = [
                {"boxes": boxes, "labels": labels}
                for boxes, labels in zip(target["boxes"], target["box_labels"], strict=True)
            ]
            losses = model(list(images), targets)
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0 or step == args.steps:
                print(f"step {step}: loss {loss.item():.3f}")
            if step == args.steps:
                break
    return loss.item()


if __name__ == "__main__":
    main()
