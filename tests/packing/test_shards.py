"""Sets: which shard holds what, parts that are packed anywhere, and what may go wrong with them."""

import errno
import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from h5feed.errors import PackError, UsageError
from h5feed.packing import pack, shards, workers
from h5feed.packing.shard_plan import find_part
from h5feed.store import check_file, open_index, read_index
from h5feed.store.read import FileReader
from packing.folders import (
    bytes_of,
    keys,
    make_folder,
    make_image,
    make_masks,
    names,
    pack_set,
)

SIZE = 32


@pytest.fixture
def out(tmp_path):
    return tmp_path / "set"


def test_shards_are_whole_files_that_together_hold_what_one_file_would(folder, out, tmp_path):
    masks = make_masks(folder, tmp_path / "masks")
    summary = pack_set(folder, out, store="jpeg", masks=masks, seed=3)
    pack(folder, tmp_path / "x.h5", size=SIZE, num_workers=0, store="jpeg", masks=masks)
    assert names(out) == ["index.h5", *(f"shard-{k:05}-of-00005.h5" for k in range(5))]
    assert (summary.items, summary.shards, summary.missing) == (24, 5, ())
    whole, seen = read_index(tmp_path / "x.h5"), []
    with FileReader(tmp_path / "x.h5") as one:
        for path in sorted(out.glob("shard-*")):
            assert check_file(path).is_sound
            with FileReader(path) as file:
                for item, position in enumerate(file.index.positions.tolist()):
                    seen.append(position)
                    assert file.index.key(item) == whole.key(position)
                    assert file.index.labels[item] == whole.labels[position]
                    assert file.index.crc32[item] == whole.crc32[position]
                    for name, extent in file.index.extents.items():
                        mine, theirs = (
                            file.item(extent, item),
                            one.item(whole.extents[name], position),
                        )
                        assert np.array_equal(mine, theirs)
    assert sorted(seen) == list(range(24))
    assert seen != sorted(seen)
    index = open_index(out)
    stored = index.columns["order"]
    assert index.columns["labels"][stored].tolist() == whole.labels.tolist()
    assert index.columns["crc32"][stored].tolist() == whole.crc32.tolist()
    assert index.plan["generations"][0] == {
        "images": 24, "order": "random", "plan": index.plan["generations"][0]["plan"],
        "seed": 3, "shards": 5,
    }  # fmt: skip


def test_what_a_shard_holds_is_a_function_of_source_and_options(folder, out, tmp_path, monkeypatch):
    """Not of workers, parts, times, or who was there first."""
    pack_set(folder, out)
    expected = bytes_of(out)
    monkeypatch.setattr(workers, "_MOST_IMAGES", 2)
    pack_set(folder, tmp_path / "two", num_workers=2)
    assert bytes_of(tmp_path / "two") == expected
    shutil.copytree(folder, tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").glob("*/*"):
        os.utime(path, (1, 1))  # clocks that differ
    for part, missing in (("2/3", 3), ("1/3", 1), ("2/3", 1), ("3/3", 0)):
        summary = pack_set(tmp_path / "elsewhere", tmp_path / "parts", part=part)
        assert len(summary.missing) == missing
    assert bytes_of(tmp_path / "parts") == expected
    pack_set(folder, tmp_path / "other", seed=1)
    assert set(bytes_of(tmp_path / "other").values()).isdisjoint(expected.values())


def test_order_source_deals_images_as_they_come(folder, out):
    pack_set(folder, out, order="source")
    found = [key for path in sorted(out.glob("shard-*")) for key in keys(path)]
    assert found == sorted(found)
    assert [len(keys(path)) for path in sorted(out.glob("shard-*"))] == [4, 5, 5, 5, 5]


def test_shards_of_a_size_follow_from_the_images_sizes(folder, out, tmp_path):
    image = SIZE * SIZE * 3
    assert pack_set(folder, out, shards=f"{image * 6 // 1000}kB").shards == 4
    assert pack_set(folder, tmp_path / "b", shards="1GB").shards == 1
    assert pack_set(folder, tmp_path / "c", shards="1kB").shards == 24
    jpeg = pack_set(folder, tmp_path / "e", store="jpeg", quality=75, shards="6kB")
    assert jpeg.shards == 2  # 13.5 kB are expected: 0.22 bytes a pixel at 256x256, 2.5 times at 32
    size = sum(path.stat().st_size for path in (folder / "cats").glob("*.jpg"))
    for path in folder.glob("*/*.png"):
        path.unlink()
    shard = f"{size // 1000}kB"
    assert pack(folder, tmp_path / "d", store="original", shards=shard, num_workers=0).shards == 2


def test_a_damaged_image_is_skipped_in_its_shard(folder, out, capfd):
    make_folder(folder, broken=(3,))
    summary = pack_set(folder, out, progress=True)
    assert (summary.items, summary.skipped) == (23, (("cats/003.jpg", "truncated"),))
    assert "skipped cats/003.jpg: truncated" in capfd.readouterr().err
    assert len(open_index(out)) == 23
    again = pack_set(folder, out, resume=True)
    assert (again.resumed, again.skipped) == (23, summary.skipped)
    options = {"on_error": "fail", "order": "source"}
    make_folder(folder, broken=(13,))
    with pytest.raises(
        PackError, match=r"dogs/001\.jpg cannot .* 2 of 5 shards are kept in .*set: "
    ):
        pack_set(folder, out, overwrite=True, **options)
    make_folder(folder)
    assert pack_set(folder, out, overwrite=True, resume=True, **options).resumed == 9


def test_a_shard_of_damaged_images_alone_is_an_error(folder, out):
    make_folder(folder, broken=(3,))
    with pytest.raises(PackError, match=r"none of the 1 images of shard-00003-of-00024\.h5 can be"):
        pack_set(folder, out, shards=24, order="source")


def test_resume_makes_what_is_missing_and_leaves_the_rest(folder, out):
    pack_set(folder, out)
    expected = bytes_of(out)
    gone = out / "shard-00002-of-00005.h5"
    gone.unlink()
    (out / "index.h5").unlink()
    (out / "shard-00002-of-00005.h5.0123456789ab.partial").write_bytes(b"of a run that was killed")
    kept = (out / "shard-00001-of-00005.h5").stat().st_ino
    summary = pack_set(folder, out, resume=True)
    assert (summary.items, summary.resumed) == (24, 19)
    assert bytes_of(out) == expected
    assert (out / "shard-00001-of-00005.h5").stat().st_ino == kept


def test_what_another_run_works_at_is_left_alone(folder, out):
    out.mkdir()
    path = out / "shard-00002-of-00005.h5.0123456789ab.partial"
    handle = shards._create_locked(path)
    try:
        pack_set(folder, out)
        assert path.exists()
    finally:
        os.close(handle)
    pack_set(folder, out, part="1/5")  # of another part, and none is missing
    assert not path.exists()


def test_two_packers_on_one_part_at_once_are_harmless(folder, out, tmp_path, monkeypatch):
    """The second one does all its work while the first has shards half written."""
    pack_set(folder, tmp_path / "alone")
    written, second = shards._Run.written, iter([1])

    def interrupted(self, blocks):
        if next(second, None):
            assert pack_set(folder, out, part="1/1").items == 24
        written(self, blocks)

    monkeypatch.setattr(workers, "_MOST_IMAGES", 2)
    monkeypatch.setattr(shards._Run, "written", interrupted)
    assert pack_set(folder, out, part="1/1").items == 24
    assert bytes_of(out) == bytes_of(tmp_path / "alone")


def test_what_is_there_is_not_replaced_unasked(folder, out):
    pack_set(folder, out)
    with pytest.raises(UsageError, match=r"set holds shards: --resume makes those that"):
        pack_set(folder, out)
    with pytest.raises(
        UsageError,
        match=r"05\.h5 is a shard of another packing \(size was '32' and is '16'\): give what it",
    ):
        pack_set(folder, out, size=16, resume=True)
    with pytest.raises(UsageError, match=r"another packing \(seed was 0 and is 1\)"):
        pack_set(folder, out, seed=1, part="1/5")
    with pytest.raises(UsageError, match=r"holds shard-00000-of-00005\.h5, and these images and"):
        pack_set(folder, out, shards=4, resume=True)
    make_image(folder / "cats" / "new.jpg", 20, 20, 1)
    with pytest.raises(UsageError, match=r"another packing \(images was 24 and is 25\)"):
        pack_set(folder, out, resume=True)
    assert pack_set(folder, out, shards=4, overwrite=True).items == 25
    assert names(out) == ["index.h5", *(f"shard-{k:05}-of-00004.h5" for k in range(4))]


def test_a_truncated_shard_is_not_taken_for_a_whole_one(folder, out):
    pack_set(folder, out)
    path = out / "shard-00002-of-00005.h5"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(PackError, match=r"02-of-00005\.h5: .*: it is not a whole shard; remove"):
        pack_set(folder, out, resume=True)


def test_a_full_disk_in_part_3_of_8_keeps_what_is_whole(folder, out, monkeypatch):
    """And nothing else: no half of a shard, under any name."""
    for part in (1, 2):
        pack_set(folder, out, shards=16, part=f"{part}/8")
    write, left = workers.PayloadFiles.write, iter(range(1))

    def full(self, *args):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "shard.partial")
        write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(workers.PayloadFiles, "write", full)
        with pytest.raises(PackError) as caught:
            pack_set(folder, out, shards=16, part="3/8")
    assert str(caught.value) == (
        "cannot write shard.partial: No space left on device; 1 of 2 shards are kept in "
        f"{out}: the same command makes the others"
    )
    assert len(names(out)) == 5
    for part in range(3, 9):
        summary = pack_set(folder, out, shards=16, part=f"{part}/8")
    assert (summary.missing, len(open_index(out))) == ((), 24)


def test_a_disk_that_is_full_when_a_shard_is_finished(folder, out, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "index")

    monkeypatch.setattr("h5feed.store.write.sync_file", full)
    with pytest.raises(PackError, match="cannot write index: No space left on device; nothing was"):
        pack_set(folder, out)
    assert not out.exists()


def test_few_shards_are_open_at_once_however_slowly_they_are_finished(folder, out, monkeypatch):
    """Each holds a descriptor, and a system gives a process 1,024 of them, or 256."""

    class Reluctant(ThreadPoolExecutor):
        """Does nothing before somebody has to have it."""

        def submit(self, work, *args):
            future = Future()
            future.result = lambda: work(*args)
            return future

    begin, most = shards._Run._begin, []

    def begun(self, shard):
        begin(self, shard)
        most.append(len(self._open))

    monkeypatch.setattr(shards, "ThreadPoolExecutor", Reluctant)
    monkeypatch.setattr(shards._Run, "_begin", begun)
    assert pack_set(folder, out, shards=24).missing == ()
    assert len(most) == 24
    assert max(most) <= 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shards": "many"}, r"shards='many' is neither a number of shards, 1 to 100,000, nor how"),
        ({"shards": 0}, "shards='0' is neither a number"),
        ({"shards": 25}, "shards=25 of 24 images: give 24 or fewer"),
        ({"order": "class"}, "order='class' is not one of random, source"),
        ({"order": "source", "seed": 1}, "seed=1 draws a random order, and order=source has none"),
        ({"seed": -1}, "seed=-1 is out of range: give 0 to"),
        ({"shards": None, "part": "1/2"}, "part=1/2 is for a set: give shards as well"),
        ({"part": "3/2"}, "part=3/2 is not a part: give 1/2 to 2/2"),
        ({"part": "2"}, "part='2' is not I/N, such as 3/8, nor auto, nor auto/N"),
        ({"part": "1/2", "overwrite": True}, "overwrite with part=1/2: parts that run at once"),
    ],
)
def test_wrong_options_are_named(folder, out, options, said):
    with pytest.raises(UsageError, match=said):
        pack_set(folder, out, **options)
    assert not out.exists()


def test_a_folder_that_cannot_become_a_set(folder, out, tmp_path):
    out.mkdir()
    (out / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"set holds what is not a part of a set \(notes\.txt\)"):
        pack_set(folder, out)
    with pytest.raises(UsageError, match=r"notes\.txt is a file, and shards=5 makes a folder of"):
        pack_set(folder, out / "notes.txt")
    with pytest.raises(UsageError, match=r"lies inside SRC"):
        pack_set(folder, folder / "set")
    with pytest.raises(UsageError, match=r"the folder .*none does not exist: make it first"):
        pack_set(folder, tmp_path / "none" / "set")
    gray = [(np.zeros((8, 8, 3), np.uint8), 0)]
    with pytest.raises(UsageError, match="shards=5 needs images in files, and source is a dataset"):
        pack_set(gray, tmp_path / "new")


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "8",
          "SLURM_ARRAY_TASK_COUNT": "8"}, (4, 8)),
        ({"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "6",
          "SLURM_ARRAY_TASK_STEP": "2", "SLURM_ARRAY_TASK_COUNT": "4"}, (2, 4)),
        ({"RANK": "3", "WORLD_SIZE": "4", "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MIN": "0",
          "SLURM_ARRAY_TASK_COUNT": "1"}, (3, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}, (1, 2)),
    ],
)  # fmt: skip
def test_a_part_is_found_by_itself(environ, part):
    assert find_part("auto", environ) == part
    assert find_part(f"auto/{part[1]}", environ) == part
    with pytest.raises(UsageError, match=r"part=auto/9, and \w+ is one of \d; give auto, or I/N"):
        find_part("auto/9", environ)


def test_a_part_that_cannot_be_found(monkeypatch):
    with pytest.raises(UsageError, match=r"auto: no Slurm array, srun, torchrun or indexed job"):
        find_part("auto", {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    kubernetes = {"JOB_COMPLETION_INDEX": "2"}
    assert find_part("auto/4", kubernetes) == (2, 4)
    with pytest.raises(UsageError, match=r"and Kubernetes needs the number: auto/N; give I/N"):
        find_part("auto", kubernetes)
    with pytest.raises(UsageError, match="JOB_COMPLETION_INDEX is 2 of 2, which is not a part"):
        find_part("auto/2", kubernetes)
    both = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    with pytest.raises(UsageError, match=r"several say .* \(RANK 1/2, SLURM_PROCID 1/3\); g"):
        find_part("auto", both)
    uneven = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "1"}
    uneven |= {"SLURM_ARRAY_TASK_MAX": "7", "SLURM_ARRAY_TASK_COUNT": "3"}
    with pytest.raises(UsageError, match="has 3 tasks from 1 to 7, which are not evenly spaced"):
        find_part("auto", uneven)


def test_the_command_packs_sets(folder, out, capsys):
    from h5feed.cli.pack import main

    given = [str(folder), str(out), "--size", "32", "--workers", "0", "--shards", "5"]
    assert main([*given, "--part", "1/2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{out}: 14 images in 3 shards, 2 classes, ")
    assert said[-1] == (
        f"not in the index yet, 2 shards still to come: the last part writes it, or merge-h5 {out}"
    )
    assert main([*given, "--resume", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["items"], said["shards"], said["missing"], said["resumed"]) == (24, 5, [], 14)
