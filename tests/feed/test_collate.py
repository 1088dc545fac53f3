import re
from collections import namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision import tv_tensors

from h5feed.errors import UsageError
from h5feed.feed.collate import collate
from h5feed.feed.dataset import H5Dataset
from packed import image_spec, random_images, write_packed

Pair = namedtuple("Pair", "image label")


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


def hwc(*shape, seed=0):
    pixels = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))
    return pixels.permute(2, 0, 1)


SAMPLES = {
    "labels": [(hwc(8, 6, 3, seed=i), i) for i in range(3)],
    "float targets": [(hwc(8, 6, 3, seed=i), torch.rand(5)) for i in range(3)],
    "masks": [(hwc(8, 6, 3, seed=i), torch.ones(8, 6, dtype=torch.uint8)) for i in range(3)],
    "floats": [(hwc(8, 6, 3, seed=i).float() / 255, i) for i in range(3)],
    "planes": [(hwc(8, 6, 3, seed=i).contiguous(), i) for i in range(3)],
    "mixed layouts": [(hwc(8, 6, 3), 0), (hwc(8, 6, 3).contiguous(), 1)],
    "vectors": [(torch.rand(7), i) for i in range(3)],
    "arrays": [(np.ones((8, 6, 3), np.uint8), i) for i in range(3)],
    "only images": [hwc(8, 6, 3), hwc(8, 6, 3)],
    "dicts": [{"image": hwc(8, 6, 3), "label": 1}] * 2,
    "lists": [[hwc(8, 6, 3), 1]] * 2,
    "dict targets": [(hwc(8, 6, 3), {"a": 1})] * 2,
    "three parts": [(hwc(8, 6, 3), 1, 2.0)] * 2,
    "image objects of torchvision": [(tv_tensors.Image(hwc(8, 6, 3)), 1)] * 2,
    "named tuples": [Pair(hwc(8, 6, 3), 1)] * 2,
    "one channel": [(hwc(8, 6, 1), 1)] * 2,
}


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_it_returns_what_default_collate_returns(samples):
    if isinstance(samples[0], dict):
        got, wanted = collate(samples), default_collate(samples)
        assert got.keys() == wanted.keys()
        assert all(same(got[key], wanted[key]) for key in got)
    elif isinstance(samples[0], tuple) and isinstance(samples[0][1], dict):
        got, wanted = collate(samples), default_collate(samples)
        assert same(got[0], wanted[0])
        assert torch.equal(got[1]["a"], wanted[1]["a"])
    else:
        assert same(collate(samples), default_collate(samples))


@pytest.mark.parametrize("name", ["labels", "masks", "floats"])
def test_views_of_hwc_become_a_channels_last_batch(name):
    images, _ = collate(SAMPLES[name])
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert not images.is_contiguous()


def test_planes_stay_planes():
    images, _ = collate(SAMPLES["planes"])
    assert images.is_contiguous()


def test_a_batch_is_a_copy_of_the_file(tmp_path):
    images = random_images(4)
    ds = H5Dataset(write_packed(tmp_path / "a.h5", images))
    batch, labels = collate(ds.__getitems__([0, 1, 2, 3]))
    assert labels.tolist() == [0, 1, 0, 1]
    batch.zero_()
    assert np.array_equal(ds[2][0].permute(1, 2, 0), images[2])


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_make_a_batch_without_a_warning(tmp_path):
    images = random_images(3)
    masks = [image[:, :, :1].copy() for image in images]
    path = write_packed(tmp_path / "m.h5", images, masks=masks)
    batch, targets = collate(H5Dataset(path, output="numpy").__getitems__([0, 1, 2]))
    assert np.array_equal(batch, np.stack(images))
    assert np.array_equal(targets, np.stack(masks)[..., 0])


def test_images_of_different_sizes_are_explained(tmp_path):
    shapes = np.int32([[8, 12], [10, 8]])
    images = [np.zeros((h, w, 3), np.uint8) for h, w in shapes.tolist()]
    spec = image_spec(size=(8, 8), fit="keep")
    ds = H5Dataset(write_packed(tmp_path / "k.h5", images, spec=spec, stored_shapes=shapes))
    text = (
        "images of one batch have 2 different sizes, among them (3, 8, 12) and (3, 10, 8); give "
        "the dataset a transform that ends in one size, such as RandomResizedCrop(224)"
    )
    with pytest.raises(UsageError, match=re.escape(text)):
        collate(ds.__getitems__([0, 1]))
    assert collate([ds[0]])[0].shape == (1, 3, 8, 12)


def test_pil_images_are_refused_as_torch_refuses_them():
    with pytest.raises(TypeError, match="must contain tensors"):
        collate([(Image.new("RGB", (4, 4)), 0)])
