"""merge-h5: shards into a set, sets and files into one."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from h5feed.cli._common import run_command
from h5feed.errors import UsageError
from h5feed.packing.merge import compact_set, join_sets, merge_set
from h5feed.text import say

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class _MergeOptions:
    """Make the index of a set, or one set of several.

    merge-h5 SET: checks that all shards are there, whole and of one packing, and writes the index.
    merge-h5 A B OUT: joins sets and files into a new set; shards are linked, or copied.
    merge-h5 --compact A [B ...] OUT: writes the items anew, into one file or with --shards into a
    new set; images keep their bytes.
    """

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SET ...")]
    """The folder of a set; or sets and files, and the set or file to make of them."""
    compact: bool = False
    """Write the items anew, into fewer, more or one file."""
    shards: str | None = None
    """With --compact: how many shards to make, or how large each, such as 256MB."""
    order: Literal["random", "source"] | None = None
    """With --shards: how items are dealt to them, as pack-h5 does; random is the default."""
    seed: int = 0
    """What order random is drawn with."""
    overwrite: bool = False
    """With --compact: replace OUT where it is a file."""
    json: bool = False
    """Print the result as one JSON object."""


def main(args: Sequence[str] | None = None) -> int:
    """Run merge-h5; return its exit status."""
    return run_command(_MergeOptions, _merge, prog="merge-h5", args=args)


def _merge(command: _MergeOptions) -> None:
    *sources, out = command.paths or (None,)
    if out is None or (command.compact and not sources):
        raise UsageError("paths: give a set, or sets and files and what to make of them")
    for name in ("shards", "order", "seed", "overwrite"):
        if (value := getattr(command, name)) and not command.compact:
            raise UsageError(f"{name}={value} is for writing items anew: give --compact as well")
    if command.compact:
        made = compact_set(
            sources,
            out,
            shards=command.shards,
            order=command.order,
            seed=command.seed,
            overwrite=command.overwrite,
            progress=True,
        )
    else:
        made = join_sets(sources, out, progress=True) if sources else merge_set(out, progress=True)
    say(made.to_json() if command.json else str(made))


if __name__ == "__main__":
    sys.exit(main())
