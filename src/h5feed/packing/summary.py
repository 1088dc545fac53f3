"""What a run of packing says of itself in the end."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from h5feed.store.layout import FieldSpec
from h5feed.text import counted, counted_labels, in_bytes

__all__ = ["PackSummary", "describe_fit", "label_numbers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSummary:
    """What was packed; `str()` of it is what `pack-h5` prints.

    >>> from h5feed import pack
    >>> summary = pack("images", "summary.h5", size=64, num_workers=0)
    >>> summary.items, summary.classes, summary.skipped
    (24, 2, ())
    >>> print(str(summary).splitlines()[0])
    summary.h5: 24 images, 2 classes, ... kB from ... kB of files
    """

    out: str
    items: int
    """Images in the file."""
    classes: int
    targets: tuple[str, ...]
    """The names of the numbers to predict; their places where they have no names."""
    resumed: int
    """Images that an earlier, interrupted run had looked at already."""
    bytes_in: int
    """Bytes of the packed images' files; 0 where the source was a dataset."""
    bytes_out: int
    """Bytes of the packed file."""
    seconds: float
    images_per_second: float
    """Over the images of this run."""
    skipped: tuple[tuple[str, str], ...]
    """(key, reason) of each image that was skipped."""
    skipped_by_reason: dict[str, int]
    fit: str
    """What --fit did, in words."""
    boxes_left_out: int = 0
    """Boxes of these images that have less than a pixel in what is stored of them."""
    shards: int = 0
    """Shards of a set, or of this part of one, in which the images are; 0 for one file."""
    missing: tuple[str, ...] = ()
    """The set's shards that other parts have yet to make; its index waits for them."""

    def to_json(self) -> str:
        """Return the summary as one JSON object."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields)

    def __str__(self) -> str:
        size = f"{in_bytes(self.bytes_out)}"
        if self.bytes_in:
            size += f" from {in_bytes(self.bytes_in)} of files"
        where = f" in {counted(self.shards, 'shard')}" if self.shards else ""
        lines = [
            f"{self.out}: {counted(self.items, 'image')}{where}, "
            + f"{counted_labels(self.classes, self.targets)}, {size}",
            f"{self.seconds:.1f} s"
            + (f", {self.images_per_second:,.0f} img/s" if self.images_per_second else "")
            + (f" ({self.resumed:,} were done before)" if self.resumed else ""),
            self.fit,
        ]
        if self.boxes_left_out:
            said = counted(self.boxes_left_out, "box", "boxes")
            lines.append(f"left out, with less than a pixel in the stored images: {said}")
        if self.skipped:
            lines.append(f"{counted(len(self.skipped), 'image')} skipped:")
            lines += [f"  {count:,} × {why}" for why, count in self.skipped_by_reason.items()]
        if self.missing:
            lines.append(
                f"not in the index yet, {counted(len(self.missing), 'shard')} still to come: the "
                f"last part writes it, or merge-h5 {self.out}"
            )
        return "\n".join(lines)


def label_numbers(classes: Sequence[str], labels: npt.NDArray[Any] | None) -> tuple[str, ...]:
    """Return the numbers of targets that have no names."""
    if labels is None or labels.ndim == 1 or classes:
        return ()
    return tuple(map(str, range(labels.shape[1])))


def describe_fit(specs: Sequence[FieldSpec], source_shapes: np.ndarray[Any, Any]) -> str:
    """Say what became of the images' sizes; `source_shapes` is (N, 2), height and width."""
    images = specs[0]
    height, width = (int(side) for side in np.median(source_shapes, axis=0))
    if images.encoding == "original":
        return f"original: the JPEG files' own bytes, median {width}x{height}"
    begin = f"{images.fit}: {width}x{height} (median sides) → "
    if images.fit == "keep":
        return begin + f"short side {images.height}, proportions kept"
    begin += f"{images.width}x{images.height}"
    if images.fit != "stretch":
        return begin + {"crop": ", centre cut out", "pad": ", letterboxed"}[images.fit]
    ratios = source_shapes[:, 1] * images.height / (source_shapes[:, 0] * images.width)
    changed = np.count_nonzero(~np.isclose(ratios, 1))
    if not changed:
        return begin
    whose = "" if changed == len(ratios) else f" of {changed:,} of {len(ratios):,} images"
    return (
        f"{begin}: proportions{whose} change; H5Loader undoes that in its crops. Other code: "
        'H5Dataset(..., aspect="source"), or pack with --fit keep'
    )
