"""What a command prints: texts that a terminal can be trusted with, and numbers of things.

What a file or a folder is called, and what a packed file says of itself, may be anybody's: control
characters move the cursor and color the screen, bidirectional ones turn what is read around.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

__all__ = ["counted", "counted_labels", "in_bytes", "printable", "printable_json", "say"]

_LISTED = 20


def printable(text: str, most: int | None = None) -> str:
    """Return `text` with line ends, control characters and undecodable bytes escaped.

    With `most`, at most so many characters of it.

    >>> printable("a\\nb"), printable("a long name", most=6)
    ('a\\\\nb', 'a lon…')
    """
    if most is not None and len(text) > most:
        return printable(text[: most - 1]) + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON that reads back as the same, with such characters escaped in it."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print `text`, line by line, on `stream` (stdout)."""
    lines = "\n".join(map(printable, text.split("\n")))
    print(lines, file=stream or sys.stdout, flush=True)


def counted(number: int, one: str, many: str = "") -> str:
    """Return the number with its noun; `many` where that is not `one` and an s.

    >>> counted(1, "image"), counted(2000, "image"), counted(0, "class", "classes")
    ('1 image', '2,000 images', '0 classes')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def counted_labels(classes: int, targets: Sequence[str]) -> str:
    """Say what is to be learned.

    >>> counted_labels(2, ()), counted_labels(0, ("age", "height"))
    ('2 classes', '2 targets (age, height)')
    """
    if not targets:
        return counted(classes, "class", "classes") if classes else "no classes"
    names = [printable(name) for name in targets[:_LISTED]] + ["…"] * (len(targets) > _LISTED)
    return f"{counted(len(targets), 'target')} ({', '.join(names)})"


def in_bytes(number: int) -> str:
    """Return a number of bytes as people say it: 98.4 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
