"""What h5feed believes of an HDF5 file: plain, fixed-size data inside this very file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5feed.errors import H5FormatError

__all__ = ["Gate"]


@dataclass(frozen=True, slots=True)
class Gate:
    """Reads parts of an opened HDF5 file, or refuses with an H5FormatError that says why.

    Soft and external links, external storage, virtual datasets, filters, variable-length and
    reference types all let a file reach outside itself or run code; h5feed writes none of them.
    """

    path: Path
    size: int
    """Bytes of the file: what an address is checked against."""

    def refuse(self, what: str) -> H5FormatError:
        """Return the error to raise."""
        return H5FormatError(f"{self.path}: {what}; pack the pictures again with pack-h5")

    def members(self, group: h5py.Group) -> list[str]:
        """Names in a group, all of them hard links."""
        names = list(group)
        for name in names:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise self.refuse(f"{_full(group, name)} is a soft or external link")
        return names

    def group(self, parent: h5py.Group, name: str, members: set[str]) -> h5py.Group:
        """Return the group `name` with exactly these members."""
        group = parent.get(name)
        if not isinstance(group, h5py.Group) or set(self.members(group)) != members:
            raise self.refuse(f"/{name} is not a group of {', '.join(sorted(members))}")
        return group

    def dataset(self, parent: h5py.Group, name: str) -> h5py.Dataset:
        """Return a dataset that is contiguous plain bytes of this file."""
        data = parent.get(name)
        full = _full(parent, name)
        if not isinstance(data, h5py.Dataset):
            raise self.refuse(f"{full} is missing or not a dataset")
        plist = data.id.get_create_plist()
        if plist.get_external_count():
            raise self.refuse(f"{full} keeps its bytes in another file (external storage)")
        if plist.get_layout() == h5py.h5d.VIRTUAL:
            raise self.refuse(f"{full} is a virtual dataset")
        if plist.get_nfilters():
            raise self.refuse(f"{full} is compressed or filtered")
        if plist.get_layout() != h5py.h5d.CONTIGUOUS:
            raise self.refuse(f"{full} is not contiguous")
        if data.dtype.hasobject or data.dtype.kind not in "uifS":
            raise self.refuse(f"{full} has the type {data.dtype}, not a fixed-size native one")
        self.address(data)
        return data

    def address(self, data: h5py.Dataset) -> int:
        """Byte address of a contiguous dataset, checked to lie inside the file."""
        if data.size == 0:
            return 0
        if data.nbytes > self.size:
            raise self.refuse(f"{data.name} claims {data.nbytes} bytes in a file of {self.size}")
        start = data.id.get_offset()
        if start is None or data.id.get_storage_size() != data.nbytes:
            raise self.refuse(f"{data.name} has no storage of its size")
        if start + data.nbytes > self.size:
            raise self.refuse(f"{data.name} ends beyond the end of the file (truncated)")
        return int(start)

    def expect(self, data: h5py.Dataset, dtype: str, shape: Sequence[int | None]) -> None:
        """Refuse a dataset of another type or shape; None in `shape` is any length."""
        fits = data.ndim == len(shape) and all(
            want is None or have == want for have, want in zip(data.shape, shape, strict=True)
        )
        if data.dtype != np.dtype(dtype) or not fits:
            wanted = f"{dtype} {tuple(shape)}"
            raise self.refuse(f"{data.name} is {data.dtype} {data.shape}, not {wanted}")

    def array(self, parent: h5py.Group, name: str, dtype: str, shape: Sequence[int | None]) -> Any:
        """Copy out a dataset of this type and shape."""
        data = self.dataset(parent, name)
        self.expect(data, dtype, shape)
        return data[()]

    def text(self, holder: Any, name: str) -> str:
        """Return a fixed-length text attribute."""
        value = self._attribute(holder, name)
        if not isinstance(value, bytes):
            raise self.refuse(f"attribute {name} of {holder.name} is not a text")
        return value.decode("utf-8", "surrogateescape")

    def integer(self, holder: Any, name: str) -> int:
        """Return an integer attribute."""
        value = self._attribute(holder, name)
        if not isinstance(value, np.integer):
            raise self.refuse(f"attribute {name} of {holder.name} is not an integer")
        return int(value)

    def _attribute(self, holder: Any, name: str) -> Any:
        if name not in holder.attrs:
            raise self.refuse(f"{holder.name} lacks the attribute {name}")
        kind = holder.attrs.get_id(name)
        if kind.dtype.hasobject or kind.shape != () or kind.get_storage_size() > self.size:
            raise self.refuse(f"attribute {name} of {holder.name} is not a fixed-size scalar")
        return holder.attrs[name]


def _full(parent: h5py.Group, name: str) -> str:
    return f"{parent.name.rstrip('/')}/{name}"
