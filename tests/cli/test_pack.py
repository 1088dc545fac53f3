import json
import signal
import time

import pytest

from cli.terminal import AtTerminal
from h5feed.cli import pack as pack_command
from h5feed.cli.pack import main
from h5feed.packing import pack, workers
from packing.folders import make_folder, names, sha256


def pack_h5(*args):
    return main([str(arg) for arg in args])


def test_packs_as_the_function_does(folder, out, capsys):
    assert pack_h5(folder, out, "--size", 32, "--store", "yuv420", "--workers", 1) == 0
    assert "x.h5: 24 images, 2 classes, " in capsys.readouterr().out
    packed = sha256(out)
    pack(folder, out, size=32, store="yuv420", overwrite=True, num_workers=0)
    assert sha256(out) == packed


def test_ctrl_c_in_a_finalizer_is_not_lost(folder, out, monkeypatch, capsys):
    """Python cannot raise there: it would print and go on."""

    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def pack_and_wait(*_, **__):
        Finalized()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            time.sleep(0.01)

    monkeypatch.setattr(pack_command, "pack_with", pack_and_wait)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert pack_h5(folder, out) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "pack-h5: interrupted\n"


def test_json_is_all_there_is_on_stdout(folder, out, capsys):
    make_folder(folder, broken=(3,))
    assert pack_h5(folder, out, "--json", "--workers", 1) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["items"] == 23
    assert said.err == "skipped cats/003.jpg: truncated\n"


def test_a_usage_error_is_one_line_and_status_2(folder, out, capsys):
    out.write_bytes(b"precious")
    assert pack_h5(folder, out) == 2
    said = capsys.readouterr()
    assert said.err.startswith("pack-h5: OUT ")
    assert said.err.endswith("exists: give another name, or --overwrite to replace it\n")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert pack_h5(folder, out, "--quality", 0, "--overwrite") == 2
    assert capsys.readouterr().err == "pack-h5: quality=0 is out of range: give 1 to 100\n"
    assert out.read_bytes() == b"precious"


def test_a_failure_is_one_line_and_status_1(folder, out, capsys):
    make_folder(folder, broken=(0,))
    assert pack_h5(folder, out, "--on-error", "fail", "--workers", 1, "--size", 32) == 1
    said = "pack-h5: cats/000.jpg cannot be packed: truncated; nothing was kept\n"
    assert capsys.readouterr().err == said
    assert names(out.parent) == []


def test_ctrl_c_is_one_line_and_status_130(folder, out, capsys, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "pack_here", interrupt)
    assert pack_h5(folder, out, "--workers", 0) == 130
    assert capsys.readouterr().err == "pack-h5: interrupted; nothing was kept\n"


@pytest.mark.parametrize("args", [[], ["--sizee", "3"], ["a", "b", "--fit", "squash"]])
def test_a_wrong_command_line_is_status_2(args, capsys):
    with pytest.raises(SystemExit) as caught:
        pack_h5(*args)
    assert caught.value.code == 2
    assert "pack-h5 --help" in capsys.readouterr().err


def test_help_is_the_docstrings(capsys):
    with pytest.raises(SystemExit) as caught:
        pack_h5("--help")
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert "usage: pack-h5 [-h] [OPTIONS] SRC OUT.h5" in said
    for text in (
        "--max-skipped",
        "letterboxed",
        "(default: stretch)",
        "{raw,yuv420,jpeg,original}",
    ):
        assert text in said


@pytest.mark.parametrize("columns", [0, 100])  # some containers' terminals have no width
def test_a_terminal_shows_a_bar(folder, out, columns):
    """A real terminal at the other end: tqdm draws only there."""
    make_folder(folder, broken=(3,))
    args = (folder, out, "--workers", 1)
    with AtTerminal("h5feed.cli.pack", *args, columns=columns) as running:
        running.read_until()
        assert running.process.wait() == 0
    text = running.shown.decode()
    assert "packing: 100%" in text
    assert "24/24" in text
    assert "skipped cats/003.jpg: truncated" in text


@pytest.mark.parametrize("text", ["\x1b[2J\x9b\x07", "\u202e\u2066", "\udce9\n\r\u2028"])
def test_no_name_of_a_file_can_write_on_the_terminal(tmp_path, capsys, text):
    """The source's folders and files, one of them broken, and OUT."""
    folder = make_folder(tmp_path / text / "images")
    (folder / "cats").rename(folder / f"{text}cats")
    (folder / f"{text}cats" / f"{text}.jpg").write_bytes(b"x")
    out = tmp_path / text / f"{text}.h5"
    said = []
    for status, args in (
        (0, [folder, out]),
        (2, [folder, out]),
        (0, [folder, out, "--overwrite", "--json"]),
        (1, [folder, out, "--overwrite", "--on-error", "fail"]),
        (2, [folder, out, "--overwrite", "--masks", tmp_path / text / f"{text}none"]),
        (2, [folder, out, "--overwrite", "--manifest", tmp_path / text / f"{text}.csv"]),
        (2, [tmp_path / f"{text}none", out, "--overwrite"]),
    ):
        assert pack_h5(*args, "--size", 32, "--workers", 0) == status, args
        said += capsys.readouterr()
    assert sum("skipped" in text for text in said) >= 3
    assert all(line.isprintable() for text in said for line in text.split("\n")), said
