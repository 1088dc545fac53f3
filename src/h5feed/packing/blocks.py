"""How the images are cut into blocks, and how a block's payload reaches the disk."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from h5feed.disk import open_file, write_at
from h5feed.packing.encode import Payload
from h5feed.store.layout import FieldSpec

__all__ = ["PayloadFiles", "blocks"]

_BLOCK_BYTES = 4 << 20
_MOST = 256
_JOIN_BELOW = 64 << 10


def blocks(start: int, stop: int, workers: int, spec: FieldSpec) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive blocks: about 4 MB of pixels, smaller towards the end.

    The last ones are small so that all workers finish together. Where blocks begin and end
    does not show in the result.
    """
    most = _MOST
    if spec.is_fixed:
        most = max(4, min(_MOST, _BLOCK_BYTES // spec.item_bytes))
    elif spec.encoding == "original":
        most = 16
    else:
        most = max(4, min(_MOST, _BLOCK_BYTES // (3 * spec.height * spec.width)))
    while start < stop:
        size = min(most, max(1, (stop - start) // (3 * max(1, workers))))
        yield start, start + size
        start += size


class PayloadFiles:
    """The files that pixels are written to, one per field, opened by each process for itself."""

    def __init__(self, paths: Sequence[Path], heads: Sequence[int]) -> None:
        self._files = [(open_file(path), path) for path in paths]
        self._heads = heads

    def __enter__(self) -> "PayloadFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for handle, _path in self._files:
            os.close(handle)

    def write(self, places: Sequence[int], payloads: Sequence[Sequence[Payload]]) -> None:
        """Write each field's payloads back to back from its place on (bytes after the head)."""
        for (handle, path), head, place, field in zip(
            self._files, self._heads, places, payloads, strict=True
        ):
            at = head + place
            for chunk in _chunks(field):
                write_at(handle, chunk, at, path)
                at += len(chunk)


def _chunks(payloads: Sequence[Payload]) -> Sequence[Payload]:
    """Join small payloads: a call to the system costs as much as copying some kilobytes."""
    if payloads and len(payloads[0]) < _JOIN_BELOW:
        return [b"".join(payloads)]
    return payloads
