"""One block of images, read, decoded, sized and encoded, and the facts that are stored of each."""

import errno
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from h5feed.errors import PackError
from h5feed.jpeg import MAX_JPEG_SIDE, encode_jpeg, restart_segments, rgb_to_nv12
from h5feed.packing.decode import TOO_LARGE, DecodeError, decode_rgb
from h5feed.packing.items import ImageSource
from h5feed.packing.options import PackOptions
from h5feed.packing.resize import Box, fit_image, fit_mask
from h5feed.packing.sources import DatasetSource, Label
from h5feed.store.layout import FieldSpec, payload_names, segment_offsets
from h5feed.system import is_out_of_memory

__all__ = [
    "BlockResult",
    "Job",
    "Payload",
    "Shard",
    "Skip",
    "encode_block",
    "payload_sizes",
    "row_type",
]

Pixels = npt.NDArray[np.uint8]
Payload = bytes | memoryview
_JPEG_MAGIC = b"\xff\xd8\xff"
# What the system lacks, not the file: to skip the file would be to lose a good image.
_OF_THE_SYSTEM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS)


@dataclass(frozen=True, slots=True)
class Shard:
    """What a shard says of itself and of its place in its set."""

    facts: dict[str, Any]
    """Kept in the provenance under "set"."""
    positions: npt.NDArray[np.int64]
    """(N,) where each of its images stands in the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every worker knows: where images come from and what they become."""

    source: ImageSource | DatasetSource
    specs: tuple[FieldSpec, ...]
    options: PackOptions
    shard: Shard | None = None
    """Which shard of a set these images make; None for a file of its own."""

    def name(self, index: int) -> str:
        """Return the key of image `index` for people to read."""
        return os.fsdecode(self.source.key(index))


class Skip(NamedTuple):
    """An image that could not be packed, and why."""

    item: int
    reason: str
    """One of a few fixed texts, to count by."""
    detail: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult:
    """All that is stored of the images `start` ≤ index < `stop`, apart from their pixels."""

    start: int
    stop: int
    rows: npt.NDArray[np.void]
    """One row of `row_type` per packed image."""
    skips: tuple[Skip, ...]
    """The images that could not be packed."""
    sizes: tuple[int, ...]
    """Bytes of payload, one number for each of `payload_names`."""
    source_bytes: int
    """Bytes of the packed images' files."""
    labels: list[Label] | None = None
    """Those of the packed images, where the source is a dataset: it shows them with its items."""


@dataclass(frozen=True, slots=True)
class _Item:
    payloads: tuple[Payload, ...]
    source_shape: tuple[int, int]
    shape: tuple[int, int]
    box: Box
    source_bytes: int
    label: Label | None = None


def row_type(specs: Sequence[FieldSpec]) -> np.dtype[np.void]:
    """Return the columns kept per item: 16 bytes for fixed fields, at most 32 for others."""
    images = specs[0]
    columns: list[Any] = [("index", "<u4"), ("crc32", "<u4"), ("source_shape", "<i4", (2,))]
    if not images.is_fixed:
        columns += [("bytes", "<i8"), ("shape", "<i4", (2,))]
    if images.fit == "pad":
        columns += [("box", "<i4", (4,))]
    return np.dtype(columns)


def payload_sizes(
    specs: Sequence[FieldSpec], rows: npt.NDArray[np.void]
) -> list[npt.NDArray[np.int64]]:
    """Return the bytes (int64, N) that the items in `rows` have of each of `payload_names`."""
    sizes: list[npt.NDArray[np.int64]] = []
    for spec in specs:
        if spec.is_fixed:
            sizes.append(np.full(len(rows), spec.item_bytes, np.int64))
        elif spec.is_encoded:
            sizes.append(rows["bytes"].astype(np.int64))
        else:
            sizes.append(spec.pixel_bytes(*rows["shape"].astype(np.int64).T))
        if len(spec.payloads) > 1:
            sizes.append(np.diff(segment_offsets(rows["shape"])))
    return sizes


def encode_block(
    job: Job, start: int, stop: int, skips_left: int, current: Any = None
) -> tuple[BlockResult, list[list[Payload]]]:
    """Encode images `start` to `stop`; return what is known of them, and their payloads.

    These are a list for each of `payload_names`.

    One skip more than `skips_left` ends the block there: the run will stop at that image.
    `current`, a one-element sequence, is told the index at hand: should a decoder take the
    whole process down, the file can still be named.
    """
    items: list[tuple[int, _Item]] = []
    skips: list[Skip] = []
    for index in range(start, stop):
        if len(skips) > skips_left:
            stop = index
            break
        if current is not None:
            current[0] = index
        try:
            items.append((index, _encode(job, index)))
        except DecodeError as ex:
            skips.append(Skip(index, ex.reason, ex.detail))
        except Exception as ex:
            if is_out_of_memory(ex):
                raise PackError(
                    f"out of memory at {job.name(index)}: fewer --workers or a smaller "
                    "--max-pixels need less"
                ) from ex
            if not isinstance(ex, OSError):
                raise
            if ex.errno in _OF_THE_SYSTEM:
                raise PackError(f"cannot read {job.name(index)}: {ex.strerror}") from ex
            skips.append(Skip(index, "cannot be read", ex.strerror or str(ex)))
    number = len(payload_names(job.specs))
    payloads = [[item.payloads[k] for _, item in items] for k in range(number)]
    result = BlockResult(
        start=start,
        stop=stop,
        rows=_rows(job.specs, items),
        skips=tuple(skips),
        sizes=tuple(sum(map(len, field)) for field in payloads),
        source_bytes=sum(item.source_bytes for _, item in items),
        labels=_labels(job, [item.label for _, item in items]),
    )
    return result, payloads


def _labels(job: Job, labels: list[Label | None]) -> list[Label] | None:
    if isinstance(job.source, DatasetSource):
        return [label for label in labels if label is not None]
    return None


def _encode(job: Job, index: int) -> _Item:
    images = job.specs[0]
    if images.encoding == "original":
        return _original(job, index)
    rgb, size, label = _load(job, index)
    pixels, box = fit_image(rgb, images, background=job.options.background)
    payloads = _encode_pixels(job, pixels)
    if len(job.specs) > 1:
        payloads += (_mask(job, index, (rgb.shape[0], rgb.shape[1])),)
    shape = (pixels.shape[0], pixels.shape[1])
    return _Item(payloads, (rgb.shape[0], rgb.shape[1]), shape, box, size, label)


def _load(job: Job, index: int) -> tuple[Pixels, int, Label | None]:
    if isinstance(job.source, DatasetSource):
        rgb, label = job.source.load(index)
        return rgb, 0, label
    options = job.options
    data = job.source.read(index, max_pixels=options.max_pixels)
    rgb = decode_rgb(data, background=options.background, max_pixels=options.max_pixels)
    return rgb, len(data), None


def _encode_pixels(job: Job, pixels: Pixels) -> tuple[Payload, ...]:
    encoding = job.specs[0].encoding
    if encoding == "yuv420":
        return (_flat(rgb_to_nv12(pixels)),)
    if encoding == "jpeg":
        data = encode_jpeg(pixels, job.options.quality)
        return data, restart_segments(data).tobytes()
    return (_flat(pixels),)


def _mask(job: Job, index: int, shape: tuple[int, int]) -> Payload:
    assert isinstance(job.source, ImageSource)
    mask = job.source.mask(index, max_pixels=job.options.max_pixels)
    if mask is None:
        raise DecodeError("no mask")
    if mask.shape != shape:
        sizes = f"mask {mask.shape[0]}x{mask.shape[1]}, image {shape[0]}x{shape[1]}"
        raise DecodeError("mask of another size", sizes)
    return _flat(fit_mask(mask, job.specs[0], fill=job.options.mask_fill))


def _original(job: Job, index: int) -> _Item:
    """Return a JPEG file's own bytes, decoded once to know that they can be."""
    assert isinstance(job.source, ImageSource)
    options = job.options
    data = job.source.read(index, max_pixels=options.max_pixels)
    is_jpeg = data.startswith(_JPEG_MAGIC)
    if data and not is_jpeg and options.non_jpeg == "refuse":
        raise PackError(
            f"{job.name(index)} is not a JPEG file, and store=original keeps JPEG bytes: "
            "--non-jpeg reencode makes such files JPEG, --store jpeg all of them"
        )
    rgb = decode_rgb(data, background=options.background, max_pixels=options.max_pixels)
    shape = (rgb.shape[0], rgb.shape[1])
    if not is_jpeg and max(shape) > MAX_JPEG_SIDE:
        raise DecodeError(
            TOO_LARGE, f"{shape[0]}x{shape[1]}, and JPEG holds {MAX_JPEG_SIDE} a side"
        )
    payload = data if is_jpeg else encode_jpeg(rgb, options.quality)
    return _Item((payload,), shape, shape, (0, 0, *shape), len(data))


def _rows(specs: Sequence[FieldSpec], items: list[tuple[int, _Item]]) -> npt.NDArray[np.void]:
    kind = row_type(specs)
    rows = []
    for index, item in items:
        row: tuple[Any, ...] = (index, _checksum(item.payloads), item.source_shape)
        if not specs[0].is_fixed:
            row += (len(item.payloads[0]), item.shape)
        rows.append((*row, item.box) if specs[0].fit == "pad" else row)
    return np.array(rows, dtype=kind)


def _checksum(payloads: tuple[Payload, ...]) -> int:
    value = 0
    for payload in payloads:
        value = zlib.crc32(payload, value)
    return value


def _flat(pixels: Pixels) -> memoryview:
    """Return the bytes of C-contiguous pixels, not copied."""
    return pixels.data.cast("B")
