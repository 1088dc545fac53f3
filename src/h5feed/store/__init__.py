"""What a packed file is. The only room that imports h5py."""

from h5feed.store.check import CheckReport, DamagedItem, check_file
from h5feed.store.layout import Columns, Encoding, Extent, FieldSpec, Fit, images_spec, masks_spec
from h5feed.store.mapping import Mapping
from h5feed.store.read import FileIndex, PackedFile, read_index
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
    "images_spec",
    "masks_spec",
    "read_index",
    "write_file",
]
