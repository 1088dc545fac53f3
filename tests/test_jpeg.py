import io
from contextlib import suppress

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from h5feed.jpeg import (
    MAX_JPEG_SIDE,
    MAX_SCANS,
    SegmentsError,
    check_scans,
    decode_jpeg,
    decode_strictly,
    encode_jpeg,
    nv12_to_rgb,
    orient,
    read_header,
    restart_segments,
    rgb_to_nv12,
    segment_grid,
    splice_regions,
)
from images import ORIENTATION, jpeg_bytes, psnr, smooth, with_orientation


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


def test_damaged_exif_never_turns_an_image_nor_fails():
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
    check_scans(data + last * 200, read_header(data))  # what follows the end is not part of it
    one = jpeg_bytes(smooth(40, 64))
    check_scans(one[:-2] + one[one.index(b"\xff\xda") :] * 200, read_header(one))


@pytest.mark.parametrize(
    ("size", "most"), [((5600, 5700), 100), ((8000, 8000), 50), ((13_000, 13_000), 19)]
)
def test_the_larger_an_image_the_fewer_scans_it_may_have(size, most):
    data = bytearray(jpeg_bytes(smooth(8, 8), progressive=True))
    at = read_header(bytes(data)).height_at
    data[at : at + 4] = b"".join(side.to_bytes(2, "big") for side in size)
    last = bytes(data[data.rindex(b"\xff\xda") : -2])
    header = read_header(bytes(data))
    check_scans(bytes(data[:-2]) + last * (most - 10), header)
    text = f"it has more than {most} scans, which no encoder writes at {size[0]}x{size[1]}"
    with pytest.raises(ValueError, match=f"^{text}$"):
        check_scans(bytes(data[:-2]) + last * (most - 9), header)


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


def cut(pixels, box):
    top, left, height, width = box
    return pixels[top : top + height, left : left + width]


def regions(data, boxes):
    """What lies in each box of an image that encode_jpeg made, and the shapes decoded for it."""
    header = read_header(data)
    count = len(boxes)
    made = splice_regions(
        np.frombuffer(data, np.uint8),
        np.zeros(count, np.int64),
        np.full(count, len(data)),
        [(header, data[: header.scan_start])] * count,
        np.tile(restart_segments(data), count),
        np.array(boxes),
    )
    found = []
    for file, (y, x, h, w), (top, left, *size) in zip(made.files, made.places, boxes, strict=True):
        pixels = decode_strictly(file)
        assert pixels.shape == (h, w, 3)
        found.append((cut(pixels, (top - y, left - x, *size)), pixels.shape[:2]))
    return found


def boxes_of(rng, height, width, count):
    for _ in range(count):
        top, left = int(rng.integers(height)), int(rng.integers(width))
        yield (
            top,
            left,
            int(rng.integers(1, height - top + 1)),
            int(rng.integers(1, width - left + 1)),
        )


def test_a_region_is_exactly_what_the_whole_image_has_there():
    rng = np.random.default_rng(0)
    for number in range(60):
        # 65, 66: a last segment of a pixel or two, whose chroma libjpeg-turbo upsamples otherwise
        height, width = (int(n) for n in rng.integers(1, 150, 2))
        width = 65 + number if number < 4 else width
        data = encode_jpeg(smooth(height, width, seed=number), 90)
        whole = decode_jpeg(data)
        boxes = [*boxes_of(rng, height, width, 10), (0, width - 1, height, 1)]
        for box, (part, _) in zip(boxes, regions(data, boxes), strict=True):
            np.testing.assert_array_equal(part, cut(whole, box))


@pytest.mark.parametrize("side", [1, 2, 3, 5, 16, 17])
def test_a_region_of_a_small_image_is_exact(side):
    data = encode_jpeg(smooth(side, side), 90)
    boxes = list(boxes_of(np.random.default_rng(side), side, side, 10))
    for box, (part, _) in zip(boxes, regions(data, boxes), strict=True):
        np.testing.assert_array_equal(part, cut(decode_jpeg(data), box))


@pytest.mark.parametrize("box", [(32, 32, 1, 1), (31, 31, 2, 2), (16, 32, 16, 32), (0, 0, 64, 96)])
def test_a_region_on_the_borders_of_segments_is_exact(box):
    data = encode_jpeg(smooth(64, 96), 90)
    np.testing.assert_array_equal(regions(data, [box])[0][0], cut(decode_jpeg(data), box))


def test_a_small_box_decodes_few_pixels():
    data = encode_jpeg(smooth(256, 256), 90)
    assert regions(data, [(100, 100, 20, 20)])[0][1] == (25, 25)


def test_more_restart_markers_than_their_numbers_are_counted_round():
    data = encode_jpeg(smooth(512, 512), 90)
    box = (33, 65, 440, 410)
    ((part, shape),) = regions(data, [box])
    assert shape < (512, 512)
    np.testing.assert_array_equal(part, cut(decode_jpeg(data), box))


def test_segments_are_what_lies_between_markers():
    data = encode_jpeg(smooth(100, 75), 90)
    at, ends = read_header(data).scan_start, []
    for length in restart_segments(data).tolist():
        at += length
        ends.append(data[at - 2 : at])
    assert ends == [bytes((0xFF, 0xD0 | k & 7)) for k in range(34)] + [b"\xff\xd9"]
    assert segment_grid(100, 75) == (7, 5)
    assert segment_grid(np.array([100, 16]), np.array([75, 48]))[1].tolist() == [5, 1]


@pytest.mark.parametrize(
    "data",
    [
        jpeg_bytes(smooth(64, 64)),
        jpeg_bytes(smooth(64, 64), restart_marker_blocks=3),
        jpeg_bytes(smooth(64, 32), subsampling=0, restart_marker_blocks=8),
        encode_jpeg(smooth(64, 64), 90) + b"more",
        encode_jpeg(smooth(64, 64), 90)[:-40],
    ],
    ids=["none", "others", "4:4:4", "longer", "cut"],
)
def test_segments_of_other_files_are_refused(data):
    with pytest.raises(ValueError, match="it has other restart segments than pack-h5 writes"):
        restart_segments(data)


def forged(lengths):
    """Lengths of segments that are wrong, each in its own way."""
    lengths = lengths.astype(np.int64)

    def changed(**at):
        new = lengths.copy()
        for where, by in at.items():
            new[int(where[1:])] += by
        return new

    return {
        "longer": changed(_3=1),
        "moved": changed(_3=1, _4=-1),
        "far": changed(_0=5000),
        "nothing": changed(_5=-lengths[5]),
        "swapped": np.concatenate([lengths[1::-1], lengths[2:]]),
        # row by row, so that every marker has the number that is looked for
        "a row later": np.concatenate(
            [[lengths[:9].sum()], lengths[9:-1], [1] * 8, [lengths[-1] - 8]]
        ),
        "zeros": np.zeros_like(lengths),
        "most": np.full_like(lengths, 0xFFFF),
    }


@pytest.mark.parametrize("way", list(forged(np.arange(1, 65))))
def test_segments_that_are_not_those_of_the_bytes_are_found(way):
    data = encode_jpeg(smooth(128, 256), 90)
    header = read_header(data)
    good = restart_segments(data)
    bad = forged(good)[way][: len(good)].astype(np.uint16)
    assert len(good) == len(bad) == 64
    with pytest.raises(SegmentsError, match="are not those of its bytes") as caught:
        splice_regions(
            np.frombuffer(data * 3, np.uint8),
            np.arange(3) * len(data),
            np.full(3, len(data)),
            [(header, data[: header.scan_start])] * 3,
            np.concatenate([good, bad, good]),
            np.array([[10, 10, 20, 20]] * 3),
        )
    assert caught.value.number == 1


def test_a_marker_is_two_bytes():
    """The second of them alone also stands among the entropy-coded ones."""
    noise = np.random.default_rng(0).integers(0, 256, (128, 256, 3), np.uint8)
    data = encode_jpeg(noise, 95)
    header, lengths = read_header(data), restart_segments(data).astype(np.int64)
    ends = header.scan_start + lengths.cumsum()
    moves = [
        (k, at + 1 - ends[k])
        for k in range(len(lengths) - 1)
        for at in range(ends[k] + 1, ends[k + 1] - 2)
        if data[at] == 0xD0 | k & 7 and data[at - 1] != 0xFF
    ]
    assert len(moves) > 5
    for k, by in moves:
        bad = lengths.copy()
        bad[[k, k + 1]] += by, -by
        with pytest.raises(SegmentsError, match="are not those of its bytes"):
            splice_regions(
                np.frombuffer(data, np.uint8),
                np.zeros(1, np.int64),
                np.full(1, len(data)),
                [(header, data[: header.scan_start])],
                bad.astype(np.uint16),
                np.array([[10, 10, 20, 20]]),
            )


def test_damage_of_the_entropy_code_is_an_image_or_a_value_error():
    data = encode_jpeg(smooth(96, 96), 90)
    start = read_header(data).scan_start
    rng = np.random.default_rng(0)
    for _ in range(200):
        broken = bytearray(data)
        for at in rng.integers(start, len(data), 3):
            broken[at] = rng.integers(256)
        with suppress(ValueError):
            assert regions(bytes(broken), [(40, 40, 20, 20)])[0][0].shape == (20, 20, 3)


def test_pillow_reads_what_encode_jpeg_marked():
    data = encode_jpeg(smooth(64, 96), 90)
    assert data.count(b"\xff\xd0") >= 1
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(np.asarray(image), decode_jpeg(data))


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
