import shutil

import numpy as np
import pytest

from h5feed.errors import UsageError
from h5feed.feed.files import expand_paths
from h5feed.feed.source import Pixels
from packed import image_spec, random_images, write_packed


def test_paths_by_pattern_come_sorted_and_a_literal_name_wins(tmp_path):
    paths = [write_packed(tmp_path / f"s{n}.h5", random_images(2)) for n in range(3)]
    assert expand_paths(tmp_path / "s*.h5") == list(map(str, paths))
    odd = shutil.copy(paths[0], tmp_path / "s[0].h5")
    assert expand_paths(odd) == [str(odd)]
    assert expand_paths(tuple(paths)) == list(map(str, paths))


def test_naming_no_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"x\*\.h5' matches no file; check the pattern"):
        expand_paths(tmp_path / "x*.h5")
    with pytest.raises(UsageError, match=r"path=\[\] names no file"):
        expand_paths([])
    with pytest.raises(FileNotFoundError):
        Pixels(expand_paths(tmp_path / "x.h5"))


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("pixel fields", {"spec": image_spec(fit="crop")}),
        ("classes", {"classes": ("cat", "cow")}),
        ("kind of labels", {"labels": np.zeros((4, 2), np.float32)}),
    ],
)
def test_files_packed_differently_are_refused(tmp_path, what, options):
    images = random_images(4)
    first = write_packed(tmp_path / "a.h5", images)
    other = write_packed(tmp_path / "b.h5", images, **options)
    with pytest.raises(UsageError, match=f"b.h5 and .*a.h5 differ in their {what}"):
        Pixels([first, other])
