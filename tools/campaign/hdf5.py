"""Files whose HDF5 checksums and fingerprint are made right again after bytes were changed.

HDF5 1.10's metadata is guarded by lookup3 checksums, and h5feed's own by a fingerprint. Damage by
chance fails there. Whoever forges a file computes both anew, and then everything behind them is on
trial: so do we.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from h5feed.errors import H5FormatError
from h5feed.store import gate, read_index

__all__ = ["mend_checksums", "mend_fingerprint", "metadata_bytes"]

_MASK = 0xFFFFFFFF
_CONTINUATION = 0x10


def mend_checksums(path: Path) -> None:
    """Write the right checksum behind the superblock and each object header of a file."""
    data = bytearray(path.read_bytes())
    for start, stop in _blocks(data):
        struct.pack_into("<I", data, stop, lookup3(bytes(data[start:stop])))
    path.write_bytes(data)


def mend_fingerprint(path: Path, known: str) -> None:
    """Put the right fingerprint in the place of the `known` one, where the gate comes so far.

    The gate itself computes it: what it compares is noted, and written down.
    """
    noted: list[str] = []
    compute = gate.fingerprint

    def note(*args: Any) -> str:
        noted.append(compute(*args))
        return noted[-1]

    with mock.patch.object(gate, "fingerprint", note):
        try:
            read_index(path)
        except (H5FormatError, OSError):
            pass
        except Exception:
            return  # the case's own opening will say so
    data = path.read_bytes()
    if noted and known.encode() in data:
        path.write_bytes(data.replace(known.encode(), noted[-1].encode()))
        mend_checksums(path)


def metadata_bytes(data: bytes) -> list[tuple[int, int]]:
    """Return (start, stop) of the blocks of HDF5's own metadata, checksums left out."""
    return list(_blocks(data))


def _blocks(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield (start, place of its checksum) of the superblock and of object headers' chunks."""
    if len(data) >= 48 and data[:8] == b"\x89HDF\r\n\x1a\n" and data[8] in (2, 3):
        yield 0, 44
    at = data.find(b"OHDR")
    while at >= 0:
        flags = data[at + 5] if at + 6 < len(data) else 0
        width = 1 << (flags & 3)
        body = at + 6 + 16 * bool(flags & 0x20) + 4 * bool(flags & 0x10)
        size = int.from_bytes(data[body : body + width], "little")
        stop = body + width + size
        if stop + 4 <= len(data):
            yield at, stop
            yield from _continuations(data, body + width, stop, bool(flags & 4))
        at = data.find(b"OHDR", at + 4)


def _continuations(
    data: bytes | bytearray, at: int, stop: int, ordered: bool
) -> Iterator[tuple[int, int]]:
    while at + 4 <= stop:
        kind, size = data[at], int.from_bytes(data[at + 1 : at + 3], "little")
        at += 4 + 2 * ordered
        if kind == _CONTINUATION and size == 16 and at + 16 <= len(data):
            where, length = struct.unpack_from("<QQ", data, at)
            if where + length <= len(data) and data[where : where + 4] == b"OCHK" and length > 8:
                yield where, where + length - 4
                yield from _continuations(data, where + 4, where + length - 4, ordered)
        at += size


def lookup3(data: bytes) -> int:
    """Return Bob Jenkins' lookup3 (hashlittle) of `data`, seeded with 0, as HDF5 stores it."""
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    at = 0
    while len(data) - at > 12:
        x, y, z = struct.unpack_from("<III", data, at)
        a, b, c = _mix((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)
        at += 12
    if at == len(data):
        return c
    x, y, z = struct.unpack("<III", data[at:].ljust(12, b"\0"))
    return _final((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)


def _rot(x: int, k: int) -> int:
    return ((x << k) | (x >> (32 - k))) & _MASK


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    a = ((a - c) & _MASK) ^ _rot(c, 4)
    c = (c + b) & _MASK
    b = ((b - a) & _MASK) ^ _rot(a, 6)
    a = (a + c) & _MASK
    c = ((c - b) & _MASK) ^ _rot(b, 8)
    b = (b + a) & _MASK
    a = ((a - c) & _MASK) ^ _rot(c, 16)
    c = (c + b) & _MASK
    b = ((b - a) & _MASK) ^ _rot(a, 19)
    a = (a + c) & _MASK
    c = ((c - b) & _MASK) ^ _rot(b, 4)
    b = (b + a) & _MASK
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    for left, right, shift in (
        (2, 1, 14),
        (0, 2, 11),
        (1, 0, 25),
        (2, 1, 16),
        (0, 2, 4),
        (1, 0, 14),
        (2, 1, 24),
    ):
        v = [a, b, c]
        v[left] = ((v[left] ^ v[right]) - _rot(v[right], shift)) & _MASK
        a, b, c = v
    return c
