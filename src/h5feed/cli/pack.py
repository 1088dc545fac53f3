"""pack-h5: a folder of images into one HDF5 file."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from h5feed.cli._common import run_command
from h5feed.packing import PackOptions, pack_with
from h5feed.text import say

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class _PackCommand:
    """Pack a folder of images into one HDF5 file.

    Subfolders of SRC are classes (SRC/cat/1.jpg); a folder of images alone has none. SRC may also
    be tar files (WebDataset) or parquet files with images: one, a pattern, or their folder.
    """

    src: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """Folder of images, or tar or parquet files: 'train-{000..146}.tar', 'data/train-*.parquet'."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT.h5")]
    """File to make; with --shards the folder of a set."""
    packing: PackOptions = field(default_factory=PackOptions)
    """How images are packed."""
    json: bool = False
    """Print the summary as one JSON object."""


def main(args: Sequence[str] | None = None) -> int:
    """Run pack-h5; return its exit status."""
    return run_command(_PackCommand, _pack, prog="pack-h5", args=args)


def _pack(command: _PackCommand) -> None:
    summary = pack_with(command.src, command.out, command.packing, progress=True)
    say(summary.to_json() if command.json else str(summary))


if __name__ == "__main__":
    sys.exit(main())
