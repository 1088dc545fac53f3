"""Files that are not what they claim: each gets one clear H5FormatError at opening."""

import dataclasses
import re
import subprocess
import sys

import h5py
import numpy as np
import pytest

from h5feed.errors import H5FormatError
from h5feed.jpeg import encode_jpeg
from h5feed.store import read_index
from h5feed.store.check import check_file
from h5feed.store.layout import LIBVER, canonical_json, fingerprint
from packed import image_spec, mask_spec, random_images, write_packed, write_provenance


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
        file["images"].attrs["height"] = np.int64(10**4)
    assert "/images is uint8" in refusal(packed)


def test_class_number_without_a_class(tmp_path):
    path = tmp_path / "x.h5"
    write_packed(path, random_images(3), labels=np.array([0, 1, 2]))
    assert "/labels has a class number outside 0 to 1" in refusal(path)
    write_packed(path, random_images(2), labels=np.array([0, -2]), classes=())
    assert "/labels has a number below −1" in refusal(path)


def test_positions_are_read_checked_and_under_the_fingerprint(tmp_path):
    path = tmp_path / "x.h5"
    plain = read_index(write_packed(path, random_images(3)))
    assert plain.positions is None
    moved = read_index(write_packed(path, random_images(3), positions=np.array([5, 0, 2])))
    assert moved.positions.tolist() == [5, 0, 2]
    assert moved.fingerprint != plain.fingerprint
    write_packed(path, random_images(3), positions=np.array([5, -1, 2]))
    assert "/positions has a number below 0" in refusal(path)
    with h5py.File(write_packed(path, random_images(3), positions=np.arange(3)), "r+") as file:
        file["positions"][0] = 7
    assert "its fingerprint does not match" in refusal(path)


@pytest.mark.parametrize("box", [(-1, 0, 4, 4), (0, 0, 33, 4), (0, 0, 0, 4)])
def test_box_outside_the_letterbox(tmp_path, box):
    boxes = np.tile(np.int32(box), (3, 1))
    path = write_packed(
        tmp_path / "x.h5", random_images(3), letterbox=boxes, spec=image_spec(fit="pad")
    )
    assert "/letterbox has a box outside" in refusal(path)


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
    shapes = np.int32([[32, 33]] * 3)
    spec = image_spec(fit="keep")
    path = write_packed(tmp_path / "x.h5", images, spec=spec, stored_shapes=shapes)
    assert "does not agree with its shapes" in refusal(path)


def test_offsets_that_wrap_around_int64(tmp_path):
    """Their differences as int64 are all positive: only a comparison sees it."""
    path = encoded(tmp_path / "x.h5")
    for name in ("images/offsets", "keys/offsets"):
        with h5py.File(path, "r+") as file:
            kept = file[name][()]
            offsets = kept.copy()
            offsets[3:6] = [2**63 - 10, -(2**63) + 5, -(2**62)]
            assert (np.diff(offsets) > 0).all()
            file[name][...] = offsets
        assert f"/{name} is not rising from 0 to " in refusal(path)
        with h5py.File(path, "r+") as file:
            file[name][...] = kept


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_that_this_process_has_open_with_h5py(packed, mode):
    with h5py.File(packed, mode):
        assert len(read_index(packed)) == 10


def geometry(**changes):
    return lambda file: file["images"].attrs.update(
        {k: np.bytes_(v) if isinstance(v, str) else np.int64(v) for k, v in changes.items()}
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (geometry(channels=1), "/images has channels=1, where h5feed writes 3"),
        (geometry(channels=4), "/images: height=32, width=32 or channels=4 is out"),
        (geometry(height=2**40), "/images: height=1099511627776, width=32 or"),
        (geometry(height=65_000, width=65_000), "/images: height=65000, width=65000 or"),
        (geometry(height=-1), "/images: height=-1, width=32 or"),
        (
            geometry(color_space="\x1b[2J"),
            "/images has color_space='\\x1b[2J', where h5feed writes",
        ),
        (geometry(interpolation="none"), "/images has interpolation='none', where h5feed writes"),
        (
            geometry(encoding="zip"),
            "/images: encoding='zip' is none of raw, yuv420, jpeg, original",
        ),
        (geometry(fit="x"), "/images: fit='x' is none of stretch, crop, pad, keep"),
        (geometry(layout="CHW"), "/images: layout='CHW' is not 'HWC'"),
    ],
)
def test_images_that_packing_never_writes(packed, change, said):
    with h5py.File(packed, "r+") as file:
        change(file)
    assert said in refusal(packed)


@pytest.mark.parametrize(
    ("options", "shape", "said"),
    [
        ({"channels": 3}, (32, 32, 3), "/masks has channels=3, where h5feed writes 1"),
        ({"encoding": "yuv420", "channels": 3}, (48, 32), "/masks has encoding='yuv420', where"),
        ({"height": 16}, (16, 32, 1), "/masks has height=16, where h5feed writes 32"),
        ({"fit": "crop"}, (32, 32, 1), "/masks has fit='crop', where h5feed writes 'stretch'"),
    ],
)
def test_masks_that_packing_never_writes(tmp_path, options, shape, said):
    spec = dataclasses.replace(mask_spec(), **options)
    masks = [np.zeros(shape, np.uint8)] * 2
    path = write_packed(tmp_path / "x.h5", random_images(2), masks=masks, mask_spec=spec)
    assert said in refusal(path)


def test_a_field_of_another_name(packed):
    with h5py.File(packed, "r+") as file:
        file.copy("images", "depth")
    assert refusal(packed) == (
        f"{packed}: /depth is not something h5feed writes; move it below /user, which is free "
        "for your own data, or pack the images again with pack-h5"
    )


def test_what_is_the_user_s_own_lies_below_user_and_is_never_opened(packed):
    before = read_index(packed)
    with h5py.File(packed, "a") as file:  # as anyone would, with HDF5's own defaults
        file["fold"] = np.arange(10)
        file.attrs["note"] = "mine"
        file["images"].attrs["camera"] = "none"
    assert "/fold is not something h5feed writes; move it below /user" in refusal(packed)
    with h5py.File(packed, "a") as file:
        file.move("fold", "user/fold")
        file["user/captions"] = ["a cat", "a dog"]
        file["user"].create_dataset("squeezed", data=np.zeros(1000), compression="gzip")
        file["user/elsewhere"] = h5py.ExternalLink("other.h5", "/x")
    assert read_index(packed).fingerprint == before.fingerprint
    assert check_file(packed).is_sound
    with h5py.File(packed, "a") as file:
        del file["user"]
        file["user"] = h5py.ExternalLink("other.h5", "/x")
    assert "/user is a soft or external link" in refusal(packed)


KEEP = {"spec": image_spec(size=(8, 8), fit="keep")}


@pytest.mark.parametrize(
    ("shapes", "options", "said"),
    [
        ([[8200, 8200]], KEEP, "/images/shapes has an item of over 67108864 pixels"),
        ([[8, 70_000]], KEEP, "/images/shapes has a side of 70000 pixels, and 65500 is the most"),
        ([[8, 0]], KEEP, "/images/shapes has a side below 1"),
        ([[9, 8]], {"spec": image_spec("jpeg", (8, 8))}, "/images/shapes has sizes other than 8x8"),
    ],
)
def test_items_of_sizes_that_packing_never_writes(tmp_path, shapes, options, said):
    images = [np.zeros((1, 1, 3), np.uint8)]
    shapes = np.int32(shapes)
    path = write_packed(tmp_path / "x.h5", images, stored_shapes=shapes, **options)
    assert said in refusal(path)


def test_an_encoded_item_of_no_bytes(tmp_path):
    shapes = np.full((2, 2), 32, np.int32)
    spec = image_spec("jpeg")
    path = write_packed(tmp_path / "x.h5", [b"", b"x"], spec=spec, stored_shapes=shapes)
    assert "/images/offsets has an item of no bytes" in refusal(path)


def test_an_encoded_item_longer_than_its_pixels_can_be(tmp_path):
    shapes = np.full((2, 2), 32, np.int32)
    items = [b"x", bytes(8 * 32 * 32 + (1 << 16))]
    path = write_packed(tmp_path / "x.h5", items, spec=image_spec("jpeg"), stored_shapes=shapes)
    read_index(path)
    items[0] = items[1] + b"x"
    path = write_packed(tmp_path / "y.h5", items, spec=image_spec("jpeg"), stored_shapes=shapes)
    assert "/images/offsets has an item longer than its pixels" in refusal(path)


def test_a_source_longer_than_any(tmp_path):
    shapes = np.int32([[1, 2**31 - 1]] * 2)
    path = write_packed(tmp_path / "x.h5", random_images(2), source_shapes=shapes)
    assert "/source_shapes has a side of 2147483647 pixels, and 536870912 is" in refusal(path)


def test_boxes_without_a_letterbox_and_a_letterbox_without_boxes(tmp_path):
    boxes = np.tile(np.int32([0, 0, 4, 4]), (2, 1))
    path = write_packed(tmp_path / "x.h5", random_images(2), letterbox=boxes)
    assert "/letterbox belongs to fit=pad, and /images has fit=stretch" in refusal(path)
    path = write_packed(tmp_path / "y.h5", random_images(2), spec=image_spec(fit="pad"))
    assert "/letterbox belongs to fit=pad, and it has none" in refusal(path)


def test_targets_of_no_numbers(tmp_path):
    labels = np.zeros((2, 0), np.float32)
    path = write_packed(tmp_path / "x.h5", random_images(2), labels=labels, classes=())
    assert "/labels has no targets" in refusal(path)


def nested(depth):
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("7", "is not a JSON object"),
        ("[1,2]", "is not a JSON object"),
        ("null", "is not a JSON object"),
        ("{", "is not JSON (Expecting property name"),
        (nested(18), "is nested more than 16 deep"),
        (nested(100_000), "is not JSON (maximum recursion depth"),
        ('{"a":' + "9" * 3000 + "}", "is not JSON (a number of too many digits)"),
        ('{"a":NaN}', "is not JSON (NaN is not a finite number)"),
        ('{"a":1e999}', "is not JSON (1e999 is not a finite number)"),
        ('{"a":"' + "x" * (16 << 20) + '"}', "has 16777224 characters, too many to be true"),
    ],
    ids=lambda value: value[:12],
)
def test_provenance_that_packing_never_writes(packed, text, said):
    """With a fingerprint made right again."""
    write_provenance(packed, text)
    assert f"attribute provenance {said}" in refusal(packed)


def test_provenance_nested_as_deep_as_is_read(packed):
    write_provenance(packed, nested(16))
    assert read_index(packed).provenance["a"]["a"]


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


@pytest.mark.parametrize("name", ["\x1b[2J", "\u202exyz", "a\x01b"])
def test_a_refusal_holds_no_character_that_a_terminal_obeys(packed, name):
    with h5py.File(packed, "r+") as file:
        file[name] = np.zeros(3)
    text = refusal(packed)
    assert text.isprintable()
    assert ascii(name)[1:-1] in text


def test_pixels_at_another_address_are_refused(packed):
    """Whoever moves them, HDF5's checksums made right, would show other pixels."""
    start = read_index(packed).extents["images"].start
    assert fingerprint_at(packed, start) == read_index(packed).fingerprint
    assert fingerprint_at(packed, start - 4096) != read_index(packed).fingerprint


def fingerprint_at(path, start):
    index = read_index(path)
    spec = index.extents["images"].spec
    text = canonical_json(index.provenance)
    return fingerprint([spec], [start], index, text, {"images": None}, {"images": None})


def jpeg_file(path):
    images = [encode_jpeg(image, 90) for image in random_images(3)]
    shapes = np.full((3, 2), 32, np.int32)
    return write_packed(path, images, spec=image_spec("jpeg"), stored_shapes=shapes)


def test_store_jpeg_without_segments_is_said_to_be_of_an_older_h5feed(tmp_path):
    path = jpeg_file(tmp_path / "x.h5")
    with h5py.File(path, "r+") as file:
        del file["images/segments"]
    assert refusal(path) == (
        f"{path}: /images has no segments, the lengths of restart segments that every file of "
        "store=jpeg must have (it is of an h5feed before 0.1.0); pack the images again with pack-h5"
    )


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.ones(11, "<u2"), r"/images/segments is uint16 \(11,\), not <u2 \(6,\)"),
        (np.ones(6, "<u4"), r"/images/segments is uint32 \(6,\), not <u2 \(6,\)"),
        (np.ones((2, 3), "<u2"), r"/images/segments is uint16 \(2, 3\), not <u2 \(6,\)"),
    ],
)
def test_segments_of_another_number_or_type(tmp_path, array, said):
    path = jpeg_file(tmp_path / "x.h5")
    with h5py.File(path, "r+") as file:
        del file["images/segments"]
        file["images/segments"] = array
    assert re.search(said, refusal(path))


def test_segments_at_another_address_do_not_have_the_fingerprint(tmp_path):
    path = jpeg_file(tmp_path / "x.h5")
    with h5py.File(path, "r+", libver=LIBVER) as file:
        values = file["images/segments"][()]
        file.move("images/segments", "old")
        file["images/segments"] = values
        del file["old"]
    assert "its fingerprint does not match" in refusal(path)
