"""What a long measurement is doing, said on stderr."""

import sys
import time

from h5feed.text import printable, say

__all__ = ["Teller"]

_SECONDS_BETWEEN_LINES = 5.0


class Teller:
    """Says on stderr what is going on: one line written over on a terminal, else now and then."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if self._on_terminal:
            print(f"\r\x1b[K{printable(text)}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            say(text, sys.stderr)

    def say(self, text: str) -> None:
        """Write a line that stays."""
        clear = "\r\x1b[K" if self._on_terminal else ""
        print(f"{clear}{printable(text)}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Teller":
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
