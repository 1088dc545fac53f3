"""Packed files of every kind, and what a loader delivered, for tests of H5Loader."""

import threading
import time

import numpy as np

from h5feed.jpeg import encode_jpeg, rgb_to_nv12
from images import jpeg_bytes, smooth
from packed import image_spec, write_packed

KINDS = ["raw", "yuv420", "jpeg", "original", "keep", "keep yuv420", "keep jpeg", "pad", "crop"]
ONE_SIZE = ["raw", "yuv420", "jpeg", "pad", "crop"]


def sizes_of(count, low=24, high=48):
    """Even heights and widths, each item its own."""
    rng = np.random.default_rng(7)
    return 2 * rng.integers(low // 2, high // 2, (count, 2))


def write_kind(path, kind, count=12, side=32):
    """Write smooth images as one of KINDS; sources are wider than what is stored."""
    fit = kind.split()[0] if kind.split()[0] in ("keep", "pad", "crop") else "stretch"
    encoding = kind.split()[-1] if kind.split()[-1] in ("yuv420", "jpeg", "original") else "raw"
    varied = fit == "keep" or encoding == "original"
    shapes = sizes_of(count) if varied else np.full((count, 2), side)
    images = [smooth(h, w, seed) for seed, (h, w) in enumerate(shapes.tolist())]
    store = {
        "raw": lambda p: p,
        "yuv420": rgb_to_nv12,
        "jpeg": lambda p: encode_jpeg(p, 90),
        "original": jpeg_bytes,
    }[encoding]
    spec = image_spec(encoding, (0, 0) if encoding == "original" else (side, side), fit)
    options = {}
    if varied or encoding == "jpeg":
        options["stored_shapes"] = shapes.astype(np.int32)
    if fit == "pad":
        options["letterbox"] = np.tile(np.int32([4, 0, 24, 32]), (count, 1))
    sources = shapes * 3 if varied else np.tile([60, 80], (count, 1))
    return write_packed(
        path, [store(image) for image in images], spec=spec, source_shapes=sources, **options
    )


def by_index(batches):
    """{index: (image, label)} of what a loader with with_index=True delivered, as copies."""
    found = {}
    for images, labels, indices in batches:
        for k, index in enumerate(indices.tolist()):
            assert index not in found, f"sample {index} came twice"
            views = images if isinstance(images, tuple) else (images,)
            found[index] = ([view[k].clone() for view in views], labels[k].clone())
    return found


def assert_same(found, expected):
    """The same samples, pixel by pixel and label by label."""
    assert found.keys() == expected.keys()
    for index, (views, label) in expected.items():
        for a, b in zip(found[index][0], views, strict=True):
            assert (a == b).all(), f"sample {index} differs"
        assert (found[index][1] == label).all()


def loader_threads():
    return {t for t in threading.enumerate() if t.name.startswith("h5feed")}


def wait_until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()
