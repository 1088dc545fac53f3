"""The known speed-ups of PyTorch training as switches of the trainer, and what others measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from h5feed.bench.subjects import imagefolder_class
from h5feed.train.config import DataConfig, TrainConfig
from h5feed.train.models import build_model
from h5feed.train.tricks import useless_biases

__all__ = [
    "CHECKPOINTING",
    "TRICKS",
    "Published",
    "Trick",
    "packed",
    "plain",
    "synthetic",
    "usable",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What somebody else measured for a trick; on other hardware, with another model."""

    figure: str
    hardware: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trick:
    """One switch."""

    name: str
    apply: Callable[[TrainConfig], TrainConfig]
    needs: Callable[[TrainConfig, Path | None], str | None] = lambda _config, _images: None
    """Why it means nothing here, or None. Arguments: configuration, folder of images."""
    undo: Callable[[TrainConfig], TrainConfig] | None = None
    """Switches off what torch does by default: the plain loop has it, and it is only left out."""
    published: Published | None = None


def _switch(tree: str, **values: Any) -> Callable[[TrainConfig], TrainConfig]:
    return lambda config: replace(config, **{tree: replace(getattr(config, tree), **values)})


def _cuda(config: TrainConfig, _: Path | None) -> str | None:
    return None if torch.cuda.is_available() and config.device != "cpu" else "needs a GPU"


def _ampere(config: TrainConfig, images: Path | None) -> str | None:
    if reason := _cuda(config, images):
        return reason
    enough = torch.cuda.get_device_capability() >= (8, 0)
    return None if enough else "needs a GPU of compute capability 8.0 or more"


def _torchvision(_: TrainConfig, __: Path | None) -> str | None:
    return None if imagefolder_class() else "needs torchvision beside it, which is not to be had"


def _folder(config: TrainConfig, images: Path | None) -> str | None:
    if images is None:
        return "needs --images DIR, the folder that TRAIN was packed from"
    return _torchvision(config, images)


def _biases(config: TrainConfig, _: Path | None) -> str | None:
    model = build_model(config.model.model, 2)
    side = config.data.size or 64
    found = useless_biases(model, torch.randn(2, 3, side, side))
    return None if found else f"{config.model.model} has no bias before a batch norm"


def packed(config: TrainConfig) -> TrainConfig:
    """Read the packed file where the plain loop reads the folder."""
    return _switch("data", loader="dataloader")(config)


def _h5loader(config: TrainConfig) -> TrainConfig:
    """H5Loader reads packed files only: without one, the stock loader stays."""
    if config.data.loader == "imagefolder":
        return config
    return _switch("data", loader="h5loader")(config)


_KUHN = "L. Kuhn, Faster Deep Learning Training with PyTorch (2021), citing S. Migacz, NVIDIA"

TRICKS: tuple[Trick, ...] = (
    Trick(
        name="workers, prefetch",
        apply=_switch("data", workers=-1, persistent_workers=True, prefetch=2),
        published=Published(
            figure="2× an epoch, four workers and pinned memory together",
            hardware="hardware not stated",
            source=_KUHN,
        ),
    ),
    Trick(name="pinned memory", apply=_switch("data", pin_memory=True), needs=_cuda),
    Trick(name="packed file", apply=packed, needs=_folder),
    Trick(name="H5Loader", apply=_h5loader, needs=_torchvision),
    Trick(name="crop on the GPU", apply=_switch("data", augment_on="device"), needs=_cuda),
    Trick(name="images on the GPU", apply=_switch("data", residency="auto"), needs=_cuda),
    Trick(
        name="cuDNN autotuner",
        apply=_switch("speed", cudnn_benchmark=True),
        needs=_cuda,
        published=Published(
            figure="1.27× forward and backward of one convolution",
            hardware="hardware not stated",
            source=_KUHN,
        ),
    ),
    Trick(name="TF32", apply=_switch("speed", precision="tf32"), needs=_ampere),
    Trick(
        name="AMP, bf16",
        apply=_switch("speed", precision="bf16"),
        published=Published(
            figure="1.5× to 5.5× over fp32, by network",
            hardware="V100 (another 1.3× to 2.5× on A100)",
            source="M. Huang et al., Accelerating Training on NVIDIA GPUs with PyTorch AMP (2020)",
        ),
    ),
    Trick(
        name="channels_last",
        apply=_switch("speed", channels_last=True),
        published=Published(
            figure="1.22× ResNet-50 with AMP; 1.08× to 1.35× over models",
            hardware="V100",
            source="V. Fedyunin, Channels Last Memory Format in PyTorch (pytorch.org tutorial)",
        ),
    ),
    Trick(name="no useless biases", apply=_switch("model", drop_biases=True), needs=_biases),
    Trick(
        name="fused optimizer",
        apply=_switch("optim", implementation="fused"),
        published=Published(
            figure="about 1.05×, apex's fused Adam", hardware="hardware not stated", source=_KUHN
        ),
    ),
    Trick(
        name="gradients to None",
        apply=_switch("optim", set_to_none=True),
        undo=_switch("optim", set_to_none=False),
    ),
    Trick(name="loss read seldom", apply=_switch("debug", log_every=20)),
    Trick(
        name="torch.compile",
        apply=_switch("speed", compile="default"),
        published=Published(
            figure="1.43× on average (1.51× with AMP, 1.21× fp32), 163 models",
            hardware="A100",
            source="PyTorch 2.0 (pytorch.org/get-started/pytorch-2.0)",
        ),
    ),
)

CHECKPOINTING = Trick(
    name="gradient checkpointing",
    apply=_switch("model", grad_checkpointing=True),
    published=Published(
        figure="1.3× the time, a seventh of the memory (48 to 7 GB), 1,000 layers",
        hardware="hardware not stated",
        source="T. Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174)",
    ),
)
"""Bought with time, so it is not part of "all together"."""


def plain(config: TrainConfig, images: Path | None) -> TrainConfig:
    """Return `config` as the loop of the blogs: no trick; a folder of files where there is one.

    What torch does by default stays: gradients set to None, TF32 in convolutions, one kernel per
    operation for all weights on a GPU. Turned off, the first trick would be torch's own.
    Stock loaders need torchvision's transforms; without it H5Loader is all there is.
    """
    stock = "imagefolder" if images else "dataloader"
    data = replace(
        config.data,
        loader=stock if imagefolder_class() else "h5loader",  # type: ignore[arg-type]
        workers=0,
        pin_memory=False,
        persistent_workers=False,
        augment_on="cpu",
        residency="stream",
        balance=False,  # stock loaders have none of these
        aug_repeats=1,
        alternating_flip=False,
    )
    return replace(
        config,
        data=data,
        model=replace(config.model, drop_biases=False, grad_checkpointing=False),
        optim=replace(
            config.optim,
            implementation="for-loop" if _cuda(config, None) else "foreach",
            set_to_none=True,
        ),
        speed=replace(
            config.speed,
            precision="torch",
            channels_last=False,
            compile="off",
            cudnn_benchmark=False,
            accumulate=1,
        ),
        debug=replace(config.debug, log_every=1, tensorboard=False, curves=False),
    )


def synthetic(config: TrainConfig) -> TrainConfig:
    """Return `config` with data that costs nothing; the same for all ways of loading."""
    data = DataConfig(loader="synthetic", size=config.data.size, crop=config.data.crop)
    return replace(config, data=data)


def usable(config: TrainConfig, images: Path | None) -> tuple[list[Trick], list[str]]:
    """Return the tricks that mean something here, and for each other one why it does not."""
    reasons = [(trick, trick.needs(config, images)) for trick in TRICKS]
    left_out = [f"{trick.name}: {reason}" for trick, reason in reasons if reason]
    return [trick for trick, reason in reasons if not reason], left_out
