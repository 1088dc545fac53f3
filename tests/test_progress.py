import io

from h5feed import progress
from h5feed.progress import Progress


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
