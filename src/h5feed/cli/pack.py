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
    ray: Annotated[tuple[()] | tuple[str] | None, tyro.conf.arg(metavar="[ADDRESS]")] = None
    """Pack the shards of a set on a Ray cluster: the one at ADDRESS, or that this machine is in.
    All nodes must reach SRC and OUT under the same paths."""
    json: bool = False
    """Print the summary as one JSON object."""


def main(args: Sequence[str] | None = None) -> int:
    """Run pack-h5; return its exit status."""
    return run_command(_PackCommand, _pack, prog="pack-h5", args=args)


def _pack(command: _PackCommand) -> None:
    if command.ray is None:
        summary = pack_with(command.src, command.out, command.packing, progress=True)
    else:
        from h5feed.interop import ray

        address = command.ray[0] if command.ray else "auto"
        summary = ray.pack(
            command.src, command.out, command.packing, address=address, progress=True
        )
    say(summary.to_json() if command.json else str(summary))


if __name__ == "__main__":
    sys.exit(main())
