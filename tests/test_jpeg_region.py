import io

import numpy as np
import pytest
from PIL import Image

from h5feed import jpeg_region
from h5feed.codec import decode_jpeg, encode_jpeg
from h5feed.jpeg_region import decode_jpeg_region
from images import jpeg_bytes, smooth


def cut(pixels, box):
    top, left, height, width = box
    return pixels[top : top + height, left : left + width]


def region(data, box, scratch=None):
    pixels, top, left = decode_jpeg_region(data, box, scratch)
    return cut(pixels, (box[0] - top, box[1] - left, box[2], box[3])), pixels


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
        height, width = (int(n) for n in rng.integers(1, 150, 2))
        data = encode_jpeg(smooth(height, width, seed=number), 90)
        whole = decode_jpeg(data)
        for box in boxes_of(rng, height, width, 10):
            np.testing.assert_array_equal(region(data, box)[0], cut(whole, box))


@pytest.mark.parametrize("box", [(32, 32, 1, 1), (31, 31, 2, 2), (16, 32, 16, 32), (0, 0, 64, 96)])
def test_a_region_on_the_borders_of_segments_is_exact(box):
    data = encode_jpeg(smooth(64, 96), 90)
    np.testing.assert_array_equal(region(data, box)[0], cut(decode_jpeg(data), box))


def test_a_small_box_decodes_few_pixels():
    data = encode_jpeg(smooth(256, 256), 90)
    _, pixels = region(data, (100, 100, 20, 20))
    assert pixels.shape == (32, 32, 3)


def test_more_restart_markers_than_their_numbers_are_counted_round():
    data = encode_jpeg(smooth(512, 512), 90)
    box = (33, 65, 440, 410)
    part, pixels = region(data, box)
    assert pixels.shape < (512, 512, 3)
    np.testing.assert_array_equal(part, cut(decode_jpeg(data), box))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 5}])
def test_without_usable_restart_markers_the_whole_image_comes(options):
    data = jpeg_bytes(smooth(100, 140), **options)
    pixels, top, left = decode_jpeg_region(data, (50, 50, 10, 10))
    assert (top, left) == (0, 0)
    np.testing.assert_array_equal(pixels, decode_jpeg(data))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_foreign_files_with_a_marker_per_row_are_cut_by_rows(mode, subsampling):
    options = {} if mode == "L" else {"subsampling": subsampling}
    data = jpeg_bytes(smooth(100, 140), mode=mode, restart_marker_rows=1, **options)
    box = (50, 50, 10, 10)
    part, pixels = region(data, box)
    assert pixels.shape[0] < 100
    assert pixels.shape[1] == 140
    np.testing.assert_array_equal(part, cut(decode_jpeg(data), box))


def test_the_orientation_is_left_alone():
    data = jpeg_bytes(smooth(40, 64), orientation=6, restart_marker_rows=1)
    part, _ = region(data, (20, 10, 10, 20))
    whole = decode_jpeg(data, apply_orientation=False)
    np.testing.assert_array_equal(part, cut(whole, (20, 10, 10, 20)))


def test_scratch_is_used_where_it_is_large_enough():
    data = encode_jpeg(smooth(128, 128), 90)
    scratch = np.zeros(128 * 128 * 3, np.uint8)
    for box in ((0, 0, 128, 128), (60, 60, 20, 20)):
        pixels, _, _ = decode_jpeg_region(data, box, scratch)
        assert np.shares_memory(pixels, scratch)
        np.testing.assert_array_equal(pixels, decode_jpeg_region(data, box)[0])
    small = np.zeros(100, np.uint8)
    assert not np.shares_memory(decode_jpeg_region(data, (0, 0, 128, 128), small)[0], small)


def test_a_view_of_a_file_is_taken_as_it_is():
    data = encode_jpeg(smooth(128, 128), 90)
    view = np.frombuffer(data, np.uint8)
    np.testing.assert_array_equal(region(view, (60, 60, 9, 9))[0], region(data, (60, 60, 9, 9))[0])


def test_a_missing_marker_leaves_the_decision_to_the_whole_file():
    data = encode_jpeg(smooth(64, 64), 90)
    at = data.index(b"\xff\xd2")
    with pytest.raises(ValueError, match=r"damaged|truncated"):
        decode_jpeg_region(data[:at], (0, 0, 8, 8))
    assert jpeg_region._segment_ends(data, data.index(b"\xff\xda")).size == 8


def test_any_damage_is_a_image_or_a_value_error():
    data = encode_jpeg(smooth(96, 96), 90)
    rng = np.random.default_rng(0)
    for _ in range(500):
        broken = bytearray(data)
        for at in rng.integers(2, len(data), 3):
            broken[at] = rng.integers(256)
        try:
            pixels, top, left = decode_jpeg_region(bytes(broken), (40, 40, 20, 20))
        except ValueError:
            continue
        assert pixels.dtype == np.uint8
        assert top <= 40
        assert left <= 40


def test_pillow_reads_what_encode_jpeg_marked():
    data = encode_jpeg(smooth(64, 96), 90)
    assert data.count(b"\xff\xd0") >= 1
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(np.asarray(image), decode_jpeg(data))
