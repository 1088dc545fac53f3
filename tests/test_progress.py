import io
import os

import pytest

from h5feed import progress
from h5feed.progress import Progress, StatusLine


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


def test_lines_come_every_few_seconds(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(progress, "time", clock)
    with Progress(1000, "packing", stream=stream) as bar:
        for _ in range(10):
            clock.now += 1
            bar.advance(20)
    assert stream.getvalue() == (
        "packing: 100 of 1,000, 20 img/s, 45 s left\npacking: 200 of 1,000, 20 img/s, 40 s left\n"
    )


def test_what_was_done_before_is_not_in_the_rate(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    bar = Progress(1000, "packing", done=900, stream=io.StringIO())
    clock.now += 2
    bar.advance(50)
    bar.note("3 skipped")
    assert bar.line() == "packing: 950 of 1,000, 25 img/s, 2 s left, 3 skipped"


def test_remarks_and_silence():
    stream = io.StringIO()
    Progress(3, "x", stream=stream).say("a remark")
    assert stream.getvalue() == "a remark\n"
    silent = Progress(3, "x", show=False, stream=stream)
    silent.say("nothing")
    silent.advance(3)
    assert stream.getvalue() == "a remark\n"


def test_work_without_a_known_end_is_counted(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    bar = Progress(None, "finding images", stream=io.StringIO())
    clock.now += 2
    bar.advance(5000)
    assert bar.line() == "finding images: 5,000, 2,500 img/s"


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 0


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_brief_bar_appears_late_and_leaves_nothing(monkeypatch, seconds):
    monkeypatch.setattr(progress, "_SECONDS_UNTIL_BRIEF", seconds)
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda _: os.terminal_size((80, 24)))
    stream = Terminal()
    with Progress(None, "finding images", brief=True, stream=stream) as bar:
        bar.advance(5000)
    shown = stream.getvalue()
    assert ("finding images" in shown) == (seconds == 0.0)
    assert shown.rpartition("\r")[2].strip() == ""


def test_a_status_line_is_written_over_on_a_terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with StatusLine() as tell:
        tell("one\x1b")
        tell.say("stays\n")
    assert stream.getvalue() == "\r\x1b[Kone\\x1b\r\x1b[Kstays\\n\n\r\x1b[K"


def test_a_status_line_is_rare_in_a_file(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 1e9)
    with StatusLine() as tell:
        tell("one")
        tell.say("stays")
    assert capsys.readouterr().err == "stays\n"
