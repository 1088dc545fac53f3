"""Plain files that are written: no links followed, every byte, and replaced whole or not at all."""

import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "create_file",
    "link_or_copy",
    "naming",
    "open_file",
    "rename_file",
    "replaced",
    "sync_file",
    "write_at",
]

# Whoever may write into the folder could have left a link or a named pipe under our name.
_OWN_FILE = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


_FICLONE = 0x40049409  # Linux' ioctl: share the blocks of another file
_COPY_BYTES = 8 << 20


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that takes the name `path` once it is written whole.

    It lies beside `path`, is brought to the disk, and renamed over it; after an error in the block
    it is deleted, and `path` is untouched. If `path` is a link, the link itself is replaced.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     target = Path(folder, "settings.json")
    ...     with replaced(target) as file:
    ...         _ = file.write(b"{}")
    ...     target.read_bytes(), os.listdir(folder)
    (b'{}', ['settings.json'])
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with os.fdopen(create_file(partial), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename_file(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def rename_file(path: Path, target: Path) -> None:
    """Give the file `path` the name `target`, in place of what has that name, and sync the folder.

    A sudden loss of power leaves the old file there or the new one.
    """
    path.replace(target)
    with suppress(OSError):  # not every file system lets a folder be opened or synced
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def link_or_copy(path: Path, target: Path) -> None:
    """Make `target`, which must not exist, hold what `path` does, at once where that can be.

    As blocks that both share until one is written to (btrfs, XFS), as a second name of the same
    file, or as a copy that is brought to the disk. Raises OSError.
    """
    target.unlink(missing_ok=True)
    if _share_blocks(path, target):
        return
    target.unlink(missing_ok=True)
    with suppress(OSError):  # another disk, or a file system without second names
        return os.link(path, target)
    with naming(target), path.open("rb") as source, os.fdopen(create_file(target), "wb") as copy:
        shutil.copyfileobj(source, copy, _COPY_BYTES)
        copy.flush()
        sync_file(copy.fileno(), target)


def _share_blocks(path: Path, target: Path) -> bool:
    if sys.platform != "linux":
        return False
    import fcntl

    with path.open("rb") as source:
        handle = create_file(target)
        try:
            fcntl.ioctl(handle, _FICLONE, source.fileno())
            return True
        except OSError:  # most file systems cannot
            return False
        finally:
            os.close(handle)


def create_file(path: Path) -> int:
    """Make an empty file under the name `path`, in place of what has that name; return a handle.

    What a link there leads to is not touched. Raises OSError.
    """
    path.unlink(missing_ok=True)
    return os.open(path, _OWN_FILE | os.O_CREAT | os.O_EXCL, 0o666)


def open_file(path: Path, *, create: bool = False) -> int:
    """Open a plain file for reading and writing, made if need be with `create`; return a handle.

    Raises OSError, also for a link: the caller wants a file of its own.
    """
    try:
        handle = os.open(path, _OWN_FILE | (os.O_CREAT if create else 0), 0o666)
    except OSError as ex:
        if ex.errno == errno.ELOOP:
            raise OSError(ex.errno, "it is a link, not a plain file: remove it", str(path)) from ex
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a plain file: remove it", str(path))
    return handle


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put `path` into an OSError that names no file: the system's know a handle only."""
    try:
        yield
    except OSError as ex:
        if ex.filename is None:
            ex.filename = str(path)
        raise


def write_at(handle: int, data: bytes | memoryview, at: int, path: Path) -> None:
    """Write all of `data` at byte `at` of an open file; raises OSError that names `path`."""
    left = memoryview(data).cast("B")
    with naming(path):
        while left:
            done = os.pwrite(handle, left, at)
            if not done:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            left, at = left[done:], at + done


def sync_file(handle: int, path: Path) -> None:
    """Bring what was written to the disk; raises OSError that names `path`."""
    with naming(path):
        getattr(os, "fdatasync", os.fsync)(handle)  # macOS has fsync alone
