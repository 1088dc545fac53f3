"""Files that are not what they claim: each gets one clear H5FormatError at opening."""

import subprocess
import sys

import h5py
import numpy as np
import pytest

from h5feed.errors import H5FormatError
from h5feed.store import read_index
from packed import image_spec, random_images, write_packed


@pytest.fixture
def packed(tmp_path):
    return write_packed(tmp_path / "good.h5", random_images(10))


def refusal(path):
    with pytest.raises(H5FormatError) as caught:
        read_index(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def replace(path, name, **how):
    """Put another dataset in the place of `name`."""
    with h5py.File(path, "r+") as file:
        attributes = dict(file[name].attrs)
        del file[name]
        made = file.create_dataset(name, **how)
        for key, value in attributes.items():
            made.attrs[key] = value


def test_good_file_opens(packed):
    index = read_index(packed)
    assert len(index) == 10
    assert index.key(3) == "1/ü3.png"


def test_missing_file_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_index(tmp_path / "none.h5")


@pytest.mark.parametrize("content", [b"", b"hello, not HDF5 at all" * 100])
def test_not_hdf5(tmp_path, content):
    path = tmp_path / "x.h5"
    path.write_bytes(content)
    assert "not a sound HDF5 file" in refusal(path)


def test_foreign_hdf5(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["images"] = np.zeros((3, 4, 4, 3), np.uint8)
    assert "not h5feed's" in refusal(path)


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_truncated(packed, keep):
    data = packed.read_bytes()
    packed.write_bytes(data[: int(len(data) * keep)])
    refusal(packed)


def test_unfinished(packed):
    with h5py.File(packed, "r+") as file:
        file.attrs["complete"] = np.int64(0)
    assert "never finished" in refusal(packed)


def test_later_version(packed):
    with h5py.File(packed, "r+") as file:
        file.attrs["format_version"] = np.int64(2)
    assert "format_version=2" in refusal(packed)


def test_tampered_label(packed):
    with h5py.File(packed, "r+") as file:
        file["labels"][3] = 0
    assert "fingerprint does not match" in refusal(packed)


def test_tampered_provenance(packed):
    with h5py.File(packed, "r+") as file:
        file.attrs["provenance"] = np.bytes_(b'{"made":"by a fest"}')
    assert "fingerprint does not match" in refusal(packed)


def test_external_link(packed, tmp_path):
    other = write_packed(tmp_path / "other.h5", random_images(10))
    with h5py.File(packed, "r+") as file:
        del file["images"]
        file["images"] = h5py.ExternalLink(str(other), "/images")
    assert "soft or external link" in refusal(packed)


def test_soft_link(packed):
    with h5py.File(packed, "r+") as file:
        file.move("labels", "elsewhere")
        file["labels"] = h5py.SoftLink("/elsewhere")
    assert "soft or external link" in refusal(packed)


def test_external_storage(packed, tmp_path):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(10 * 32 * 32 * 3))
    shape = (10, 32, 32, 3)
    replace(
        packed,
        "images",
        shape=shape,
        dtype="u1",
        external=[(str(secret), 0, secret.stat().st_size)],
    )
    assert "external storage" in refusal(packed)


def test_virtual_dataset(packed, tmp_path):
    other = write_packed(tmp_path / "other.h5", random_images(10))
    layout = h5py.VirtualLayout((10, 32, 32, 3), np.uint8)
    layout[:] = h5py.VirtualSource(str(other), "images", (10, 32, 32, 3))
    with h5py.File(packed, "r+") as file:
        attributes = dict(file["images"].attrs)
        del file["images"]
        file.create_virtual_dataset("images", layout)
        file["images"].attrs.update(attributes)
    assert "virtual dataset" in refusal(packed)


def test_filtered(packed):
    data = np.zeros((10, 32, 32, 3), np.uint8)
    replace(packed, "images", data=data, chunks=(1, 32, 32, 3), compression="gzip")
    assert "compressed or filtered" in refusal(packed)


def test_chunked(packed):
    replace(packed, "images", data=np.zeros((10, 32, 32, 3), np.uint8), chunks=(1, 32, 32, 3))
    assert "not contiguous" in refusal(packed)


def test_vlen(packed):
    with h5py.File(packed, "r+") as file:
        del file["classes"]
        file["classes"] = ["cat", "dog"]
    assert "not a fixed-size native one" in refusal(packed)


def test_object_reference(packed):
    with h5py.File(packed, "r+") as file:
        reference = file["images"].ref
        del file["crc32"]
        file.create_dataset("crc32", data=[reference] * 10, dtype=h5py.ref_dtype)
    assert "not a fixed-size native one" in refusal(packed)


def test_vlen_attribute(packed):
    with h5py.File(packed, "r+") as file:
        file.attrs["format"] = "h5feed"
    assert "not a fixed-size scalar" in refusal(packed)


def test_more_labels_than_images(packed):
    replace(packed, "labels", data=np.zeros(11, np.int64))
    assert "/images is uint8 (10, 32, 32, 3), not |u1 (11, 32, 32, 3)" in refusal(packed)


def test_lying_geometry(packed):
    with h5py.File(packed, "r+") as file:
        file["images"].attrs["height"] = np.int64(10**6)
    assert "/images is uint8" in refusal(packed)


def test_class_number_without_a_class(tmp_path):
    path = tmp_path / "x.h5"
    write_packed(path, random_images(3), labels=np.array([0, 1, 2]))
    assert "/labels has a class number outside 0 to 1" in refusal(path)
    write_packed(path, random_images(2), labels=np.array([0, -2]), classes=())
    assert "/labels has a number below −1" in refusal(path)


@pytest.mark.parametrize("box", [(-1, 0, 4, 4), (0, 0, 33, 4), (0, 0, 0, 4)])
def test_box_outside_the_letterbox(tmp_path, box):
    boxes = np.tile(np.int32(box), (3, 1))
    path = write_packed(tmp_path / "x.h5", random_images(3), boxes=boxes)
    assert "/boxes has a box outside" in refusal(path)


def encoded(path):
    items = [bytes([i]) * (50 + i) for i in range(10)]
    shapes = np.full((10, 2), 32, np.int32)
    return write_packed(path, items, spec=image_spec("jpeg"), stored_shapes=shapes)


def test_falling_offsets(tmp_path):
    path = encoded(tmp_path / "x.h5")
    with h5py.File(path, "r+") as file:
        file["images/offsets"][4] = 3
    assert "/images/offsets is not rising" in refusal(path)


def test_offsets_beyond_the_payload(tmp_path):
    path = encoded(tmp_path / "x.h5")
    with h5py.File(path, "r+") as file:
        file["images/offsets"][10] = 10**9
    assert "/images/offsets is not rising" in refusal(path)


def test_sizes_that_do_not_agree_with_offsets(tmp_path):
    images = random_images(3)
    shapes = np.full((3, 2), 31, np.int32)
    spec = image_spec(fit="keep")
    path = write_packed(tmp_path / "x.h5", images, spec=spec, stored_shapes=shapes)
    assert "does not agree with its shapes" in refusal(path)


def test_user_block(packed, tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", userblock_size=512) as file, h5py.File(packed) as good:
        for name in good:
            good.copy(name, file)
        file.attrs.update(good.attrs)
    refusal(path)


CORRUPT = """
import sys
import numpy as np
from h5feed.errors import H5FormatError
from h5feed.store import check_file, read_index
path, trial, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
good = open(path, "rb").read()
wanted = read_index(path)
extent = wanted.extents["images"]
pixels = range(extent.start, extent.start + extent.nbytes)
opened = refused = 0
for seed in range(first, last):
    rng = np.random.default_rng(seed)
    data = bytearray(good)
    metadata = [i for i in rng.integers(0, len(good), 64).tolist() if i not in pixels] or [0]
    places = metadata[:1] if seed % 4 else rng.integers(0, len(good), 3).tolist()
    for at in places:
        data[at] ^= 1 << int(rng.integers(8))
    if seed % 25 == 0:
        at = int(rng.integers(len(good)))
        data[at : at + 64] = rng.bytes(64)
    open(trial, "wb").write(data)
    try:
        index = read_index(trial)
    except H5FormatError:
        refused += 1
        continue
    opened += 1
    assert index.fingerprint == wanted.fingerprint
    assert index.classes == wanted.classes and index.provenance == wanted.provenance
    for name in ("labels", "key_bytes", "key_offsets", "source_shapes", "crc32"):
        assert np.array_equal(getattr(index, name), getattr(wanted, name)), (seed, name)
    assert index.extents["images"].start == extent.start
    hit = {(i - extent.start) // extent.spec.item_bytes for i in range(len(data))
           if i in pixels and data[i] != good[i]}
    assert {d.index for d in check_file(trial).damaged} == hit, seed
print(opened, refused)
"""


@pytest.mark.parametrize("part", range(2))
def test_random_corruptions_open_right_or_refuse(tmp_path, part):
    """500 damaged copies, in a process of their own: a crash inside HDF5 would show as one."""
    path = write_packed(tmp_path / "good.h5", random_images(3, (8, 8)))
    command = [sys.executable, "-c", CORRUPT, path, tmp_path / "trial.h5"]
    done = subprocess.run(
        [*map(str, command), str(part * 250), str(part * 250 + 250)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    opened, refused = map(int, done.stdout.split())
    assert opened + refused == 250
    assert opened > 20
    assert refused > 20
