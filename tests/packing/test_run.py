import inspect
import json
import os
from collections import namedtuple
from dataclasses import fields
from itertools import pairwise

import h5py
import numpy as np
import pytest
from PIL import Image

from h5feed.errors import PackError, UsageError
from h5feed.feed.facts import file_facts
from h5feed.feed.files import PackedFiles
from h5feed.jpeg import restart_segments
from h5feed.packing import PackOptions, encode, journal, output, pack, workers
from h5feed.packing.decode import decode_rgb
from h5feed.packing.options import field_specs
from h5feed.packing.output import OutputPaths
from h5feed.packing.resize import fit_image
from h5feed.packing.sources import open_source
from h5feed.packing.summary import describe_fit
from h5feed.store.check import check_file
from h5feed.store.read import read_index
from packed import image_spec
from packing.folders import keys, make_folder, make_image, names, sha256

SIZE = 32


def provenance(path):
    with h5py.File(path) as file:
        return json.loads(file.attrs["provenance"])


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
    assert file_facts(PackedFiles([out]))["targets"] == ["age", "y"]
    with h5py.File(out) as file:
        assert file["labels"][:].tolist() == [[3, 0.5], [4, 1]]
    pairs = [(np.zeros((20, 30, 3), np.uint8), [1.0, 2])] * 6
    unnamed = pack(pairs, out, size=16, overwrite=True)
    assert unnamed.targets == ("0", "1")
    assert "targets" not in provenance(out)
    assert file_facts(PackedFiles([out]))["targets"] == ["0", "1"]


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


def told(*shapes):
    return describe_fit([image_spec(size=(8, 8))], np.array(shapes)).partition("; ")[0]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(100, 100), (50, 50), (300, 300)], "stretch: 100x100 (median sides) → 8x8"),
        (
            [(100, 100), (50, 200), (200, 50)],
            "stretch: 100x100 (median sides) → 8x8: proportions of 2 of 3 images change",
        ),
        (
            [(50, 200), (200, 50)],
            "stretch: 125x125 (median sides) → 8x8: proportions change",
        ),
    ],
)
def test_the_summary_says_how_many_images_change_their_proportions(shapes, expected):
    assert told(*shapes) == expected


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
    with pytest.raises(UsageError, match=r"--resume continues it, --overwrite starts again"):
        pack(folder, out, size=SIZE)
    pack(folder, out, size=SIZE, overwrite=True, num_workers=0)
    assert names(out.parent) == ["x.h5"]


def test_a_data_frame_is_a_manifest(folder, out):
    class Frame:
        """What packing asks of pandas, which the tests have not."""

        def to_json(self, path, *, orient, lines, default_handler):
            assert (orient, lines, default_handler) == ("records", True, str)
            rows = [{"id": f"b/{n}", "what": "x"} for n in range(3)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    for n in range(3):
        (folder / "b").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / "b" / f"{n}.png")
    columns = {"path_column": "id", "label_column": "what"}
    pack(folder, out, size=SIZE, manifest=Frame(), **columns, num_workers=0)
    index = read_index(out)
    assert [index.key(n) for n in range(3)] == ["b/0.png", "b/1.png", "b/2.png"]
    assert index.provenance["options"]["manifest"] == "DataFrame.jsonl"
    with pytest.raises(UsageError, match=r"path_column='file': .*jsonl has no such column; its"):
        pack(folder, out, manifest=Frame(), path_column="file", overwrite=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quality": 0}, "quality=0 is out of range: give 1 to 100"),
        ({"num_workers": -1}, "num_workers=-1 is too small: give 0 or more"),
        ({"num_workers": 1.5}, r"num_workers=1\.5 is not a whole number"),
        ({"max_skipped": "3"}, "max_skipped='3' is not a whole number"),
        ({"quality": 90.0}, r"quality=90\.0 is not a whole number"),
        ({"targets": ["a", "b"]}, "targets=a b is about a manifest's columns: give one as well"),
        ({"path_column": "id"}, "path_column=id is about a manifest's"),
        (
            {"class_columns": ["y", "z"]},
            "class_columns=y z is about a manifest's",
        ),
        (
            {"label_column": "y", "targets": ["a"], "manifest": "x.csv"},
            "label_column=y beside targets=a: an item has a class, several, or numbers to predict",
        ),
        (
            {"label_delimiter": " ", "class_columns": ["a"], "manifest": "x.csv"},
            "label_delimiter=  beside class_columns=a: an item has a class, several, or numbers",
        ),
        ({"label_delimiter": "", "manifest": "x.csv"}, "label_delimiter='' is empty: give what"),
        ({"manifest": [("a.jpg", 1)]}, "manifest is a list: give the path of a csv, tsv, jsonl"),
        (
            {"extensions": ["gif"]},
            "extensions=gif: 'gif' is not the end of a name: give them in small",
        ),
        ({"class_order": "timm"}, "class_order='timm' is not one of sorted, natural"),
        ({"background": 255}, "background=255 is not a color: give red, green, blue"),
        ({"background": (0, 0, 256)}, "background=256 is out of range"),
        ({"mask_fill": 256}, "mask_fill=256 is out of range: give 0 to 255"),
        (
            {"mask_fill": 9},
            "mask_fill=9 fills the borders of letterboxed masks, and fit=stretch mak",
        ),
        ({"mask_fill": 9, "fit": "pad"}, "mask_fill=9 without masks: leave it out, or give masks"),
        ({"size": 64, "store": "original"}, "size=64 with store=original: .* leave size out"),
        ({"fit": "crop", "store": "original"}, "fit=crop with store=original"),
        ({"non_jpeg": "reencode"}, "non_jpeg=reencode is for store=original"),
        ({"quality": 50}, "quality=50 is for encoding JPEG, and store=raw keeps pixels"),
        ({"size": "32x64", "fit": "keep"}, "size=32x64 with fit=keep: give one number"),
        ({"fit": "squash"}, "fit='squash' is not one of stretch, crop, pad, keep"),
        ({"store": "png"}, "store='png' is not one of raw, yuv420, jpeg, original"),
        ({"on_error": "stop"}, "on_error='stop' is not one of skip, fail"),
        ({"background": (1, 2)}, r"background=\(1, 2\) is not a color: give red, green, blue"),
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


@pytest.mark.parametrize("fit", ["stretch", "keep"])
def test_segments_are_those_of_the_items(folder, out, fit):
    pack(folder, out, size=48, store="jpeg", fit=fit, any_size=True, num_workers=0)
    with h5py.File(out) as file:
        data, ends = file["images/bytes"][()].tobytes(), file["images/offsets"][()].tolist()
        segments = file["images/segments"][()]
    expected = [restart_segments(data[a:b]) for a, b in pairwise(ends)]
    assert (len({len(item) for item in expected}) > 1) == (fit == "keep")
    np.testing.assert_array_equal(segments, np.concatenate(expected))
    assert check_file(out).is_sound
    assert sorted(path.name for path in out.parent.glob(out.name + "*")) == [out.name]
