"""ImageNet on several GPUs, in plain PyTorch: DistributedDataParallel, bf16, exact resume.

    pack-h5 imagenet/train train.h5 --store jpeg
    pack-h5 imagenet/val val.h5 --store jpeg --fit crop
    torchrun --nproc-per-node 8 examples/imagenet_ddp.py train.h5 val.h5
    torchrun --nproc-per-node 4 examples/imagenet_ddp.py train.h5 val.h5 --resume

H5Loader finds rank and world size by itself. Its state is a few numbers and the same on every
rank: a run can be stopped at any step and resumed on another number of GPUs with the samples and
crops that were left.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from h5feed import H5Dataset, H5Loader
from h5feed.augment import CenterCrop, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToDtype

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def loaders(args: argparse.Namespace, device: str) -> tuple[H5Loader, H5Loader]:
    """Return this rank's loaders to train on and to score on."""
    share = args.batch_size // dist.get_world_size()
    floats = [ToDtype(torch.float32, scale=True), Normalize(MEAN, STD)]
    train = H5Loader(
        H5Dataset(args.train),
        share,
        shuffle=True,
        drop_last=True,
        augment=[RandomResizedCrop(args.size), RandomHorizontalFlip(), *floats],
        device=device,
        seed=args.seed,
    )
    val = H5Loader(
        H5Dataset(args.val), share, augment=[CenterCrop(args.size), *floats], device=device
    )
    return train, val


@torch.no_grad()
def accuracy(model: nn.Module, loader: H5Loader) -> float:
    """Return the accuracy over all ranks (a few images count twice where ranks do not divide)."""
    model.eval()
    counts = torch.zeros(2, device=next(model.parameters()).device)
    for images, labels in loader:
        counts[0] += (model(images).argmax(1) == labels).sum()
        counts[1] += len(labels)
    dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def main(given: list[str] | None = None) -> float:
    """Train; rank 0 prints and saves. Returns the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=2048, help="of all ranks together")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--lr", type=float, default=2.0)
    parser.add_argument("--warmup", type=int, default=5, help="epochs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("imagenet.pt"))
    parser.add_argument("--save-every", type=int, default=1000, help="steps")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(given)

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    train, val = loaders(args, device)

    model = torchvision.models.get_model(args.model, num_classes=len(train.dataset.classes))
    model = model.to(device, memory_format=torch.channels_last)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, 0.9, weight_decay=5e-5, nesterov=True)
    steps = len(train) * args.epochs
    rising = min(args.warmup * len(train), steps - 1)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=rising),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - rising),
        ],
        milestones=[rising],
    )
    parts = {"model": model.module, "optimizer": optimizer, "schedule": schedule, "loader": train}
    epoch = step = 0
    if args.resume:
        saved = torch.load(args.checkpoint, map_location=device)
        epoch, step = saved.pop("epoch"), saved.pop("step")
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    def save() -> None:
        if dist.get_rank() == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "epoch": epoch, "step": step}, args.checkpoint)

    score = 0.0
    while epoch < args.epochs:
        for images, labels in train:
            with torch.autocast(images.device.type, torch.bfloat16, enabled=on_gpu):
                loss = cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % args.save_every == 0:
                save()
        epoch += 1
        save()
        score = accuracy(model, val)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {100 * score:.2f} %")
    dist.barrier()
    dist.destroy_process_group()
    return score


if __name__ == "__main__":
    main()
