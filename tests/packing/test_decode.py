import io
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from h5feed import jpeg
from h5feed.errors import H5FeedError
from h5feed.packing import decode
from h5feed.packing.decode import DecodeError, decode_mask, decode_rgb, read_size
from images import encoded, jpeg_bytes, smooth, with_orientation

PIXELS = smooth(40, 56)
IMAGE = Image.fromarray(PIXELS)
RAMP = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (4, 1)))


def files():
    rgba = IMAGE.convert("RGBA")
    rgba.putalpha(RAMP.resize(IMAGE.size))
    palette, second = IMAGE.quantize(64), IMAGE.rotate(90)
    deep = Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257)
    turned = {"exif": with_orientation(6)}
    frames = {"save_all": True, "append_images": [second]}
    return {
        "jpeg": encoded(IMAGE, "JPEG", **turned),
        "progressive": encoded(IMAGE, "JPEG", progressive=True),
        "cmyk": encoded(IMAGE.convert("CMYK"), "JPEG"),
        "png": encoded(IMAGE, "PNG", **turned),
        "png alpha": encoded(rgba, "PNG"),
        "png palette": encoded(palette, "PNG", transparency=3),
        "png 16": encoded(deep, "PNG"),
        "gif": encoded(palette, "GIF", save_all=True, append_images=[second.quantize(9)]),
        "webp": encoded(IMAGE, "WEBP", **turned),
        "webp lossless": encoded(rgba, "WEBP", lossless=True),
        "webp frames": encoded(IMAGE, "WEBP", **frames),
        "bmp": encoded(IMAGE, "BMP"),
        "ppm": encoded(IMAGE, "PPM"),
        "pbm": encoded(IMAGE.convert("1"), "PPM"),
        "tiff": encoded(IMAGE, "TIFF"),
        "tiff lzw": encoded(IMAGE, "TIFF", compression="tiff_lzw"),
        "tiff jpeg": encoded(IMAGE, "TIFF", compression="jpeg"),
        "tiff 16": encoded(deep, "TIFF"),
    }


FILES = files()


def by_pillow(data, mode="RGB"):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert(mode))


def over(rgba, background):
    """Lay RGBA over a plain color by Pillow, which rounds within 1."""
    below = Image.new("RGBA", rgba.size, (*background, 255))
    return np.asarray(Image.alpha_composite(below, rgba).convert("RGB"))


def refused(data, **options):
    with pytest.raises(DecodeError) as caught:
        decode_rgb(data, **options)
    return caught.value


def furthest(a, b):
    assert a.shape == b.shape
    return int(np.abs(a.astype(int) - b.astype(int)).max())


# --- JPEG -------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_is_what_pillow_reads(mode, options):
    data = jpeg_bytes(PIXELS, mode=mode, **options)
    pixels = decode_rgb(data)
    assert pixels.flags.c_contiguous
    assert pixels.dtype == np.uint8
    assert furthest(pixels, by_pillow(data)) <= (2 if mode == "CMYK" else 0)


def test_ycck_jpeg_is_what_pillow_reads():
    inks = np.dstack([255 - PIXELS, 255 - PIXELS[..., 0] // 4])
    data = simplejpeg.encode_jpeg(np.ascontiguousarray(inks), 95, "CMYK", "420")
    assert b"Adobe\0\x64\0\0\0\0\x02" in data  # transform 2: YCCK
    assert furthest(decode_rgb(data), by_pillow(data)) <= 2


def test_jpeg_of_rgb_components_is_what_pillow_reads():
    data = encoded(IMAGE, "JPEG", quality=95, keep_rgb=True)
    assert furthest(decode_rgb(data), by_pillow(data)) == 0


def test_jpeg_with_stray_bytes_is_read_and_a_cut_one_refused():
    data = jpeg_bytes(PIXELS)
    at = data.index(b"\xff\xda")
    np.testing.assert_array_equal(decode_rgb(data[:at] + b"\0\0" + data[at:]), decode_rgb(data))
    assert refused(data[: at + 200]).reason == "truncated"
    # Other readers fill the rest of this one with gray: the end marker is there.
    assert by_pillow(data[: at + 200] + b"\xff\xd9").shape == PIXELS.shape
    assert refused(data[: at + 200] + b"\xff\xd9").reason == "truncated"


# --- rotation ---------------------------------------------------------------


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied_in_every_format(kind, turn):
    options = {"quality": 100, "lossless": True} if kind == "WEBP" else {}
    data = encoded(IMAGE, kind, exif=with_orientation(turn), **options)
    pixels = decode_rgb(data)
    np.testing.assert_array_equal(pixels, by_pillow(data))
    assert pixels.flags.c_contiguous
    assert pixels.shape == ((56, 40, 3) if turn >= 5 else (40, 56, 3))
    assert read_size(data) == pixels.shape[:2]
    if kind != "JPEG":
        transposed = {1: PIXELS, 3: PIXELS[::-1, ::-1], 6: np.rot90(PIXELS, -1)}
        np.testing.assert_array_equal(pixels, transposed.get(turn, pixels))


def test_a_jpeg_inside_tiff_is_turned_once():
    data = encoded(IMAGE, "TIFF", compression="jpeg", exif=with_orientation(6))
    np.testing.assert_array_equal(decode_rgb(data), by_pillow(data))
    assert read_size(data) == (56, 40)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_unreadable_exif_leaves_the_image_as_it_lies():
    for kind in ("PNG", "WEBP"):
        data = encoded(IMAGE, kind, exif=b"Exif\0\0MM\0*\xff\xff\xff\xff", lossless=True)
        np.testing.assert_array_equal(decode_rgb(data), PIXELS)


# --- colors -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM", "TIFF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P"])
def test_lossless_formats_give_their_pixels(kind, mode):
    if (kind, mode) == ("PPM", "P"):
        return  # PPM has no palette
    image = IMAGE.convert(mode)
    np.testing.assert_array_equal(decode_rgb(encoded(image, kind)), image.convert("RGB"))


def test_every_tiff_compression_gives_its_pixels():
    for compression in (None, "tiff_lzw", "tiff_adobe_deflate", "packbits"):
        np.testing.assert_array_equal(
            decode_rgb(encoded(IMAGE, "TIFF", compression=compression)), PIXELS
        )
    cmyk = IMAGE.convert("CMYK")
    np.testing.assert_array_equal(decode_rgb(encoded(cmyk, "TIFF")), cmyk.convert("RGB"))


@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (12, 200, 99)])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_composited(kind, background):
    rgba = IMAGE.convert("RGBA")
    rgba.putalpha(RAMP.resize(IMAGE.size))
    data = encoded(rgba, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    pixels = decode_rgb(data, background=background)
    assert furthest(pixels, over(rgba, background)) <= 1
    # Exactly the nearest whole number, which Pillow's own compositing misses by 1 at times.
    color, alpha = np.asarray(rgba)[..., :3].astype(float), np.asarray(rgba)[..., 3:] / 255
    np.testing.assert_array_equal(
        pixels, np.rint(color * alpha + np.array(background) * (1 - alpha))
    )


def test_gray_with_alpha_is_composited():
    image = IMAGE.convert("LA")
    image.putalpha(RAMP.resize(IMAGE.size))
    pixels = decode_rgb(encoded(image, "PNG"), background=(0, 0, 200))
    assert furthest(pixels, over(image.convert("RGBA"), (0, 0, 200))) <= 1


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_palette_with_a_transparent_entry_is_composited(kind):
    image = IMAGE.quantize(16)
    data = encoded(image, kind, transparency=3)
    pixels = decode_rgb(data, background=(1, 2, 3))
    clear = by_pillow(data, "RGBA")[..., 3] == 0
    assert clear.any()
    assert (pixels[clear] == (1, 2, 3)).all()
    np.testing.assert_array_equal(pixels[~clear], by_pillow(data)[~clear])


def test_a_palette_with_levels_of_transparency_is_composited():
    data = encoded(IMAGE.quantize(16), "PNG", transparency=bytes(range(0, 256, 16)))
    rgba = Image.fromarray(by_pillow(data, "RGBA"), "RGBA")
    assert furthest(decode_rgb(data, background=(9, 9, 9)), over(rgba, (9, 9, 9))) <= 1


@pytest.mark.parametrize(("mode", "clear"), [("RGB", (10, 20, 30)), ("L", 77), ("1", 1)])
def test_a_transparent_color_is_composited(mode, clear):
    image = IMAGE.convert(mode)
    image.putpixel((3, 5), clear if mode != "1" else 255)
    pixels = decode_rgb(encoded(image, "PNG", transparency=clear), background=(200, 0, 100))
    assert tuple(pixels[5, 3]) == (200, 0, 100)
    opaque = np.asarray(image) != (1 if mode == "1" else clear)
    opaque = opaque.any(-1) if opaque.ndim == 3 else opaque
    np.testing.assert_array_equal(pixels[opaque], np.asarray(image.convert("RGB"))[opaque])


@pytest.mark.parametrize("kind", [".png", ".tif"])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_keep_the_high_byte(kind, channels):
    values = np.random.default_rng(0).integers(0, 65536, (20, 30, 3), dtype=np.uint16)
    written = cv2.imencode(kind, values[..., ::-1] if channels == 3 else values[..., 0])[1]
    pixels = decode_rgb(written.tobytes())
    expected = values >> 8
    if channels == 1:
        expected = np.repeat(expected[..., :1], 3, -1)
    np.testing.assert_array_equal(pixels, expected)


def test_16_bit_alpha_is_composited():
    values = np.random.default_rng(0).integers(0, 65536, (20, 30, 4), dtype=np.uint16)
    data = cv2.imencode(".png", values[..., [2, 1, 0, 3]])[1].tobytes()
    rgba = Image.fromarray((values >> 8).astype(np.uint8), "RGBA")
    assert furthest(decode_rgb(data), over(rgba, (255, 255, 255))) <= 1


def test_16_bit_gray_with_a_transparent_value_is_composited():
    values = np.array([[1000, 1001, 65535]], np.uint16)
    image = Image.fromarray(values)
    pixels = decode_rgb(encoded(image, "PNG", transparency=1001), background=(1, 2, 3))
    np.testing.assert_array_equal(pixels, [[(3, 3, 3), (1, 2, 3), (255, 255, 255)]])


def test_pnm_of_another_range_fills_the_whole_one():
    assert decode_rgb(b"P5 3 1 100\n\x00\x32\x64").tolist() == [[[0] * 3, [128] * 3, [255] * 3]]
    wide = b"P5 3 1 65535\n" + struct.pack(">3H", 0, 32768, 65535)
    assert decode_rgb(wide).tolist() == [[[0] * 3, [128] * 3, [255] * 3]]
    color = b"P6 1 1 65535\n" + struct.pack(">3H", 0, 32768, 65535)
    assert decode_rgb(color).tolist() == [[[0, 128, 255]]]
    assert decode_rgb(b"P2 2 1 10\n0 10\n").tolist() == [[[0] * 3, [255] * 3]]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "PNG"])
def test_the_first_frame_stands_for_all(kind):
    second = Image.new("RGB", IMAGE.size, (255, 0, 0))
    options = {"lossless": True} if kind == "WEBP" else {}
    first = IMAGE.quantize(64).convert("RGB") if kind == "GIF" else IMAGE
    data = encoded(first, kind, save_all=True, append_images=[second], **options)
    with Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 2
    np.testing.assert_array_equal(decode_rgb(data), by_pillow(data))
    assert furthest(decode_rgb(data), np.asarray(first)) <= (1 if kind == "GIF" else 0)


@pytest.mark.parametrize("mode", ["F", "I", "LAB"])
def test_pixels_without_a_fixed_range_are_refused(mode):
    image = Image.new(mode, (4, 3))
    error = refused(encoded(image, "TIFF"))
    assert str(error) == f"unsupported pixels (Pillow mode {mode})"


# --- what is not an image -----------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"hello, world", "not an image in a known format"),
        (b"Python is not PPM", "not an image in a known format"),
        (b"RIFF\x10\0\0\0WAVEfmt " + bytes(20), "not an image in a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "not an image in a known format"),
        (b"<svg></svg>", "not an image in a known format"),
        (bytes(100), "not an image in a known format"),
        (b"\xff\xd8", "truncated"),
        (b"\x89PNG\r\n\x1a\n", "damaged"),
        (b"P6 0 5 255\n", "damaged"),
    ],
)
def test_what_is_no_image_has_a_short_reason(data, reason):
    assert refused(data).reason == reason
    with pytest.raises(DecodeError, match=reason):
        read_size(data)
    with pytest.raises(DecodeError):
        decode_mask(data)


def png_header(width, height):
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


def jpeg_of(width, height):
    data = bytearray(jpeg_bytes(PIXELS))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize(
    "data", [png_header(60_000, 60_000), jpeg_of(60_000, 60_000)], ids=["png", "jpeg"]
)
def test_an_absurd_size_is_refused_from_the_header(data):
    error = refused(data)
    assert str(error) == "too many pixels (60000x60000, more than max_pixels=178956970)"
    with pytest.raises(DecodeError, match="too many pixels"):
        read_size(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP"])
def test_the_cap_holds_to_the_pixel_in_every_format(kind):
    data = encoded(IMAGE, kind)
    assert decode_rgb(data, max_pixels=40 * 56).shape == PIXELS.shape
    assert refused(data, max_pixels=40 * 56 - 1).reason == "too many pixels"
    with pytest.raises(DecodeError, match="40x56, more than max_pixels=10"):
        decode_mask(data, max_pixels=10)


def test_pillows_own_cap_neither_interferes_nor_changes(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("JPEG", "PNG", "GIF", "BMP", "PPM"):
            assert decode_rgb(encoded(IMAGE, kind)).shape == PIXELS.shape
    assert Image.MAX_IMAGE_PIXELS == 100
    # Pillow's WebP and TIFF readers ask for themselves.
    error = refused(encoded(IMAGE, "WEBP"))
    assert str(error) == "too many pixels (more than Pillow decodes in this format)"


@pytest.mark.parametrize(("kind", "least"), [("WEBP", 17), ("TIFF", 12)])
def test_the_memory_that_decoding_takes_is_capped_too(kind, least, monkeypatch):
    monkeypatch.setattr(decode, "_SPARE_BYTES", 0)
    data = encoded(IMAGE, kind)
    need = least * 40 * 56 + len(data)
    assert decode_rgb(data, max_pixels=-(-need // 12)).shape == PIXELS.shape
    error = refused(data, max_pixels=max(40 * 56, need // 12 - 1))
    assert error.reason == "too many pixels"
    assert f"40x56 take {need / 1000:.1f} kB to decode, more than 12 bytes for" in error.detail


def test_a_progressive_files_coefficients_count(monkeypatch):
    monkeypatch.setattr(decode, "_SPARE_BYTES", 0)
    data = encoded(IMAGE.convert("CMYK"), "JPEG", progressive=True)
    assert decode._bytes_per_pixel(data) == 4 + 2 * 4
    assert "to decode, more than 12 bytes for each" in refused(data, max_pixels=40 * 56).detail


def test_webp_is_measured_before_libwebp_makes_canvases():
    for options in ({}, {"lossless": True}, {"exif": with_orientation(6)}):
        data = encoded(IMAGE, "WEBP", **options)
        assert decode._webp_size(data) == (40, 56)
    large = data[:24] + b"\xff\xff\xff\xff\xff\xff" + data[30:]
    assert refused(large).detail.startswith("16777216x16777216, more than max_pixels=")


def test_a_file_too_large_to_be_an_image_is_not_read(tmp_path):
    path = tmp_path / "x.jpg"
    with path.open("wb") as file:
        file.truncate(50_000_000_000)
    with pytest.raises(DecodeError) as caught:
        decode.read_file(os.fsencode(path))
    assert str(caught.value) == (
        "file too large (50.0 GB, more than 12 bytes for each of max_pixels=178956970)"
    )
    path.write_bytes(b"12345")
    assert decode.read_file(os.fsencode(path), most=3) == b"123"
    assert decode.read_file(os.fsencode(path)) == b"12345"


_UNDER_A_LIMIT = r"""
import resource, sys
import numpy as np
from PIL import Image
from h5feed.packing.decode import decode_rgb
from images import encoded

rng = np.random.default_rng(0)
rgba = Image.fromarray(rng.integers(0, 256, (20, 25, 4), np.uint8), "RGBA").resize((1500, 1500))
rgb, gray = rgba.convert("RGB"), np.asarray(rgba.convert("L"))
files = {
    "jpeg": encoded(rgb, "JPEG"),
    "progressive": encoded(rgb, "JPEG", progressive=True),
    "png": encoded(rgba, "PNG", compress_level=1),
    "png 16": encoded(Image.fromarray(gray.astype(np.uint16) * 257), "PNG", compress_level=1),
    "webp": encoded(rgb, "WEBP", method=0),
    "webp lossless": encoded(rgba, "WEBP", method=0, lossless=True, quality=0),
    "tiff": encoded(rgb, "TIFF", compression="tiff_lzw"),
    "gif": encoded(rgb.quantize(9), "GIF"),
}
cut = files["jpeg"].index(b"\xff\xda")
files["stray"] = files["jpeg"][:cut] + b"\0\0" + files["jpeg"][cut:]
for data in files.values():
    decode_rgb(data)  # everything is loaded
free = (resource.RLIM_INFINITY,) * 2
begin = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for name, data in files.items():
    outcomes = set()
    for extra in (0, 3, 6, 10, 16, 24, 36, 50):
        resource.setrlimit(resource.RLIMIT_AS, (begin + (extra << 20), free[1]))
        try:
            decode_rgb(data)
            outcomes.add("decoded")
        except MemoryError:
            outcomes.add("MemoryError")
        except Exception as ex:
            outcomes.add(repr(ex))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, free)
    print(name, *sorted(outcomes), sep=",")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's limit of memory")
def test_a_shortage_of_memory_is_never_blamed_on_the_file():
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
    ran = subprocess.run(
        [sys.executable, "-c", _UNDER_A_LIMIT],
        # glibc gives back at once what is larger than this, so that the limit is what counts.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == 9
    outcomes = {line.partition(",")[0]: set(line.split(",")[1:]) for line in lines}
    assert all(got <= {"MemoryError", "decoded"} for got in outcomes.values()), outcomes
    assert sum("MemoryError" in got for got in outcomes.values()) >= 5, outcomes


@pytest.mark.parametrize("name", FILES)
def test_rows_converted_in_bands_are_those_of_the_whole(name, monkeypatch):
    data = FILES[name]
    whole = decode_rgb(data, background=(7, 8, 9))
    monkeypatch.setattr(jpeg, "_BAND_PIXELS", 500)
    np.testing.assert_array_equal(decode_rgb(data, background=(7, 8, 9)), whole)


def test_zero_height_is_refused():
    assert str(refused(jpeg_of(56, 0))) == "damaged (0x56 pixels)"
    assert refused(png_header(0, 5)).reason == "damaged"


def test_thousands_of_scans_are_refused_and_said():
    data = jpeg_bytes(smooth(40, 64), progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(DecodeError, match=r"^damaged \(it has more than 100 scans, which no enc"):
        decode_rgb(data[:-2] + last * 3000 + data[-2:])


def test_the_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(DecodeError("truncated", "at 5")))
    assert isinstance(error, H5FeedError)
    assert (error.reason, error.detail, str(error)) == ("truncated", "at 5", "truncated (at 5)")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore")
def test_a_cut_file_is_refused_or_whole(name):
    data = FILES[name]
    whole, reasons = decode_rgb(data), []
    for end in range(0, len(data), max(1, len(data) // 150)):
        try:
            pixels = decode_rgb(data[:end])
        except DecodeError as error:
            reasons.append(error.reason)
        else:  # what was cut off is an end marker or a second frame
            np.testing.assert_array_equal(pixels, whole)
    assert len(reasons) > 30
    assert "unsupported pixels" not in reasons


def broken(data, rng):
    data = bytearray(data)
    how = rng.integers(4)
    if how == 0:
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(256)
    elif how == 1:
        for at in rng.integers(0, min(120, len(data)), 2):
            data[at] = rng.integers(256)
    elif how == 2:
        first, last = sorted(rng.integers(0, len(data) + 1, 2))
        del data[first:last]
    else:
        at = rng.integers(0, len(data))
        data[at:at] = rng.integers(0, 256, 20, dtype=np.uint8).tobytes()
    return bytes(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore")
def test_damage_is_an_image_or_a_decode_error(name):
    data, rng = FILES[name], np.random.default_rng(0)
    outcomes = set()
    for _ in range(150):
        for reader in (decode_rgb, decode_mask, read_size):
            try:
                result = reader(broken(data, rng), max_pixels=1_000_000)
            except DecodeError as error:
                outcomes.add(error.reason)
                continue
            if reader is decode_rgb:
                assert result.dtype == np.uint8
                assert result.shape[2:] == (3,)
                assert result.flags.c_contiguous
    assert outcomes


# --- masks ------------------------------------------------------------------


def test_masks_keep_their_numbers(monkeypatch):
    numbers = np.random.default_rng(0).integers(0, 5, (20, 30), dtype=np.uint8)
    gray = Image.fromarray(numbers)
    palette = gray.convert("P")
    palette.putpalette([250, 0, 0, 0, 250, 0, 0, 0, 250, 9, 9, 9, 7, 7, 7])
    color = Image.merge("RGB", (gray, gray, gray))
    deep = Image.fromarray(numbers.astype(np.uint16))
    see_through = Image.fromarray(255 - numbers)
    gray_alpha = Image.merge("LA", (gray, see_through))
    color_alpha = Image.merge("RGBA", (gray, gray, gray, see_through))
    for image in (gray, palette, color, deep, gray_alpha, color_alpha):
        monkeypatch.setattr(jpeg, "_BAND_PIXELS", 1 << 20)
        mask = decode_mask(encoded(image, "PNG"))
        monkeypatch.setattr(jpeg, "_BAND_PIXELS", 90)  # three rows at a time
        np.testing.assert_array_equal(decode_mask(encoded(image, "PNG")), mask)
        np.testing.assert_array_equal(mask, numbers)
        assert mask.dtype == np.uint8
        assert mask.flags.c_contiguous
    bits = Image.fromarray(numbers > 2)
    np.testing.assert_array_equal(decode_mask(encoded(bits, "PNG")), numbers > 2)


def test_masks_are_turned_like_images():
    numbers = np.arange(12, dtype=np.uint8).reshape(3, 4)
    data = encoded(Image.fromarray(numbers), "PNG", exif=with_orientation(6))
    np.testing.assert_array_equal(decode_mask(data), np.rot90(numbers, -1))


def test_what_is_no_mask_is_refused():
    with pytest.raises(DecodeError, match="a mask needs one channel of class numbers"):
        decode_mask(encoded(IMAGE, "PNG"))
    with pytest.raises(DecodeError, match="a mask's class numbers are 0 to 255"):
        decode_mask(encoded(Image.fromarray(np.array([[300]], np.uint16)), "PNG"))
    with pytest.raises(DecodeError, match="a mask of 16 bits needs one channel"):
        decode_mask(cv2.imencode(".png", np.ones((2, 3, 3), np.uint16))[1].tobytes())
    with pytest.raises(DecodeError, match="a mask needs whole numbers"):
        decode_mask(encoded(Image.new("F", (3, 3), 0.5), "TIFF"))
