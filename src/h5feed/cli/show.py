"""show-h5: what a packed file holds, in words, as a contact sheet, and as files again."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from h5feed.cli._common import check_target, run_command
from h5feed.disk import replaced
from h5feed.errors import UsageError
from h5feed.feed.facts import ChannelStats, channel_stats, facts_in_words, file_facts
from h5feed.feed.files import PackedFiles
from h5feed.feed.sheet import contact_sheet
from h5feed.feed.unpack import Unpacked, unpack
from h5feed.jpeg import MAX_PIXELS
from h5feed.progress import Progress
from h5feed.text import printable_json, say

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class _ShowOptions:
    """Show what a packed file or a set holds."""

    file: tyro.conf.Positional[Path]
    """The file to show, or the folder of a set."""
    sheet: Path | None = None
    """Write a contact sheet (PNG) with class names, true proportions restored."""
    images: int = 48
    """Images on the contact sheet, evenly from all classes."""
    stats: bool = False
    """Also compute mean and standard deviation of each channel (reads all images)."""
    export: Path | None = None
    """Write the images (JPEG as they are stored, else PNG), masks and a manifest of labels and all
    fields into this folder, which is new or empty, and print the command that packs it again."""
    classes: int = 20
    """Classes in the printed histogram; the JSON output has all."""
    json: bool = False
    """Print everything as one JSON object."""


def main(args: Sequence[str] | None = None) -> int:
    """Run show-h5; return its exit status."""
    return run_command(_ShowOptions, _show, prog="show-h5", args=args)


def _show(command: _ShowOptions) -> None:
    _check(command)
    # where nothing is decoded, images may be of any size
    most = MAX_PIXELS if command.stats else sys.maxsize
    files = PackedFiles([command.file], max_pixels=most)
    facts = file_facts(files)
    exported = None if command.export is None else _export(command.file, command.export)
    if exported is not None:
        facts["export"] = asdict(exported)
    if command.stats:
        facts["channel_stats"] = asdict(_stats(files.reading()))
    if command.sheet is not None:
        _write_sheet(command, command.sheet)
        facts["sheet"] = str(command.sheet)
    say(printable_json(facts) if command.json else facts_in_words(facts, classes=command.classes))
    if exported is not None and not command.json:
        say(exported.in_words())


def _check(command: _ShowOptions) -> None:
    for name in ("images", "classes"):
        if (value := getattr(command, name)) < 1:
            raise UsageError(f"{name}={value} is too small: give 1 or more")
    if command.sheet is not None:
        check_target("--sheet", command.sheet, endings=(".png",), reads=(command.file,))


def _write_sheet(command: _ShowOptions, path: Path) -> None:
    sheet = contact_sheet(command.file, images=command.images)
    with replaced(Path(os.path.realpath(path))) as file:  # a link goes on leading to its file
        sheet.save(file, "PNG")


def _export(file: Path, folder: Path) -> Unpacked:
    files = PackedFiles([file]).reading()
    with Progress(len(files), "exporting") as progress:
        return unpack(files, folder, progress=progress.advance)


def _stats(files: PackedFiles) -> ChannelStats:
    with Progress(len(files), "statistics") as progress:
        return channel_stats(files, progress=progress.advance)


if __name__ == "__main__":
    sys.exit(main())
