from dataclasses import fields

import pytest
import torch

from h5feed.augment import (
    CenterCrop,
    ColorJitter,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from h5feed.errors import UsageError
from h5feed.train.config import DataConfig
from h5feed.train.data import scoring_ops, to_torchvision, training_ops

FLIP = RandomHorizontalFlip()


@pytest.mark.parametrize(
    ("crop", "size", "stored", "dense", "expected"),
    [
        ("auto", 32, (32, 32), False, [RandomCrop(32, padding=4), FLIP]),
        ("auto", 24, (32, 32), False, [Resize((24, 24)), RandomCrop(24, padding=3), FLIP]),
        ("auto", 224, (256, 256), False, [RandomResizedCrop(224), FLIP]),
        ("auto", 224, None, False, [RandomResizedCrop(224), FLIP]),
        ("auto", 64, (64, 64), True, [RandomResizedCrop(64, scale=(0.25, 1.0)), FLIP]),
        ("random-resized", 32, (32, 32), False, [RandomResizedCrop(32), FLIP]),
        ("random-crop", 224, (224, 224), False, [RandomCrop(224, padding=28), FLIP]),
        ("none", 224, (256, 128), False, [Resize((224, 224)), FLIP]),
        ("none", 32, (32, 32), False, [FLIP]),
    ],
)
def test_training(crop, size, stored, dense, expected):
    assert training_ops(DataConfig(crop=crop), size, stored, dense=dense) == expected
    plain = training_ops(DataConfig(crop=crop, flip=False), size, stored, dense=dense)
    assert plain == expected[:-1]


@pytest.mark.parametrize("padding", [0, 2])
def test_padding_may_be_chosen(padding):
    config = DataConfig(crop="random-crop", padding=padding)
    expected = [RandomCrop(32, padding=padding), FLIP]
    assert training_ops(config, 32, (32, 32), dense=False) == expected


@pytest.mark.parametrize(
    ("crop", "size", "stored", "dense", "expected"),
    [
        ("auto", 32, (32, 32), False, []),
        ("auto", 24, (32, 32), False, [Resize((24, 24))]),
        ("auto", 224, (256, 256), False, [Resize(256), CenterCrop(224)]),
        ("random-resized", 96, None, False, [Resize(110), CenterCrop(96)]),
        ("auto", 224, (256, 256), True, [Resize((224, 224))]),
        ("none", 224, (256, 256), False, [Resize((224, 224))]),
    ],
)
def test_scoring(crop, size, stored, dense, expected):
    assert scoring_ops(DataConfig(crop=crop), size, stored, dense=dense) == expected


def test_torchvision_gets_the_same_arguments():
    pytest.importorskip("torchvision")
    ops = [
        Resize((24, 20)),
        CenterCrop(16),
        RandomCrop(16, padding=4),
        RandomResizedCrop(8, scale=(0.25, 1.0)),
        RandomHorizontalFlip(0.25),
    ]
    made = to_torchvision(ops).transforms
    assert [type(op).__name__ for op in made] == [type(op).__name__ for op in ops]
    assert made[0].size == [24, 20]
    assert made[1].size == (16, 16)
    assert (made[2].size, made[2].padding) == ((16, 16), [4, 4, 4, 4])
    assert made[3].scale == (0.25, 1.0)
    assert made[4].p == 0.25
    assert {f.name for f in fields(RandomResizedCrop)} - {"interpolation", "antialias"} == {
        "size", "scale", "ratio"
    }  # fmt: skip


def test_padding_of_masks_is_not_scored():
    pytest.importorskip("torchvision")
    from torchvision import tv_tensors

    config = DataConfig(crop="random-crop", flip=False)
    ops = training_ops(config, 32, (32, 32), dense=True, ignore_index=255)
    assert ops == [RandomCrop(32, padding=4, mask_fill=255)]
    made = to_torchvision([RandomCrop(32, padding=31, mask_fill=255)])
    scene = torch.full((3, 32, 32), 7, dtype=torch.uint8)
    image, mask = made(tv_tensors.Image(scene), tv_tensors.Mask(scene[0]))
    assert set(image.unique().tolist()) == {0, 7}
    assert torch.equal(mask == 255, image[0] == 0)
    assert training_ops(config, 32, (32, 32), dense=False, ignore_index=255) == [
        RandomCrop(32, padding=4)
    ]


def test_color_jitter_and_random_erase_come_last_and_only_where_asked_for():
    config = DataConfig(crop="none", color_jitter=0.4, random_erase=0.25)
    mean = (120.4, 110.6, 99.5)
    jitter = ColorJitter(0.4, 0.4, 0.4)
    erasing = RandomErasing(0.25, value=[120.0, 111.0, 100.0])
    assert training_ops(config, 32, (32, 32), dense=False, mean=mean) == [FLIP, jitter, erasing]
    assert scoring_ops(config, 32, (32, 32), dense=False) == []
    scenes = DataConfig(crop="none", color_jitter=0.4)
    assert training_ops(scenes, 32, (32, 32), dense=True) == [FLIP, jitter]
    with pytest.raises(UsageError, match=r"--random-erase 0\.25 would paint over what masks still"):
        training_ops(config, 32, (32, 32), dense=True)
    with pytest.raises(UsageError, match=r"--random-erase 1\.5 is too large: it is a share"):
        DataConfig(random_erase=1.5)
    with pytest.raises(UsageError, match=r"--color-jitter -1\.0 is too small"):
        DataConfig(color_jitter=-1.0)


def test_torchvision_jitters_and_erases_alike():
    pytest.importorskip("torchvision")
    config = DataConfig(crop="none", flip=False, color_jitter=0.4, random_erase=1.0)
    ops = training_ops(config, 32, (32, 32), dense=False, mean=(200.0, 0.0, 0.0))
    jitter, erasing = to_torchvision(ops).transforms
    assert (jitter.brightness, jitter.saturation, jitter.hue) == ((0.6, 1.4), (0.6, 1.4), None)
    erased = erasing(torch.full((3, 32, 32), 7, dtype=torch.uint8))
    assert [sorted(set(channel.flatten().tolist())) for channel in erased] == [
        [7, 200], [0, 7], [0, 7]
    ]  # fmt: skip
