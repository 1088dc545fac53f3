"""What a packed file holds, in numbers a person asks for."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from h5feed.feed.files import PackedFiles
from h5feed.feed.image import image_reader
from h5feed.system import available_cores
from h5feed.text import counted, counted_labels, printable, printable_json

__all__ = ["ChannelStats", "channel_stats", "class_counts", "facts_in_words", "file_facts"]

_BLOCK = 64  # items a thread decodes and sums at a time
_BAR = 40  # characters of the longest bar of the histogram
_LONGEST_NAME = 60  # characters of a class name beside it
_LONGEST_OPTIONS = 2000  # characters of the options of packing


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """Mean and standard deviation of each channel, over all pixels, on the scale 0 to 1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    images: int
    """How many images they were taken from."""


def channel_stats(
    files: PackedFiles,
    *,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ChannelStats:
    """Mean and standard deviation of red, green and blue of the stored images.

    With `limit`, at most that many images are read, evenly spaced.
    `progress(n)` is called as n more images are done.
    """
    read = image_reader(files, "images", output="numpy", aspect="stored")
    count = len(files) if limit is None else min(limit, len(files))
    chosen = np.linspace(0, len(files) - 1, count).round().astype(np.int64)
    total = np.zeros((3, 3))  # pixels, sum and sum of squares, by channel
    with ThreadPoolExecutor(available_cores()) as pool:
        blocks = [chosen[at : at + _BLOCK] for at in range(0, count, _BLOCK)]
        found = pool.map(lambda block: _sums(files, read, block), blocks)
        for block, sums in zip(blocks, found, strict=True):
            total += sums
            if progress is not None:
                progress(len(block))
    mean = total[1] / total[0]
    std = np.sqrt(np.maximum(total[2] / total[0] - mean**2, 0))
    return ChannelStats(mean=_triple(mean / 255), std=_triple(std / 255), images=count)


def class_counts(files: PackedFiles) -> dict[str, int]:
    """Items of each class by name; "(none)" counts label −1, "(targets)" float targets.

    An item of several classes counts for each.
    """
    if files.label_shape and not files.classes:
        return {"(targets)": len(files)}
    if files.label_shape:
        has = files.labels > 0
        by_label = dict(enumerate(has.sum(axis=0).tolist()))
        none = int((~has.any(axis=1)).sum())
    else:
        # Not bincount: without classes a single label may be 10⁹.
        labels, counts = (array.tolist() for array in np.unique(files.labels, return_counts=True))
        by_label = dict(zip(labels, counts, strict=True))
        none = by_label.pop(-1, 0)
    found: dict[str, int] = {}
    if files.classes:
        for label, name in enumerate(files.classes):
            # ImageNet has two cranes, and two maillots.
            name = f"{name} (class {label})" if name in found else name
            found[name] = by_label.get(label, 0)
    else:
        found = {str(label): count for label, count in by_label.items()}
    return found | ({"(none)": none} if none else {})


def target_names(files: PackedFiles) -> list[str]:
    """Return the names of float targets, as packing noted them; their numbers where it did not."""
    if not files.label_shape or files.classes:
        return []
    (count,) = files.label_shape
    noted = files.provenance.get("targets")
    if isinstance(noted, list) and len(noted) == count:
        return [str(name) for name in noted]
    return [str(number) for number in range(count)]


def file_facts(files: PackedFiles) -> dict[str, Any]:
    """Return what `show-h5` tells of a file or a set, as JSON values."""
    sides = files.source_shapes
    return {
        "path": files.name,
        "items": len(files),
        "file_bytes": int(files.index.sizes.sum()),
        "classes": len(files.classes),
        "class_counts": class_counts(files),
        "targets_per_item": len(target_names(files)) or None,
        "targets": target_names(files),
        "shards": len(files.index.paths) if files.index.path else None,
        "generation": files.index.generation if files.index.path else None,
        "fields": {
            name: spec.attributes() | {"bytes": int(files.index.lengths[name].sum())}
            for name, spec in files.specs.items()
        },
        "source_height": _spread(sides[:, 0]),
        "source_width": _spread(sides[:, 1]),
        "provenance": files.provenance,
        "fingerprint": files.fingerprint,
    }


def _sums(
    files: PackedFiles, read: Callable[[int], Any], indices: np.ndarray[Any, np.dtype[np.int64]]
) -> Any:
    files.announce(indices, ["images"])
    sums = np.zeros((3, 3))
    for at in indices.tolist():
        image = read(at)
        count = image.shape[0] * image.shape[1]
        mean, std = (part.ravel() for part in cv2.meanStdDev(image))
        sums += count * np.stack([np.ones(3), mean, std**2 + mean**2])
    return sums


def _triple(values: Any) -> tuple[float, float, float]:
    red, green, blue = values.tolist()
    return red, green, blue


def _spread(values: Any) -> dict[str, int]:
    return {
        "min": int(values.min()),
        "median": int(np.median(values)),
        "max": int(values.max()),
    }


def facts_in_words(facts: dict[str, Any], *, classes: int) -> str:
    """Return the lines that `show-h5` prints of `file_facts`; a histogram of `classes` classes.

    Channel statistics are told where `facts` has them as "channel_stats".
    """
    lines = [
        printable(facts["path"]),
        f"  {counted(facts['items'], 'item')}, "
        + printable(counted_labels(facts["classes"], facts["targets"]), _LONGEST_OPTIONS)
        + f", {facts['file_bytes'] / 1e6:,.1f} MB on disk{_shards(facts)}",
    ]
    for name, field in facts["fields"].items():
        lines.append(f"  /{name}: {printable(_field_text(field))}, {field['bytes'] / 1e6:,.1f} MB")
    height, width = facts["source_height"], facts["source_width"]
    options, skipped = (facts["provenance"].get(name) for name in ("options", "skipped"))
    lines += [
        f"  sources: height {_three(height)}, width {_three(width)} (min, median, max)",
        f"  fingerprint: {facts['fingerprint'][:16]}…",
        "  packed with: " + printable(printable_json(options), _LONGEST_OPTIONS),
    ]
    if isinstance(skipped, list) and skipped:
        lines.append(f"  skipped when packed: {len(skipped)} (--json lists them)")
    if (stats := facts.get("channel_stats")) is not None:
        lines.append(f"  mean {_channels(stats['mean'])}, std {_channels(stats['std'])} (0 to 1)")
    return "\n".join(lines + _histogram(facts["class_counts"], classes))


def _shards(facts: dict[str, Any]) -> str:
    if facts["shards"] is None:
        return ""
    return f" in {counted(facts['shards'], 'shard')} (generation {facts['generation']})"


def _field_text(field: dict[str, Any]) -> str:
    size = f"{field['height']}x{field['width']}" if field["height"] else "own sizes"
    return (
        f"store={field['encoding']}, {size}, fit={field['fit']}, "
        f"{field['interpolation']}, {field['color_space']}"
    )


def _three(values: dict[str, int]) -> str:
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
