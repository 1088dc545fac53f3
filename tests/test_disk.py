import errno
import os
from pathlib import Path

import pytest

from h5feed.disk import create_file, open_file, replaced, sync_file, write_at


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    with replaced(path) as file:
        file.write(b"old")
    with pytest.raises(TypeError, match="bytes-like"), replaced(path) as file:
        file.write("a text is not bytes")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_rename_that_fails_leaves_nothing_beside_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"), replaced(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_that_lies_where_the_new_file_is_written_is_not_followed(tmp_path):
    (tmp_path / "precious").write_bytes(b"old")
    (tmp_path / "a.json.partial").symlink_to(tmp_path / "precious")
    with replaced(tmp_path / "a.json") as file:
        file.write(b"new")
    assert (tmp_path / "precious").read_bytes() == b"old"
    assert (tmp_path / "a.json").read_bytes() == b"new"
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="it is a link, not a plain file: remove it"):
        open_file(tmp_path / "link")


def test_bytes_go_where_they_are_told_and_errors_name_the_file(tmp_path):
    path = tmp_path / "a"
    handle = create_file(path)
    write_at(handle, b"abc", 2, path)
    sync_file(handle, path)
    os.close(handle)
    assert path.read_bytes() == b"\0\0abc"
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        write_at(handle, b"abc", 2, path)
    assert caught.value.filename == str(path)
