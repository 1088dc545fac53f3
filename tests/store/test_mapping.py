import os
from pathlib import Path

import numpy as np
import pytest

from h5feed.errors import H5FormatError
from h5feed.store import Mapping, read_index
from packed import image_spec, random_images, write_packed


@pytest.fixture
def images():
    return random_images(6, (64, 64))


@pytest.fixture
def opened(tmp_path, images):
    index = read_index(write_packed(tmp_path / "a.h5", images))
    return index, Mapping(index)


def test_items_and_whole_are_views_of_one_mapping(opened, images):
    index, mapping = opened
    extent = index.extents["images"]
    whole = mapping.whole(extent)
    for i, image in enumerate(images):
        item = mapping.item(extent, i)
        assert np.array_equal(item, image)
        assert np.shares_memory(item, mapping.data)
        assert np.shares_memory(item, whole)


def test_a_write_stays_private_and_restore_takes_it_back(opened, images):
    index, mapping = opened
    extent = index.extents["images"]
    before = Path(index.path).read_bytes()
    mapping.item(extent, 2)[:] = 7
    assert (Mapping(index).item(extent, 2) == images[2]).all()
    assert Path(index.path).read_bytes() == before
    mapping.restore(*extent.item_range(2))
    assert np.array_equal(mapping.item(extent, 2), images[2])
    assert np.array_equal(mapping.item(extent, 1), images[1])


def test_restore_leaves_a_neighbor_on_the_same_page_alone(tmp_path):
    images = random_images(3, (8, 8))
    index = read_index(write_packed(tmp_path / "small.h5", images))
    mapping, extent = Mapping(index), index.extents["images"]
    mapping.item(extent, 1)[:] = 1
    mapping.item(extent, 2)[:] = 2  # as another thread's transform would
    mapping.restore(*extent.item_range(1))
    assert np.array_equal(mapping.item(extent, 1), images[1])
    assert (mapping.item(extent, 2) == 2).all()


def test_views_outlive_the_mapping(opened, images):
    index, mapping = opened
    item = mapping.item(index.extents["images"], 5)
    del mapping, opened
    assert np.array_equal(item, images[5])


def test_announcements_are_cut_to_what_the_kernel_reads_of_one(opened, monkeypatch):
    _, mapping = opened
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *what: told.append(what))
    mapping.announce(1000, 300_000)
    advice = os.POSIX_FADV_WILLNEED
    assert told == [
        (1000, 131_072, advice),
        (132_072, 131_072, advice),
        (263_144, 37_856, advice),
    ]


def test_a_file_that_changed_size_since_is_refused(opened):
    index, _ = opened
    os.truncate(index.path, index.size - 1)
    with pytest.raises(H5FormatError, match="open it again"):
        Mapping(index)


def test_descriptors_are_closed(opened):
    index, _ = opened
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        Mapping(index)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_items_of_their_own_size(tmp_path):
    shapes = np.int32([[8, 12], [10, 8], [8, 8]])
    images = [np.full((h, w, 3), i, np.uint8) for i, (h, w) in enumerate(shapes)]
    spec = image_spec(size=(8, 8), fit="keep")
    path = write_packed(tmp_path / "k.h5", images, spec=spec, stored_shapes=shapes)
    index = read_index(path)
    for i, image in enumerate(images):
        assert np.array_equal(Mapping(index).item(index.extents["images"], i), image)


def test_nv12_items(tmp_path):
    images = [np.arange(12 * 16, dtype=np.uint8).reshape(12, 16) + i for i in range(3)]
    path = write_packed(tmp_path / "y.h5", images, spec=image_spec("yuv420", (8, 16)))
    index = read_index(path)
    extent = index.extents["images"]
    assert np.array_equal(Mapping(index).item(extent, 2), images[2])
    assert Mapping(index).whole(extent).shape == (3, 12, 16)
