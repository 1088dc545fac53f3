import errno
import faulthandler
import hashlib
import itertools
import os
import resource
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from h5feed.store import head_bytes, read_index, write
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


# --- disks that fail


def write_masked(path, count=40):
    """A file with all that a file can have, of some 40 kB: head, two payloads, arrays behind."""
    shapes = np.full((count, 2), 16, np.int32)
    images = random_images(count, (16, 16))
    masks = [image[..., :1] for image in images]
    spec = image_spec("jpeg", size=(16, 16))
    return write_packed(path, images, masks=masks, spec=spec, stored_shapes=shapes)


def in_child(work):
    """Do `work` in a forked process; return its exit status, negative where a signal ended it."""
    child = os.fork()
    if not child:
        faulthandler.disable()  # pytest's; it would print a traceback
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_limit_of_size_anywhere_is_an_error_that_names_the_file(tmp_path):
    end = write_masked(tmp_path / "whole.h5").stat().st_size
    (tmp_path / "whole.h5").unlink()

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            write_masked(tmp_path / "a.h5")
        except OSError as ex:
            beside = Path(ex.filename).name in ("a.h5.partial", "a.h5.partial.masks")
            return 1 if beside and ex.errno == errno.EFBIG else 2
        return 0

    outcomes = {}
    for limit in (*range(0, end, 1009), end - 1, end):
        outcomes[limit] = in_child(limited)
        assert list(tmp_path.glob("a.h5*")) == ([tmp_path / "a.h5"] if limit == end else [])
    assert outcomes == dict.fromkeys(outcomes, 1) | {end: 0}


def test_hdf5_needs_no_temporary_folder(monkeypatch):
    monkeypatch.setattr("tempfile.mkdtemp", None)
    assert head_bytes([image_spec()]) > 0


@pytest.mark.parametrize("kept", [0, 3, 20])
def test_memory_that_ends_within_hdf5_is_a_memory_error(tmp_path, monkeypatch, kept):
    """HDF5 must not see it: it would go on with half a file, or crash at closing it."""
    store, calls = write.MemoryFile._store, itertools.count()
    spec = image_spec()
    head_bytes([spec])  # what HDF5 makes once in a process

    def run_out(self, view):
        if next(calls) >= kept:
            raise MemoryError
        store(self, view)

    monkeypatch.setattr(write.MemoryFile, "_store", run_out)
    with pytest.raises(MemoryError):
        head_bytes([spec])
    monkeypatch.undo()
    with h5py.File(write_packed(tmp_path / "a.h5", random_images(3))) as file:
        assert len(file["images"]) == 3


def test_a_link_beside_the_file_is_not_written_through(tmp_path):
    for name in ("a.h5.partial", "a.h5.partial.masks"):
        (tmp_path / f"{name}.target").write_bytes(b"precious")
        (tmp_path / name).symlink_to(f"{name}.target")
    write_masked(tmp_path / "a.h5")
    assert {path.read_bytes() for path in tmp_path.glob("*.target")} == {b"precious"}
    assert not (tmp_path / "a.h5").is_symlink()
