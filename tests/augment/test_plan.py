import pytest
import torch

from h5feed.augment import (
    CenterCrop,
    ColorJitter,
    MixUp,
    Normalize,
    Pipeline,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
)
from h5feed.augment.plan import Plan
from h5feed.errors import UsageError


@pytest.mark.parametrize(
    ("ops", "passes"),
    [
        ([], 1),
        ([Resize(256), RandomResizedCrop(224), RandomHorizontalFlip()], 1),
        ([Resize(256), CenterCrop(224), RandomHorizontalFlip()], 1),
        ([RandomCrop(32, 4), RandomHorizontalFlip(), RandomHorizontalFlip()], 1),
        ([RandomCrop(200), Resize(224)], 1),
        ([RandomCrop(32, 4), Resize(64)], 2),  # the fill is to be resized with it
        ([CenterCrop(32), RandomCrop(32, 4)], 2),  # padded with fill, not with what was cut off
        ([ColorJitter(0.4), RandomResizedCrop(224)], 3),
    ],
    ids=str,
)
def test_neighbours_fold_into_one_pass_where_that_is_the_same(ops, passes):
    assert len(Plan(ops, "auto").stages) == passes


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        (
            ["flip"],
            "augment holds 'flip', which is not an op of h5feed.augment; leave "
            "it out, or keep all of the transform in H5Dataset(path, transform=...) and use "
            "make_dataloader",
        ),
        (
            [Normalize([0.5], [0.5])],
            "Normalize(mean=[0.5], std=[0.5]) works on floats: "
            "put ToDtype(torch.float32, scale=True) before it",
        ),
        (
            [ToDtype(torch.float32, scale=True), RandomErasing(), Normalize([0.5], [0.5])],
            "Normalize(mean=[0.5], std=[0.5]) comes too late: put it next to ToDtype",
        ),
        (
            [ToDtype(torch.float32, scale=True), RandomHorizontalFlip()],
            "RandomHorizontalFlip(p=0.5) works on bytes: put it before ToDtype",
        ),
        (
            [ToDtype(torch.float32, scale=True), ToDtype(torch.float32, scale=True)],
            "ToDtype(dtype=torch.float32, scale=True) works on bytes: put it before ToDtype",
        ),
        (
            [MixUp(), RandomErasing()],
            "MixUp(alpha=1.0, num_classes=None) works on whole batches: put it last",
        ),
    ],
    ids=[0, 1, 2, 3, 4, 5],
)
def test_ops_out_of_order_are_one_clear_error(ops, text):
    with pytest.raises(UsageError) as caught:
        Pipeline(ops)
    assert str(caught.value) == text


def test_the_type_of_the_output_is_the_last_ops():
    assert Plan([], "auto").dtype == torch.uint8
    assert Plan([ToDtype(torch.bfloat16, scale=True)], "auto").dtype == torch.bfloat16
