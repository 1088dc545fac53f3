import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from h5feed.cli import check, show
from h5feed.store import read_index
from packed import image_spec, random_images, write_packed, write_provenance, write_set


@pytest.fixture
def packed(tmp_path):
    return write_packed(tmp_path / "a.h5", random_images(5), classes=("cat", "dög"))


def damage(path, item):
    start, _ = read_index(path).extents["images"].item_range(item)
    data = bytearray(path.read_bytes())
    data[start] ^= 4
    path.write_bytes(data)


def test_check_says_sound(packed, capsys):
    assert check.main([str(packed)]) == 0
    assert f"{packed}: sound (5 items" in capsys.readouterr().out


def test_check_lists_the_damaged_and_exits_1(packed, capsys):
    damage(packed, 1)
    damage(packed, 4)
    assert check.main([str(packed)]) == 1
    out = capsys.readouterr().out
    assert "2 damaged of 5 items" in out
    assert "item 1: 1/ü1.png" in out
    assert "item 4: 0/ü4.png" in out
    assert check.main([str(packed), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["sound"] is False
    assert report["damaged"][0] == {"index": 1, "key": "1/ü1.png", "error": None}


def fail_item_2(packed, monkeypatch):
    """Let the disk fail where item 2 begins."""
    start, _ = read_index(packed).extents["images"].item_range(2)
    pread = os.pread

    def failing(fd, length, at):
        if at == start:
            raise OSError(5, "Input/output error")
        return pread(fd, length, at)

    monkeypatch.setattr("os.pread", failing)


def test_check_names_what_cannot_be_read_and_why(packed, capsys, monkeypatch):
    fail_item_2(packed, monkeypatch)
    assert check.main([str(packed)]) == 1
    out = capsys.readouterr().out
    assert "1 damaged of 5 items" in out
    assert "item 2: 0/ü2.png: cannot be read: Input/output error (errno 5)\n" in out


def test_statistics_of_images_of_billions_of_pixels_are_refused(tmp_path, capsys):
    path = write_packed(
        tmp_path / "o.h5",
        [b"never decoded"],
        spec=image_spec("original", (0, 0)),
        stored_shapes=np.int32([[65_500, 65_500]]),
    )
    assert show.main([str(path), "--stats"]) == 1
    said = capsys.readouterr()
    assert "is stored as 65500x65500, more than max_pixels=178956970" in said.err
    assert len(said.err.splitlines()) == 1
    assert show.main([str(path)]) == 0  # nothing is decoded
    assert "store=original" in capsys.readouterr().out


def test_names_cannot_write_on_the_terminal(tmp_path, capsys):
    path = write_packed(tmp_path / "a.h5", random_images(2), classes=("a\nb", "\x1b[31m"))
    assert show.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "  a\\nb " in out
    assert "  \\x1b[31m " in out


HOSTILE = {
    "control": "\x1b]0;x\x07\x1b[2J\x08\x7f\x9b",
    "bidi": "\u202e\u2066gnp.exe\u2069\u200f",
    "surrogates": "\udce9\udcff\n\r\t\v\u2028\u0085",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_nothing_of_a_file_can_write_on_the_terminal(tmp_path, capsys, text):
    """Class, key, path and provenance, in words, in JSON, and in errors."""
    path = write_packed(
        tmp_path / f"{text}.h5",
        random_images(3),
        classes=(f"{text}1", f"{text}2"),
        keys=[f"{text}{i}" for i in range(3)],
    )
    made = {"options": {text: [text]}, "skipped": [[text, text]], text: text}
    write_provenance(path, json.dumps(made))
    damage(path, 1)
    (tmp_path / f"{text}.txt").write_text("x")
    sheet = ["--sheet", str(tmp_path / f"{text}.png")]
    texts, values = [], []
    for command, args in (
        (show, []),
        (show, sheet),
        (show, ["--stats"]),
        (check, []),
        (show, ["--json", *sheet]),
        (check, ["--json"]),
    ):
        command.main([str(path), *args])
        said = capsys.readouterr()
        texts += [said.out, said.err]
        if "--json" in args:
            values.append(json.loads(said.out))
    for bad in (tmp_path / f"{text}.txt", tmp_path / f"{text}.none"):
        assert show.main([str(bad)]) == 1
        texts += capsys.readouterr()
        assert check.main([str(bad)]) == 1
        texts += capsys.readouterr()
    assert show.main([str(path), "--sheet", str(path)]) == 2
    texts += capsys.readouterr()
    assert all(line.isprintable() for said in texts for line in said.split("\n")), texts
    shown, checked = values
    assert (shown["path"], shown["provenance"]) == (str(path), made)
    assert list(shown["class_counts"]) == [f"{text}1", f"{text}2"]
    assert checked["damaged"][0]["key"] == f"{text}1"


@pytest.mark.parametrize(
    "made", [{"options": 7, "skipped": 7}, {"options": [1], "skipped": {"a": 1}}, {"options": "x"}]
)
def test_provenance_of_another_make_is_shown(packed, capsys, made):
    write_provenance(packed, json.dumps(made))
    assert show.main([str(packed)]) == 0
    assert f"packed with: {json.dumps(made['options'])}\n" in capsys.readouterr().out


def test_a_class_of_a_very_long_name_does_not_fill_the_screen(tmp_path, capsys):
    path = write_packed(tmp_path / "a.h5", random_images(2), classes=("x" * 10**6, "y"))
    sheet = str(tmp_path / "s.png")
    assert show.main([str(path), "--sheet", sheet]) == 0
    out = capsys.readouterr().out
    assert "x" * 59 + "…" in out
    assert len(out) < 2000


def test_show_names_what_cannot_be_read_and_why(packed, tmp_path, capsys, monkeypatch):
    fail_item_2(packed, monkeypatch)
    assert show.main([str(packed)]) == 0
    capsys.readouterr()
    for args in (["--stats"], ["--sheet", str(tmp_path / "s.png")]):
        assert show.main([str(packed), *args]) == 1
        said = "item 2 of /images (key '0/ü2.png') cannot be read: Input/output error (errno 5); "
        assert said in capsys.readouterr().err


def test_check_of_a_refused_and_of_a_missing_file(tmp_path, capsys):
    (tmp_path / "x.h5").write_bytes(b"nothing")
    assert check.main([str(tmp_path / "x.h5")]) == 1
    assert "refused: " in capsys.readouterr().out


@pytest.mark.parametrize("command", [check, show], ids=["check-h5", "show-h5"])
def test_a_file_that_cannot_be_opened_is_one_sentence(tmp_path, capsys, command):
    name = command.__name__.rpartition(".")[2] + "-h5"
    locked = tmp_path / "locked.h5"
    locked.touch(0)
    for path, said in (
        (tmp_path / "none.h5", "does not exist"),
        (tmp_path / "none" / "a.h5", "does not exist"),
        (locked / "a.h5", "does not exist: a part of this path is a file"),
        (locked, "may not be opened: permission denied"),
    ):
        if path == locked and os.access(locked, os.R_OK):
            continue  # root opens everything
        assert command.main([str(path)]) == 1
        assert capsys.readouterr().err == f"{name}: {path} {said}\n"
    assert command.main([str(tmp_path)]) == 1
    assert f"{name}: {tmp_path}: no set, for it has no index.h5" in capsys.readouterr().err


def test_a_set_is_shown_and_checked(tmp_path, capsys):
    folder = write_set(tmp_path / "set", random_images(12))
    assert show.main([str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["shards"], facts["generation"], facts["items"]) == (3, 1, 12)
    assert facts["class_counts"] == {"cat": 6, "dög": 6}
    assert show.main([str(folder), "--stats", "--sheet", str(tmp_path / "sheet.png")]) == 0
    shown = capsys.readouterr().out
    assert "12 items, 2 classes, 0.1 MB on disk in 3 shards (generation 1)" in shown
    assert check.main([str(folder)]) == 0
    assert "set: sound (12 items in 3 shards, 0.0 MB)" in capsys.readouterr().out
    next(folder.glob("shard-*")).unlink()
    assert check.main([str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["sound"] is False


@pytest.mark.parametrize("args", [[], ["--json"]])
def test_who_stops_reading_is_not_told_of_it(packed, args):
    """As in `show-h5 FILE | head -1`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "h5feed.cli.show", str(packed), *args]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_show_tells_facts_and_histogram(packed, capsys):
    assert show.main([str(packed)]) == 0
    out = capsys.readouterr().out
    assert "5 items, 2 classes" in out
    assert "store=raw, 32x32, fit=stretch" in out
    bars = {line.split()[0]: line.count("█") for line in out.splitlines() if "█" in line}
    assert bars == {"cat": 40, "dög": 27}


def test_show_leaves_out_what_is_too_much(packed, capsys):
    show.main([str(packed), "--classes", "1"])
    assert "… and 1 more class (--classes N" in capsys.readouterr().out


def test_one_item_is_not_items(tmp_path, capsys):
    path = write_packed(tmp_path / "a.h5", random_images(1), classes=("cat",))
    show.main([str(path)])
    check.main([str(path)])
    out = capsys.readouterr().out
    assert "  1 item, 1 class, " in out
    assert "sound (1 item, " in out


def test_show_json_stats_and_sheet(packed, tmp_path, capsys):
    sheet = tmp_path / "sheet.png"
    assert show.main([str(packed), "--json", "--stats", "--sheet", str(sheet)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["class_counts"] == {"cat": 3, "dög": 2}
    mean = np.stack(random_images(5)).mean((0, 1, 2)) / 255
    assert facts["channel_stats"]["mean"] == pytest.approx(mean.tolist())
    assert Image.open(sheet).width == 1200


def test_show_of_a_refused_file_is_one_sentence(tmp_path, capsys):
    (tmp_path / "x.h5").write_bytes(b"nothing")
    assert show.main([str(tmp_path / "x.h5")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("show-h5: ")
    assert err.count("\n") == 1


def linked(packed, name):
    (packed.parent / name).hardlink_to(packed)
    return packed.parent / name


@pytest.mark.parametrize(
    ("sheet", "said"),
    [
        ("a.h5", " does not end in .png: give a name that does"),
        ("sheet", " does not end in .png: give a name that does"),
        ("same.png", " is a file that is read here: give another name"),
        (".", " is a folder: give a file in it"),
        ("none/x.png", ": the folder {none} does not exist: make it first"),
    ],
)
def test_a_sheet_that_must_not_be_written_is_refused_before_any_work(
    packed, capsys, monkeypatch, sheet, said
):
    linked(packed, "same.png")
    before = packed.read_bytes()
    monkeypatch.setattr(show, "file_facts", lambda _: pytest.fail("work was begun"))
    place = packed.parent / sheet
    assert show.main([str(packed), "--sheet", str(place)]) == 2
    said = said.format(none=packed.parent / "none")
    assert capsys.readouterr().err == f"show-h5: --sheet {place}{said}\n"
    assert packed.read_bytes() == before


def test_a_sheet_that_cannot_be_finished_leaves_the_old_one(packed, tmp_path, monkeypatch, capsys):
    sheet = tmp_path / "sheet.png"
    sheet.write_bytes(b"precious")

    def full(*_):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(Path, "replace", full)
    assert show.main([str(packed), "--sheet", str(sheet)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert sheet.read_bytes() == b"precious"
    assert {path.name for path in tmp_path.iterdir()} == {"a.h5", "sheet.png"}


def test_a_sheet_through_a_link_goes_where_it_leads(packed, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "sheet.PNG").symlink_to(tmp_path / "there" / "sheet.png")
    assert show.main([str(packed), "--sheet", str(tmp_path / "sheet.PNG")]) == 0
    with Image.open(tmp_path / "there" / "sheet.png") as image:
        assert image.format == "PNG"


@pytest.mark.parametrize("command", [show, check])
def test_a_file_that_memory_does_not_hold_is_one_sentence(packed, capsys, monkeypatch, command):
    def too_large(*_):
        raise MemoryError("Unable to allocate 8.00 TiB for an array")

    monkeypatch.setattr("h5feed.store.gate.Gate.array", too_large)
    assert command.main([str(packed)]) == 1
    assert capsys.readouterr().err.partition(": ")[2] == (
        f"{packed} needs more memory than there is\n"
    )


def test_memory_that_ends_later_is_one_sentence(packed, capsys, monkeypatch):
    def full(_):
        raise MemoryError("Unable to allocate\n8 GiB")

    monkeypatch.setattr(show, "file_facts", full)
    assert show.main([str(packed)]) == 1
    assert capsys.readouterr().err == (
        "show-h5: there is not enough memory (Unable to allocate\\n8 GiB)\n"
    )


def test_a_line_end_in_a_name_makes_no_second_line(packed, capsys):
    named = packed.with_name("a\nb.h5")
    named.write_bytes(b"nothing")
    for path in (named, packed.with_name("no\nfile.h5")):
        assert show.main([str(path)]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"show-h5: {packed.parent}/")
        assert said.count("\n") == 1
        assert "\\n" in said


@pytest.mark.parametrize("option", ["images", "classes"])
def test_a_count_below_one_is_refused(packed, capsys, option):
    assert show.main([str(packed), f"--{option}", "-3"]) == 2
    assert capsys.readouterr().err == f"show-h5: {option}=-3 is too small: give 1 or more\n"


def test_a_closed_stdout_is_no_traceback(packed):
    command = f'exec "{sys.executable}" -m h5feed.cli.show "{packed}" >&-'
    done = subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_stderr_sends_no_error_to_stdout(tmp_path):
    command = f'exec "{sys.executable}" -m h5feed.cli.show "{tmp_path / "none.h5"}" 2>&-'
    done = subprocess.run(["/bin/sh", "-c", command], stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (1, b"")
