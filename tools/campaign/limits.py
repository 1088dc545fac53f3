"""Too little of something: disk, inodes, file size, descriptors, memory, a place to print to."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from cases import Case, Wrong, limit_memory
from kills import check_alone, check_out
from material import Kind, sha256

__all__ = ["can_mount", "full_disk", "limited_packing", "limited_reading"]

_CLONE_NEWNS, _CLONE_NEWUSER, _MS_PRIVATE_ALL = 0x00020000, 0x10000000, 0x44000


def limited_packing(case: Case) -> None:
    """Packing with too little of something: done right, or a sentence and then resumed."""
    kind, out = case.kind(), case.out()
    limit = case.random.choice(
        [_file_size, _descriptors, _memory, _no_temporary_folder, _full_stdout]
    )
    before = limit(case, kind.path.stat().st_size)
    _pack_within(case, kind, out, before)


def full_disk(case: Case) -> None:
    """Packing onto a disk without room or inodes: done right, or a sentence and then resumed."""
    kind = case.kind()
    room = case.folder / "disk"
    room.mkdir()
    size, side = kind.path.stat().st_size, kind.path.stat().st_size if "masks" in kind.name else 0
    space = case.random.choice([case.random.randint(1, 2 * size + side), 3 * size + (4 << 20)])
    inodes = case.random.choice([0, 0, 0, 2, 3, 4, 5, 6])
    _mount(room, f"size={space},nr_inodes={inodes}")
    case.note(f"a disk of {space} bytes and {inodes} inodes (0: enough)")
    if case.random.random() < 0.3:
        tempfile.tempdir = str(room)
    out = room / "x.h5"
    result = case.run("pack-h5", *kind.args, out, "--workers", case.workers())
    check_out(kind, out, result)
    if result.status and "nothing was kept" in result.err and (left := list(room.iterdir())):
        raise Wrong(f"nothing was kept, it says, and there are {left}")
    tempfile.tempdir = None
    _remount(room, f"size={8 * size + (16 << 20)},nr_inodes=0")
    _finish(case, kind, out, done=result.status == 0)


def limited_reading(case: Case) -> None:
    """Commands that read under limits: the answer they give without, or a sentence."""
    kind = case.kind()
    program = case.random.choice(["check-h5", "show-h5"])
    limit = case.random.choice([_file_size, _descriptors, _memory, _full_stdout])
    args: list[object] = [kind.path, "--json"]
    sheet = case.folder / "sheet.png"
    if program == "show-h5" and case.random.random() < 0.5:
        args += ["--sheet", sheet]
    free = case.run(program, *args)
    if sheet.exists():
        sheet.unlink()
    result = case.run(program, *args, before=limit(case, 100_000))
    if result.status == 0 and limit is not _full_stdout and result.out != free.out:
        raise Wrong(f"{program} gives another answer where there is little of something")
    if program == "check-h5" and '"damaged": [{' in result.out:
        raise Wrong("check-h5 calls items damaged where there is little of something")
    if result.status and sheet.exists() and limit is not _full_stdout:
        raise Wrong("a contact sheet is there, of a command that failed")


def _pack_within(case: Case, kind: Kind, out: Path, before: Callable[[], None]) -> None:
    result = case.run("pack-h5", *kind.args, out, "--workers", case.workers(), before=before)
    if result.status == 0 and sha256(out) != kind.sha256:
        raise Wrong("packing with too little of something exits with 0, and gives other bytes")
    check_out(kind, out, result)
    _finish(case, kind, out, done=out.exists())


def _finish(case: Case, kind: Kind, out: Path, *, done: bool) -> None:
    """Go on without the limit."""
    if done:
        check_alone(out)
        return
    again = case.run("pack-h5", *kind.args, out, "--resume", "--workers", case.workers())
    check_out(kind, out, again, done=True)


# Limits: each returns what the command calls in its own process ---------------------------------


def _file_size(case: Case, size: int) -> Callable[[], None]:
    most = case.random.choice([0, 1, 4096, case.random.randint(0, 2 * size)])
    case.note(f"files of at most {most} bytes")
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def _descriptors(case: Case, size: int) -> Callable[[], None]:
    more = case.random.randint(0, 24)
    case.note(f"{more} more descriptors than there are")

    def limit() -> None:
        most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    return limit


def _memory(case: Case, size: int) -> Callable[[], None]:
    # At least 16 MB: Python waits for ever for a thread whose first allocation fails.
    more = case.random.choice([case.random.randint(16, 64), case.random.randint(16, 700)]) << 20
    case.note(f"{more} more bytes of memory than are taken")
    return lambda: limit_memory(more)


def _no_temporary_folder(case: Case, size: int) -> Callable[[], None]:
    def limit() -> None:
        os.environ["TMPDIR"] = "/nonexistent"
        tempfile.tempdir = None
        tempfile._candidate_tempdir_list = lambda: ["/nonexistent"]  # type: ignore[attr-defined]

    return limit


def _full_stdout(case: Case, size: int) -> Callable[[], None]:
    return lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


# Disks of our own -------------------------------------------------------------------------------


def _mount(room: Path, options: str) -> None:
    """Mount an empty disk in memory that this process alone, and its children, see."""
    libc = ctypes.CDLL(None, use_errno=True)
    new = _CLONE_NEWNS if os.geteuid() == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    if libc.unshare(new) or libc.mount(b"none", b"/", None, _MS_PRIVATE_ALL, None):
        raise OSError(ctypes.get_errno(), "no mount namespace of its own")
    _remount(room, options, flags=0)


def _remount(room: Path, options: str, flags: int = 32) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(room), b"tmpfs", flags, options.encode()):
        raise OSError(ctypes.get_errno(), "cannot mount", str(room))


@cache
def can_mount() -> bool:
    """Return whether this user may mount disks here; tried in a process of its own."""
    child = os.fork()
    if not child:
        status = 1
        try:
            with tempfile.TemporaryDirectory() as room:
                _mount(Path(room), "size=64k")
                ctypes.CDLL(None).umount(os.fsencode(room))
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
