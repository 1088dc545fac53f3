"""What a packed file is. The only room that imports h5py."""

from h5feed.store.check import CheckReport, DamagedItem, SetReport, check_file, check_set
from h5feed.store.fields import FieldExtent, FieldType, FieldValues
from h5feed.store.index import (
    INDEX_NAME,
    SetIndex,
    is_set,
    listed_index,
    open_index,
    write_index,
)
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
from h5feed.store.read import FileReader, MappedBytes, MappedFile, read_index
from h5feed.store.write import finalize, head_bytes, write_file

__all__ = [
    "INDEX_NAME",
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
    "MappedBytes",
    "MappedFile",
    "SegmentsExtent",
    "SetIndex",
    "SetReport",
    "check_file",
    "check_set",
    "finalize",
    "head_bytes",
    "images_spec",
    "is_set",
    "listed_index",
    "masks_spec",
    "open_index",
    "payload_names",
    "read_index",
    "write_file",
    "write_index",
]
