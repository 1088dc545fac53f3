"""After timm's train.py: create_dataset, create_loader with PrefetchLoader, FastCollateMixup."""

import torch
from shared import SIDE, arguments, report, seeded_model, step
from timm.data import FastCollateMixup, create_loader
from timm.data.dataset_factory import create_dataset
from timm.loss import SoftTargetCrossEntropy
from timm.utils import random_seed

args = arguments()
random_seed(42)
dataset_train = create_dataset("", root=args.data)
dataset_eval = create_dataset("", root=args.data)
classes = 4
loader_train = create_loader(
    dataset_train,
    input_size=(3, SIDE, SIDE),
    batch_size=16,
    is_training=True,
    re_prob=0.25,
    auto_augment="rand-m9-mstd0.5",
    num_workers=args.workers,
    collate_fn=FastCollateMixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=classes),
    device=torch.device("cpu"),
    persistent_workers=False,
)
loader_eval = create_loader(
    dataset_eval,
    input_size=(3, SIDE, SIDE),
    batch_size=16,
    num_workers=args.workers,
    device=torch.device("cpu"),
    persistent_workers=False,
)
model = seeded_model(classes).to(memory_format=torch.channels_last)
train_loss = SoftTargetCrossEntropy()
losses = []
for images, target in loader_train:
    images = images.contiguous(memory_format=torch.channels_last)
    losses.append(train_loss(model(images), target).item())
    step(model, images, target)
order = torch.cat([target for _, target in loader_eval]).tolist()
report(losses, order=order)
