import pickle
import shutil

import numpy as np
import pytest

from h5feed.errors import H5FormatError, UsageError
from h5feed.feed.files import PackedFiles, expand_paths
from packed import image_spec, mask_spec, random_images, write_packed


@pytest.fixture
def shards(tmp_path):
    """Three files of 4, 1 and 3 items, and the images of all."""
    images = random_images(8)
    keys = [f"cat/{i}.png" for i in range(8)]
    cuts = [(0, 4), (4, 5), (5, 8)]
    paths = [
        write_packed(tmp_path / f"s{n}.h5", images[a:b], keys=keys[a:b], labels=np.arange(a, b) % 2)
        for n, (a, b) in enumerate(cuts)
    ]
    return paths, images


def test_several_files_are_one_row_of_items(shards):
    paths, images = shards
    files = PackedFiles(paths)
    assert len(files) == 8
    for i, image in enumerate(images):
        assert np.array_equal(files.item("images", i), image)
    assert [files.locate(i) for i in (0, 3, 4, 5, 7)] == [(0, 0), (0, 3), (1, 0), (2, 0), (2, 2)]
    assert files.labels.tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert files.keys() == [f"cat/{i}.png" for i in range(8)] == list(map(files.key, range(8)))
    assert files.stored_shapes.tolist() == [[32, 32]] * 8
    assert files.source_shapes.shape == (8, 2)


def test_it_pickles_as_paths_and_opens_the_same_items(shards):
    paths, images = shards
    files = PackedFiles(paths)
    pickled = pickle.dumps(files)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert again.fingerprint == files.fingerprint
    assert np.array_equal(again.item("images", 6), images[6])


def test_the_size_of_a_pickle_does_not_grow_with_items(tmp_path):
    path = write_packed(tmp_path / "n.h5", random_images(100_000, (1, 1)))
    files = PackedFiles([path])
    assert len(files) == 100_000
    assert len(pickle.dumps(files)) < 10_000


def test_a_file_that_changed_is_refused_when_unpickled(tmp_path):
    path = write_packed(tmp_path / "a.h5", random_images(4, seed=1))
    pickled = pickle.dumps(PackedFiles([path]))
    write_packed(tmp_path / "a.h5", random_images(4, seed=2))
    with pytest.raises(H5FormatError, match=r"a\.h5: the file has changed .* open it again"):
        pickle.loads(pickled)


def test_one_fingerprint_for_all_files_together(shards):
    paths, _ = shards
    one, two = PackedFiles(paths[:1]), PackedFiles(paths[:2])
    assert one.fingerprint != two.fingerprint
    assert two.fingerprint == PackedFiles(paths[:2]).fingerprint
    assert two.fingerprint != PackedFiles([paths[1], paths[0]]).fingerprint


def test_what_is_read_here_cannot_be_written_to(shards):
    files = PackedFiles(shards[0])
    with pytest.raises(ValueError, match="read-only"):
        files.item("images", 6)[:] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        files.item("images", 6).flags.writeable = True


def test_writable_items_of_several_files(shards):
    paths, images = shards
    files = PackedFiles(paths)
    for index, image in enumerate(images):
        item = files.writable("images", index)
        assert np.array_equal(item, image)
        item[:] = 0
        assert np.array_equal(files.item("images", index), image)


def announced(files, indices):
    """The (file, start, length) that `announce` tells the kernel, and what it returns."""
    told = []
    for number, shard in enumerate(files._shards):
        shard.mapping.announce = lambda start, length, n=number: told.append((n, start, length))
    return told, files.announce(indices)


def test_neighbors_are_announced_together_in_the_order_of_need(shards):
    files = PackedFiles(shards[0])
    start = files.index.addresses["images"].tolist()
    size = 32 * 32 * 3
    told, total = announced(files, [5, 6, 2, 3, 4, 0])
    assert told == [
        (2, start[2], 2 * size),
        (0, start[0] + 2 * size, 2 * size),
        (1, start[1], size),
        (0, start[0], size),
    ]
    assert total == 6 * size


def test_an_item_needed_twice_is_not_a_range_backwards(shards):
    told, total = announced(PackedFiles(shards[0]), [1, 1, 0])
    assert [length for _, _, length in told] == [3072, 3072]
    assert total == 2 * 3072
    assert announced(PackedFiles(shards[0]), []) == ([], 0)


def test_items_with_masks_and_of_their_own_size(tmp_path):
    shapes = np.int32([[8, 12], [10, 8], [8, 8]])
    images = [np.full((h, w, 3), i, np.uint8) for i, (h, w) in enumerate(shapes)]
    path = write_packed(
        tmp_path / "k.h5", images, spec=image_spec(size=(8, 8), fit="keep"), stored_shapes=shapes
    )
    files = PackedFiles([path])
    assert files.stored_shapes.tolist() == shapes.tolist()
    assert files.item_bytes([2, 0]).tolist() == [8 * 8 * 3, 8 * 12 * 3]
    assert np.array_equal(files.item("images", 1), images[1])
    with pytest.raises(UsageError, match="not one array of one size"):
        files.whole("images")

    masks = [np.full((32, 32, 1), i, np.uint8) for i in range(3)]
    path = write_packed(tmp_path / "m.h5", random_images(3), masks=masks)
    files = PackedFiles([path])
    assert files.specs["masks"] == mask_spec((32, 32))
    assert files.item_bytes([1]).tolist() == [32 * 32 * 4]
    assert np.array_equal(files.item("masks", 2), masks[2])
    told, total = announced(files, [0])
    assert len(told) == 2
    assert total == 32 * 32 * 4


def test_paths_by_pattern_come_sorted_and_a_literal_name_wins(tmp_path):
    paths = [write_packed(tmp_path / f"s{n}.h5", random_images(2)) for n in range(3)]
    assert expand_paths(tmp_path / "s*.h5") == list(map(str, paths))
    odd = shutil.copy(paths[0], tmp_path / "s[0].h5")
    assert expand_paths(odd) == [str(odd)]
    assert expand_paths(tuple(paths)) == list(map(str, paths))


def test_naming_no_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"x\*\.h5' matches no file; check the pattern"):
        expand_paths(tmp_path / "x*.h5")
    with pytest.raises(UsageError, match=r"root=\[\] names no file"):
        expand_paths([])
    with pytest.raises(FileNotFoundError):
        PackedFiles(expand_paths(tmp_path / "x.h5"))


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("pixel fields", {"spec": image_spec(fit="crop")}),
        ("classes", {"classes": ("cat", "cow")}),
        ("kind of labels", {"labels": np.zeros((4, 2), np.float32)}),
    ],
)
def test_files_packed_differently_are_refused(tmp_path, what, options):
    images = random_images(4)
    first = write_packed(tmp_path / "a.h5", images)
    other = write_packed(tmp_path / "b.h5", images, **options)
    with pytest.raises(UsageError, match=f"b.h5 and .*a.h5 differ in their {what}"):
        PackedFiles([first, other])
