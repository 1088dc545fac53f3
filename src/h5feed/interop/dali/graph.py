"""The DALI pipeline: how stored images come into it, what is done to them, and what comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h5feed.augment import Params, Pipeline
from h5feed.augment.cpu import Scratch, nv12_box
from h5feed.errors import DamagedItemError
from h5feed.feed.files import BYTES_CHANGED, GO_ON, PackedFiles
from h5feed.interop.dali.parts import YX, Box, Port, Step, dali, fn, make_steps, types
from h5feed.jpeg import encode_jpeg

__all__ = ["Graph", "ImageInput", "Nv12Planes", "image_input", "make_graph", "make_pipeline"]

Indices = NDArray[np.int64]

_IMAGE = Port("UINT8", 3, "HWC")


@dataclass(frozen=True, slots=True)
class Graph:
    """Inputs, operators and outputs of a pipeline.

    Its outputs: HWC images of each view, (H, W) masks of each field and view, labels (1,) int64 or
    (K,) float32, and indices () int64 `with_index`. All but the indices lie on the device.
    """

    images: ImageInput
    steps: tuple[Step, ...]
    views: int
    mask_names: tuple[str, ...]
    label: Port
    with_index: bool

    @property
    def ports(self) -> list[Port]:
        """The inputs, in order: images, steps of each view, masks, labels, indices."""
        steps = [port for step in self.steps for port in step.part.ports]
        masks = [Port("UINT8", 2, "HW")] * (len(self.mask_names) * self.views)
        index = [Port("INT64", 0)] if self.with_index else []
        return [*self.images.ports, *steps * self.views, *masks, self.label, *index]

    def feed(self, indices: Indices, params: Params, blank: Collection[int]) -> list[Any]:
        """Return a batch for each port up to the masks; rows in `blank` get a black image."""
        made = self.images.feed(indices, params, blank)
        for view in params.views:
            for step in self.steps:
                made += step.part.feed(view[step.stage])
        return made

    def build(self, nodes: Sequence[Any], *, on_gpu: bool) -> list[Any]:
        """Return the outputs, from a node for each port."""
        count = len(self.images.ports)
        outputs, rest = [], list(nodes[count:])
        for image in self.images.build(nodes[:count]):
            for step in self.steps:
                count = len(step.part.ports)
                image = step.part.build(image, rest[:count])
                rest = rest[count:]
            outputs.append(image)
        count = len(rest) - self.with_index
        targets = [node.gpu() for node in rest[:count]] if on_gpu else rest[:count]
        return [*outputs, *targets, *rest[count:]]


def make_graph(
    files: PackedFiles, pipeline: Pipeline, images: ImageInput, *, with_index: bool
) -> Graph:
    """Return the graph of these ops; UsageError names an op that DaliLoader does not support."""
    return Graph(
        images,
        make_steps(pipeline.ops, pipeline.plan),
        pipeline.views,
        tuple(spec.name for spec in files.specs.values() if spec.channels == 1),
        Port("INT64" if not files.label_shape else "FLOAT", 1),
        with_index,
    )


def make_pipeline(
    graph: Graph,
    feed: Callable[[Any], list[Any]],
    batch_size: int,
    *,
    threads: int,
    device_id: int | None,
    prefetch: int,
    workers: int,
) -> Any:
    """Return a pipeline of `graph`, not built yet; `device_id` None makes one without a GPU.

    `feed` gives a batch for each port. `workers` processes run it; with 0 the thread that runs the
    pipeline does.
    """
    return _defined(
        graph,
        feed,
        device_id is not None,
        prefetch if workers else None,
        batch_size=batch_size,
        num_threads=threads,
        device_id=device_id,
        prefetch_queue_depth=prefetch,
        exec_dynamic=True,
        py_num_workers=workers or 1,
        py_start_method="spawn",
    )


@dali.pipeline_def(enable_conditionals=True)  # type: ignore[untyped-decorator]
def _defined(
    graph: Graph, feed: Callable[[Any], list[Any]], on_gpu: bool, parallel: int | None
) -> Any:
    ports = graph.ports
    nodes = fn.external_source(
        feed,
        num_outputs=len(ports),
        dtype=[getattr(types, port.dtype) for port in ports],
        ndim=[port.ndim for port in ports],
        layout=[port.layout for port in ports],
        batch=True,
        batch_info=True,
        no_copy=True,
        parallel=parallel is not None,
        prefetch_queue_depth=parallel,
    )
    return tuple(graph.build(nodes, on_gpu=on_gpu))


class ImageInput(ABC):
    """How stored images come in: of each, per view, the box that the first crop reads."""

    ports: tuple[Port, ...]

    def __init__(self, files: PackedFiles) -> None:
        self._files = files

    def damage(self, index: int) -> str | None:
        """Return what is wrong with an item; None where it can be decoded, or needs not be."""
        return None

    def damaged_item(self, index: int, then: str = GO_ON) -> DamagedItemError:
        """Make the error that names file, index and key of an item, and what is wrong with it."""
        return self._files.damaged(
            "images", index, f"cannot be decoded: {self.damage(index)}", then
        )

    @abstractmethod
    def feed(self, indices: Indices, params: Params, blank: Collection[int]) -> list[Any]:
        """Return a batch for each port; rows in `blank` get a black image."""

    @abstractmethod
    def build(self, nodes: Sequence[Any]) -> list[Any]:
        """Return an HWC uint8 node per view, on the pipeline's device."""


def image_input(
    files: PackedFiles, pipeline: Pipeline, *, on_gpu: bool, unreadable: Collection[int]
) -> ImageInput:
    """Return the input for the images of `files`; `unreadable` are items that DALI refused."""
    spec = files.specs["images"]
    if spec.is_encoded:
        return _JpegFiles(files, pipeline, on_gpu, unreadable)
    if spec.encoding == "yuv420":
        views = pipeline.views
        return Nv12Planes(files, views, on_gpu) if on_gpu else _Nv12Boxes(files, views)
    return _RawImages(files, pipeline.views, on_gpu)


class _RawImages(ImageInput):
    """Views of the file.

    Boxes are cut on the CPU, in DALI's threads: that reads the pages, and only boxes are copied to
    a GPU.
    """

    def __init__(self, files: PackedFiles, views: int, on_gpu: bool) -> None:
        super().__init__(files)
        self.ports = (_IMAGE, *(Box.ports * views))
        self._on_gpu = on_gpu

    def feed(self, indices: Indices, params: Params, blank: Collection[int]) -> list[Any]:
        """Return views of the items and the boxes of each view."""
        made: list[Any] = [[self._files.item("images", i) for i in indices.tolist()]]
        for view in params.views:
            made += Box().feed(view[0])
        return made

    def build(self, nodes: Sequence[Any]) -> list[Any]:
        """Return the boxes."""
        image, *boxes = nodes
        made = [Box().build(image, boxes[k : k + 2]) for k in range(0, len(boxes), 2)]
        return [box.gpu() for box in made] if self._on_gpu else made


class _JpegFiles(ImageInput):
    """JPEG files, of which DALI decodes the part that all views together read."""

    def __init__(
        self, files: PackedFiles, pipeline: Pipeline, on_gpu: bool, unreadable: Collection[int]
    ) -> None:
        super().__init__(files)
        inner = Box.ports * pipeline.views if pipeline.views > 1 else ()
        self.ports = (Port("UINT8", 1), *Box.ports, *inner)
        self._pipeline = pipeline
        self._device = "mixed" if on_gpu else "cpu"
        self._unreadable = frozenset(unreadable)

    def damage(self, index: int) -> str | None:
        """Compare the item's checksum: DALI passes over some damage with a line on stderr.

        2.4 µs of 15 kB, where decoding takes some hundred.
        """
        if index in self._unreadable:
            return "DALI's decoder refuses it"
        return None if self._files.is_intact(index) else BYTES_CHANGED

    def feed(self, indices: Indices, params: Params, blank: Collection[int]) -> list[Any]:
        """Return views of the items, the region to decode, and each view's box within."""
        items = [
            self._black(index) if k in blank else self._files.item("images", index)
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
            axes=YX,
            device=self._device,
            output_type=types.RGB,
            jpeg_fancy_upsampling=True,
        )
        if not boxes:
            return [image]
        return [Box().build(image, boxes[k : k + 2]) for k in range(0, len(boxes), 2)]

    def _black(self, index: int) -> NDArray[np.uint8]:
        """Return a file of the item's size, for a row that is not going to be delivered."""
        black = np.zeros((*self._files.row("shapes", index), 3), np.uint8)
        return np.frombuffer(encode_jpeg(black, 50), np.uint8)


class _Nv12Boxes(ImageInput):
    """Boxes of NV12 images, made RGB by cv2.

    DALI's own operators take 30 times as long on the CPU (1.7 ms a 256x256 image).
    """

    def __init__(self, files: PackedFiles, views: int) -> None:
        super().__init__(files)
        self.ports = (_IMAGE,) * views

    def feed(self, indices: Indices, params: Params, blank: Collection[int]) -> list[Any]:
        """Return RGB boxes of each view."""
        images = [self._files.item("images", i) for i in indices.tolist()]
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


class Nv12Planes(ImageInput):
    """Boxes of NV12 images, copied to a GPU as luma and chroma, half the bytes; RGB there."""

    def __init__(self, files: PackedFiles, views: int, on_gpu: bool) -> None:
        super().__init__(files)
        self._per_view = (*Box.ports * 3, Port("FLOAT", 1))
        self.ports = (_IMAGE, _IMAGE, *self._per_view * views)
        self._on_gpu = on_gpu

    def feed(self, indices: Indices, params: Params, blank: Collection[int]) -> list[Any]:
        """Return views of both planes, and the boxes of each view in them and in the result."""
        luma, chroma = [], []
        for index in indices.tolist():
            item = self._files.item("images", index)
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
