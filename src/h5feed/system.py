"""How many cores and how much memory this process may use; how processes end."""

import ctypes
import errno
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = [
    "available_cores",
    "available_memory",
    "die_with",
    "exit_reason",
    "held_memory",
    "is_out_of_memory",
    "total_memory",
]

_ROOT = Path("/")
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "insufficient memory",
    "failed to allocate",
    "bad_alloc",
    "cudnn_status_alloc_failed",
    "cublas_status_alloc_failed",
)
"""What torch, OpenCV, libjpeg, Pillow and CUDA say."""


def available_cores(root: Path = _ROOT) -> int:
    """Return the cores of the affinity mask, or fewer where a cgroup's quota grants fewer.

    >>> 1 <= available_cores() <= os.cpu_count()
    True
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _quotas(root))]))


def total_memory(root: Path = _ROOT) -> int | None:
    """Return the machine's bytes of memory, or fewer where a cgroup grants fewer.

    None where the system does not tell.
    """
    total = _meminfo(root, "MemTotal")
    if total is None:
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return None
    return min([total, *(limit for limit, _ in _memory_limits(root))])


def available_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes that this process could still take; None where the system does not tell.

    Cached file pages that the system would give up count as free, in a cgroup too.
    """
    free = _meminfo(root, "MemAvailable")
    if free is None:
        return None
    return max(0, min([free, *(limit - used for limit, used in _memory_limits(root))]))


def held_memory(root: Path = _ROOT, *, peak: bool = False) -> int | None:
    """Return the bytes that this process holds, or held at most; None outside Linux.

    >>> held = held_memory()
    >>> held is None or held > 10**6
    True
    """
    return _kilobytes(root / "proc/self/status", "VmHWM" if peak else "VmRSS")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on a device or in the machine.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory")), is_out_of_memory(ValueError("no"))
    (True, False)
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(part in text for part in _OUT_OF_MEMORY)


def die_with(parent: int) -> None:
    """Have the system kill this process when the one that forked it dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def exit_reason(code: int | None) -> str:
    """Say how a process ended whose exit code is `code`, a negative one being a signal's.

    >>> exit_reason(-9), exit_reason(-7), exit_reason(3)
    ('SIGKILL, as when memory runs out', 'SIGBUS', 'exit status 3')
    """
    how = f"exit status {code}"
    if code is not None and code < 0:
        with suppress(ValueError):
            how = signal.Signals(-code).name
    return f"{how}, as when memory runs out" if code == -signal.SIGKILL else how


def _quotas(root: Path) -> Iterator[float]:
    """Yield the cores that each cgroup around this process grants, where it has a limit."""
    for group in _groups(root, "cpu"):
        words = _words(group / "cpu.max")  # version 2: quota and period in µs
        if not words:
            words = _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            yield int(words[0]) / int(words[1])


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of each cgroup around this process that has a limit."""
    for group in _groups(root, "memory"):
        for limit, used, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            words = _words(group / limit)[:1] + _words(group / used)[:1]
            if len(words) == 2 and all(word.isdigit() for word in words):
                stat = _words(group / "memory.stat")
                # Active ones too, as in MemAvailable: mapped packed files soon are.
                names = {prefix + "inactive_file", prefix + "active_file"}
                pairs = zip(stat[::2], stat[1::2], strict=False)
                reclaimable = sum(int(value) for name, value in pairs if name in names)
                yield int(words[0]), int(words[1]) - reclaimable


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those around it, versions 1 and 2.

    A limit anywhere above binds as well: `docker run --cpus` or a systemd slice sets it there.
    """
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):  # "4:cpu,cpuacct:/a/b", in version 2 "0::/a/b"
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" or controller in names.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for line in _lines(root / "proc/self/mountinfo"):  # proc(5): … root mount-point … - type …
        before, _, after = line.partition(" - ")
        kind, options = after.split(" ", 1)[0], after.rpartition(" ")[2].split(",")
        if kind not in paths or (kind == "cgroup" and controller not in options):
            continue
        top, mount = before.split(" ")[3:5]
        # A container may see only its own part of the tree, or the path from outside of it.
        inner = os.path.relpath(paths[kind], top)
        folder = root / mount.lstrip("/")
        yield folder
        if not inner.startswith(".."):
            for part in Path(inner).parts:
                folder /= part
                yield folder


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _meminfo(root: Path, name: str) -> int | None:
    return _kilobytes(root / "proc/meminfo", name)


def _kilobytes(path: Path, name: str) -> int | None:
    """Return the number of kB that a line of a file in /proc names, in bytes."""
    for line in _lines(path):
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None
