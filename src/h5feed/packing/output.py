"""Where a run writes: OUT, what lies beside it until it is done, and what must not be touched."""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from h5feed.disk import create_file
from h5feed.errors import PackError, UsageError
from h5feed.packing.encode import Job
from h5feed.packing.options import PackOptions
from h5feed.packing.summary import in_bytes
from h5feed.store.layout import MASKS, FieldSpec
from h5feed.store.write import head_bytes

__all__ = ["OutputPaths", "check_out", "check_space", "refuse_existing"]


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """The files of one run."""

    out: Path
    """The finished file; nothing unfinished ever has this name."""
    given: Path
    """OUT as the user wrote it: `out`, or a link that leads there."""

    @classmethod
    def of(cls, out: str | os.PathLike[str]) -> "OutputPaths":
        """Return the files for OUT. A link stays a link: what it leads to is made or replaced."""
        given = Path(out)
        return cls(Path(os.path.realpath(given)) if given.is_symlink() else given, given)

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

    def heads(self, specs: Sequence[FieldSpec]) -> tuple[int, ...]:
        """Return the byte in each of `payloads` at which its first item begins."""
        return (head_bytes(specs), *(0 for _ in specs[1:]))

    def begin(self, specs: Sequence[FieldSpec]) -> None:
        """Make the payload files, empty, in place of what has their names.

        The masks of an earlier run that was given up go, too, where this one has none.
        """
        with suppress(OSError):
            self.partial.with_name(f"{self.partial.name}.{MASKS}").unlink()
        for path in self.payloads(specs):
            os.close(create_file(path))

    def discard(self, specs: Sequence[FieldSpec]) -> None:
        """Remove what is unfinished, as far as that can be done."""
        for path in (*self.payloads(specs), self.journal):
            with suppress(OSError):
                path.unlink()


def check_out(paths: OutputPaths, source: Path | None, options: PackOptions) -> None:
    """Refuse an OUT that cannot or must not be written, before any work is done."""
    out, given, folder = paths.out, paths.given, paths.out.parent
    if out.is_symlink():
        raise UsageError(f"OUT {given} is a link that leads to itself: give another name")
    if not folder.is_dir():
        raise UsageError(f"OUT {given}: the folder {folder} does not exist: make it first")
    if out.is_dir():
        raise UsageError(
            f"OUT {given} is a folder: give the name of a file, such as {given / 'out.h5'}"
        )
    if out.exists() and not out.is_file():
        raise UsageError(f"OUT {given} is a device or a pipe: give the name of a file")
    if source is not None and source.resolve() in out.resolve().parents:
        raise UsageError(
            f"OUT {given} lies inside SRC {source}: give a path outside the images' folder"
        )
    finishing = options.resume and paths.journal.exists() and not paths.partial.exists()
    if not finishing:
        refuse_existing(paths, options)
    if os.path.lexists(paths.partial) and not (options.overwrite or options.resume):
        raise UsageError(
            f"{paths.partial} is there, of a run that was interrupted or still goes on: --resume "
            "goes on with it, --overwrite begins anew"
        )


def refuse_existing(paths: OutputPaths, options: PackOptions) -> None:
    """Refuse to replace a file, or to follow a link, that nobody asked to replace or follow."""
    if options.overwrite or not os.path.lexists(paths.given):
        return
    if not paths.out.exists():
        raise UsageError(
            f"OUT {paths.given} is a link to {paths.out}, which does not exist: give another "
            "name, or --overwrite to make that file"
        )
    raise UsageError(f"OUT {paths.given} exists: give another name, or --overwrite to replace it")


def check_space(paths: OutputPaths, job: Job) -> None:
    """Refuse to begin what cannot fit on the disk, however many images are skipped."""
    specs = job.specs
    if not all(spec.is_fixed for spec in specs):
        return
    # A further field is copied from its own file into OUT at the end.
    count = len(job.source) - job.options.skip_limit(len(job.source))
    need = count * sum(spec.item_bytes * (1 + (k > 0)) for k, spec in enumerate(specs))
    for path in paths.payloads(specs):
        with suppress(OSError):
            need -= path.stat().st_blocks * 512
    free = shutil.disk_usage(paths.out.parent).free
    if need > free:
        raise PackError(
            f"OUT {paths.given} needs {in_bytes(need)} more, and {in_bytes(free)} are free there: "
            "free some, take a smaller --size, or --store yuv420 or jpeg"
        )
