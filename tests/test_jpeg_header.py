import io

import numpy as np
import pytest
from PIL import Image

from h5feed.codec import encode_jpeg
from h5feed.jpeg_header import MAX_SCANS, check_scans, read_header
from images import ORIENTATION, jpeg_bytes, smooth, with_orientation


def pillow_orientation(data):
    with Image.open(io.BytesIO(data)) as image:
        return image.getexif().get(ORIENTATION, 1)


@pytest.mark.parametrize(("subsampling", "mcu"), [(0, (8, 8)), (1, (8, 16)), (2, (16, 16))])
def test_the_frame_is_read(subsampling, mcu):
    header = read_header(jpeg_bytes(smooth(50, 70), subsampling=subsampling))
    assert (header.height, header.width, header.components) == (50, 70, 3)
    assert (header.mcu_height, header.mcu_width) == mcu
    assert header.frame == 0xC0
    assert header.restart_interval == 0


def test_gray_cmyk_progressive_and_restarts_are_told_apart():
    pixels = smooth(50, 70)
    assert read_header(jpeg_bytes(pixels, mode="L")).components == 1
    assert read_header(jpeg_bytes(pixels, mode="CMYK")).components == 4
    assert read_header(jpeg_bytes(pixels, progressive=True)).frame == 0xC2
    assert read_header(jpeg_bytes(pixels, restart_marker_blocks=7)).restart_interval == 7
    assert read_header(encode_jpeg(smooth(64, 64), 90)).restart_interval == 2


@pytest.mark.parametrize("orientation", range(10))
def test_exif_orientation_is_pillows(orientation):
    data = jpeg_bytes(smooth(8, 16), orientation=orientation)
    assert read_header(data).orientation == (orientation if orientation in range(1, 9) else 1)
    assert read_header(data).rotated_shape == ((16, 8) if 5 <= orientation <= 8 else (8, 16))


@pytest.mark.parametrize("order", ["<", ">"])
def test_both_byte_orders_are_read(order):
    exif = with_orientation(6)
    exif.endian = order
    data = jpeg_bytes(smooth(8, 16), exif=exif)
    assert read_header(data).orientation == pillow_orientation(data) == 6


@pytest.mark.parametrize(
    "text", [b'tiff:Orientation="6"', b"<tiff:Orientation>6</tiff:Orientation>"]
)
def test_xmp_speaks_where_exif_is_silent(text):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/">' + text + b"</x:xmpmeta>"
    data = jpeg_bytes(smooth(8, 16), xmp=xmp)
    assert read_header(data).orientation == pillow_orientation(data) == 6
    both = jpeg_bytes(smooth(8, 16), xmp=xmp, orientation=3)
    assert read_header(both).orientation == pillow_orientation(both) == 3


def test_damaged_exif_never_turns_a_image_nor_fails():
    data = bytearray(jpeg_bytes(smooth(8, 16), orientation=6))
    start = data.index(b"Exif\0\0") + 6
    rng = np.random.default_rng(0)
    for _ in range(500):
        broken = bytearray(data)
        broken[start + int(rng.integers(0, 26))] = int(rng.integers(256))
        assert read_header(bytes(broken)).orientation in range(1, 9)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not a JPEG file"),
        (b"\x89PNG", "not a JPEG file"),
        (b"\xff\xd8", "truncated JPEG header"),
        (b"\xff\xd8\xff\xd9\x00\x02", "truncated JPEG header"),
        (b"\xff\xd8\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00", "a scan without a frame"),
        (b"\xff\xd8\xff\xc0\x00\x04\x08\x00", "short frame"),
    ],
)
def test_what_is_no_header_is_said(data, text):
    with pytest.raises(ValueError, match=text):
        read_header(data)


def test_every_cut_of_a_header_is_an_error():
    data = jpeg_bytes(smooth(8, 16), orientation=6)
    whole = read_header(data)
    for end in range(whole.scan_start):
        with pytest.raises(ValueError, match="JPEG"):
            read_header(data[:end])
    assert read_header(data[: whole.scan_start]) == whole


def test_scans_are_counted_before_any_is_decoded():
    def of(scans, between=b""):
        return data[:-2] + (between + last) * (scans - 10) + data[-2:]

    data = jpeg_bytes(smooth(40, 64), progressive=True)
    assert data.count(b"\xff\xda") == 10
    last = data[data.rindex(b"\xff\xda") : -2]
    comment = b"\xff\xfe\x00\x06\xff\xda\xff\xd9"  # neither a scan nor the end
    for between in (b"", comment, b"\xff\x01", b"\xff"):
        header = read_header(data)
        check_scans(of(MAX_SCANS, between), header)
        with pytest.raises(ValueError, match="it has more than 100 scans, which no encoder writes"):
            check_scans(of(MAX_SCANS + 1, between), header)
    check_scans(data + last * 200, read_header(data))  # what follows the end is no part of it
    one = jpeg_bytes(smooth(40, 64))
    check_scans(one[:-2] + one[one.index(b"\xff\xda") :] * 200, read_header(one))
