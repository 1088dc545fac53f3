"""What every client here begins and ends with; the rest of each script is its own."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SIDE", "Segmenter", "arguments", "report", "seeded_model", "step"]

SIDE = 48
"""Of the square that every client crops."""


def arguments() -> argparse.Namespace:
    """Return the data, a folder or a packed file, and how many worker processes read it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--masks", help="the folder of masks, for what is not a packed file")
    parser.add_argument("--workers", type=int, default=0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return parser.parse_args()


def seeded_model(classes: int) -> nn.Module:
    """Return a classifier that learns something in a few steps, the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(108, classes))


class Segmenter(nn.Module):
    """The same for masks: a class for each pixel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.conv = nn.Conv2d(3, classes, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, classes, H, W)."""
        return self.conv(images)


def step(model: nn.Module, images: Tensor, targets: Tensor, rate: float = 0.05) -> float:
    """Take one step of plain SGD; return the loss before it."""
    loss = nn.functional.cross_entropy(model(images), targets)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= rate * weight.grad
    return loss.item()


def report(losses: Sequence[float], **facts: Any) -> None:
    """Print what is compared, as the last line."""
    print(json.dumps({"losses": list(losses), **facts}))
