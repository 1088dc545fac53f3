import numpy as np
import pytest

from h5feed.feed.facts import channel_stats, class_counts, file_facts
from h5feed.feed.files import PackedFiles
from packed import image_spec, random_images, write_packed


def test_channel_stats_are_numpys_over_all_pixels(tmp_path):
    images = random_images(150, (16, 24))
    images[3][..., 0] = 200
    stats = channel_stats(PackedFiles([write_packed(tmp_path / "a.h5", images)]))
    pixels = np.stack(images) / 255
    assert stats.images == 150
    assert stats.mean == pytest.approx(pixels.mean((0, 1, 2)))
    assert stats.std == pytest.approx(pixels.std((0, 1, 2)))


def test_channel_stats_weigh_pixels_not_images(tmp_path):
    shapes = np.int32([[8, 8], [8, 80]])
    images = [np.full((h, w, 3), v, np.uint8) for (h, w), v in zip(shapes, (0, 255), strict=True)]
    spec = image_spec(size=(8, 8), fit="keep")
    path = write_packed(tmp_path / "a.h5", images, spec=spec, stored_shapes=shapes)
    assert channel_stats(PackedFiles([path])).mean == pytest.approx([10 / 11] * 3)


def test_channel_stats_limit(tmp_path):
    images = random_images(100, (8, 8))
    done = []
    files = PackedFiles([write_packed(tmp_path / "a.h5", images)])
    stats = channel_stats(files, limit=2, progress=done.append)
    assert stats.images == 2
    assert sum(done) == 2
    assert stats.mean == pytest.approx(np.stack([images[0], images[99]]).mean((0, 1, 2)) / 255)


@pytest.mark.parametrize(
    ("labels", "classes", "counts"),
    [
        ([0, 1, 1], ("cat", "dog"), {"cat": 1, "dog": 2}),
        ([0, -1, 0], ("cat", "dog"), {"cat": 2, "dog": 0, "(none)": 1}),
        ([-1, -1, -1], (), {"(none)": 3}),
        ([2, 0, 2], (), {"0": 1, "2": 2}),
        ([10**9, 0, 2**62], (), {"0": 1, "1000000000": 1, str(2**62): 1}),
        ([0, 1, 1], ("crane", "crane"), {"crane": 1, "crane (class 1)": 2}),
        ([[0.5], [1], [2]], (), {"(targets)": 3}),
    ],
)
def test_class_counts(tmp_path, labels, classes, counts):
    kind = np.float32 if isinstance(labels[0], list) else np.int64
    images = random_images(3, (8, 8))
    path = write_packed(tmp_path / "a.h5", images, labels=np.array(labels, kind), classes=classes)
    assert class_counts(PackedFiles([path])) == counts


def test_facts_name_sizes_and_options(tmp_path):
    sources = np.int32([[30, 40], [50, 20], [70, 90]])
    path = write_packed(tmp_path / "a.h5", random_images(3, (8, 8)), source_shapes=sources)
    facts = file_facts(PackedFiles([path]))
    assert facts["items"] == 3
    assert facts["file_bytes"] == path.stat().st_size
    assert facts["source_height"] == {"min": 30, "median": 50, "max": 70}
    assert facts["source_width"] == {"min": 20, "median": 40, "max": 90}
    assert facts["fields"]["images"]["encoding"] == "raw"
    assert facts["fields"]["images"]["bytes"] == 3 * 8 * 8 * 3
    assert facts["provenance"] == {"made": "by a test"}
