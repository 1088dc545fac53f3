"""Progress of long work: a bar with rate and ETA on a terminal, plain lines elsewhere."""

import os
import sys
import time
from typing import TextIO

from tqdm import tqdm

from h5feed.text import printable, say

__all__ = ["Progress", "StatusLine"]

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_UNTIL_BRIEF = 1.0
_WIPE = "\r\x1b[K"  # back to the first column, and erase to the end of the line


class _Bar(tqdm):  # type: ignore[type-arg]
    """tqdm without its monitor thread: whoever forks workers beside a bar must have no threads."""

    monitor_interval = 0


class Progress:
    """Shows how far a piece of work is, on stderr; silent with `show=False`.

    A context manager: what was done is told by `advance`, a remark gets a line of its own by
    `say`, and `note` sets the short text behind the numbers. In a log file or a pipe a line is
    written every few seconds and none when the work is over sooner. `total=None` counts work
    whose end is not known. A `brief` bar appears after a second and is wiped at the end.

    >>> with Progress(1000, "packing") as bar:
    ...     bar.advance(250)
    ...     bar.line()
    'packing: 250 of 1,000, ... img/s, ... s left'
    """

    def __init__(
        self,
        total: int | None,
        what: str,
        *,
        unit: str = "img",
        show: bool = True,
        done: int = 0,
        brief: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.total, self.what, self.unit, self.done = total, what, unit, done
        self._stream = (stream or sys.stderr) if show else None
        self._first, self._began = done, time.monotonic()
        self._last_line = self._began
        self._note = ""
        self._bar = self._open_bar(brief)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int = 1) -> None:
        """Count `count` more units as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._stream is not None and self._is_time():
            say(self.line(), self._stream)

    def say(self, text: str) -> None:
        """Write one line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write("\n".join(map(printable, text.split("\n"))), file=self._stream)
        elif self._stream is not None:
            say(text, self._stream)

    def note(self, text: str) -> None:
        """Set the short text shown behind the numbers."""
        self._note = text
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def line(self) -> str:
        """Return the state in words, as the plain lines have it."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = (self.done - self._first) / seconds
        total = left = ""
        if self.total is not None:
            total = f" of {self.total:,}"
            left = f", {(self.total - self.done) / rate:.0f} s left" if rate else ""
        note = f", {self._note}" if self._note else ""
        return f"{self.what}: {self.done:,}{total}, {rate:,.0f} {self.unit}/s{left}{note}"

    def _open_bar(self, brief: bool) -> "_Bar | None":
        if self._stream is None or not self._stream.isatty():
            return None
        # Some containers' terminals say that they are 0 columns wide; tqdm would show nothing.
        has_width = os.get_terminal_size(self._stream.fileno()).columns > 0
        return _Bar(
            total=self.total,
            desc=self.what,
            unit=self.unit,
            initial=self.done,
            file=self._stream,
            dynamic_ncols=has_width,
            ncols=None if has_width else 80,
            smoothing=0.05,
            leave=not brief,
            delay=_SECONDS_UNTIL_BRIEF if brief else 0,
        )

    def _is_time(self) -> bool:
        now = time.monotonic()
        if now - self._last_line < _SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return True


class StatusLine:
    """Says on stderr what is going on: one line written over on a terminal, else now and then.

    A context manager, which wipes the line at its end; for work that has steps but no count.
    """

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        """Say what is done now."""
        if self._on_terminal:
            self._write(_WIPE + printable(text))
        elif time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            self._write(printable(text) + "\n")

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self._write((_WIPE if self._on_terminal else "") + printable(text) + "\n")

    def __enter__(self) -> "StatusLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            self._write(_WIPE)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
