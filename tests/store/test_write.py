import hashlib
import time

import h5py
import numpy as np
import pytest

from h5feed.store import head_bytes, read_index
from h5feed.store.layout import ALIGNMENT
from packed import image_spec, mask_spec, random_images, write_packed


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_same_items_give_the_same_bytes_at_another_time(tmp_path, encoding):
    images = random_images(5)
    shapes = np.full((5, 2), 32, np.int32)
    spec = image_spec(encoding)
    write_packed(tmp_path / "a.h5", images, spec=spec, stored_shapes=shapes)
    time.sleep(1.1)  # HDF5's time stamps count seconds
    write_packed(tmp_path / "b.h5", images, spec=spec, stored_shapes=shapes)
    assert sha(tmp_path / "a.h5") == sha(tmp_path / "b.h5")


def test_plain_h5py_reads_every_part(tmp_path):
    images = random_images(7)
    masks = [image[..., :1] // 16 for image in images]
    path = write_packed(tmp_path / "a.h5", images, masks=masks)
    with h5py.File(path) as file:
        assert np.array_equal(file["images"][:], images)
        assert np.array_equal(file["masks"][:], masks)
        assert file["images"].attrs["layout"] == b"HWC"
        assert file["classes"].asstr()[:].tolist() == ["cat", "dög"]
        assert file["labels"][:].tolist() == [0, 1] * 3 + [0]
        assert file.attrs["format"] == b"h5feed"
        assert file["images"].id.get_offset() % ALIGNMENT == 0
        assert file["masks"].id.get_offset() % ALIGNMENT == 0


@pytest.mark.parametrize("count", [1, 3, 500])
@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_payload_begins_where_head_bytes_says_whatever_its_size(tmp_path, encoding, count):
    spec = image_spec(encoding, size=(8, 8))
    shapes = np.full((count, 2), 8, np.int32)
    images = random_images(count, (8, 8))
    write_packed(tmp_path / "a.h5", images, spec=spec, stored_shapes=shapes)
    assert read_index(tmp_path / "a.h5").extents["images"].start == head_bytes([spec])


def test_nothing_is_left_beside_the_file(tmp_path):
    images = random_images(3)
    write_packed(tmp_path / "a.h5", images, masks=[image[..., :1] for image in images])
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]


def test_mask_and_image_heads_agree():
    assert head_bytes([image_spec()]) % ALIGNMENT == 0
    assert head_bytes([image_spec(), mask_spec()]) == head_bytes([image_spec()])
