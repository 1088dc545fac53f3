import dataclasses
import inspect

import numpy as np
import pytest
import torch

from h5feed import augment
from h5feed.augment import (
    CenterCrop,
    ColorJitter,
    CutMix,
    GaussianBlur,
    Grayscale,
    MixUp,
    Normalize,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToDtype,
)
from h5feed.errors import UsageError

SIZE = "must be a positive whole number or a pair (height, width)"
PAIR = "must be a pair of numbers (min, max)"

BAD = [
    (lambda: Resize(0), f"Resize: size=0 {SIZE}"),
    (lambda: Resize((3, 4, 5)), f"Resize: size=(3, 4, 5) {SIZE}"),
    (lambda: Resize(None), "Resize: size=None needs max_size"),
    (
        lambda: Resize((8, 8), max_size=9),
        "Resize: max_size=9 goes with one number for size, not two",
    ),
    (lambda: Resize(8, max_size=8), "Resize: max_size=8 must be larger than size=8"),
    (
        lambda: Resize(8, "lanczos"),
        'Resize: interpolation=\'lanczos\' must be "bilinear" or "bicubic"',
    ),
    (
        lambda: Resize(8, antialias="no"),
        "Resize: antialias='no' must be True, False, \"auto\" or None (the default)",
    ),
    (lambda: CenterCrop(2.5), f"CenterCrop: size=2.5 {SIZE}"),
    (lambda: RandomCrop("8"), f"RandomCrop: size='8' {SIZE}"),
    (
        lambda: RandomCrop(8, padding=(1, 2, 3)),
        "RandomCrop: padding=(1, 2, 3) must be 1, 2 or 4 whole numbers, none below 0",
    ),
    (
        lambda: RandomCrop(8, padding=-1),
        "RandomCrop: padding=-1 must be 1, 2 or 4 whole numbers, none below 0",
    ),
    (
        lambda: RandomCrop(8, fill=256),
        "RandomCrop: fill=256 must be one number or three, within 0..255",
    ),
    (
        lambda: RandomCrop(8, padding_mode="wrap"),
        "RandomCrop: padding_mode='wrap' is none of constant, edge, reflect, symmetric",
    ),
    (lambda: RandomResizedCrop(True), f"RandomResizedCrop: size=True {SIZE}"),
    (lambda: RandomResizedCrop(8, scale=0.5), f"RandomResizedCrop: scale=0.5 {PAIR}"),
    (
        lambda: RandomResizedCrop(8, scale=(1, 0.5)),
        "RandomResizedCrop: scale=(1, 0.5) must rise and lie within [0, inf]",
    ),
    (
        lambda: RandomResizedCrop(8, ratio=(0, 1)),
        "RandomResizedCrop: ratio=(0, 1) must be positive",
    ),
    (
        lambda: RandomHorizontalFlip(1.1),
        "RandomHorizontalFlip: p=1.1 must be a probability between 0 and 1",
    ),
    (
        lambda: RandomVerticalFlip("x"),
        "RandomVerticalFlip: p='x' must be a probability between 0 and 1",
    ),
    (
        lambda: RandomGrayscale(-1),
        "RandomGrayscale: p=-1 must be a probability between 0 and 1",
    ),
    (lambda: Grayscale(2), "Grayscale: num_output_channels=2 must be 1 or 3"),
    (
        lambda: ColorJitter(-1),
        "ColorJitter: brightness=-1 must be None, a number not below 0, or a pair (min, max)",
    ),
    (
        lambda: ColorJitter(hue=0.6),
        "ColorJitter: hue=(-0.6, 0.6) must rise and lie within [-0.5, 0.5]",
    ),
    (
        lambda: ColorJitter(contrast=(2, 1)),
        "ColorJitter: contrast=(2, 1) must rise and lie within [0, inf]",
    ),
    (lambda: GaussianBlur(4), "GaussianBlur: kernel_size=4 must be odd"),
    (lambda: GaussianBlur(3, 0), "GaussianBlur: sigma=0 must be positive"),
    (lambda: RandomAffine(-1), "RandomAffine: degrees=-1 must not be negative"),
    (
        lambda: RandomAffine(0, translate=(2, 0)),
        "RandomAffine: translate=(2, 0) must be two shares within 0..1",
    ),
    (lambda: RandomAffine(0, scale=(0, 1)), "RandomAffine: scale=(0, 1) must be positive"),
    (
        lambda: RandomAffine(0, shear=-2),
        "RandomAffine: shear=-2 must be a number not below 0, or 2 or 4 numbers",
    ),
    (lambda: RandomAffine(0, center=(1,)), "RandomAffine: center=(1,) must be a pair (x, y)"),
    (
        lambda: RandomAffine(0, interpolation="cubic"),
        'RandomAffine: interpolation=\'cubic\' must be "nearest" or "bilinear"',
    ),
    (
        lambda: RandomErasing(scale=(0, 2)),
        "RandomErasing: scale=(0, 2) must rise and lie within [0, 1]",
    ),
    (
        lambda: RandomErasing(value="noise"),
        "RandomErasing: value='noise' must be numbers or \"random\"",
    ),
    (
        lambda: ToDtype(torch.float64, scale=True),
        "ToDtype: dtype=torch.float64 must be torch.float32, torch.float16 or torch.bfloat16",
    ),
    (
        lambda: Normalize(0.5, (1,)),
        "Normalize: mean=0.5 must be a sequence of numbers, one for each channel",
    ),
    (lambda: Normalize((0.5,), (0,)), "Normalize: std=(0,) must be positive"),
    (
        lambda: Normalize((0.5,), (1, 1)),
        "Normalize: std=(1, 1) must have as many numbers as mean=(0.5,)",
    ),
    (lambda: MixUp(alpha=0), "MixUp: alpha=0 must be positive"),
    (lambda: CutMix(num_classes=0), "CutMix: num_classes=0 must be at least 1"),
]


@pytest.mark.parametrize(
    ("make", "text"), BAD, ids=[text.partition(" ")[2][:30] for _, text in BAD]
)
def test_bad_arguments_are_one_clear_error(make, text):
    with pytest.raises(UsageError) as caught:
        make()
    assert str(caught.value) == text


def all_ops():
    public = (getattr(augment, name) for name in augment.__all__)
    return [
        op
        for op in public
        if isinstance(op, type)
        and issubclass(op, augment.Op)
        and op not in (augment.Op, augment.ImageOp)
    ]


def test_ops_are_frozen_dataclasses_with_values_to_compare():
    assert len(all_ops()) == 33
    for op in all_ops():
        assert dataclasses.is_dataclass(op)
        assert op.__dataclass_params__.frozen
    assert RandomCrop(32, padding=4) == RandomCrop(32, 4)
    assert {RandomResizedCrop(8), RandomResizedCrop(8)} == {RandomResizedCrop(8)}


def test_values_of_torchvision_numpy_and_torch_are_taken_as_they_are():
    mode = pytest.importorskip("torchvision.transforms").InterpolationMode
    for value in ("bicubic", mode.BICUBIC, 3):  # Pillow's number
        assert RandomResizedCrop(8, interpolation=value) == RandomResizedCrop(
            8, interpolation="bicubic"
        )
        assert Resize(8, interpolation=value).interpolation == "bicubic"
    assert RandomAffine(9, interpolation=mode.BILINEAR) == RandomAffine(9, interpolation="bilinear")
    half = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    for mean, std in [(np.full(3, 0.5), np.full(3, 0.25)), (torch.full((3,), 0.5), (0.25,) * 3)]:
        assert Normalize(mean, std) == half
        assert hash(Normalize(mean, std)) == hash(half)


THEIRS_ONLY = ("self", "inplace", "labels_getter")
THEIRS = [op for op in all_ops() if op.__name__ not in ("AlternatingFlip", "MixUpOrCutMix")]
OURS_ONLY = ("mask_fill", "min_visibility")  # torchvision says the first by a dict in fill


@pytest.mark.parametrize("op", THEIRS)
def test_arguments_and_defaults_are_torchvisions(op):
    v2 = pytest.importorskip("torchvision.transforms.v2")
    init = getattr(v2, op.__name__).__init__
    theirs = {
        name: getattr(parameter.default, "value", parameter.default)  # of an enum
        for name, parameter in inspect.signature(init).parameters.items()
        if name not in THEIRS_ONLY
    }
    ours = {
        name: parameter.default
        for name, parameter in inspect.signature(op).parameters.items()
        if name not in OURS_ONLY
    }
    theirs.update(antialias=None) if "antialias" in theirs else None  # the pipeline's
    assert ours == theirs
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("op", [*all_ops(), augment.Op, augment.ImageOp, augment.Pipeline])
def test_its_docstring_has_an_example(op):
    assert ">>> " in op.__doc__  # tests/test_examples.py runs them
