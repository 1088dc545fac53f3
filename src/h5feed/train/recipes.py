"""Published trainings by name: the options that each comes to here, and what it leaves out.

Learning rates belong to the published batch size, and follow --batch-size from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, get_args

from h5feed.errors import UsageError
from h5feed.train.config import RecipeName, TrainConfig

__all__ = ["RECIPES", "Recipe", "described", "with_recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A published training.

    >>> RECIPES["timm-a3"].options["optimizer"]
    'lamb'
    """

    source: str
    """Where it is published."""
    options: Mapping[str, Any]
    """By field, as on the command line."""
    left_out: str
    """What of it is otherwise here."""


RECIPES: Mapping[str, Recipe] = {
    "torchvision-resnet50": Recipe(
        source="https://pytorch.org/blog/"
        "how-to-train-state-of-the-art-models-using-torchvision-latest-primitives/ and the second "
        "ResNet command in references/classification of github.com/pytorch/vision",
        options={
            "model": "torchvision:resnet50",
            "epochs": 600,
            "batch_size": 1024,  # 8 processes of 128
            "optimizer": "sgd",
            "nesterov": False,
            "lr": 0.5,
            "lr_scaling": "linear",
            "lr_batch": 1024,
            "weight_decay": 2e-5,
            "schedule": "cosine",
            "warmup": 5 / 600,
            "crop": "random-resized",
            "size": 176,
            "val_size": 224,
            "val_resize": 232,
            "auto_augment": "ta_wide",
            "random_erase": 0.1,
            "aug_repeats": 4,
            "label_smoothing": 0.1,
            "mixup": 0.2,
            "cutmix": 1.0,
            # 0.99998 every 32 steps, by torchvision's rule for 1024 images and 600 epochs, per step
            "ema": 0.999966,
        },
        left_out="weight decay spares biases besides norms",
    ),
    "timm-a3": Recipe(
        source="Wightman, Touvron, Jegou 2021, arXiv:2110.00476, table 2, procedure A3",
        options={
            "model": "timm:resnet50",
            "epochs": 100,
            "batch_size": 2048,
            "optimizer": "lamb",
            "lr": 8e-3,
            "lr_scaling": "sqrt",
            "lr_batch": 2048,
            "weight_decay": 0.02,
            "schedule": "cosine",
            "warmup": 5 / 100,
            "crop": "random-resized",
            "size": 160,
            "val_size": 224,
            "val_resize": 235,  # 224 / 0.95
            "auto_augment": "ra",
            "ra_magnitude": 18,  # of 30; timm's 6 of 10
            "loss": "bce",
            "bce_target_thresh": 0.2,
            "mixup": 0.1,
            "cutmix": 1.0,
        },
        left_out="RandAugment is torchvision's, whose two changes are never left out and have one "
        "strength; images are resized bilinearly",
    ),
    "cifar-airbench": Recipe(
        source="Jordan 2024, arXiv:2404.00498; airbench94.py of github.com/KellerJordan/"
        "cifar10-airbench",
        options={
            "model": "resnet9",
            "epochs": 10,
            "batch_size": 1024,
            "optimizer": "sgd",
            # 11.5 for a sum over 1024 images, divided by 1 + 1 / (1 - momentum); decay 0.0153
            # apart from the rate
            "lr": 1.5,
            "lr_scaling": "linear",
            "lr_batch": 1024,
            "momentum": 0.85,
            "weight_decay": 0.0153 / 11.5,
            "schedule": "linear",
            "warmup": 0.23,
            "crop": "random-crop",
            "padding": 2,
            "padding_mode": "reflect",
            "alternating_flip": True,
            "label_smoothing": 0.2,
            "test_flip": True,
        },
        left_out="its network and the whitening layer, the higher rate of biases, lookahead, and "
        "translated images when it scores",
    ),
}


def with_recipe(config: TrainConfig, name: str) -> TrainConfig:
    """Return `config` with the options of a recipe; UsageError for one that is not known.

    >>> from pathlib import Path
    >>> config = with_recipe(TrainConfig(train=Path("photos.h5")), "timm-a3")
    >>> config.epochs, config.optim.optimizer, config.recipe.recipe
    (100, 'lamb', 'timm-a3')
    """
    if name not in get_args(RecipeName):
        raise UsageError(f"--recipe {name!r} is not known: take {', '.join(RECIPES)} or none")
    given = {"recipe": name, **(RECIPES[name].options if name in RECIPES else {})}
    changes: dict[str, Any] = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value) and not isinstance(value, type):
            known = {inner.name for inner in fields(value)}
            changes[entry.name] = replace(value, **{k: v for k, v in given.items() if k in known})
        elif entry.name in given:
            changes[entry.name] = given[entry.name]
    return replace(config, **changes)


def described(name: RecipeName) -> list[str]:
    """Return what a run is to say of its recipe; nothing where it has none.

    >>> described("none")
    []
    """
    if name not in RECIPES:
        return []
    recipe = RECIPES[name]
    return [f"recipe {name}, of {recipe.source}; otherwise here: {recipe.left_out}"]
