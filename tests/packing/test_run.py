import errno
import faulthandler
import inspect
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import fields
from pathlib import Path

import cv2
import h5py
import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from h5feed.errors import PackError, UsageError
from h5feed.feed.facts import file_facts
from h5feed.packing import PackOptions, encode, journal, output, pack, run, workers
from h5feed.packing.decode import decode_rgb
from h5feed.packing.options import field_specs
from h5feed.packing.output import OutputPaths
from h5feed.packing.resize import fit_image
from h5feed.packing.sources import open_source
from h5feed.packing.workers import pack_here
from h5feed.store.check import check_file
from h5feed.store.read import read_index
from packing.folders import make_folder, make_image, names, sha256

SIZE = 32


def provenance(path):
    with h5py.File(path) as file:
        return json.loads(file.attrs["provenance"])


def keys(path):
    with h5py.File(path) as file:
        blob, ends = file["keys/bytes"][:].tobytes(), file["keys/offsets"][:]
    return [blob[a:b].decode() for a, b in itertools.pairwise(ends)]


def failing_with(code):
    def fail(*args):
        raise OSError(code, os.strerror(code))

    return fail


# --- what is packed


def test_the_function_has_the_options_of_the_dataclass_with_their_defaults():
    given = {
        name: parameter.default
        for name, parameter in inspect.signature(pack).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name != "progress"
    }
    options = PackOptions()
    assert given == {field.name: getattr(options, field.name) for field in fields(options)}


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_bytes_do_not_depend_on_the_workers(folder, out, count, monkeypatch):
    make_folder(folder, broken=(3, 4, 13))
    pack(folder, out, size=SIZE, num_workers=0)
    expected = sha256(out)
    monkeypatch.setattr(workers, "_MOST_IMAGES", 3)
    pack(folder, out, size=SIZE, num_workers=count, overwrite=True)
    assert sha256(out) == expected
    assert names(out.parent) == ["x.h5"]


def test_pixels_labels_and_keys_are_in_source_order_without_holes(folder, out):
    make_folder(folder, broken=(0, 7, 23))
    summary = pack(folder, out, size=SIZE, num_workers=2)
    (spec,) = field_specs(PackOptions(), (SIZE, SIZE))
    paths = sorted(folder.glob("*/*"))
    kept = [path for number, path in enumerate(paths) if number not in (0, 7, 23)]
    with h5py.File(out) as file:
        for number, path in enumerate(kept):
            expected, _ = fit_image(decode_rgb(path.read_bytes()), spec)
            assert np.array_equal(file["images"][number], expected), path
        assert file["labels"][:].tolist() == [0] * 10 + [1] * 11
        assert file["source_shapes"][:2].tolist() == [[37, 45], [44, 50]]
    assert keys(out) == [str(path.relative_to(folder)) for path in kept]
    assert summary.items == 21
    assert check_file(out).is_sound


@pytest.mark.parametrize(
    "options",
    [
        {"store": "yuv420"},
        {"store": "jpeg"},
        {"store": "original", "non_jpeg": "reencode", "size": "auto"},
        {"fit": "keep"},
        {"fit": "keep", "store": "yuv420"},
        {"fit": "pad"},
        {"fit": "crop", "store": "jpeg"},
    ],
)
def test_every_store_and_fit_is_sound_and_the_same_for_all_workers(folder, out, options):
    options = {"size": SIZE} | options
    pack(folder, out, num_workers=0, **options)
    first = sha256(out)
    pack(folder, out, num_workers=2, overwrite=True, **options)
    assert sha256(out) == first
    report = check_file(out)
    assert report.is_sound
    assert report.items == 24


def test_masks_follow_their_images(folder, out, tmp_path):
    masks = tmp_path / "masks"
    for path in folder.glob("*/*"):
        width, height = Image.open(path).size
        target = masks / path.relative_to(folder).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((height, width), len(list(masks.glob("*/*"))), np.uint8)).save(
            target
        )
    wrong = masks / "cats" / "005.png"
    Image.fromarray(np.zeros((3, 3), np.uint8)).save(wrong)
    summary = pack(folder, out, size=SIZE, fit="keep", masks=masks, num_workers=2)
    assert summary.skipped == (("cats/005.jpg", "mask of another size (mask 3x3, image 30x65)"),)
    assert check_file(out).is_sound
    with h5py.File(out) as file:
        assert file["masks/shapes"][:].tolist() == file["images/shapes"][:].tolist()
    assert names(out.parent) == ["x.h5"]


def test_original_keeps_the_files_own_bytes(folder, out):
    for path in folder.glob("*/*.png"):
        path.unlink()
    pack(folder, out, store="original", num_workers=2)
    with h5py.File(out) as file:
        stored = file["images/bytes"][:].tobytes()
    assert stored == b"".join(path.read_bytes() for path in sorted(folder.glob("*/*")))


def test_original_refuses_other_formats_by_name(folder, out):
    with pytest.raises(PackError, match=r"cats/004\.png is not a JPEG file.*--non-jpeg reencode"):
        pack(folder, out, store="original", num_workers=1)
    assert names(out.parent) == []


def test_auto_takes_the_power_of_two_nearest_to_the_median(folder, out):
    pack(folder, out, num_workers=0)
    with h5py.File(out) as file:
        assert file["images"].shape == (24, 32, 32, 3)


def test_auto_reads_a_header_that_lies_behind_a_large_comment(out, tmp_path):
    path = tmp_path / "images" / "a.jpg"
    make_image(path, 64, 64, 0)
    data = path.read_bytes()
    comment = b"\xff\xfe\xff\xff" + bytes(0xFFFD)
    path.write_bytes(data[:2] + comment * 2 + data[2:])
    pack(path.parent, out, num_workers=0)
    with h5py.File(out) as file:
        assert file["images"].shape == (1, 64, 64, 3)


# --- the summary and the provenance


def test_provenance_says_what_made_the_file_and_nothing_of_the_run(folder, out, tmp_path):
    make_folder(folder, broken=(5,))
    pack(folder, out, size=SIZE, num_workers=2)
    said = provenance(out)
    assert said["options"]["size"] == "32"
    assert (
        not {"num_workers", "overwrite", "resume", "on_error", "max_skipped"}
        & said["options"].keys()
    )
    assert said["counts"] == {"found": 24, "packed": 23, "skipped": {"truncated": 1}}
    assert said["skipped"] == [["cats/005.jpg", "truncated"]]
    assert str(tmp_path) not in json.dumps(said)


def test_more_skips_than_provenance_holds_are_counted(folder, out, monkeypatch):
    """A file whose provenance is too long is one that nobody can open."""
    make_folder(folder, broken=(5, 6, 7))
    monkeypatch.setattr(output, "_SKIPPED_CHARACTERS", 60)
    summary = pack(folder, out, size=SIZE, num_workers=0)
    said = provenance(out)
    assert said["counts"]["skipped"] == {"truncated": 3}
    assert said["skipped"] == [["cats/005.jpg", "truncated"], ["cats/006.jpg", "truncated"]]
    assert len(summary.skipped) == 3


def test_summary_in_words_and_as_json(folder, out):
    make_folder(folder, broken=(5, 6))
    summary = pack(folder, out, size=SIZE, num_workers=1)
    text = str(summary)
    assert "x.h5: 22 images, 2 classes, " in text
    assert "2 images skipped:\n  2 × " in text
    assert "stretch: 50x44 (median sides) → 32x32: proportions change" in text
    assert "--fit keep" in text
    fields_ = json.loads(summary.to_json())
    assert fields_["items"] == 22
    assert fields_["bytes_out"] == out.stat().st_size
    assert sum(fields_["skipped_by_reason"].values()) == 2


def test_the_names_of_targets_are_kept_and_told(folder, out, tmp_path):
    manifest = tmp_path / "list.csv"
    manifest.write_text("id,path,y,age\n7,cats/000.jpg,0.5,3\n8,dogs/001.jpg,1,4\n")
    summary = pack(folder, out, size=SIZE, manifest=manifest, targets=["age", "y"], num_workers=0)
    assert summary.targets == ("age", "y")
    assert "x.h5: 2 images, 2 targets (age, y), " in str(summary)
    assert provenance(out)["targets"] == provenance(out)["options"]["targets"] == ["age", "y"]
    assert file_facts(read_index(out))["targets"] == ["age", "y"]
    with h5py.File(out) as file:
        assert file["labels"][:].tolist() == [[3, 0.5], [4, 1]]
    unnamed = pack(Pairs([(a, [1.0, 2]) for a in arrays()]), out, size=16, overwrite=True)
    assert unnamed.targets == ("0", "1")
    assert "targets" not in provenance(out)
    assert file_facts(read_index(out))["targets"] == ["0", "1"]


def test_progress_lists_what_is_skipped(folder, out, capsys):
    make_folder(folder, broken=(5,))
    pack(folder, out, size=SIZE, num_workers=1, progress=True)
    assert "skipped cats/005.jpg: " in capsys.readouterr().err
    pack(folder, out, size=SIZE, num_workers=1, overwrite=True)
    assert capsys.readouterr().err == ""


def test_progress_lists_also_what_breaks_the_limit(folder, out, capsys):
    make_folder(folder, broken=(0, 1))
    with pytest.raises(PackError, match="more than max_skipped=1 "):
        pack(folder, out, size=SIZE, num_workers=0, max_skipped=1, progress=True)
    said = capsys.readouterr().err
    assert "skipped cats/000.jpg: truncated\nskipped cats/001.jpg: truncated\n" in said


# --- refusals before any work


def test_out_is_refused_with_one_sentence_each(folder, out, tmp_path):
    out.write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"x\.h5 exists: give another name, or --overwrite"):
        pack(folder, out)
    with pytest.raises(UsageError, match=r"lies inside SRC .*: give a path outside"):
        pack(folder, folder / "cats" / "x.h5")
    with pytest.raises(UsageError, match=r"the folder .*nowhere does not exist: make it first"):
        pack(folder, tmp_path / "nowhere" / "x.h5")
    with pytest.raises(UsageError, match="is a folder: give the name of a file"):
        pack(folder, tmp_path)
    assert out.read_bytes() == b"precious"
    assert names(out.parent) == ["x.h5"]


def test_letterboxed_masks_are_surrounded_by_mask_fill(folder, out, tmp_path):
    masks = tmp_path / "masks"
    for path in folder.glob("*/*"):
        with Image.open(path) as image:
            mask = Image.new("L", image.size, 7)
        target = masks / path.relative_to(folder).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        mask.save(target)
    options = {"size": SIZE, "fit": "pad", "masks": masks, "num_workers": 0, "overwrite": True}
    found = []
    for fill in ({}, {"mask_fill": 255}):
        pack(folder, out, **options, **fill)
        with h5py.File(out) as file:
            found.append(file["masks"][:])
    plain, filled = found
    assert set(np.unique(plain)) == {0, 7}
    assert np.array_equal(filled, np.where(plain == 0, 255, 7))


def test_a_leftover_partial_needs_a_word(folder, out):
    OutputPaths.of(out).partial.write_bytes(b"")
    with pytest.raises(UsageError, match=r"--resume goes on with it, --overwrite begins anew"):
        pack(folder, out, size=SIZE)
    pack(folder, out, size=SIZE, overwrite=True, num_workers=0)
    assert names(out.parent) == ["x.h5"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quality": 0}, "quality=0 is out of range: give 1 to 100"),
        ({"num_workers": -1}, "num_workers=-1 is too small: give 0 or more"),
        ({"num_workers": 1.5}, r"num_workers=1\.5 is not a whole number"),
        ({"max_skipped": "3"}, "max_skipped='3' is not a whole number"),
        ({"quality": 90.0}, r"quality=90\.0 is not a whole number"),
        ({"targets": ["a", "b"]}, "targets=a b are columns of a manifest: give one as well"),
        ({"background": 255}, "background=255 is no color: give red, green, blue"),
        ({"background": (0, 0, 256)}, "background=256 is out of range"),
        ({"mask_fill": 256}, "mask_fill=256 is out of range: give 0 to 255"),
        ({"mask_fill": 9}, "mask_fill=9 is what surrounds letterboxed masks, and fit=stretch mak"),
        ({"mask_fill": 9, "fit": "pad"}, "mask_fill=9 without masks: leave it out, or give masks"),
        ({"size": 64, "store": "original"}, "size=64 with store=original: .* leave size out"),
        ({"fit": "crop", "store": "original"}, "fit=crop with store=original"),
        ({"non_jpeg": "reencode"}, "non_jpeg=reencode is for store=original"),
        ({"quality": 50}, "quality=50 is for encoding JPEG, and store=raw keeps pixels"),
        ({"size": "32x64", "fit": "keep"}, "size=32x64 with fit=keep: give one number"),
        ({"fit": "squash"}, "fit='squash' is not one of stretch, crop, pad, keep"),
        ({"store": "png"}, "store='png' is not one of raw, yuv420, jpeg, original"),
        ({"on_error": "stop"}, "on_error='stop' is not one of skip, fail"),
        ({"background": (1, 2)}, r"background=\(1, 2\) is no color: give red, green, blue"),
        ({"size": 1 << 20, "store": "jpeg"}, "size='1048576' is too large: give at most 65500"),
        ({"size": (31, 32), "store": "yuv420", "any_size": True}, "both sides must be even"),
    ],
)
def test_wrong_options_are_refused(folder, out, options, said):
    with pytest.raises(UsageError, match=said):
        pack(folder, out, **options)
    assert names(out.parent) == []


def test_too_small_a_disk_is_refused_before_any_work(folder, out, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage(10_000))
    with pytest.raises(PackError, match=r"needs 43\.0 kB more, and 10\.0 kB are free there"):
        pack(folder, out, size=SIZE, num_workers=0)
    assert names(out.parent) == []


def test_two_runs_cannot_work_on_one_out(folder, out, monkeypatch):
    monkeypatch.setattr(journal, "_SECONDS_FOR_LOCK", 0.1)
    with (
        journal.lock(OutputPaths.of(out), ()),
        pytest.raises(PackError, match="is in use by another run"),
    ):
        pack(folder, out, size=SIZE, num_workers=0)


def test_a_lock_is_on_the_file_that_is_there(out, monkeypatch):
    paths = OutputPaths.of(out)
    wait = journal._wait_for_lock

    def wait_for_a_run_that_ends(handle, path):
        monkeypatch.setattr(journal, "_wait_for_lock", wait)
        path.unlink()  # as a run that is done does while it holds the lock
        wait(handle, path)

    monkeypatch.setattr(journal, "_wait_for_lock", wait_for_a_run_that_ends)
    monkeypatch.setattr(journal, "_SECONDS_FOR_LOCK", 0.1)
    with (
        journal.lock(paths, ()),
        pytest.raises(PackError, match="is in use by another run"),
        journal.lock(paths, ()),
    ):
        pass


def test_a_folder_that_cannot_be_written(folder):
    with pytest.raises(PackError, match=r"cannot write /proc/x\.h5\.partial\.journal: "):
        pack(folder, "/proc/x.h5")


# --- images that cannot be packed


def test_fail_stops_at_the_first_in_source_order(folder, out):
    make_folder(folder, broken=(20, 9, 15))
    with pytest.raises(PackError, match=r"^cats/009\.png cannot be packed: truncated; "):
        pack(folder, out, size=SIZE, on_error="fail", num_workers=2)
    assert pack(folder, out, size=SIZE, num_workers=2, resume=True).items == 21


def test_a_failure_at_the_first_image_leaves_nothing_behind(folder, out):
    make_folder(folder, broken=(0,))
    with pytest.raises(PackError, match=r"^cats/000\.jpg .*; nothing was kept$"):
        pack(folder, out, size=SIZE, on_error="fail", num_workers=2)
    assert names(out.parent) == []


def test_more_than_max_skipped_stops(folder, out):
    make_folder(folder, broken=(2, 9, 15))
    with pytest.raises(PackError, match=r"more than max_skipped=2 images .* is dogs/003\.jpg: "):
        pack(folder, out, size=SIZE, max_skipped=2, num_workers=1)
    assert pack(folder, out, size=SIZE, max_skipped=3, num_workers=1, resume=True).items == 21


@pytest.mark.parametrize("count", [0, 1])
def test_max_skipped_stops_at_the_image_that_exceeds_it(folder, out, capfd, count):
    """Not at the end of its block, and no image behind it is spoken of."""
    make_folder(folder, broken=(2, 9, 15, 16, 17))
    with pytest.raises(PackError, match=r"more than max_skipped=2 images .* is dogs/003\.jpg: "):
        pack(folder, out, size=SIZE, max_skipped=2, num_workers=count, progress=True)
    said = [line.split()[1] for line in capfd.readouterr().err.splitlines()]
    assert said == ["cats/002.jpg:", "cats/009.png:", "dogs/003.jpg:"]


@pytest.mark.parametrize(("left", "stop"), [(0, 3), (1, 10), (2, 16), (3, 24)])
def test_a_block_ends_where_the_run_will(folder, left, stop):
    make_folder(folder, broken=(2, 9, 15))
    options = PackOptions(size=str(SIZE))
    job = encode.Job(
        source=open_source(folder), specs=field_specs(options, (SIZE, SIZE)), options=options
    )
    record, _ = encode.encode_block(job, 0, 24, left)
    assert (record.start, record.stop) == (0, stop)
    assert len(record.rows) == stop - len(record.skips)


def test_max_skipped_is_ten_or_one_percent():
    assert PackOptions().skip_limit(100) == 10
    assert PackOptions().skip_limit(5000) == 50
    assert PackOptions(max_skipped=0).skip_limit(5000) == 0


def test_nothing_to_pack_is_an_error(out, tmp_path):
    folder = make_folder(tmp_path / "images", per_class=2, broken=(0, 1, 2, 3))
    with pytest.raises(PackError, match="none of the 4 images can be packed"):
        pack(folder, out, size=SIZE, num_workers=1)
    assert names(out.parent) == []
    with pytest.raises(PackError, match="size=auto: not one image of those looked at"):
        pack(folder, out, num_workers=1)
    assert names(out.parent) == []


def test_an_unreadable_file_is_skipped(folder, out, monkeypatch):
    (folder / "cats" / "003.jpg").unlink()
    (folder / "cats" / "003.jpg").symlink_to("nowhere.jpg")
    summary = pack(folder, out, size=SIZE, num_workers=2)
    assert summary.skipped == (("cats/003.jpg", "cannot be read (No such file or directory)"),)


def test_a_thin_line_is_not_blown_up(folder, out):
    make_image(folder / "cats" / "line.png", 1, 4000, 0)
    summary = pack(folder, out, size=SIZE, fit="keep", num_workers=1)
    reason = "too many pixels (1x4000 would be resized to 32x128000)"
    assert summary.skipped == (("cats/line.png", reason),)


def test_a_side_that_jpeg_cannot_hold_is_skipped(folder, out):
    make_image(folder / "cats" / "line.png", 1, 65501, 0)
    summary = pack(folder, out, store="original", non_jpeg="reencode", num_workers=1)
    reason = "too many pixels (1x65501, and JPEG holds 65500 a side)"
    assert summary.skipped == (("cats/line.png", reason),)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.timeout(30)
def test_a_named_pipe_is_skipped_and_not_waited_for(folder, out):
    os.mkfifo(folder / "cats" / "000.jpeg")  # the first, so that size=auto looks at it too
    summary = pack(folder, out, num_workers=1)
    assert summary.skipped == (("cats/000.jpeg", "not a regular file"),)


def test_a_name_cannot_write_on_the_terminal(folder, out, capsys):
    (folder / "cats" / "a\n\x1b[31mb.jpg").write_bytes(b"")
    summary = pack(folder, out, size=SIZE, num_workers=1, progress=True)
    assert "skipped cats/a\\n\\x1b[31mb.jpg: empty file\n" in capsys.readouterr().err
    assert summary.skipped == (("cats/a\n\x1b[31mb.jpg", "empty file"),)


# --- workers that fail


def test_memory_that_runs_out_names_the_file(folder, out, monkeypatch):
    def run_out(*args, **options):
        raise MemoryError

    monkeypatch.setattr(encode, "fit_image", run_out)
    with pytest.raises(PackError, match=r"out of memory at cats/000\.jpg: fewer --workers"):
        pack(folder, out, size=SIZE, num_workers=1)


def test_a_worker_that_dies_is_one_error_that_names_the_file(folder, out, monkeypatch):
    decode = encode.decode_rgb

    def die(data, **options):
        if data == (folder / "dogs" / "002.jpg").read_bytes():
            faulthandler.disable()  # pytest's; it would print a traceback
            os.kill(os.getpid(), signal.SIGSEGV)
        return decode(data, **options)

    monkeypatch.setattr(encode, "decode_rgb", die)
    with pytest.raises(PackError, match=r"a worker process died \(SIGSEGV\) at dogs/002\.jpg; "):
        pack(folder, out, size=SIZE, num_workers=2)
    assert not out.exists()


def test_a_worker_killed_for_memory_says_so(folder, out, monkeypatch):
    monkeypatch.setattr(encode, "decode_rgb", lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PackError, match=r"SIGKILL, as when memory runs out\) at cats/000\.jpg"):
        pack(folder, out, size=SIZE, num_workers=1)


def test_a_full_disk_leaves_what_can_be_resumed(folder, out, monkeypatch):
    """The file-size limit gives EFBIG where a full disk gives ENOSPC, at the same call."""
    pack(folder, out, size=SIZE, num_workers=0)
    expected = sha256(out)
    monkeypatch.setattr(workers, "_MOST_IMAGES", 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(PackError) as caught:
            pack(folder, out, size=SIZE, num_workers=1, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"cannot write {out}.partial: File too large; ")
    assert str(caught.value).endswith(
        f"of 24 images are kept in {out}.partial: the same command with --resume goes on"
    )
    assert sha256(out) == expected
    summary = pack(folder, out, size=SIZE, num_workers=2, overwrite=True, resume=True)
    assert 8 <= summary.resumed < 24
    assert sha256(out) == expected


def test_a_disk_that_is_full_when_it_is_synced(folder, out, monkeypatch):
    monkeypatch.setattr(journal, "sync_file", failing_with(errno.ENOSPC))
    with pytest.raises(PackError, match="No space left on device; nothing was kept"):
        pack(folder, out, size=SIZE, num_workers=1)
    assert names(out.parent) == []


@pytest.mark.parametrize(
    ("memory", "started"), [(None, 3), (10 << 30, 3), (600 << 20, 2), (1 << 20, 1)]
)
def test_workers_are_as_many_as_cores_and_memory_allow(folder, out, monkeypatch, memory, started):
    counts = []

    def in_processes(job, target, ledger, tick, workers):
        counts.append(workers)
        pack_here(job, target, ledger, tick)

    monkeypatch.setattr(run, "available_cores", lambda: 3)
    monkeypatch.setattr(run, "available_memory", lambda: memory)
    monkeypatch.setattr(run, "pack_in_processes", in_processes)
    pack(folder, out, size=SIZE)
    pack(folder, out, size=SIZE, num_workers=5, overwrite=True)
    assert counts == [started, 5]


def test_a_system_that_cannot_write_at_a_position_is_refused_at_once(folder, out, monkeypatch):
    monkeypatch.delattr(os, "pwrite")
    with pytest.raises(PackError, match="packing needs Linux or macOS: this system cannot write"):
        pack(folder, out, size=SIZE)
    assert names(out.parent) == []


def test_workers_keep_no_pipe_of_their_siblings(folder, out, monkeypatch):
    """A worker that held another end of its own pipe would never see the coordinator go."""
    work = workers._serve_tasks

    def count_sockets(*args):
        handles = Path("/proc/self/fd")
        links = [os.readlink(path) for path in handles.iterdir() if path.is_symlink()]
        sockets = sum(link.startswith("socket:") for link in links)
        (folder.parent / f"sockets{os.getpid()}").write_text(str(sockets))
        work(*args)

    monkeypatch.setattr(workers, "_serve_tasks", count_sockets)
    before = sum(
        os.readlink(path).startswith("socket:")
        for path in Path("/proc/self/fd").iterdir()
        if path.is_symlink()
    )
    pack(folder, out, size=SIZE, num_workers=3)
    counts = {path.read_text() for path in folder.parent.glob("sockets*")}
    assert counts == {str(before + 1)}


def test_workers_have_one_thread_each_and_leave_ctrl_c_alone(folder, out, monkeypatch):
    work = workers._serve_tasks

    def look(*args):
        ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        said = f"{torch.get_num_threads()} {ignores}"
        (folder.parent / f"seen{os.getpid()}").write_text(said)
        work(*args)

    monkeypatch.setattr(workers, "_serve_tasks", look)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pack(folder, out, size=SIZE, num_workers=2)
        pack(folder, out, size=SIZE, num_workers=0, overwrite=True)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    seen = [path.read_text() for path in folder.parent.glob("seen*")]
    assert seen == ["1 True", "1 True"]


def test_no_process_is_left_behind(folder, out):
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = children.read_text()
    pack(folder, out, size=SIZE, num_workers=3)
    assert children.read_text() == before


# --- what is not the image's fault


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        cv2.error("OpenCV: (-4:Insufficient memory) Failed to allocate 9 bytes"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
@pytest.mark.parametrize("at", ["fit_image", "read_file"])
def test_memory_that_runs_out_ends_the_run_and_skips_nothing(folder, out, monkeypatch, error, at):
    done, whole = [], getattr(encode, at)

    def run_out(*args, **options):
        if len(done) == 8:
            raise error
        done.append(0)
        return whole(*args, **options)

    monkeypatch.setattr(workers, "_MOST_IMAGES", 2)
    with monkeypatch.context() as short:
        short.setattr(encode, at, run_out)
        with pytest.raises(PackError) as caught:
            pack(folder, out, size=SIZE, num_workers=0)
    assert str(caught.value).startswith("out of memory at cats/008.jpg: fewer --workers or a small")
    assert "8 of 24 images are kept" in str(caught.value)
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True).items == 24


def test_a_library_that_cannot_be_loaded_leaves_nothing_behind(folder, out, monkeypatch):
    def unloadable(*args, **options):
        raise ImportError("libtorch_cpu.so: failed to map segment")

    monkeypatch.setattr(encode, "fit_image", unloadable)
    with pytest.raises(ImportError, match="failed to map segment"):
        pack(folder, out, size=SIZE, num_workers=0)
    assert names(out.parent) == []


def test_too_many_open_files_end_the_run_and_skip_nothing(folder, out, monkeypatch):
    monkeypatch.setattr(encode, "_encode", failing_with(errno.EMFILE))
    said = r"^cannot read cats/000\.jpg: Too many open files; nothing was kept$"
    with pytest.raises(PackError, match=said):
        pack(folder, out, size=SIZE, num_workers=0)


def test_workers_that_cannot_be_started_are_one_sentence(folder, out, monkeypatch):
    monkeypatch.setattr(os, "fork", failing_with(errno.ENOMEM))
    said = "cannot start 2 worker processes: Cannot allocate memory: give fewer --workers; nothing"
    with pytest.raises(PackError, match=said):
        pack(folder, out, size=SIZE, num_workers=2)
    assert names(out.parent) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cut_file_is_refused_whatever_pillow_was_told(folder, out, monkeypatch, workers):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for name in ("cats/000.jpg", "cats/004.png"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) * 2 // 3])
    summary = pack(folder, out, size=SIZE, num_workers=workers)
    assert summary.skipped == (("cats/000.jpg", "truncated"), ("cats/004.png", "truncated"))
    assert ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize("size", [SIZE, "auto"])
def test_a_file_of_50_gb_is_skipped_by_its_size(folder, out, size):
    with (folder / "cats" / "999.jpg").open("wb") as file:
        file.truncate(50_000_000_000)
    with (folder / "cats" / "998.jpg").open("wb") as file:
        file.truncate(900_000)
    summary = pack(folder, out, size=size, num_workers=0, max_pixels=10_000)
    assert [reason.split(" (")[0] for _, reason in summary.skipped] == [
        "not an image in a known format",
        "file too large",
    ]
    assert summary.skipped[1][1].startswith("file too large (50.0 GB, more than 12 bytes for each")


def test_packing_imports_nothing_once_it_has_begun(folder, out):
    """What is imported late fails where a folder can't be read or no descriptor is left."""
    script = """
import sys
from pathlib import Path
from h5feed.packing import pack, workers, run
import torch

def begin(*args, start=run._fill):
    before.update(sys.modules)
    return start(*args)

before, run._fill = set(), begin
pack(sys.argv[1], sys.argv[2], size=32, num_workers=2)
print(*sorted(set(sys.modules) - before))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, folder, out],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == []


# --- datasets


class Pairs:
    classes = ("even", "odd")

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if isinstance(self.items[index], BaseException):
            raise self.items[index]
        return self.items[index]


def arrays(count=6):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (20 + i, 30, 3), np.uint8) for i in range(count)]


@pytest.mark.parametrize(
    "convert",
    [Image.fromarray, lambda a: a, lambda a: torch.from_numpy(a).permute(2, 0, 1)],
    ids=["pil", "numpy", "tensor"],
)
def test_a_dataset_of_any_image_type(out, convert):
    images = arrays()
    pack(Pairs([(convert(a), i % 2) for i, a in enumerate(images)]), out, size=16)
    (spec,) = field_specs(PackOptions(), (16, 16))
    with h5py.File(out) as file:
        assert np.array_equal(file["images"][:], [fit_image(a, spec)[0] for a in images])
        assert file["labels"][:].tolist() == [0, 1, 0, 1, 0, 1]
        assert file["classes"].asstr()[:].tolist() == ["even", "odd"]
    assert keys(out) == list("012345")
    assert check_file(out).is_sound


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_a_dataset_of_targets(out, make):
    targets = [[0.5, float(i)] for i in range(6)]
    pack(Pairs([(a, make(t)) for a, t in zip(arrays(), targets, strict=True)]), out, size=16)
    with h5py.File(out) as file:
        assert file["labels"].dtype == np.float32
        assert file["labels"][:].tolist() == targets


@pytest.mark.parametrize("error", [SystemExit(3), ZeroDivisionError(), MemoryError()])
def test_a_dataset_that_ends_the_program_leaves_nothing_behind(out, monkeypatch, error):
    """SystemExit goes through; a shortage of memory fails the run; any other error is a skip."""
    items = [(a, 0) for a in arrays()]
    items[3] = error
    if isinstance(error, ZeroDivisionError):
        assert pack(Pairs(items), out, size=16).items == 5
        return
    said = {"SystemExit": "^3$", "MemoryError": "^out of memory at 3: fewer --workers or a smaller"}
    expected = SystemExit if isinstance(error, SystemExit) else PackError
    with pytest.raises(expected, match=said[type(error).__name__]):
        pack(Pairs(items), out, size=16)
    assert names(out.parent) == []


@pytest.mark.parametrize(
    "mask", [Image.new("L", (8, 8)), np.zeros((8, 8), np.uint8), torch.zeros(1, 8, 8)]
)
def test_a_dataset_of_masks_is_refused(out, mask):
    said = (
        r"the label of Pairs\[0\] is .*\(.*8.*8\), a mask by its shape: a class number or a row of"
    )
    with pytest.raises(UsageError, match=said):
        pack(Pairs([(arrays(1)[0], mask)]), out, size=16)
    assert names(out.parent) == []


def test_a_dataset_item_that_raises_is_skipped(out):
    items = [(a, np.int64(i % 2)) for i, a in enumerate(arrays())]
    items[2] = OSError("bad file")
    summary = pack(Pairs(items), out, size=16)
    assert summary.skipped == (("2", "cannot be loaded (OSError: bad file)"),)
    with h5py.File(out) as file:
        assert file["labels"][:].tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ((torch.rand(3, 8, 8), 0), r"image of Pairs\[0\] is Tensor of torch.float32 \(3, 8, 8\)"),
        ((np.zeros((8, 8, 4), np.uint8), 0), r"is ndarray of uint8 \(8, 8, 4\)"),
        ((np.zeros((8, 8), np.uint8), "cat"), r"the label of Pairs\[0\] is a str"),
        ((np.zeros((8, 8), np.uint8), []), r"the label of Pairs\[0\] is a list"),
        ((np.zeros((8, 8), np.uint8), 2), r"Pairs\[0\] is 2: −1 or a class number, 0 to 1 of its"),
        ((np.zeros((8, 8), np.uint8), -2), r"the label of Pairs\[0\] is -2: −1 or a class number"),
        (np.zeros((8, 8), np.uint8), r"Pairs\[0\] is ndarray .*: \(image, label\) is needed"),
    ],
)
def test_a_dataset_of_something_else_is_refused(out, item, said):
    with pytest.raises(UsageError, match=said):
        pack(Pairs([item]), out, size=16)
    assert names(out.parent) == []


def test_a_dataset_item_without_pixels_is_skipped(out):
    items = [(a, 0) for a in arrays(2)] + [(np.zeros((0, 8, 3), np.uint8), 0)]
    assert pack(Pairs(items), out, size=16).skipped == (("2", "damaged (0x8 pixels)"),)


def test_a_dataset_without_items_is_refused(out):
    with pytest.raises(UsageError, match="source=Pairs holds no images"):
        pack(Pairs([]), out)
    assert names(out.parent) == []


def test_what_a_dataset_cannot_do(out):
    pairs = Pairs([(a, 0) for a in arrays()])
    with pytest.raises(UsageError, match="resume=True needs a folder, and source is a dataset"):
        pack(pairs, out, resume=True)
    with pytest.raises(UsageError, match="store=original needs a folder of files"):
        pack(pairs, out, store="original")
    with pytest.raises(UsageError, match="source=int is neither a folder's path nor a dataset"):
        pack(3, out)


def test_torchvision_imagefolder_packs_as_the_folder_does(folder, out):
    datasets = pytest.importorskip("torchvision.datasets")
    pack(folder, out, size=SIZE, num_workers=0)
    with h5py.File(out) as file:
        images, labels = file["images"][:], file["labels"][:]
    pack(datasets.ImageFolder(folder), out, size=SIZE, overwrite=True)
    with h5py.File(out) as file:
        # Two JPEG decoders, up to rounding; PNG is exact.
        assert np.abs(file["images"][:].astype(int) - images).max() <= 2
        assert np.array_equal(file["labels"][:], labels)


def test_spawned_workers_give_the_same_bytes(folder, out):
    """What macOS and Windows do; in a script of its own, for spawn imports the main module."""
    pack(folder, out, size=SIZE, num_workers=0)
    expected = sha256(out)
    script = (
        "import sys, h5feed.packing as p, h5feed.packing.workers as w\n"
        "if __name__ == '__main__':\n"
        "    w._START_METHOD = 'spawn'\n"
        f"    p.pack(sys.argv[1], sys.argv[2], size={SIZE}, num_workers=2, overwrite=True)\n"
    )
    path = out.with_name("script.py")
    path.write_text(script)
    subprocess.run([sys.executable, str(path), str(folder), str(out)], check=True)
    assert sha256(out) == expected
