"""What a packed file is made of: names, versions and shapes. No input or output here.

The format is described in the README; `write` makes it, `read` accepts it, `check` proves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

__all__ = [
    "ALIGNMENT",
    "FORMAT",
    "FORMAT_VERSION",
    "IMAGES",
    "LIBVER",
    "Columns",
    "Encoding",
    "FieldSpec",
    "Fit",
]

FORMAT = "h5feed"
FORMAT_VERSION = 1
ALIGNMENT = 4096
"""Bytes: every pixel field begins on a page, so that whole pages are announced and dropped."""
LIBVER = ("v110", "v110")
"""HDF5 1.10's own metadata: checksummed, and read by every HDF5 since 2016."""
IMAGES = "images"

Encoding = Literal["raw", "yuv420", "jpeg", "original"]
Fit = Literal["stretch", "crop", "pad", "keep"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
UInt8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """One pixel field of a packed file, `/images` or a further one such as `/masks`.

    `height` and `width` are pixels. With `fit="keep"` both name the short side S, and each
    item has its own size; with `encoding="original"` both are 0.
    """

    name: str
    encoding: Encoding
    height: int
    width: int
    channels: int
    """3 for RGB pictures, 1 for masks."""
    fit: Fit
    interpolation: str
    """"bilinear" (antialiased, Pillow's BILINEAR), "nearest" (Pillow's NEAREST), or "none"."""
    color_space: str
    """"RGB", "YUV BT.601 limited", "JPEG" or "classes" (a mask's class numbers)."""

    def __post_init__(self) -> None:
        if self.encoding not in get_args(Encoding) or self.fit not in get_args(Fit):
            raise ValueError(f"{self.encoding=} or {self.fit=} is not one this version knows")
        if self.encoding == "original":
            return
        if self.height < 1 or self.width < 1 or self.channels not in (1, 3):
            raise ValueError(f"{self.height=}, {self.width=} or {self.channels=} is out of range")
        if self.encoding == "yuv420" and (self.height % 2 or self.width % 2 or self.channels != 3):
            raise ValueError(f"yuv420 needs even sides, got {self.height=}, {self.width=}")

    @property
    def is_encoded(self) -> bool:
        """Whether an item is a JPEG file's bytes rather than pixels."""
        return self.encoding in ("jpeg", "original")

    @property
    def is_fixed(self) -> bool:
        """Whether all items have one size, so that `/name` is a single (N, ...) dataset."""
        return not self.is_encoded and self.fit != "keep"

    @property
    def layout(self) -> str:
        """Order of the stored bytes of an item, as recorded in the file."""
        if self.is_encoded:
            return "JFIF"
        return "NV12" if self.encoding == "yuv420" else "HWC"

    @property
    def item_bytes(self) -> int:
        """Bytes of one item of a fixed field."""
        return int(self.pixel_bytes(self.height, self.width))

    def pixel_bytes(self, height: Any, width: Any) -> Any:
        """Bytes of `height` × `width` pixels (ints or int64 arrays); not for encoded fields."""
        if self.encoding == "yuv420":
            return height * width * 3 // 2
        return height * width * self.channels

    def item_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one item's uint8 array: (H, W, C), or (H·3/2, W) for NV12."""
        if self.encoding == "yuv420":
            return (height * 3 // 2, width)
        return (height, width, self.channels)

    def dataset_shape(self, count: int) -> tuple[int, ...]:
        """Shape of the `/name` dataset of a fixed field of `count` items, as the file has it."""
        if self.encoding == "yuv420":
            return (count, self.item_bytes)
        return (count, self.height, self.width, self.channels)

    def attributes(self) -> dict[str, str | int]:
        """Return the attributes that `/name` carries in the file."""
        return {
            "encoding": self.encoding,
            "color_space": self.color_space,
            "layout": self.layout,
            "height": self.height,
            "width": self.width,
            "channels": self.channels,
            "fit": self.fit,
            "interpolation": self.interpolation,
        }

    @classmethod
    def from_attributes(cls, name: str, attributes: Mapping[str, Any]) -> "FieldSpec":
        """Rebuild the spec from a file's attributes; ValueError where they make no sense."""
        spec = cls(
            name=name,
            encoding=attributes["encoding"],
            height=int(attributes["height"]),
            width=int(attributes["width"]),
            channels=int(attributes["channels"]),
            fit=attributes["fit"],
            interpolation=attributes["interpolation"],
            color_space=attributes["color_space"],
        )
        if spec.layout != attributes["layout"]:
            raise ValueError(f"layout={attributes['layout']!r} is not {spec.layout!r}")
        return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The small arrays of N packed items."""

    labels: Int64 | npt.NDArray[np.float32]
    """int64 (N,), −1 where there is none; or float32 (N, K) targets."""
    classes: tuple[str, ...]
    key_bytes: UInt8
    """The source paths, relative to SRC, back to back (file-system bytes)."""
    key_offsets: Int64
    """(N+1,) where each key begins in `key_bytes`."""
    source_shapes: Int32
    """(N, 2) height and width of the source after EXIF rotation."""
    crc32: UInt32
    """(N,) zlib.crc32 of an item's image payload, continued over its further fields in order."""
    boxes: Int32 | None = None
    """(N, 4) top, left, height, width of the picture inside the letterbox (fit="pad")."""

    def __len__(self) -> int:
        return len(self.source_shapes)
