"""What the system tells: the machine, the page cache, and what a process and its children cost.

Linux reads /proc. Elsewhere CPU seconds are the process's own and its finished children's, and
memory and bytes read are None: nothing there tells them without a privileged call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "Memory",
    "MemoryPeak",
    "cpu_seconds",
    "describe_machine",
    "evict",
    "files_below",
    "machine_facts",
    "memory",
    "read_bytes",
    "resident_share",
    "tree",
    "versions",
]

_PACKAGES = ("h5feed", "torch", "torchvision", "numpy", "h5py", "opencv-python-headless", "pillow")


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _disk(path: Path) -> dict[str, Any]:
    """Name and kind of the block device that holds `path`; empty where the system hides it."""
    try:
        device = path.stat().st_dev
        block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
        rotational = next(
            folder / "queue/rotational"
            for folder in (block, block.parent)
            if (folder / "queue/rotational").exists()
        )
        return {"device": block.name, "rotational": rotational.read_text().strip() == "1"}
    except (OSError, StopIteration):
        return {}


def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Versions of those of `packages` that are installed, and Python's."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine_facts(data: str | Path) -> dict[str, Any]:
    """Facts about this machine and the disk that holds `data`; nothing that names its owner."""
    from h5feed.system import available_cores, total_memory  # a rival has no h5feed beside it

    cpu = _cpuinfo()
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cores": available_cores(),
        "virtual": "hypervisor" in cpu.get("flags", "").split(),
        "memory_bytes": total_memory(),
        "system": f"{platform.system()} {platform.release()}",
        "disk": _disk(Path(data)),
    }


def describe_machine(facts: dict[str, Any]) -> str:
    """Say the machine in a few words: "2-core AMD EPYC VM, 24 GB"."""
    memory = facts["memory_bytes"]
    size = f", {memory / 1e9:.0f} GB" if memory else ""
    return f"{facts['cores']}-core {facts['cpu']}{' VM' if facts['virtual'] else ''}{size}"


def files_below(paths: Iterable[str | Path]) -> list[Path]:
    """Return the regular files among `paths` and, for folders, all files below them."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = path.rglob("*") if path.is_dir() else [path]
        found += sorted(file for file in inside if file.is_file())
    return found


def evict(files: Iterable[Path]) -> bool:
    """Ask the kernel to drop the files' pages; return False where it cannot be asked.

    Pages that some process has mapped stay: close every loader of a file first.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page not yet written cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def _resident_pages(file: Path, size: int) -> tuple[int, int]:
    """Pages of `file` in the cache, and all its pages, by mincore(2)."""
    with file.open("rb") as stream:
        # Private and writable only because ctypes takes an address from a writable buffer.
        mapping = mmap.mmap(stream.fileno(), size, flags=mmap.MAP_PRIVATE)
    flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    start = ctypes.c_char.from_buffer(mapping)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(
        ctypes.c_void_p(ctypes.addressof(start)),
        ctypes.c_size_t(size),
        ctypes.c_void_p(flags.ctypes.data),
    )
    del start  # the mapping cannot be closed while something points into it
    mapping.close()
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
    return int((flags & 1).sum()), len(flags)


def resident_share(files: Iterable[Path]) -> float | None:
    """Return what share of the files' pages the page cache holds, or None where it can't tell."""
    try:
        counted = [_resident_pages(file, size) for file in files if (size := file.stat().st_size)]
    except (OSError, AttributeError, ValueError):
        return None
    pages = sum(total for _, total in counted)
    return sum(held for held, _ in counted) / pages if pages else None


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
