"""Where a run writes: OUT, what lies beside it until it is done, and who may touch it."""

import errno
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from h5feed.errors import PackError, UsageError
from h5feed.packing.encode import Job, Record
from h5feed.packing.options import PackOptions
from h5feed.packing.summary import in_bytes
from h5feed.store.layout import FieldSpec

__all__ = ["Place", "check_out", "check_space", "lock", "refuse_existing"]

_SECONDS_FOR_LOCK = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """The files of one run."""

    out: Path
    """The finished file; nothing unfinished ever has this name."""

    @property
    def partial(self) -> Path:
        """The first field's pixels, in place; in the end it becomes `out`."""
        return self.out.with_name(self.out.name + ".partial")

    @property
    def journal(self) -> Path:
        """What of `partial` is safely on the disk."""
        return self.partial.with_name(self.partial.name + ".journal")

    def side(self, specs: Sequence[FieldSpec]) -> dict[str, Path]:
        """Return a file for each further field's pixels."""
        return {
            spec.name: self.partial.with_name(f"{self.partial.name}.{spec.name}")
            for spec in specs[1:]
        }

    def payloads(self, specs: Sequence[FieldSpec]) -> tuple[Path, ...]:
        """Return the file of each field's pixels."""
        return (self.partial, *self.side(specs).values())

    def begin(self, specs: Sequence[FieldSpec]) -> None:
        """Make the payload files, empty."""
        for path in self.payloads(specs):
            path.open("wb").close()

    def holds(self, job: Job, records: Sequence[Record]) -> bool:
        """Return whether what `records` speak of is there; PackError where a part of it is not."""
        if not self.partial.exists():
            # Whole, and gone from here: the run died after it had renamed `partial` to `out`.
            return self.out.exists() and bool(records) and records[-1].stop == len(job.source)
        for k, path in enumerate(self.payloads(job.specs)):
            need = sum(record.sizes[k] for record in records)
            if not path.exists() or path.stat().st_size < need:
                raise PackError(f"{path} lacks what its journal speaks of: --overwrite begins anew")
        return True

    def discard(self, specs: Sequence[FieldSpec]) -> None:
        """Remove what is unfinished."""
        skeleton = self.partial.with_name(self.partial.name + ".skeleton")  # finalize's
        for path in (*self.payloads(specs), skeleton, self.journal):
            path.unlink(missing_ok=True)


def check_out(place: Place, source: Path | None, options: PackOptions) -> None:
    """Refuse an OUT that cannot or must not be written, before any work is done."""
    out, folder = place.out, place.out.parent
    if not folder.is_dir():
        raise UsageError(f"OUT {out}: the folder {folder} does not exist: make it first")
    if out.is_dir():
        raise UsageError(
            f"OUT {out} is a folder: give the name of a file, such as {out / 'out.h5'}"
        )
    if source is not None and source.resolve() in out.resolve().parents:
        raise UsageError(
            f"OUT {out} lies inside SRC {source}: give a path outside the pictures' folder"
        )
    finishing = options.resume and place.journal.exists() and not place.partial.exists()
    if not finishing:
        refuse_existing(place, options)
    if place.partial.exists() and not (options.overwrite or options.resume):
        raise UsageError(
            f"{place.partial} is there, of a run that was interrupted or still goes on: --resume "
            "goes on with it, --overwrite begins anew"
        )


def refuse_existing(place: Place, options: PackOptions) -> None:
    """Refuse to replace a file that nobody asked to replace."""
    if place.out.exists() and not options.overwrite:
        raise UsageError(f"OUT {place.out} exists: give another name, or --overwrite to replace it")


def check_space(place: Place, job: Job) -> None:
    """Refuse to begin what cannot fit on the disk, however many pictures are skipped."""
    specs = job.specs
    if not all(spec.is_fixed for spec in specs):
        return
    # A further field is copied from its own file into OUT at the end.
    count = len(job.source) - job.options.skip_limit(len(job.source))
    need = count * sum(spec.item_bytes * (1 + (k > 0)) for k, spec in enumerate(specs))
    for path in place.payloads(specs):
        with suppress(OSError, AttributeError):  # st_blocks is POSIX
            need -= path.stat().st_blocks * 512
    free = shutil.disk_usage(place.out.parent).free
    if need > free:
        raise PackError(
            f"OUT {place.out} needs {in_bytes(need)} more, and {in_bytes(free)} are free there: "
            "free some, take a smaller --size, or --store yuv420 or jpeg"
        )


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock on `path`, made if need be: one run at a time may work on an OUT.

    Forked workers inherit it, so whoever gets it knows that no straggler of a killed run is
    still writing pixels. Without effect where the system has no flock.
    """
    with _locked(path) as file:
        try:
            yield
        finally:
            if os.fstat(file.fileno()).st_size == 0:  # the run was refused before it began
                path.unlink(missing_ok=True)


def _locked(path: Path) -> IO[bytes]:
    """Open `path` and lock it; again where the run waited for has removed it in the meantime."""
    while True:
        try:
            file = path.open("ab")
        except OSError as ex:
            raise PackError(f"cannot write {path}: {ex.strerror}") from ex
        try:
            _wait_for_lock(file.fileno(), path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _wait_for_lock(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    until = time.monotonic() + _SECONDS_FOR_LOCK
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as ex:
            if ex.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # a file system without locks
        if time.monotonic() > until:
            raise PackError(f"{path} is in use by another run: wait for it, or give another OUT")
        time.sleep(0.05)
