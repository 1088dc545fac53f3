import io
import pickle
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import functional as F

from h5feed.augment import CenterCrop
from h5feed.errors import DamagedItemError, H5FormatError, UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.files import PackedFiles
from h5feed.feed.image import JpegItems, source_size
from h5feed.feed.loader import H5Loader
from h5feed.feed.sheet import contact_sheet
from h5feed.jpeg import encode_jpeg, nv12_to_rgb, read_header, restart_segments, rgb_to_nv12
from h5feed.store.check import check_file
from mapped import is_view
from packed import image_spec, random_images, write_packed


def ramp(height, width, seed=0):
    """A smooth image, which JPEG and YUV keep nearly as it is."""
    y, x = np.mgrid[:height, :width]
    planes = [np.sin(x / (9 + seed) + k) * 60 + np.cos(y / 11 + k) * 60 + 128 for k in range(3)]
    return np.stack(planes, axis=2).astype(np.uint8)


def jpeg_bytes(image, **options):
    target = io.BytesIO()
    Image.fromarray(image).save(target, "jpeg", quality=95, **options)
    return target.getvalue()


def three_outputs(path, index, **options):
    """One item as uint8 (H, W, C), read in all three outputs and found to be the same."""
    options = {"aspect": "stored"} | options
    tensor = H5Dataset(path, **options)[index][0]
    array = H5Dataset(path, output="numpy", **options)[index][0]
    image = H5Dataset(path, output="pil", **options)[index][0]
    assert tensor.dtype == torch.uint8
    assert array.dtype == np.uint8
    assert image.mode == "RGB"
    assert np.array_equal(tensor.permute(1, 2, 0).numpy(), array)
    assert np.array_equal(np.asarray(image), array)
    assert not array.flags.writeable
    return array


def test_yuv420(tmp_path):
    images = [ramp(32, 48, seed) for seed in range(4)]
    path = write_packed(
        tmp_path / "y.h5", [rgb_to_nv12(p) for p in images], spec=image_spec("yuv420", (32, 48))
    )
    for i, image in enumerate(images):
        got = three_outputs(path, i)
        assert np.array_equal(got, nv12_to_rgb(rgb_to_nv12(image)))
        assert np.abs(got.astype(int) - image).mean() < 3


def test_jpeg_and_items_of_their_own_size(tmp_path):
    shapes = np.int32([[32, 40], [56, 32], [32, 32]])
    images = [ramp(h, w) for h, w in shapes.tolist()]
    path = write_packed(
        tmp_path / "j.h5",
        [encode_jpeg(p, 95) for p in images],
        spec=image_spec("jpeg", (32, 32), "keep"),
        stored_shapes=shapes,
    )
    for i, image in enumerate(images):
        got = three_outputs(path, i)
        assert got.shape == image.shape
        assert np.abs(got.astype(int) - image).mean() < 3


@pytest.mark.parametrize("store", ["raw", "yuv420"])
def test_keep_without_encoding(tmp_path, store):
    shapes = np.int32([[32, 40], [56, 32], [32, 32]])
    photos = [ramp(h, w) for h, w in shapes.tolist()]
    stored = photos if store == "raw" else [rgb_to_nv12(p) for p in photos]
    path = write_packed(
        tmp_path / "k.h5", stored, spec=image_spec(store, (32, 32), "keep"), stored_shapes=shapes
    )
    for i, photo in enumerate(photos):
        wanted = photo if store == "raw" else nv12_to_rgb(stored[i])
        assert np.array_equal(three_outputs(path, i), wanted)
    ds = H5Dataset(path)
    image, _ = ds[1]
    assert is_view(path, image.data_ptr(), image.nbytes) == (store == "raw")


def test_original_is_turned_upright(tmp_path):
    image = ramp(24, 40)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying, to be turned by a quarter
    data = [jpeg_bytes(image, exif=exif), jpeg_bytes(image)]
    path = write_packed(
        tmp_path / "o.h5",
        data,
        spec=image_spec("original", (0, 0)),
        stored_shapes=np.int32([[40, 24], [24, 40]]),
        source_shapes=np.int32([[40, 24], [24, 40]]),
    )
    assert np.abs(three_outputs(path, 0).astype(int) - np.rot90(image, -1)).mean() < 3
    assert np.abs(three_outputs(path, 1).astype(int) - image).mean() < 3
    assert three_outputs(path, 0, aspect="source").shape == (40, 24, 3)


@pytest.mark.parametrize("source", [(375, 500), (500, 375), (333, 334), (100, 1000), (40, 30)])
def test_the_true_size_is_that_of_torchvision_s_resize(source):
    image = torch.zeros(3, *source, dtype=torch.uint8)
    assert source_size((64, 64), source) == tuple(F.resize(image, [64]).shape[1:])


def test_the_true_size_covers_a_stored_rectangle():
    assert source_size((32, 64), (100, 200)) == (32, 64)
    assert source_size((32, 64), (100, 100)) == (64, 64)
    assert source_size((32, 64), (100, 400)) == (32, 128)


def test_what_is_thinner_than_sixteen_to_one_stays_small_and_thin():
    assert source_size((64, 64), (100, 1600)) == (64, 1024)
    height, width = source_size((64, 64), (10, 1000))
    assert 95 < width / height < 105
    assert 0.95 < height * width / (16 * 64 * 64) <= 1
    assert source_size((64, 64), (1000, 10)) == (width, height)
    for stored in ((64, 64), (1, 1), (300, 20)):
        for source in ((1, 65_000), (2**31 - 1, 1), (1, 2**31 - 1)):
            height, width = source_size(stored, source)
            assert 1 <= height * width <= 16 * stored[0] * stored[1]


def test_aspect_source_undoes_the_squeeze_by_one_resize(tmp_path):
    images = [ramp(64, 64, seed) for seed in range(3)]
    masks = [(p[:, :, :1] // 50).copy() for p in images]
    sources = np.int32([[300, 400], [500, 250], [80, 80]])
    path = write_packed(tmp_path / "s.h5", images, masks=masks, source_shapes=sources)
    sizes = [(64, 85), (128, 64), (64, 64)]
    ds = H5Dataset(path, aspect="source")
    for i, (height, width) in enumerate(sizes):
        got = three_outputs(path, i, aspect="source")
        wanted = Image.fromarray(images[i]).resize((width, height), Image.Resampling.BILINEAR)
        assert got.shape == (height, width, 3)
        assert np.abs(got.astype(int) - np.asarray(wanted)).max() <= 2
        flat = Image.fromarray(masks[i][:, :, 0])
        wanted = flat.resize((width, height), Image.Resampling.NEAREST)
        assert np.array_equal(ds[i][1].numpy(), np.asarray(wanted))
    assert is_view(path, ds[2][0].data_ptr())  # nothing to undo
    assert three_outputs(path, 0).shape == (64, 64, 3)


def test_aspect_source_cuts_a_padded_image_out_without_a_copy(tmp_path):
    images = random_images(2, (64, 64))
    boxes = np.int32([[8, 0, 48, 64], [0, 16, 64, 32]])
    path = write_packed(
        tmp_path / "p.h5", images, spec=image_spec(size=(64, 64), fit="pad"), letterbox=boxes
    )
    ds = H5Dataset(path, aspect="source")
    for i, (top, left, height, width) in enumerate(boxes.tolist()):
        wanted = images[i][top : top + height, left : left + width]
        assert np.array_equal(three_outputs(path, i, aspect="source"), wanted)
        assert is_view(path, ds[i][0].data_ptr())
    assert three_outputs(path, 0).shape == (64, 64, 3)


def test_aspect_source_leaves_true_proportions_alone(tmp_path):
    images = random_images(2, (64, 64))
    path = write_packed(
        tmp_path / "c.h5",
        images,
        spec=image_spec(size=(64, 64), fit="crop"),
        source_shapes=[[300, 400], [500, 250]],
    )
    assert np.array_equal(three_outputs(path, 0, aspect="source"), images[0])


def test_an_image_of_more_pixels_than_max_pixels_is_refused_at_opening(tmp_path):
    shapes = np.int32([[32, 40], [20_000, 10_000], [8, 8]])
    path = write_packed(
        tmp_path / "o.h5",
        [b"never looked at"] * 3,
        spec=image_spec("original", (0, 0)),
        stored_shapes=shapes,
    )
    text = re.escape(
        f"{path}: item 1 of /images (key '1/ü1.png') is stored as 20000x10000, more than "
        "max_pixels=178956970; give a higher max_pixels to H5Dataset if you trust the file"
    )
    with pytest.raises(H5FormatError, match=f"^{text}$"):
        H5Dataset(path)
    assert len(H5Dataset(path, max_pixels=200_000_000)) == 3
    fixed = write_packed(tmp_path / "f.h5", random_images(2))
    with pytest.raises(
        H5FormatError, match=r"item 0 .* stored as 32x32, more than max_pixels=1023"
    ):
        H5Dataset([fixed, fixed], max_pixels=1023)
    with pytest.raises(H5FormatError, match="more than max_pixels=1023"):
        contact_sheet(fixed, max_pixels=1023)
    trusted = pickle.loads(pickle.dumps(H5Dataset(path, max_pixels=200_000_000)))
    assert len(trusted) == 3
    with pytest.raises(UsageError, match="max_pixels=0 must be a whole number of at least 1"):
        H5Dataset(fixed, max_pixels=0)


@pytest.fixture
def damaged(tmp_path):
    good = encode_jpeg(ramp(32, 32), 90)
    path = write_packed(
        tmp_path / "d.h5",
        [good, good[:100], good, encode_jpeg(ramp(16, 32), 90)],
        spec=image_spec("jpeg"),
        stored_shapes=np.full((4, 2), 32, np.int32),
    )
    other = write_packed(
        tmp_path / "a.h5", [good], spec=image_spec("jpeg"), stored_shapes=np.int32([[32, 32]])
    )
    return path, other


def test_a_damaged_item_names_file_key_and_index(damaged):
    path, other = damaged
    ds = H5Dataset([other, path])
    text = re.escape(f"{path}: item 1 of /images (key '1/ü1.png') cannot be decoded: ")
    with pytest.raises(DamagedItemError, match=text + ".*; check-h5 lists every damaged item"):
        ds[2]
    text = re.escape(
        f"{path}: item 3 of /images (key '1/ü3.png') cannot be decoded: "
        "its header says 16x32, and the packed file says 32x32"
    )
    with pytest.raises(DamagedItemError, match=text):
        ds[4]
    assert ds[3][0].shape == (3, 32, 32)


def test_a_damaged_item_is_named_through_a_worker(damaged):
    loader = DataLoader(H5Dataset(damaged[0]), 2, num_workers=1)
    with pytest.raises(DamagedItemError, match="item 1 of /images"):
        list(loader)


def test_no_wrong_bit_of_a_header_gives_a_image(tmp_path):
    good = [encode_jpeg(ramp(24, 32, seed), 90) for seed in range(2)]
    path = write_packed(
        tmp_path / "j.h5",
        good,
        spec=image_spec("jpeg", (24, 32)),
        stored_shapes=np.int32([[24, 32]] * 2),
    )
    ds = H5Dataset(path)
    wanted = [ds[i][0] for i in range(2)]
    header = good[1].index(b"\xff\xda") + 14
    for bit in range(8 * header):
        broken = np.frombuffer(good[1], np.uint8).copy()
        broken[bit // 8] ^= 1 << bit % 8
        ds.files.item = lambda field, index, data=broken: data
        with pytest.raises(DamagedItemError, match=r"item 1 of /images .* cannot be decoded: "):
            ds[1]
        if bit % 5 == 0:
            with pytest.raises(ValueError, match=r"its header|its bytes|JPEG"):
                JpegItems(ds.files, "images").decode(1)  # which knows no header yet
        del ds.files.item
    assert all(torch.equal(ds[i][0], image) for i, image in enumerate(wanted))


def test_a_header_is_known_though_another_thread_forgets_all(tmp_path):
    class Forgetful(dict):
        def __contains__(self, key):
            found = super().__contains__(key)
            self.clear()  # what another thread does where there are too many
            return found

    good = encode_jpeg(ramp(32, 32), 90)
    path = write_packed(
        tmp_path / "j.h5", [good], spec=image_spec("jpeg"), stored_shapes=np.int32([[32, 32]])
    )
    items = JpegItems(PackedFiles([path]), "images")
    wanted = items.decode(0)
    items._known = Forgetful(items._known)
    items._length = 0  # that thread met a header of another length
    assert np.array_equal(items.decode(0), wanted)
    assert not items._known


def crafted(tmp_path, data, store="jpeg", size=(32, 32)):
    """A sound file, checksums and all, whose one item is `data`."""
    spec = image_spec(store, size if store == "jpeg" else (0, 0))
    return write_packed(tmp_path / "c.h5", [data], spec=spec, stored_shapes=np.int32([size]))


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_what_pack_h5_does_not_encode_is_refused_with_a_right_checksum(tmp_path, mode):
    target = io.BytesIO()
    Image.fromarray(ramp(32, 32)).convert(mode).save(target, "jpeg", progressive=mode == "RGB")
    text = "cannot be decoded: it is not a baseline JPEG of three components"
    with pytest.raises(DamagedItemError, match=text):
        H5Dataset(crafted(tmp_path, target.getvalue()))[0]


@pytest.mark.parametrize("store", ["jpeg", "original"])
def test_a_jpeg_of_another_size_is_refused_before_it_is_decoded(tmp_path, monkeypatch, store):
    bomb = bytearray(encode_jpeg(ramp(32, 32), 90))
    at = read_header(bytes(bomb)).height_at
    bomb[at : at + 4] = bytes.fromhex("ffdcffdc")  # 65500x65500
    ds = H5Dataset(crafted(tmp_path, bytes(bomb), store))
    monkeypatch.setattr("simplejpeg.decode_jpeg", None)
    monkeypatch.setattr("h5feed.jpeg._decode_forgiving", None)
    text = "its header says 65500x65500, and the packed file says 32x32"
    with pytest.raises(DamagedItemError, match=text):
        ds[0]


def test_an_original_of_thousands_of_scans_is_refused(tmp_path):
    data = jpeg_bytes(ramp(32, 32), progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    ds = H5Dataset(crafted(tmp_path, data[:-2] + last * 3000 + data[-2:], "original"))
    with pytest.raises(DamagedItemError, match="it has more than 100 scans, which no encoder wr"):
        ds[0]


@pytest.mark.parametrize("io", ["map", "read"])
@pytest.mark.parametrize("way", ["longer", "moved", "nothing", "other item's"])
def test_forged_segments_are_a_damaged_item(tmp_path, way, io):
    images = [encode_jpeg(ramp(48, 64, seed), 90) for seed in range(4)]
    segments = [restart_segments(image) for image in images]
    forged = segments[2].copy()
    if way == "longer":
        forged[1] += 1
    elif way == "moved":
        forged[1:3] += np.array([2, -2]).astype("<u2")
    elif way == "nothing":
        forged[:] = 0
    else:
        forged = segments[3]
    good = write_packed(
        tmp_path / "good.h5", images, spec=image_spec("jpeg", (48, 64)), stored_shapes=shapes(4)
    )
    path = write_packed(
        tmp_path / "bad.h5",
        images,
        spec=image_spec("jpeg", (48, 64)),
        stored_shapes=shapes(4),
        segments=[*segments[:2], forged, segments[3]],
    )
    options = {"augment": [CenterCrop(20)], "num_workers": 1, "io": io}
    text = re.escape(
        f"{path}: item 2 of /images (key '0/ü2.png') cannot be decoded: the lengths of its restart "
        'segments are not those of its bytes; check-h5 lists every damaged item, and on_error="sk'
    )
    with (
        H5Loader(H5Dataset(path), 4, **options) as loader,
        pytest.raises(DamagedItemError, match=text),
    ):
        next(iter(loader))
    expected = next(iter(H5Loader(H5Dataset(good), 4, **options)))[0]
    found = next(iter(H5Loader(H5Dataset(path), 4, on_error="skip", **options)))[0]
    assert torch.equal(found, expected[[0, 1, 3, 3]])
    assert [(d.index, d.error) for d in check_file(path).damaged] == [
        (2, "the lengths of its restart segments are not those of its bytes")
    ]


def shapes(count):
    return np.tile(np.int32([48, 64]), (count, 1))


def test_crops_of_several_files_and_sizes_are_those_of_the_whole_images(tmp_path):
    rng = np.random.default_rng(3)
    sizes = rng.integers(20, 90, (9, 2)).astype(np.int32)
    images = [encode_jpeg(ramp(h, w, seed), 90) for seed, (h, w) in enumerate(sizes.tolist())]
    spec = image_spec("jpeg", (20, 20), "keep")
    paths = [
        write_packed(tmp_path / f"{a}.h5", images[a:b], spec=spec, stored_shapes=sizes[a:b])
        for a, b in ((0, 4), (4, 9))
    ]
    pixels = PackedFiles(paths)
    indices = rng.permutation(9)
    boxes = np.array([[h // 3, w // 4, h // 2, w // 2] for h, w in sizes[indices].tolist()])
    for source in (pixels, pixels.reading()):
        found = JpegItems(source, "images").decode_regions(
            indices, boxes, lambda size: np.empty(size, np.uint8)
        )
        for index, (y, x, h, w), (part, top, left) in zip(
            indices.tolist(), boxes.tolist(), found, strict=True
        ):
            whole = JpegItems(source, "images").decode(index)[y : y + h, x : x + w]
            np.testing.assert_array_equal(part[y - top :, x - left :][:h, :w], whole)
    assert pixels.item_bytes(np.arange(9)).sum() == sum(map(len, images)) + 2 * sum(
        len(restart_segments(image)) for image in images
    )
