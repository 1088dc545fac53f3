import errno
import json
import os
import shutil

import h5py
import numpy as np
import pytest

from h5feed.store import check_file, check_set, read_index
from packed import further_fields, image_spec, random_images, write_packed, write_set


@pytest.fixture
def packed(tmp_path):
    images = random_images(600, (8, 8))
    return write_packed(tmp_path / "a.h5", images, masks=[i[..., :1] for i in images])


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_one_block_of_items_is_checked_without_a_thread(tmp_path, monkeypatch):
    path = write_packed(tmp_path / "x.h5", random_images(3))
    monkeypatch.setattr("threading.Thread.start", None)  # whatever began one would fail
    assert check_file(path).is_sound


def test_a_good_file_is_sound(packed):
    report = check_file(packed)
    assert report.is_sound
    assert report.items == 600
    assert report.payload_bytes == 600 * 8 * 8 * 4


@pytest.mark.parametrize("field", ["images", "masks"])
@pytest.mark.parametrize("item", [0, 299, 599])
def test_one_flipped_bit_names_its_item(packed, field, item):
    start, length = read_index(packed).extents[field].item_range(item)
    flip(packed, start + length - 1, bit=7)
    report = check_file(packed)
    assert not report.is_sound
    assert [(d.index, d.key) for d in report.damaged] == [(item, f"{item % 2}/ü{item}.png")]


def test_every_bit_of_the_small_arrays_counts(tmp_path):
    """Labels, names, keys, sizes, checksums: any flipped bit is found at opening."""
    path = write_packed(tmp_path / "a.h5", random_images(2, (2, 2)))
    good = path.read_bytes()
    index = read_index(path)
    seen = 0
    for needle in (
        index.labels.tobytes(),
        index.key_bytes.tobytes(),
        index.key_offsets.tobytes(),
        index.source_shapes.tobytes(),
        index.crc32.tobytes(),
        "cat\0dög".encode(),
        index.fingerprint.encode(),
        b'{"made":"by a test"}',
    ):
        at = good.index(needle)
        for bit in range(len(needle) * 8):
            data = bytearray(good)
            data[at + bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            assert not check_file(path).is_sound, (needle, bit)
            seen += 1
    assert seen > 1000


def test_a_refused_file_is_reported_not_raised(packed):
    packed.write_bytes(b"nothing")
    report = check_file(packed)
    assert not report.is_sound
    assert "not a sound HDF5 file" in report.error


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        check_file(tmp_path / "none.h5")


def test_encoded_items_and_progress(tmp_path):
    items = [bytes([i]) * (20 + i) for i in range(9)]
    shapes = np.full((9, 2), 4, np.int32)
    spec = image_spec("original", (0, 0))
    path = write_packed(tmp_path / "a.h5", items, spec=spec, stored_shapes=shapes)
    calls = []
    assert check_file(path, progress=lambda *a: calls.append(a)).is_sound
    assert calls == [(9, 9)]
    extent = read_index(path).extents["images"]
    flip(path, extent.start + int(extent.offsets[4]))
    assert [d.index for d in check_file(path).damaged] == [4]


def test_every_byte_that_is_written_is_covered(tmp_path):
    """Flip a bit of each non-zero byte of a whole file: HDF5's own metadata included.

    The zero bytes left out are padding between extents and numbers that the test above flips.
    """
    path = write_packed(tmp_path / "a.h5", random_images(2, (2, 2)))
    good = path.read_bytes()
    places = [at for at, value in enumerate(good) if value]
    assert len(places) > 500
    for at in places:
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        assert not check_file(path).is_sound, at


def test_items_that_the_disk_does_not_give_are_named_with_what_it_said(packed, monkeypatch):
    extent = read_index(packed).extents["masks"]
    bad = {extent.item_range(item)[0]: item for item in (7, 300)}
    pread = os.pread

    def failing(fd, length, start):
        if start in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, length, start)

    monkeypatch.setattr(os, "pread", failing)
    report = check_file(packed)
    assert not report.is_sound
    assert [(d.index, d.error) for d in report.damaged] == [
        (7, "cannot be read: Input/output error (errno 5)"),
        (300, "cannot be read: Input/output error (errno 5)"),
    ]


def test_an_item_is_read_in_pieces(packed, monkeypatch):
    monkeypatch.setattr("h5feed.store.check._PIECE", 7)
    assert check_file(packed).is_sound
    flip(packed, read_index(packed).extents["images"].item_range(5)[0] + 8)
    assert [d.index for d in check_file(packed).damaged] == [5]


def test_a_set_is_checked_shard_by_shard(tmp_path):
    folder = write_set(tmp_path / "set", random_images(12), further=further_fields(12))
    told = []
    report = check_set(folder, progress=lambda done, total: told.append((done, total)))
    assert report.is_sound
    assert str(report).endswith("set: sound (12 items in 3 shards, 0.0 MB)")
    assert told == [(4, 12), (8, 12), (12, 12)]
    names = sorted(path.name for path in folder.glob("shard-*"))
    (folder / names[0]).unlink()
    start, _ = read_index(folder / names[1]).extents["images"].item_range(2)
    with (folder / names[1]).open("r+b") as file:
        file.seek(start)
        file.write(b"wrong")
    report = check_set(folder)
    assert not report.is_sound
    assert "set: 2 of 3 shards not sound (8 items read, " in str(report)
    assert f"{names[0]}: this shard of the set is missing" in str(report)
    assert f"{names[1]}: 1 damaged of 4 items" in str(report)
    assert [shard["sound"] for shard in json.loads(report.to_json())["shards"]] == [
        False,
        False,
        True,
    ]


def test_an_index_that_says_something_else_of_a_shard_is_told(tmp_path):
    folder = write_set(tmp_path / "set", random_images(12))
    shutil.copy(folder / "index.h5", tmp_path / "kept.h5")
    with h5py.File(folder / "index.h5", "r+") as file:
        file["labels"][0] ^= 1
    assert "column labels is damaged" in str(check_set(folder))
    (folder / "index.h5").write_bytes(b"no index")
    assert "refused: " in str(check_set(folder))
