"""torchvision's and timm's transforms as ops: the same arguments, and the same pixels."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from augment.draws import FakeDraws
from augment.judge import assert_close, make_images, planar, run
from h5feed import H5Dataset, H5Loader, augment
from h5feed.augment import (
    CenterCrop,
    ColorJitter,
    CutMix,
    GaussianBlur,
    Grayscale,
    MixUp,
    MixUpOrCutMix,
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
    from_torchvision,
)
from h5feed.errors import UsageError
from loaders import write_kind

v1 = pytest.importorskip("torchvision.transforms")
v2 = pytest.importorskip("torchvision.transforms.v2")
tv_tensors = pytest.importorskip("torchvision.tv_tensors")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOATS = [ToDtype(torch.float32, scale=True), Normalize(MEAN, STD)]
BILINEAR = v1.InterpolationMode.BILINEAR
BICUBIC = v1.InterpolationMode.BICUBIC

BOTH = {
    "imagenet": (
        lambda t: t.Compose(
            [
                t.RandomResizedCrop(224, interpolation=BICUBIC), t.RandomHorizontalFlip(),
                t.ToTensor(), t.Normalize(mean=torch.tensor(MEAN), std=np.array(STD)),
            ]
        ),
        [
            RandomResizedCrop((224, 224), interpolation="bicubic", antialias=True),
            RandomHorizontalFlip(),
        ],
    ),
    "evaluation": (
        lambda t: t.Compose(
            [t.Resize(256), t.CenterCrop(224), t.ToTensor(), t.Normalize(MEAN, STD)]
        ),
        [Resize(256, antialias=True), CenterCrop((224, 224))],
    ),
    "cifar": (
        lambda t: [
            t.RandomCrop(32, padding=4, padding_mode="reflect"), t.RandomHorizontalFlip(0.3)
        ],
        [RandomCrop((32, 32), 4, padding_mode="reflect"), RandomHorizontalFlip(0.3)],
    ),
    "padded before": (
        lambda t: t.Compose([t.Pad(4, fill=9), t.RandomCrop(32)]),
        [RandomCrop((32, 32), padding=4, fill=9, mask_fill=9)],
    ),
    "nested": (
        lambda t: nn.Sequential(t.Resize((20, 30)), nn.Identity(), t.RandomVerticalFlip(p=1)),
        [Resize((20, 30), antialias=True), RandomVerticalFlip(1)],
    ),
    "colors": (
        lambda t: t.Compose(
            [
                t.ColorJitter(0.4, hue=0.1), t.RandomGrayscale(0.2), t.Grayscale(3),
                t.GaussianBlur(5, (0.1, 2)), t.PILToTensor(), t.ConvertImageDtype(torch.float16),
                t.RandomErasing(value="random"), t.RandomErasing(0.1, value=(1, 2, 3)),
            ]
        ),
        [
            ColorJitter((0.6, 1.4), None, None, (-0.1, 0.1)), RandomGrayscale(0.2), Grayscale(3),
            GaussianBlur((5, 5), (0.1, 2)), ToDtype(torch.float16, scale=True),
            RandomErasing(value="random"), RandomErasing(0.1, value=(1, 2, 3)),
        ],
    ),
    "tones": (
        lambda t: t.Compose(
            [
                t.RandomPosterize(4), t.RandomSolarize(99, p=0.1), t.RandomInvert(0.2),
                t.RandomAutocontrast(0.3), t.RandomEqualize(0.4), t.RandomAdjustSharpness(2, 0.6),
            ]
        ),
        [
            augment.RandomPosterize(4), augment.RandomSolarize(99, 0.1), augment.RandomInvert(0.2),
            augment.RandomAutocontrast(0.3), augment.RandomEqualize(0.4),
            augment.RandomAdjustSharpness(2, 0.6),
        ],
    ),
    "affine": (
        lambda t: [
            t.RandomAffine(9, (0.1, 0.2), (0.9, 1), shear=3, interpolation=BILINEAR),
            t.RandomRotation((-5, 9), fill=7), t.RandomPerspective(0.3, 0.2, fill=8),
        ],
        [
            RandomAffine((-9, 9), (0.1, 0.2), (0.9, 1), (-3, 3), "bilinear"),
            augment.RandomRotation((-5, 9), fill=7, mask_fill=7),
            augment.RandomPerspective(0.3, 0.2, fill=8, mask_fill=8),
        ],
    ),
    "policies": (
        lambda t: [
            t.RandAugment(3, 7, 11, BILINEAR), t.TrivialAugmentWide(fill=[1, 2, 3]),
            t.AutoAugment(v2.AutoAugmentPolicy.CIFAR10), t.AugMix(4, 2, 1, 0.5, False, fill=3),
        ],
        [
            augment.RandAugment(3, 7, 11, "bilinear", fill=0),
            augment.TrivialAugmentWide(fill=(1, 2, 3)), augment.AutoAugment("cifar10", fill=0),
            augment.AugMix(4, 2, 1, 0.5, False, fill=3),
        ],
    ),
    "choices": (
        lambda t: [
            t.RandomApply([t.ColorJitter(0.4), t.RandomGrayscale()], p=0.8),
            t.RandomChoice([t.RandomInvert(), nn.Identity(), t.RandomApply([t.GaussianBlur(5)])]),
        ],
        [
            augment.RandomApply([ColorJitter((0.6, 1.4)), RandomGrayscale()], 0.8),
            augment.RandomChoice(
                [augment.RandomInvert(), (), augment.RandomApply([GaussianBlur((5, 5), (0.1, 2))])]
            ),
        ],
    ),
}  # fmt: skip


def plain(op):
    """An op's arguments, sequences of one kind."""
    values = vars(op).values()
    return type(op), [tuple(v) if isinstance(v, (list, tuple)) else v for v in values]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("library", [v1, v2], ids=["v1", "v2"])
@pytest.mark.filterwarnings("ignore:The transform `ToTensor")
def test_a_scripts_line_comes_to_the_ops_of_its_names(library, name):
    make, expected = BOTH[name]
    found = [plain(op) for op in from_torchvision(make(library))]
    expected = [*expected, *(FLOATS if name in ("imagenet", "evaluation") else [])]
    if name == "cifar" and library is v2:
        expected[0] = RandomCrop((32, 32), [4] * 4, padding_mode="reflect")
    if name == "choices" and library is v2:  # where p is never None
        expected[1] = augment.RandomChoice(expected[1].transforms, (1 / 3,) * 3)
    for (kind, values), op in zip(found, expected, strict=True):
        assert kind is type(op)
        for ours, theirs in zip(values, plain(op)[1], strict=True):
            numbers = isinstance(theirs, tuple) and all(isinstance(v, (int, float)) for v in theirs)
            assert ours == (pytest.approx(theirs) if numbers else theirs)


def test_v2s_own_ways_of_saying_it():
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomCrop(8, padding=2, fill={tv_tensors.Image: (1, 2, 3), tv_tensors.Mask: 255}),
            v2.ToDtype(torch.uint8, scale=True),
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
            v2.ToPureTensor(),
            v2.CutMix(alpha=0.5, num_classes=7),
        ]
    )
    assert from_torchvision(transform) == (
        RandomCrop((8, 8), (2, 2, 2, 2), fill=(1, 2, 3), mask_fill=255),
        ToDtype(torch.float32, scale=True),
        CutMix(alpha=0.5, num_classes=7),
    )
    mixed = from_torchvision([CenterCrop(8), v2.MixUp(num_classes=3)])
    assert mixed == (CenterCrop(8), MixUp(num_classes=3))


@pytest.mark.filterwarnings("ignore:The transform `ToTensor")
@pytest.mark.parametrize("library", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("interpolation", [BILINEAR, BICUBIC])
def test_an_evaluations_pixels_are_torchvisions(library, interpolation):
    """As tensors, on the way to floats: within 2 levels, on average half a level."""
    images = make_images(6, 90, 120)[2:]
    transform = library.Compose(
        [library.Resize(64, interpolation=interpolation), library.CenterCrop(56)]
    )
    _, _, out = run(from_torchvision(transform), images, FakeDraws(range(4)))
    for image, made in zip(images, out, strict=True):
        assert_close(made, transform(planar(image)).permute(1, 2, 0))


@pytest.mark.filterwarnings("ignore:The transform `ToTensor")
def test_h5loader_takes_a_scripts_transform_as_it_is(tmp_path):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "keep"))
    transform = v1.Compose([v1.Resize((20, 20)), v1.ToTensor(), v1.Normalize(mean=MEAN, std=STD)])
    theirs = H5Dataset(tmp_path / "a.h5", transform=transform, output="pil")
    with H5Loader(ds, 4, augment=transform) as loader:
        images = torch.cat([images.clone() for images, _ in loader])
    want = torch.stack([theirs[k][0] for k in range(len(theirs))])
    levels = (images - want).abs() * torch.tensor(STD).view(1, 3, 1, 1) * 255
    assert levels.max() <= 2
    assert levels.mean() <= 0.5


def test_timms_own_transforms_are_known():
    data = pytest.importorskip("timm.data")
    train = data.create_transform(
        (3, 64, 64), is_training=True, re_prob=0.25, re_mode="pixel", interpolation="bicubic",
        color_jitter=0.4,
    )  # fmt: skip
    found = from_torchvision(train)
    assert [type(op).__name__ for op in found] == [
        "RandomResizedCrop", "RandomHorizontalFlip", "ColorJitter", "ToDtype", "Normalize",
        "RandomErasing",
    ]  # fmt: skip
    assert found[0] == RandomResizedCrop((64, 64), interpolation="bicubic", antialias=True)
    assert found[-1] == RandomErasing(0.25, (0.02, 1 / 3), (0.3, 3.333333333), "random")
    score = from_torchvision(data.create_transform((3, 64, 64), is_training=False))
    assert score[:2] == (Resize(73, antialias=True), CenterCrop((64, 64)))


def test_a_choice_of_mixing_is_one_op():
    """torchvision's reference script's, and timm's collate functions."""
    choice = v2.RandomChoice(
        [v2.CutMix(alpha=0.7, num_classes=5), v2.MixUp(alpha=0.2, num_classes=5)], p=[3, 1]
    )
    assert from_torchvision([CenterCrop(8), choice])[1] == MixUpOrCutMix(
        alpha=0.2, num_classes=5, cutmix_alpha=0.7, cutmix_p=0.75
    )
    data = pytest.importorskip("timm.data")
    with pytest.raises(UsageError, match="timm's RandAugment has no counterpart"):
        from_torchvision(data.create_transform(64, is_training=True, auto_augment="rand-m9"))
    both = data.FastCollateMixup(0.8, 1.0, prob=0.9, label_smoothing=0.1, num_classes=7)
    assert from_torchvision([both]) == (
        MixUpOrCutMix(alpha=0.8, num_classes=7, p=0.9, label_smoothing=0.1),
    )
    one = data.Mixup(mixup_alpha=0.0, cutmix_alpha=0.5, num_classes=7, label_smoothing=0)
    assert from_torchvision([one])[0] == MixUpOrCutMix(
        num_classes=7, cutmix_alpha=0.5, cutmix_p=1.0
    )
    with pytest.raises(UsageError, match="timm's Mixup with mode='elem'"):
        from_torchvision([data.Mixup(mode="elem")])


class Own(v2.CenterCrop):
    """A class of a script."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: v2.Compose([v2.RandomOrder([v2.RandomInvert()])]),
            "augment: torchvision's RandomOrder has no counterpart in h5feed.augment; leave it "
            "out, or keep all of the transform in H5Dataset(path, transform=...) and use "
            "make_dataloader",
        ),
        (
            lambda: [v1.RandomApply([v1.RandomOrder([v1.RandomGrayscale()])])],
            "augment: torchvision's RandomOrder has",
        ),
        (lambda: [v2.RandomChoice([v2.Grayscale()])], "RandomChoice: transforms=[Grayscale(num_o"),
        (lambda: [v2.RandAugment(interpolation=BICUBIC)], "RandAugment: interpolation='bicubic' m"),
        (lambda: [v2.Lambda(abs)], "augment: torchvision's Lambda has no counterpart in"),
        (
            lambda: [abs],
            "augment holds <built-in function abs>, which is not an op of h5feed.augment;",
        ),
        (
            lambda: abs,
            "augment holds <built-in function abs>, which is not an op of h5feed.augment;",
        ),
        (
            lambda: [Own(8)],
            "augment holds Own(size=(8, 8)), which is not an op of h5feed.augment; le",
        ),
        (
            lambda: 5,
            "augment=5 is not a list of ops of h5feed.augment, nor a transform of torchvision",
        ),
        (lambda: None, "augment=None is not a list of ops of h5feed.augment"),
        (lambda: CenterCrop(8), "augment=CenterCrop(size=8, mask_fill=0) is one op: give a list"),
        (lambda: v2.Compose([v2.Pad(2)]), "augment: torchvision's Pad has a counterpart in h5fee"),
        (lambda: [v2.Pad(2), v2.CenterCrop(3)], "augment: torchvision's Pad has a counterpart i"),
        (
            lambda: [v2.RandomRotation(9, expand=True)],
            "RandomRotation: expand=True makes images of several sizes",
        ),
        (
            lambda: [v2.ToDtype({tv_tensors.Mask: torch.int64, "others": None})],
            "augment: ToDtype makes masks torch.int64, and ops change images only: give H5Dataset "
            "target_dtype=torch.int64",
        ),
        (
            lambda: [v1.Resize(8, v1.InterpolationMode.NEAREST)],
            'Resize: interpolation=\'nearest\' must be "bilinear" or "bicubic"',
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(make, message):
    with pytest.raises(UsageError) as caught:
        augment.Pipeline(make())
    assert message in str(caught.value)


def test_no_library_is_imported_to_know_its_classes():
    code = "import h5feed.augment, sys; print({'torchvision', 'timm', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done
