"""What a process and all its children cost: CPU seconds, memory, bytes from the disk.

Linux reads /proc. Elsewhere CPU seconds are the process's own and its finished children's, and
memory and bytes read are None: nothing there tells them without a privileged call.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Memory", "MemoryPeak", "cpu_seconds", "memory", "read_bytes", "tree"]

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a process tree in bytes, pages shared between its processes counted once."""

    private: int
    """Anonymous and shared memory (Pss_Anon + Pss_Shmem): what nobody else can use."""
    mapped: int
    """Pages of mapped files (Pss_File): page cache, given back when memory runs short."""


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:
            continue  # the thread ended meanwhile
    return found


def tree(pid: int | None = None) -> list[int]:
    """Return `pid` (default: this process) and its living descendants."""
    pids = [os.getpid() if pid is None else pid]
    if _PROC.is_dir():
        for parent in pids:
            pids += _children(parent)
    return pids


def _stat_seconds(pid: int) -> float:
    """User and system time of one process and of its children that ended."""
    try:
        # The command's name may hold blanks and brackets: the fields begin after the last one.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU seconds used so far by this process and its children, living and ended.

    The process's own part is exact; the others' come in ticks of 10 ms.
    """
    own = os.times()
    living = sum(_stat_seconds(pid) for pid in tree()[1:])
    return own.user + own.system + own.children_user + own.children_system + living


def _fields(path: Path, names: tuple[str, ...]) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))


def memory() -> Memory | None:
    """Return the memory this process and its descendants hold now, or None off Linux."""
    if not (_PROC / "self/smaps_rollup").exists():
        return None
    rollups = [_PROC / str(pid) / "smaps_rollup" for pid in tree()]
    return Memory(
        private=1024 * sum(_fields(path, ("Pss_Anon:", "Pss_Shmem:")) for path in rollups),
        mapped=1024 * sum(_fields(path, ("Pss_File:",)) for path in rollups),
    )


def read_bytes() -> int | None:
    """Bytes that this process and its children had fetched from a disk, or None off Linux.

    Counted by the kernel where the page cache misses, so reads through a mapping count too.
    """
    if not (_PROC / "self/io").exists():
        return None
    return sum(_fields(_PROC / str(pid) / "io", ("read_bytes:",)) for pid in tree())


class MemoryPeak:
    """The highest memory seen between `__enter__` and `__exit__`, looked at every `every` s."""

    def __init__(self, every: float = 0.05) -> None:
        self.peak = memory()
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _look(self) -> None:
        now = memory()
        if now is not None and self.peak is not None and now.private > self.peak.private:
            self.peak = now

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            self._look()

    def __enter__(self) -> MemoryPeak:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
