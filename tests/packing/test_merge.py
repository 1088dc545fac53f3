"""Shards merged into sets, sets and files joined, and items written anew without a new pixel."""

import errno
import json
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from h5feed import disk
from h5feed.cli.merge import main
from h5feed.errors import PackError, UsageError
from h5feed.packing import pack
from h5feed.packing.merge import compact_set, join_sets, merge_set
from h5feed.packing.shard_plan import look_into
from h5feed.store import check_file, open_index, read_index
from packed import random_images, write_packed
from packing.folders import (
    bytes_of,
    labelled,
    make_birds,
    make_folder,
    make_masks,
    names,
    pack_set,
    packed_labels,
    sha256,
)

SIZE = 32


@pytest.fixture
def out(tmp_path):
    return tmp_path / "set"


@pytest.fixture
def birds(tmp_path):
    return make_birds(tmp_path / "more")


def test_a_set_is_merged_only_when_all_its_shards_are_there_and_of_it(folder, out, tmp_path):
    pack_set(folder, out)
    before = sha256(out / "index.h5")
    pack_set(folder, tmp_path / "other", seed=1)
    path = "shard-{:05}-of-00005.h5".format
    (out / path(0)).unlink()
    os.replace(out / path(2), tmp_path / "kept")
    shutil.copy(out / path(1), out / path(2))
    shutil.copy(tmp_path / "other" / path(3), out / path(3))
    os.truncate(out / path(4), 3000)
    with pytest.raises(PackError) as caught:
        merge_set(out)
    assert caught.value.sentence == (
        f"{out} is not a whole set, 4 of 5 shards missing or wrong: pack their parts, or bring "
        "the shards, then merge-h5 again"
    )
    lines = caught.value.details.splitlines()
    assert lines[0] == f"  {path(0)}: missing"
    assert lines[1] == f"  {path(2)}: holds shard 1 of 5 (swapped or renamed)"
    assert lines[2] == (
        f"  {path(3)}: of another packing than the first one (its plan, seed differs)"
    )
    assert lines[3].startswith(f"  {out / path(4)}: not a sound HDF5 file")
    assert sha256(out / "index.h5") == before


def test_a_shard_of_another_version_is_named(folder, out):
    pack_set(folder, out)
    with h5py.File(out / "shard-00001-of-00005.h5", "r+") as file:
        file.attrs["format_version"] = np.int64(2)
    with pytest.raises(PackError, match="1 of 5 shards missing") as caught:
        merge_set(out)
    assert "format_version=2, and this h5feed reads 1" in caught.value.details


def test_merging_makes_the_same_index_again(folder, out):
    pack_set(folder, out)
    before = sha256(out / "index.h5")
    (out / "index.h5").write_bytes(b"older than its shards")
    merged = merge_set(out, progress=True)
    assert (merged.shards, merged.items, merged.generations) == (5, 24, 1)
    assert sha256(out / "index.h5") == before


def test_a_folder_without_shards_or_of_two_packings(folder, out, tmp_path):
    out.mkdir()
    with pytest.raises(PackError, match=r"set holds no shards: pack some with pack-h5 SRC"):
        merge_set(out)
    pack_set(folder, out)
    pack_set(folder, tmp_path / "other", shards=2)
    shutil.copy(tmp_path / "other" / "shard-00001-of-00002.h5", out)
    with pytest.raises(PackError, match=r"two packings \(shard-00001-of-00002\.h5 and shard"):
        merge_set(out)
    assert look_into(out).missing is not None
    shutil.move(out / "shard-00001-of-00002.h5", out / "shard-g002-00001-of-00002.h5")
    with pytest.raises(PackError, match=r"were appended, and none of those before .*shard-g001"):
        merge_set(out)


# --- sets and files joined


def test_sets_and_files_are_joined_by_links(folder, birds, out, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_share_blocks", lambda path, target: False)  # as ext4 does
    one = tmp_path / "one.h5"
    pack_set(folder, tmp_path / "a")
    pack(folder, one, size=SIZE, num_workers=0, store="raw", background=(0, 0, 0))
    joined = join_sets([tmp_path / "a", one], out, progress=True)
    assert str(joined) == f"{out}: 48 images in 6 shards, of 2 packings"
    first = "shard-00000-of-00005.h5"
    assert os.path.samefile(out / first, tmp_path / "a" / first)
    assert labelled(out) == 2 * packed_labels(one)
    both = join_sets([out, birds_set(birds, tmp_path)], tmp_path / "both")
    assert (both.items, both.generations) == (54, 3)


def birds_set(birds, tmp_path):
    pack_set(birds, tmp_path / "b", shards=2)
    return tmp_path / "b"


def test_other_classes_extend_the_list_and_shards_keep_their_pixels(folder, birds, out, tmp_path):
    pack_set(folder, tmp_path / "a")
    pack(birds, tmp_path / "birds.h5", size=SIZE, num_workers=0)
    pack(folder, tmp_path / "a.h5", size=SIZE, num_workers=0)
    join_sets([tmp_path / "a", birds_set(birds, tmp_path)], out)
    assert open_index(out).classes == ("cats", "dogs", "birds")
    wanted = packed_labels(tmp_path / "a.h5") + packed_labels(tmp_path / "birds.h5")
    assert labelled(out) == wanted
    for path in out.glob("shard-g001-*"):
        index = read_index(path)
        assert check_file(path).is_sound
        assert {index.classes[label] for label in index.labels} <= {"birds", "dogs"}
        assert index.classes == ("cats", "dogs", "birds")
    assert merge_set(out).items == 30


def test_a_link_that_cannot_be_is_a_copy(folder, out, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    pack_set(folder, tmp_path / "a")
    monkeypatch.setattr(disk, "_share_blocks", lambda path, target: False)
    monkeypatch.setattr(os, "link", refuse)
    join_sets([tmp_path / "a"], out)
    assert bytes_of(out) == bytes_of(tmp_path / "a")
    name = "shard-00001-of-00005.h5"
    assert not os.path.samefile(out / name, tmp_path / "a" / name)


def test_what_cannot_be_one_set_is_refused_by_name(folder, birds, out, tmp_path):
    for name, source, options in (
        ("a", folder, {}),
        ("small", birds, {"size": 16}),
        ("jpeg", birds, {"store": "jpeg"}),
    ):
        pack(source, tmp_path / f"{name}.h5", **({"size": SIZE, "num_workers": 0} | options))
    a = tmp_path / "a.h5"
    for name in ("small", "jpeg"):
        with pytest.raises(UsageError, match=rf"{name}\.h5 and .*a\.h5 differ in their pixel"):
            join_sets([a, tmp_path / f"{name}.h5"], out)
    shutil.copy(a, tmp_path / "copy.h5")
    with pytest.raises(UsageError, match=r"a\.h5 and .*copy\.h5 hold the same shard: leave one of"):
        join_sets([a, tmp_path / "copy.h5"], out)
    nameless = write_packed(tmp_path / "n.h5", random_images(3, (SIZE, SIZE)), classes=())
    with pytest.raises(UsageError, match=r"n\.h5 has other numbers without names than .* \(none;"):
        join_sets([a, nameless], out)
    assert not out.exists()
    pack_set(folder, tmp_path / "set1")
    with pytest.raises(UsageError, match=r"00000-of-00005\.h5 is a shard of a set: give the set's"):
        join_sets([tmp_path / "set1" / "shard-00000-of-00005.h5"], out)
    with pytest.raises(UsageError, match=r"set1 exists: give a new folder"):
        join_sets([a], tmp_path / "set1")
    (tmp_path / "set1" / "shard-00003-of-00005.h5").unlink()
    with pytest.raises(PackError, match=r"set1 is not a whole set, 1 of 5 shards missing or wrong"):
        join_sets([a, tmp_path / "set1"], out)


def test_joining_that_fails_leaves_nothing_and_shards_without_an_index_alone(
    folder, birds, out, tmp_path, monkeypatch
):
    pack_set(folder, tmp_path / "a")
    pack_set(birds, tmp_path / "b", shards=2)
    pack_set(folder, out, seed=1, part="1/2")
    before = bytes_of(out)
    with pytest.raises(UsageError, match=r"set exists: give a new folder"):
        join_sets([tmp_path / "a", tmp_path / "b"], out)
    assert bytes_of(out) == before
    copy, left = disk.link_or_copy, iter(range(3))

    def full(source, target):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        copy(source, target)

    def full_disk(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "_share_blocks", lambda *args: False)
        patch.setattr(os, "link", full_disk)
        patch.setattr(shutil, "copyfileobj", full_disk)
        with pytest.raises(OSError, match=r"No space left on device: '.*new/shard-00000-of"):
            join_sets([tmp_path / "a"], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("h5feed.packing.merge.link_or_copy", full)
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        left = iter(range(3))
        with pytest.raises(OSError, match="No space left"):
            join_sets([tmp_path / "a", tmp_path / "b"], tmp_path / name)
    assert not (tmp_path / "new").exists()
    assert names(tmp_path / "there") == []


# --- items written anew


@pytest.mark.parametrize("store", ["raw", "jpeg"])
def test_a_set_becomes_the_very_file_that_packing_makes_and_back(folder, out, tmp_path, store):
    make_folder(folder, broken=(3, 15))
    options = {"store": store, "masks": make_masks_of(folder, tmp_path / "masks")}
    pack_set(folder, out, **options)
    pack(folder, tmp_path / "x.h5", size=SIZE, num_workers=0, **options)
    compact_set([out], tmp_path / "y.h5")
    assert sha256(tmp_path / "y.h5") == sha256(tmp_path / "x.h5")
    made = compact_set([tmp_path / "x.h5"], tmp_path / "few", shards=3, seed=1)
    assert (made.shards, made.items) == (3, 22)
    assert names(tmp_path / "few") == [
        "index.h5",
        *(f"shard-0000{k}-of-00003.h5" for k in range(3)),
    ]
    assert labelled(tmp_path / "few") == packed_labels(tmp_path / "x.h5")
    assert all(check_file(path).is_sound for path in (tmp_path / "few").glob("shard-*"))
    compact_set([tmp_path / "few"], tmp_path / "z.h5")
    assert sha256(tmp_path / "z.h5") == sha256(tmp_path / "x.h5")


def make_masks_of(folder, masks):
    """Make masks of a folder some of whose images are broken."""
    whole = make_folder(masks.with_name("whole"))
    return make_masks(whole, masks)


def test_many_shards_become_few_of_a_size(folder, birds, out, tmp_path):
    pack_set(folder, out, shards=12)
    pack(birds, tmp_path / "b.h5", size=SIZE, num_workers=0)
    size = SIZE * SIZE * 3
    made = compact_set([out, tmp_path / "b.h5"], tmp_path / "few", shards=f"{15 * size // 1000}kB")
    assert (made.shards, made.items, made.generations) == (2, 30, 1)
    assert open_index(tmp_path / "few").classes == ("cats", "dogs", "birds")


def test_a_full_disk_leaves_nothing_of_a_new_set(folder, out, tmp_path, monkeypatch):
    pack_set(folder, out)
    sync, left = disk.sync_file, iter(range(1))

    def full(handle, path):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        sync(handle, path)

    monkeypatch.setattr("h5feed.store.write.sync_file", full)
    with pytest.raises(OSError, match="No space left"):
        compact_set([out], tmp_path / "few", shards=3)
    with pytest.raises(OSError, match="No space left"):
        compact_set([out], tmp_path / "y.h5")
    assert names(tmp_path) == ["set", "source_images"]


@pytest.mark.parametrize("name", ["index.h5", "shard-00000-of-00005.h5", "x"])
def test_nothing_is_made_inside_a_set(folder, out, tmp_path, name):
    """It would replace a part of it, or stand in the way of an append."""
    pack_set(folder, out)
    before = bytes_of(out)
    (tmp_path / "link").symlink_to(out)
    said = r"lies inside the set .*(set|link): give a path outside of it"
    for place in (out, tmp_path / "link"):
        for options in ({}, {"shards": 2}):
            with pytest.raises(UsageError, match=said):
                compact_set([out], place / name, overwrite=True, **options)
    with pytest.raises(UsageError, match=said):
        join_sets([out], out / "both")
    assert bytes_of(out) == before


# --- the command


def test_the_command(folder, out, tmp_path, capsys):
    pack_set(folder, out)
    assert main([str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 24 images in 5 shards\n"
    y = tmp_path / "y.h5"
    assert main([str(out), str(y), "--compact", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"out": str(y), "shards": 0, "items": 24, "generations": 1}
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("merge-h5 ")


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["none"], 2, "none does not exist: give the folder of a set"),
        (["file.h5"], 2, "file.h5 is a file: give the folder of a set"),
        (["."], 1, ". holds no shards: pack some with pack-h5 SRC . --shards N"),
        (["none", "out", "--shards", "3"], 2, "shards=3 is for writing items anew: give --compact"),
        (["none", "--compact"], 2, "paths: give a set, or sets and files and what to make of them"),
        (["none", "out"], 1, "none does not exist"),
    ],
)
def test_the_command_says_what_is_wrong(args, status, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file.h5").touch()
    assert main(args) == status
    assert said in capsys.readouterr().err
