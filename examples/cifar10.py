"""CIFAR-10 in one file: a small network, a short loop, and what makes both fast.

    pack-h5 cifar10/train train.h5 && pack-h5 cifar10/test test.h5
    python examples/cifar10.py train.h5 test.h5

On a GPU all images stay in its memory, and batches are cropped and flipped there. The network is
after airbench94 (Jordan 2024, arXiv:2404.00498): its first layer whitens 2 x 2 patches of the
images and is not trained, and its convolutions begin as the identity. `--width 0.25` suits a CPU.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, max_pool2d

from h5feed import H5Dataset, H5Loader
from h5feed.augment import Normalize, RandomCrop, RandomHorizontalFlip, ToDtype

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Norm(nn.BatchNorm2d):
    """Batch norm that learns a shift and no scale."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=0.4)
        self.weight.requires_grad_(False)


class Block(nn.Module):
    """Two convolutions that begin as the identity, at half the size."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList([Norm(outside), Norm(outside)])
        for channels in (inside, outside):
            conv = nn.Conv2d(channels, outside, 3, padding=1, bias=False)
            nn.init.dirac_(conv.weight[:channels])
            self.convs.append(conv)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inside, H, W) to (B, outside, H/2, W/2)."""
        x = gelu(self.norms[0](max_pool2d(self.convs[0](x), 2)))
        return gelu(self.norms[1](self.convs[1](x)))


class Net(nn.Module):
    """Normalized images (B, 3, 32, 32) to scores (B, classes)."""

    def __init__(self, classes: int, width: float) -> None:
        super().__init__()
        widths = [max(24, int(width * channels)) for channels in (64, 256, 256)]
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad_(False)
        self.blocks = nn.Sequential(
            *(Block(a, b) for a, b in zip([24, *widths], widths, strict=False))
        )
        self.head = nn.Linear(widths[-1], classes, bias=False)

    @torch.no_grad()
    def whiten_by(self, images: Tensor) -> None:
        """Set the first layer's filters to the whitened principal components of 2 x 2 patches."""
        patches = images.double().unfold(2, 2, 2).unfold(3, 2, 2)
        rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
        values, vectors = torch.linalg.eigh(rows.T.cov())
        filters = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        self.whiten.weight.copy_(torch.cat((filters, -filters)))
        nn.init.zeros_(self.whiten.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (B, classes)."""
        return self.head(self.blocks(gelu(self.whiten(x))).amax((2, 3))) / 9


def loaders(args: argparse.Namespace) -> tuple[H5Loader, H5Loader]:
    """Return the loaders to train on and to score on."""
    floats = [ToDtype(torch.float32, scale=True), Normalize(MEAN, STD)]
    residency = "device" if args.device == "cuda" else "stream"
    common = {"device": args.device, "residency": residency}
    train = H5Loader(
        H5Dataset(args.train),
        args.batch_size,
        shuffle=True,
        drop_last=True,
        augment=[
            RandomCrop(32, padding=2, padding_mode="reflect"),
            RandomHorizontalFlip(),
            *floats,
        ],
        seed=args.seed,
        **common,
    )
    return train, H5Loader(H5Dataset(args.test), args.batch_size, augment=floats, **common)


@torch.no_grad()
def accuracy(net: nn.Module, loader: H5Loader) -> float:
    """Return the share of images that are right; each is scored with its mirror image."""
    net.eval()
    right = total = 0
    for images, labels in loader:
        scores = net(images) + net(images.flip(-1))
        right += (scores.argmax(1) == labels).sum()
        total += len(labels)
    net.train()
    return float(right) / total


def main(given: list[str] | None = None) -> float:
    """Train, print a line for each epoch, and return the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--momentum", type=float, default=0.85)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(given)

    torch.manual_seed(args.seed)
    train, test = loaders(args)
    net = Net(len(train.dataset.classes), args.width)
    net = net.to(args.device, memory_format=torch.channels_last)
    net.whiten_by(next(iter(train))[0])
    train.set_epoch(0)

    steps = args.epochs * len(train)
    trained = [weight for weight in net.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(
        trained, args.lr, args.momentum, weight_decay=args.weight_decay, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=max(steps, 2), pct_start=0.25, cycle_momentum=False
    )
    half = torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda")

    begun, score = time.perf_counter(), 0.0
    for epoch in range(args.epochs):
        for images, labels in train:
            with half:
                loss = cross_entropy(net(images), labels, label_smoothing=0.2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        score = accuracy(net, test)
        print(
            f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {100 * score:.1f} %, "
            f"{time.perf_counter() - begun:.0f} s"
        )
    return score


if __name__ == "__main__":
    main()
