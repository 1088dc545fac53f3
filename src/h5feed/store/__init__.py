"""What a packed file is. The only room that imports h5py."""

from h5feed.store.check import CheckReport, DamagedItem, check_file
from h5feed.store.layout import Columns, Encoding, FieldSpec, Fit
from h5feed.store.mapping import Mapping
from h5feed.store.read import Extent, FileIndex, PackedFile, read_index
from h5feed.store.write import finalize, head_bytes, write_file

__all__ = [
    "CheckReport",
    "Columns",
    "DamagedItem",
    "Encoding",
    "Extent",
    "FieldSpec",
    "FileIndex",
    "Fit",
    "Mapping",
    "PackedFile",
    "check_file",
    "finalize",
    "head_bytes",
    "read_index",
    "write_file",
]
