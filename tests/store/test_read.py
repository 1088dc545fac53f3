import errno
import gc
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from feed.test_readahead import drop_from_memory
from h5feed.errors import H5FormatError
from h5feed.store import FileReader, MappedFile, read
from loaders import wait_until
from mapped import is_view, maps_of
from packed import image_spec, random_images, write_packed


@pytest.fixture
def images():
    return random_images(6, (64, 64))


@pytest.fixture
def opened(tmp_path, images):
    mapping = MappedFile(write_packed(tmp_path / "a.h5", images))
    return mapping.index, mapping


def test_items_and_whole_are_views_of_one_mapping(opened, images):
    index, mapping = opened
    extent = index.extents["images"]
    whole = mapping.whole(extent)
    for i, image in enumerate(images):
        item = mapping.item(extent, i)
        assert np.array_equal(item, image)
        assert np.shares_memory(item, mapping.data)
        assert np.shares_memory(item, whole)


def test_what_is_written_is_kept_by_its_holder_and_read_by_nobody_else(opened, images):
    index, mapping = opened
    extent = index.extents["images"]
    before = Path(index.path).read_bytes()
    held = mapping.writable(extent, 2)
    assert is_view(index.path, held.ctypes.data, held.nbytes)
    held[:] = 7
    assert np.array_equal(mapping.writable(extent, 2), images[2])
    assert np.array_equal(mapping.item(extent, 2), images[2])
    assert np.array_equal(mapping.writable(extent, 1), images[1])
    assert (held == 7).all()
    assert Path(index.path).read_bytes() == before


def test_one_byte_written_makes_a_page_the_process_s_own(opened, images):
    index, mapping = opened
    extent = index.extents["images"]  # of three pages an item
    for at in ((0, 0, 0), (31, 3, 1), (63, 63, 2)):
        mapping = MappedFile(index.path)
        mapping.writable(extent, 3)[at] ^= 255
        assert np.array_equal(mapping.writable(extent, 3), images[3])


def test_a_neighbor_on_the_same_page_keeps_what_its_holder_wrote(tmp_path):
    images = random_images(3, (8, 8))
    mapping = MappedFile(write_packed(tmp_path / "small.h5", images))
    extent = mapping.index.extents["images"]
    first, second = mapping.writable(extent, 1), mapping.writable(extent, 2)
    first[:], second[:] = 1, 2
    assert np.array_equal(mapping.writable(extent, 1), images[1])
    assert (first == 1).all()
    assert (second == 2).all()


def test_whoever_writes_into_all_it_reads_fills_no_memory(tmp_path):
    path = write_packed(tmp_path / "many.h5", random_images(300, (64, 64)))
    for late in (0, 40):  # reads between an item's reading and its writing
        mapping, held, views = MappedFile(path), [], 0
        extent = mapping.index.extents["images"]
        for i in range(300):
            held.append(mapping.writable(extent, i))
            views += is_view(path, held[-1].ctypes.data)
            if len(held) > late:
                held.pop(0)[:] = 0
        assert views <= 72 + late


def test_while_nobody_writes_everything_is_a_view(opened):
    index, mapping = opened
    extent = index.extents["images"]
    for i in [*range(6)] * 50:
        item = mapping.writable(extent, i)
        assert is_view(index.path, item.ctypes.data, item.nbytes)


def test_the_mapping_that_was_written_into_goes_with_its_last_view(opened):
    index, mapping = opened
    extent = index.extents["images"]
    held = mapping.writable(extent, 0)
    held[:] = 0
    assert len(maps_of(index.path)) > 1
    mapping.writable(extent, 0)
    del held
    assert len(maps_of(index.path)) == 1


@pytest.mark.parametrize("lacking", ["pagemap", "memory"])
def test_where_the_system_cannot_tell_or_reserves_items_are_copies(
    opened, images, lacking, monkeypatch
):
    index, mapping = opened
    extent = index.extents["images"]
    if lacking == "pagemap":
        monkeypatch.setattr(read, "_pagemap", None)
    else:  # as vm.overcommit_memory=2 does with a file larger than what is left to commit
        monkeypatch.setattr(read, "map_file", refuse_writable(read.map_file))
        with pytest.raises(OSError, match="Cannot allocate memory"):
            mapping.writable_whole(extent)
    for i in (2, 2, 5):
        item = mapping.writable(extent, i)
        assert np.array_equal(item, images[i])
        assert not is_view(index.path, item.ctypes.data)
        item[:] = 0


def refuse_writable(really):
    def refuse(fd, size, *, writable=False):
        if writable:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return really(fd, size)

    return refuse


def test_a_mapping_that_cannot_be_is_an_error(opened):
    index, _ = opened
    with pytest.raises(OSError, match="Bad file descriptor"):
        read.map_file(-1, index.size)


def test_views_outlive_the_mapping(opened, images):
    index, mapping = opened
    item = mapping.item(index.extents["images"], 5)
    del mapping, opened
    assert np.array_equal(item, images[5])


def test_announcements_are_cut_to_what_the_kernel_reads_of_one(opened, monkeypatch):
    _, mapping = opened
    told = []
    start = mapping.data.ctypes.data
    advise = lambda at, length: told.append((at - start, length))  # noqa: E731
    monkeypatch.setattr("h5feed.store.read._advise", advise)
    mapping.announce(1000, 300_000)
    assert told == [
        (1000, 131_072),
        (132_072, 131_072),
        (263_144, 37_856),
    ]


@pytest.mark.parametrize("opens", [MappedFile, FileReader])
def test_a_file_replaced_while_it_is_opened_is_one_or_the_other(tmp_path, monkeypatch, opens):
    """Packing again renames the new file over the old one: at the worst moment, here."""
    versions = [random_images(6, (64, 64), seed) for seed in (1, 2)]
    path, other = (
        write_packed(tmp_path / f"{seed}.h5", images, labels=np.full(6, seed), classes=())
        for seed, images in enumerate(versions)
    )
    opened_by_hdf5 = h5py.File

    def replaced(*args, **options):
        file = opened_by_hdf5(*args, **options)
        os.replace(other, path)
        return file

    monkeypatch.setattr("h5py.File", replaced)
    file = opens(path)
    assert not other.exists()
    assert (file.index.labels == 0).all()
    assert np.array_equal(file.item(file.index.extents["images"], 3), versions[0][3])


def test_descriptors_are_closed(opened):
    index, _ = opened
    gc.collect()  # of what earlier tests left
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        MappedFile(index.path)
    os.truncate(index.path, 5000)
    errors = []
    for _ in range(50):
        with pytest.raises(H5FormatError) as caught:
            MappedFile(index.path)
        errors.append(caught.value)  # and the frames it passed through
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_hundreds_of_files_need_no_descriptor_each(opened, images, tmp_path):
    index, _ = opened
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    mappings = [MappedFile(index.path) for _ in range(50)]
    for mapping in mappings:
        extent = index.extents["images"]
        assert np.array_equal(mapping.item(extent, 1), images[1])
        assert np.array_equal(mapping.writable(extent, 1), images[1])
        mapping.announce(*extent.item_range(1))
        mapping.in_memory(extent.start)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_replaced_after_it_was_opened_is_still_the_old_one(opened, images):
    """What needs a descriptor again does without, or says so; no byte comes from the new file."""
    index, mapping = opened
    extent = index.extents["images"]
    other = write_packed(Path(index.path).with_name("new.h5"), random_images(6, (64, 64), seed=9))
    os.replace(other, index.path)
    assert np.array_equal(mapping.item(extent, 2), images[2])
    assert np.array_equal(mapping.writable(extent, 2), images[2])
    mapping.announce(*extent.item_range(2))
    assert not mapping.in_memory(extent.start)
    for needs_it in (mapping.keep_open, lambda: mapping.writable_whole(extent)):
        with pytest.raises(OSError, match="the file has been replaced since it was opened"):
            needs_it()


def test_what_is_announced_is_read(tmp_path):
    path = write_packed(tmp_path / "a.h5", random_images(8, (256, 256)))
    drop_from_memory(path)
    mapping = MappedFile(path)
    start, length = mapping.index.extents["images"].item_range(5)
    assert not mapping.in_memory(start + length // 2)
    mapping.announce(start, length)
    assert wait_until(lambda: mapping.in_memory(start, start + length // 2, start + length - 1))


def test_items_of_their_own_size(tmp_path):
    shapes = np.int32([[8, 12], [10, 8], [8, 8]])
    images = [np.full((h, w, 3), i, np.uint8) for i, (h, w) in enumerate(shapes)]
    spec = image_spec(size=(8, 8), fit="keep")
    path = write_packed(tmp_path / "k.h5", images, spec=spec, stored_shapes=shapes)
    mapping = MappedFile(path)
    for i, image in enumerate(images):
        assert np.array_equal(mapping.item(mapping.index.extents["images"], i), image)


def test_nv12_items(tmp_path):
    images = [np.arange(12 * 16, dtype=np.uint8).reshape(12, 16) + i for i in range(3)]
    path = write_packed(tmp_path / "y.h5", images, spec=image_spec("yuv420", (8, 16)))
    mapping = MappedFile(path)
    extent = mapping.index.extents["images"]
    assert np.array_equal(mapping.item(extent, 2), images[2])
    assert mapping.whole(extent).shape == (3, 12, 16)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.h5")
    for path in (tmp_path / "pipe.h5", Path(os.devnull)):
        with pytest.raises(H5FormatError, match=f"^{path}: not a regular file; give a file that"):
            FileReader(path)


def failing_disk(monkeypatch, bad):
    """Let `os.pread` fail as a disk does for the bytes `bad`, a range of addresses."""
    pread = os.pread

    def read(fd, length, start):
        if start < bad.stop and start + length > bad.start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, length, start)

    monkeypatch.setattr(os, "pread", read)


def test_an_item_that_the_disk_does_not_give_is_an_os_error(opened, images, monkeypatch):
    index, _ = opened
    extent = index.extents["images"]
    start, length = extent.item_range(3)
    failing_disk(monkeypatch, range(start, start + length))
    with FileReader(index.path) as file:
        assert np.array_equal(file.item(extent, 2), images[2])
        with pytest.raises(OSError, match="Input/output error"):
            file.item(extent, 3)
        os.truncate(index.path, start - 1)
        with pytest.raises(OSError, match="the file ends before it"):
            file.item(extent, 2)


def test_what_the_system_says_of_hdf5s_own_reads_is_an_os_error(opened, monkeypatch):
    """HDF5 reports in words what `pread` said to it: a disk that fails is not a damaged file."""
    index, _ = opened
    said = "file read failed: time = 1, filename = 'a.h5', errno = 5, error message = 'x', buf = 0"

    def fail(*_, **__):
        raise OSError(f"Unable to synchronously open file ({said})")

    monkeypatch.setattr("h5py.File", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        FileReader(index.path)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, index.path)


def test_no_descriptor_left_is_no_fault_of_the_file(opened, monkeypatch):
    index, _ = opened

    def none_left(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", none_left)
    with pytest.raises(OSError, match="Too many open files") as caught:
        FileReader(index.path)
    assert caught.value.filename == index.path


def test_a_file_that_needs_more_memory_than_there_is_is_an_os_error(opened, monkeypatch):
    """A file of a terabyte, mostly holes, may have a column of any size."""
    index, _ = opened

    def too_large(*_):
        raise MemoryError("Unable to allocate 8.00 TiB for an array")

    monkeypatch.setattr("h5feed.store.gate.Gate.array", too_large)
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        MappedFile(index.path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOMEM, index.path)


def test_no_memory_to_map_names_the_file(opened, monkeypatch):
    index, _ = opened

    def full(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(read, "map_file", full)
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        MappedFile(index.path)
    assert caught.value.filename == index.path
