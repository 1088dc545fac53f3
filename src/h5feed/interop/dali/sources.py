"""How the stored items of each kind come into a DALI pipeline, down to the boxes that are read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from h5feed.augment import Params, Pipeline
from h5feed.augment.cpu import Scratch, nv12_box
from h5feed.errors import DamagedItemError
from h5feed.feed.files import BYTES_CHANGED, GO_ON, PackedFiles
from h5feed.interop.dali._library import dali, fn, types
from h5feed.interop.dali.parts import Box, Port
from h5feed.jpeg import encode_jpeg

__all__ = ["Source", "damaged_item", "open_source"]

Indices = NDArray[np.int64]
_YX = [0, 1]
_IMAGE = Port("UINT8", 3, "HWC")


class Source(Protocol):
    """The first step: of each image, per view, the box that the first crop reads."""

    ports: tuple[Port, ...]

    def damage(self, index: int) -> str | None:
        """Return what is wrong with an item; None where it can be decoded, or needs not be."""
        ...

    def feed(self, indices: Indices, params: Params, blank: Collection[int]) -> list[Any]:
        """Return a batch for each port; rows in `blank` get a black image."""
        ...

    def build(self, nodes: Sequence[Any]) -> list[Any]:
        """Return an HWC uint8 node per view, on the pipeline's device."""
        ...


def open_source(
    pixels: PackedFiles, pipeline: Pipeline, *, on_gpu: bool, unreadable: Collection[int]
) -> Source:
    """Return the source for the images of `pixels`; `unreadable` are items that DALI refused."""
    spec = pixels.specs["images"]
    if spec.is_encoded:
        return _Encoded(pixels, pipeline, on_gpu, unreadable)
    if spec.encoding == "yuv420":
        views = pipeline.views
        return _Planes(pixels, views, on_gpu) if on_gpu else _Converted(pixels, views)
    return _Raw(pixels, pipeline.views, on_gpu)


def damaged_item(
    pixels: PackedFiles, source: Source, index: int, then: str = GO_ON
) -> DamagedItemError:
    """Make the error that names file, index and key of an item, and what is wrong with it."""
    return pixels.damaged("images", index, f"cannot be decoded: {source.damage(index)}", then)


class _Raw:
    """Views of the file.

    Boxes are cut on the CPU, in DALI's threads: that reads the pages, and only boxes are copied to
    a GPU.
    """

    def __init__(self, pixels: PackedFiles, views: int, on_gpu: bool) -> None:
        self.ports = (_IMAGE, *(Box.ports * views))
        self._pixels = pixels
        self._on_gpu = on_gpu

    def damage(self, index: int) -> str | None:
        """Return None: there is nothing to decode."""
        return None

    def feed(self, indices: Indices, params: Params, blank: Collection[int]) -> list[Any]:
        """Return views of the items and the boxes of each view."""
        made: list[Any] = [[self._pixels.item("images", i) for i in indices.tolist()]]
        for view in params.views:
            made += Box().feed(view[0])
        return made

    def build(self, nodes: Sequence[Any]) -> list[Any]:
        """Return the boxes."""
        image, *boxes = nodes
        made = [Box().build(image, boxes[k : k + 2]) for k in range(0, len(boxes), 2)]
        return [box.gpu() for box in made] if self._on_gpu else made


class _Encoded:
    """JPEG files, of which DALI decodes the part that all views together read."""

    def __init__(
        self, pixels: PackedFiles, pipeline: Pipeline, on_gpu: bool, unreadable: Collection[int]
    ) -> None:
        inner = Box.ports * pipeline.views if pipeline.views > 1 else ()
        self.ports = (Port("UINT8", 1), *Box.ports, *inner)
        self._pixels = pixels
        self._pipeline = pipeline
        self._device = "mixed" if on_gpu else "cpu"
        self._unreadable = frozenset(unreadable)

    def damage(self, index: int) -> str | None:
        """Compare the item's checksum: DALI passes over some damage with a line on stderr.

        2.4 µs of 15 kB, where decoding takes some hundred.
        """
        if index in self._unreadable:
            return "DALI's decoder refuses it"
        return None if self._pixels.is_intact(index) else BYTES_CHANGED

    def feed(self, indices: Indices, params: Params, blank: Collection[int]) -> list[Any]:
        """Return views of the items, the region to decode, and each view's box within."""
        items = [
            self._black(index) if k in blank else self._pixels.item("images", index)
            for k, index in enumerate(indices.tolist())
        ]
        region = self._pipeline.source_rows(params)
        made: list[Any] = [items, *Box().feed(region)]
        if self._pipeline.views > 1:
            for view in params.views:
                boxes = view[0][:, :4].copy()
                boxes[:, :2] -= region[:, :2]
                made += Box().feed(boxes)
        return made

    def build(self, nodes: Sequence[Any]) -> list[Any]:
        """Return the boxes."""
        data, start, shape, *boxes = nodes
        image = fn.decoders.image_slice(
            data,
            start=start,
            shape=shape,
            axes=_YX,
            device=self._device,
            output_type=types.RGB,
            jpeg_fancy_upsampling=True,
        )
        if not boxes:
            return [image]
        return [Box().build(image, boxes[k : k + 2]) for k in range(0, len(boxes), 2)]

    def _black(self, index: int) -> NDArray[np.uint8]:
        """Return a file of the item's size, for a row that is not going to be delivered."""
        pixels = np.zeros((*self._pixels.stored_shapes[index], 3), np.uint8)
        return np.frombuffer(encode_jpeg(pixels, 50), np.uint8)


class _Converted:
    """Boxes of NV12 images, made RGB by cv2.

    DALI's own operators take 30 times as long on the CPU (1.7 ms a 256x256 image).
    """

    def __init__(self, pixels: PackedFiles, views: int) -> None:
        self.ports = (_IMAGE,) * views
        self._pixels = pixels

    def damage(self, index: int) -> str | None:
        """Return None: there is nothing to decode."""
        return None

    def feed(self, indices: Indices, params: Params, blank: Collection[int]) -> list[Any]:
        """Return RGB boxes of each view."""
        images = [self._pixels.item("images", i) for i in indices.tolist()]
        return [self._boxes(images, view[0][:, :4].tolist()) for view in params.views]

    def _boxes(self, images: Sequence[Any], boxes: Sequence[Sequence[int]]) -> list[Any]:
        scratch = Scratch()
        made = []
        for image, (y, x, h, w) in zip(images, boxes, strict=True):
            made.append(nv12_box(image, y, x, h, w, scratch).copy())
        return made

    def build(self, nodes: Sequence[Any]) -> list[Any]:
        """Return the nodes as they are."""
        return list(nodes)


class _Planes:
    """Boxes of NV12 images, copied to a GPU as luma and chroma, half the bytes; RGB there."""

    def __init__(self, pixels: PackedFiles, views: int, on_gpu: bool) -> None:
        self._per_view = (*Box.ports * 3, Port("FLOAT", 1))
        self.ports = (_IMAGE, _IMAGE, *self._per_view * views)
        self._pixels = pixels
        self._on_gpu = on_gpu

    def damage(self, index: int) -> str | None:
        """Return None: there is nothing to decode."""
        return None

    def feed(self, indices: Indices, params: Params, blank: Collection[int]) -> list[Any]:
        """Return views of both planes, and the boxes of each view in them and in the result."""
        luma, chroma = [], []
        for index in indices.tolist():
            item = self._pixels.item("images", index)
            height, width = item.shape[0] * 2 // 3, item.shape[1]
            luma.append(item[:height, :, None])
            chroma.append(item[height:].reshape(height // 2, width // 2, 2))
        made: list[Any] = [luma, chroma]
        for view in params.views:
            made += _even_boxes(view[0])
        return made

    def build(self, nodes: Sequence[Any]) -> list[Any]:
        """Return RGB boxes."""
        luma, chroma, *boxes = nodes
        count = len(self._per_view)
        return [self._rgb(luma, chroma, boxes[k : k + count]) for k in range(0, len(boxes), count)]

    def _rgb(self, luma: Any, chroma: Any, nodes: Sequence[Any]) -> Any:
        outer, half, inner, size = nodes[0:2], nodes[2:4], nodes[4:6], nodes[6]
        luma, chroma = Box().build(luma, outer), Box().build(chroma, half)
        if self._on_gpu:
            luma, chroma = luma.gpu(), chroma.gpu()
        # cv2 takes luma below black (16) for black
        luma = dali.math.max(luma, types.Constant(16, dtype=types.UINT8))
        chroma = fn.resize(chroma, size=size, interp_type=types.INTERP_NN)
        rgb = fn.color_space_conversion(
            fn.cat(luma, chroma, axis=2), image_type=types.YCbCr, output_type=types.RGB
        )
        return Box().build(rgb, inner)


def _even_boxes(rows: NDArray[Any]) -> list[Any]:
    """Return for each row's box: the even box around it, its half, itself within, and its size."""
    low, high = rows[:, :2] & -2, (rows[:, :2] + rows[:, 2:4] + 1) & -2
    inside = np.concatenate([rows[:, :2] - low, rows[:, 2:4]], axis=1)
    outer = np.concatenate([low, high - low], axis=1)
    box = Box()
    size = (high - low).astype(np.float32)
    return [*box.feed(outer), *box.feed(outer // 2), *box.feed(inside), size]
