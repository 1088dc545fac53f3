"""What tells a feed which pass comes, wherever DALI runs it."""

from __future__ import annotations

import json
import os
import weakref
from typing import NamedTuple

from h5feed.errors import UsageError

__all__ = ["Agenda", "Pass"]

_ENTRY = 256  # bytes
_LEFT = b"!"


class Pass(NamedTuple):
    """One pass over an epoch."""

    seed: int
    epoch: int
    start: int
    """Position to begin at."""


class Agenda:
    """The passes that a pipeline makes, each noted before DALI asks for its first batch.

    DALI tells a feed the numbers of pass and batch, and no more; nor can it leave a pass before
    the feed ends it. So passes are written into a file in memory, which worker processes read
    through /proc: gone with this process, however that ends.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("h5feed-agenda")
        self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        weakref.finalize(self, os.close, self._fd)

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)

    def note(self, number: int, which: Pass) -> None:
        """Write down what pass `number` is."""
        entry = json.dumps(which).encode()
        if len(entry) > _ENTRY - 1:
            raise UsageError(f"seed={which.seed} has more digits than DaliLoader can hand on")
        os.pwrite(self._fd, entry.rjust(_ENTRY), number * _ENTRY)

    def leave(self, number: int) -> None:
        """End pass `number` where it is."""
        os.pwrite(self._fd, _LEFT, number * _ENTRY)

    def read(self, number: int) -> Pass | None:
        """Return what pass `number` is; None where it has been left."""
        entry = os.pread(self._fd, _ENTRY, number * _ENTRY)
        return None if entry.startswith(_LEFT) else Pass(*json.loads(entry))
