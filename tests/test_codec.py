import io

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from h5feed.codec import (
    MAX_JPEG_SIDE,
    decode_jpeg,
    decode_strictly,
    encode_jpeg,
    nv12_to_rgb,
    orient,
    rgb_to_nv12,
)
from images import jpeg_bytes, psnr, smooth


def by_pillow(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (16, 16), (32, 33), (256, 256), (101, 368)])
def test_what_encode_jpeg_writes_all_decoders_read_alike(shape):
    pixels = smooth(*shape)
    data = encode_jpeg(pixels, 90)
    ours = decode_jpeg(data)
    assert ours.shape == (*shape, 3)
    assert ours.flags.c_contiguous
    np.testing.assert_array_equal(ours, by_pillow(data))
    with_cv2 = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    np.testing.assert_array_equal(ours, with_cv2)
    assert min(shape) < 16 or psnr(ours, pixels) > 30


def test_encode_jpeg_follows_quality_and_repeats_itself():
    pixels = smooth(64, 64)
    sizes = [len(encode_jpeg(pixels, quality)) for quality in (50, 75, 90, 100)]
    assert sizes == sorted(set(sizes))
    assert encode_jpeg(pixels, 90) == encode_jpeg(pixels.copy(), 90)


def test_encode_jpeg_names_the_longest_side():
    with pytest.raises(ValueError, match="JPEG holds 65500 pixels a side, not \\(1, 65501\\)"):
        encode_jpeg(np.zeros((1, MAX_JPEG_SIDE + 1, 3), np.uint8), 90)


@pytest.mark.parametrize("turn", range(1, 9))
def test_decode_jpeg_applies_the_orientation(turn):
    data = jpeg_bytes(smooth(24, 40), orientation=turn)
    upright = decode_jpeg(data)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(upright, expected)
    assert upright.flags.c_contiguous
    np.testing.assert_array_equal(orient(decode_jpeg(data, apply_orientation=False), turn), upright)
    out = np.zeros_like(upright)
    assert decode_jpeg(data, out) is out
    np.testing.assert_array_equal(out, upright)


def test_decode_jpeg_writes_where_it_is_told():
    data = encode_jpeg(smooth(20, 30), 90)
    batch = np.zeros((3, 20, 30, 3), np.uint8)
    decode_jpeg(data, batch[1], apply_orientation=False)
    np.testing.assert_array_equal(batch[1], decode_jpeg(data))
    assert not batch[0].any()
    assert not batch[2].any()
    wide = np.zeros((20, 60, 3), np.uint8)
    decode_jpeg(data, wide[:, ::2])
    np.testing.assert_array_equal(wide[:, ::2], batch[1])
    assert not wide[:, 1::2].any()


@pytest.mark.parametrize("shape", [(30, 20, 3), (40, 60, 3), (20, 30, 4)])
def test_decode_jpeg_refuses_a_place_of_another_size(shape):
    with pytest.raises(ValueError, match="the image is \\(20, 30, 3\\), the place for it"):
        decode_jpeg(encode_jpeg(smooth(20, 30), 90), np.zeros(shape, np.uint8))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decode_jpeg_takes_any_bytes_and_a_read_only_view(kind):
    data = encode_jpeg(smooth(20, 30), 90)
    np.testing.assert_array_equal(decode_jpeg(kind(data)), decode_jpeg(data))
    view = np.frombuffer(data, np.uint8)
    assert not view.flags.writeable
    np.testing.assert_array_equal(decode_jpeg(view), decode_jpeg(data))


def test_decode_jpeg_makes_gray_and_cmyk_rgb():
    gray = jpeg_bytes(smooth(24, 40), mode="L")
    np.testing.assert_array_equal(decode_jpeg(gray), by_pillow(gray))
    for subsampling in (0, 2):
        cmyk = jpeg_bytes(smooth(24, 40), mode="CMYK", subsampling=subsampling)
        assert np.abs(decode_jpeg(cmyk).astype(int) - by_pillow(cmyk)).max() <= 2


def test_decode_jpeg_forgives_stray_bytes_and_refuses_a_cut():
    data = encode_jpeg(smooth(64, 64), 90)
    start = data.index(b"\xff\xda")
    # Stray bytes between two segments of the header: libjpeg warns, Pillow reads on.
    strayed = data[:start] + b"\x00\x01\x02" + data[start:]
    np.testing.assert_array_equal(decode_jpeg(strayed), decode_jpeg(data))
    for cut in (data[: len(data) // 2], data[:-2], data[: len(data) // 2] + b"\xff\xd9"):
        with pytest.raises(ValueError, match="truncated"):
            decode_jpeg(cut)
    for junk in (b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"GIF89a", bytes(1000)):
        with pytest.raises(ValueError, match=r"not a JPEG file|truncated JPEG header"):
            decode_jpeg(junk)


def test_decode_jpeg_refuses_thousands_of_scans_and_takes_what_encoders_write(monkeypatch):
    data = jpeg_bytes(smooth(40, 64), progressive=True)
    np.testing.assert_array_equal(decode_jpeg(data), by_pillow(data))
    last = data[data.rindex(b"\xff\xda") : -2]
    monkeypatch.setattr("simplejpeg.decode_jpeg", None)  # nothing is decoded
    with pytest.raises(ValueError, match="more than 100 scans"):
        decode_jpeg(data[:-2] + last * 3000 + data[-2:])


def test_decode_strictly_forgives_nothing():
    data = encode_jpeg(smooth(64, 64), 90)
    out = np.empty((64, 64, 3), np.uint8)
    assert decode_strictly(data, out) is out
    np.testing.assert_array_equal(decode_strictly(data), decode_jpeg(data))
    start = data.index(b"\xff\xda")
    with pytest.raises(ValueError, match=r"damaged \(.*extraneous bytes"):
        decode_strictly(data[:start] + b"\x00\x01\x02" + data[start:])
    with pytest.raises(ValueError, match=r"^truncated$"):
        decode_strictly(data[:-2])


def test_nv12_keeps_the_grays_exactly():
    for value in (0, 1, 100, 254, 255):
        gray = np.full((4, 6, 3), value, np.uint8)
        np.testing.assert_array_equal(nv12_to_rgb(rgb_to_nv12(gray)), gray)


def test_nv12_is_laid_out_as_two_planes_of_limited_range():
    red = np.zeros((4, 6, 3), np.uint8)
    red[..., 0] = 255
    nv12 = rgb_to_nv12(red)
    assert nv12.shape == (6, 6)
    # BT.601-7 limited range: Y = 16 + 65.481, Cb = 128 − 37.797, Cr = 128 + 112
    np.testing.assert_allclose(nv12[:4], 81, atol=1)
    np.testing.assert_allclose(nv12[4:, 0::2], 90, atol=1)
    np.testing.assert_allclose(nv12[4:, 1::2], 240, atol=1)


def test_nv12_chroma_is_the_mean_of_four_pixels():
    pixels = np.zeros((2, 2, 3), np.uint8)
    pixels[0, 0] = (200, 40, 40)
    alone, mean = rgb_to_nv12(pixels)[2], pixels.mean((0, 1))
    expected = 128 + (112 * mean[0] - 93.786 * mean[1] - 18.214 * mean[2]) / 255
    assert abs(alone[1] - expected) <= 1


def test_nv12_goes_there_and_back(tmp_path):
    pixels = smooth(64, 96)
    nv12 = rgb_to_nv12(pixels)
    assert psnr(nv12_to_rgb(nv12), pixels) > 37
    out = np.empty_like(pixels)
    assert nv12_to_rgb(nv12, out) is not None
    np.testing.assert_array_equal(out, nv12_to_rgb(nv12))
