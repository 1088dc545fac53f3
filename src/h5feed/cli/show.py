"""show-h5: what a packed file holds, in words and as a contact sheet."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from h5feed.cli._common import check_target, run_command
from h5feed.disk import replaced
from h5feed.errors import UsageError
from h5feed.feed.facts import ChannelStats, channel_stats, file_facts
from h5feed.feed.files import PackedFiles
from h5feed.feed.sheet import contact_sheet
from h5feed.progress import Progress
from h5feed.store import read_index
from h5feed.text import counted, counted_labels, printable, printable_json, say

__all__ = ["main"]

_BAR = 40  # characters of the longest bar of the histogram
_LONGEST_NAME = 60  # characters of a class name beside it
_LONGEST_OPTIONS = 2000  # characters of the options of packing


@dataclass(frozen=True, kw_only=True)
class _ShowOptions:
    """Show what a packed file holds."""

    file: tyro.conf.Positional[Path]
    """The file to show."""
    sheet: Path | None = None
    """Write a contact sheet (PNG) with class names, true proportions restored."""
    images: int = 48
    """Images on the contact sheet, evenly from all classes."""
    stats: bool = False
    """Also compute mean and standard deviation of each channel (reads all images)."""
    classes: int = 20
    """Classes in the printed histogram; the JSON output has all."""
    json: bool = False
    """Print everything as one JSON object."""


def main(args: Sequence[str] | None = None) -> int:
    """Run show-h5; return its exit status."""
    return run_command(_ShowOptions, _show, prog="show-h5", args=args)


def _show(command: _ShowOptions) -> None:
    _check(command)
    if command.stats:
        pixels = PackedFiles([command.file]).reading()
        facts = file_facts(pixels.indexes[0]) | {"channel_stats": asdict(_stats(pixels))}
    else:  # nothing is decoded, so images may be of any size
        facts = file_facts(read_index(command.file))
    if command.sheet is not None:
        _write_sheet(command, command.sheet)
        facts["sheet"] = str(command.sheet)
    say(printable_json(facts) if command.json else _as_text(facts, command))


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


def _stats(pixels: PackedFiles) -> ChannelStats:
    with Progress(len(pixels), "statistics") as progress:
        return channel_stats(pixels, progress=progress.advance)


def _as_text(facts: dict[str, Any], command: _ShowOptions) -> str:
    lines = [
        printable(facts["path"]),
        f"  {counted(facts['items'], 'item')}, "
        + printable(counted_labels(facts["classes"], facts["targets"]), _LONGEST_OPTIONS)
        + f", {facts['file_bytes'] / 1e6:,.1f} MB on disk",
    ]
    for name, field in facts["fields"].items():
        lines.append(f"  /{name}: {printable(_field_text(field))}, {field['bytes'] / 1e6:,.1f} MB")
    height, width = facts["source_height"], facts["source_width"]
    options, skipped = (facts["provenance"].get(name) for name in ("options", "skipped"))
    lines += [
        f"  sources: height {_spread(height)}, width {_spread(width)} (min, median, max)",
        f"  fingerprint: {facts['fingerprint'][:16]}…",
        "  packed with: " + printable(printable_json(options), _LONGEST_OPTIONS),
    ]
    if isinstance(skipped, list) and skipped:
        lines.append(f"  skipped when packed: {len(skipped)} (--json lists them)")
    if command.stats:
        stats = facts["channel_stats"]
        lines.append(f"  mean {_channels(stats['mean'])}, std {_channels(stats['std'])} (0 to 1)")
    return "\n".join(lines + _histogram(facts["class_counts"], command.classes))


def _field_text(field: dict[str, Any]) -> str:
    size = f"{field['height']}x{field['width']}" if field["height"] else "own sizes"
    return (
        f"store={field['encoding']}, {size}, fit={field['fit']}, "
        f"{field['interpolation']}, {field['color_space']}"
    )


def _spread(values: dict[str, int]) -> str:
    return " / ".join(str(values[key]) for key in ("min", "median", "max"))


def _channels(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def _histogram(counts: dict[str, int], most: int) -> list[str]:
    """Bars of items by class, the first `most` classes of the file."""
    shown = [(printable(name, _LONGEST_NAME), count) for name, count in list(counts.items())[:most]]
    longest = max(len(name) for name, _ in shown)
    unit = max(counts.values()) / _BAR
    lines = [
        f"  {name:<{longest}}  {count:>9,}  {'█' * round(count / unit)}" for name, count in shown
    ]
    if more := len(counts) - len(shown):
        left = counted(more, "more class", "more classes")
        lines.append(f"  … and {left} (--classes N shows more)")
    return lines


if __name__ == "__main__":
    sys.exit(main())
