"""What a packed file is. The only room that imports h5py."""

from h5feed.store.check import CheckReport, DamagedItem, check_file
from h5feed.store.fields import FieldExtent, FieldType, FieldValues
from h5feed.store.layout import (
    SEGMENTS,
    Columns,
    Encoding,
    Extent,
    FieldSpec,
    FileIndex,
    Fit,
    SegmentsExtent,
    images_spec,
    masks_spec,
    payload_names,
)
from h5feed.store.read import FileReader, MappedFile, read_index
from h5feed.store.write import finalize, head_bytes, write_file

__all__ = [
    "SEGMENTS",
    "CheckReport",
    "Columns",
    "DamagedItem",
    "Encoding",
    "Extent",
    "FieldExtent",
    "FieldSpec",
    "FieldType",
    "FieldValues",
    "FileIndex",
    "FileReader",
    "Fit",
    "MappedFile",
    "SegmentsExtent",
    "check_file",
    "finalize",
    "head_bytes",
    "images_spec",
    "masks_spec",
    "payload_names",
    "read_index",
    "write_file",
]
