"""A packed file as the trainer sees it: what it is for, and what is wrong with it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from h5feed.errors import UsageError
from h5feed.feed import H5Dataset
from h5feed.train.config import LossConfig

__all__ = ["Kind", "check_alike", "choose_outputs", "default_size", "read_kind", "stored_size"]

_MASKS_LOOKED_AT = 512
_USUAL_SIZE = 224
"""Pixels: what ImageNet's models are trained and compared at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a set's targets are."""

    task: str
    """classification, regression or segmentation."""
    num_outputs: int
    classes: tuple[str, ...]


def read_kind(ds: H5Dataset, path: Path, config: LossConfig) -> Kind:
    """Return what `ds` can be trained for; UsageError where that is not what is asked for."""
    pixels = ds.pixels
    has = "classification"
    if "masks" in pixels.specs:
        has = "segmentation"
    elif pixels.labels.ndim == 2:
        has = "regression"
    wanted = has if config.task == "auto" or ":" in config.task else config.task
    _check_column(wanted, has, path)
    if wanted == "segmentation":
        found = named = _classes_in_masks(ds, config.ignore_index)
    elif wanted == "regression":
        found = named = int(pixels.labels.shape[1])
    else:
        _check_labels(pixels.labels, path)
        found = int(pixels.labels.max(initial=-1)) + 1
        named = len(pixels.classes) or found
    outputs = named
    if config.num_outputs:
        outputs = choose_outputs(config, wanted, found, path)
    classes = pixels.classes if wanted == "classification" else ()
    return Kind(task=wanted, num_outputs=outputs, classes=classes)


def choose_outputs(config: LossConfig, task: str, found: int, path: Path) -> int:
    """Return --num-outputs; UsageError where our loss cannot learn the `found` targets with it."""
    given = config.num_outputs
    if ":" in config.task:  # the user's own loss, which may take any number
        return given
    if task == "regression" and given != found:
        raise UsageError(
            f"--num-outputs {given}: {path} has {found} targets an image, each of which needs one "
            "output; leave it out"
        )
    if given < found:
        raise UsageError(
            f"--num-outputs {given} is too small: {path} has class numbers up to {found - 1}, "
            f"which need {found}; leave it out to take the file's"
        )
    return given


def _check_column(wanted: str, has: str, path: Path) -> None:
    if wanted == "segmentation" and has != "segmentation":
        raise UsageError(
            f"--task segmentation needs masks, and {path} has none: pack it with --masks DIR"
        )
    if wanted == "regression" and has != "regression":
        raise UsageError(
            f"--task regression needs a column of targets, and {path} has classes: pack it with a "
            "--manifest of numbers"
        )
    if wanted == "classification" and has == "regression":
        raise UsageError(
            f"--task classification needs a class per image, and {path} has numbers: take "
            "--task regression"
        )


def _check_labels(labels: npt.NDArray[np.int64], path: Path) -> None:
    if missing := int((labels < 0).sum()):
        raise UsageError(
            f"{path} has {missing} of {len(labels)} images without a class (label -1): pack a "
            "folder of class folders, or a --manifest with a label column"
        )


def _classes_in_masks(ds: H5Dataset, ignore_index: int) -> int:
    """Return the highest class number of evenly spaced masks, and one."""
    count = min(len(ds), _MASKS_LOOKED_AT)
    chosen = np.linspace(0, len(ds) - 1, count).round().astype(np.int64)
    ds.pixels.announce(chosen, ["masks"])
    found = 0
    for index in chosen.tolist():
        mask = ds.pixels.item("masks", index)
        found = max(found, int(mask.max(initial=0, where=mask != ignore_index)))
    return found + 1


def check_alike(train: Kind, val: Kind, train_path: Path, val_path: Path) -> None:
    """Raise UsageError unless what was learned on one set can be scored on the other."""
    if strange := sorted(set(train.classes) ^ set(val.classes)):
        shown = ", ".join(strange[:5]) + (", ..." if len(strange) > 5 else "")
        raise UsageError(
            f"--val {val_path} and {train_path} have not the same classes; in one of them only: "
            f"{shown}. Pack both from folders with the same class folders"
        )
    fits = val.num_outputs <= train.num_outputs
    if val.task == "regression":
        fits = val.num_outputs == train.num_outputs
    if not fits:
        what = "targets an image" if val.task == "regression" else "classes"
        raise UsageError(
            f"--val {val_path} has {val.num_outputs} {what}, and {train_path} has "
            f"{train.num_outputs}: score on a set of the same kind"
        )


def stored_size(ds: H5Dataset) -> tuple[int, int] | None:
    """Return (height, width) in which `ds` hands out its images, None where they differ."""
    spec = ds.pixels.specs["images"]
    if ds.aspect == "source" and spec.fit in ("stretch", "pad"):
        return None
    one_size = spec.fit != "keep" and spec.encoding != "original"
    return (spec.height, spec.width) if one_size else None


def default_size(ds: H5Dataset) -> int:
    """Return the side of the images that a model sees: the stored short side, up to 224 px."""
    spec = ds.pixels.specs["images"]
    return min(spec.height or _USUAL_SIZE, spec.width or _USUAL_SIZE, _USUAL_SIZE)
