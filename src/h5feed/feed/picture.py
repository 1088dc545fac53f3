"""What a stored item is to Python code: pixels of a picture, as array, tensor or PIL image."""

from collections.abc import Callable
from typing import Any, Literal

import cv2
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from h5feed.augment.frame import Shapes
from h5feed.codec import decode_jpeg, nv12_to_rgb
from h5feed.feed.source import Pixels

__all__ = ["Aspect", "Output", "first_squeezed", "picture_reader", "source_size"]

Output = Literal["tensor", "pil", "numpy"]
Aspect = Literal["stored", "source"]
Picture = npt.NDArray[np.uint8]

_AT_ONCE = 1 << 16  # items: the first is found at once, and ten million cost no memory


def picture_reader(
    pixels: Pixels, field: str, *, output: Output, aspect: Aspect
) -> Callable[[int], Any]:
    """Return the function that makes item `index` of a field into what `output` says.

    "tensor": uint8 (C, H, W) in channels_last memory, (H, W) for masks; "numpy": uint8
    (H, W, C) or (H, W), read-only; "pil": an RGB or L image. Views of the file wherever the
    field is raw and nothing is resized (an RGB image of PIL is always a copy).
    """
    read = _stored_reader(pixels, field)
    if aspect == "source":
        read = _true_proportions(pixels, field, read)
    if pixels.specs[field].channels == 1:
        read = _without_channel(read)
    finishers: dict[Output, Callable[[Picture], Any]] = {
        "tensor": _as_tensor,
        "numpy": _as_readonly,
        "pil": Image.fromarray,
    }
    finish = finishers[output]
    return lambda index: finish(read(index))


def source_size(stored: tuple[int, int], source: tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) in `source` proportions that just covers `stored`.

    For a square it is what torchvision's Resize(S) makes of the source: the short side S, the
    long one int(S · long / short).
    """
    (height, width), (true_height, true_width) = stored, source
    if true_height * width >= true_width * height:
        return max(height, int(width * true_height / true_width)), width
    return height, max(width, int(height * true_width / true_height))


def first_squeezed(pixels: Pixels) -> int | None:
    """Return the first item that fit="stretch" stored in other than its own proportions.

    By more than a pixel, which is what h5feed.augment takes for squeezed. None where none is.
    """
    spec = pixels.specs["images"]
    if spec.fit != "stretch" or spec.encoding == "original":
        return None
    for begin in range(0, len(pixels), _AT_ONCE):
        source = pixels.source_shapes[begin : begin + _AT_ONCE].astype(np.int64)
        stored = np.broadcast_to(np.array([spec.height, spec.width], np.int64), source.shape)
        shapes = Shapes.stored(stored, source, None)
        squeezed = (shapes.true != shapes.actual).any(axis=1)
        if squeezed.any():
            return begin + int(squeezed.argmax())
    return None


def _stored_reader(pixels: Pixels, field: str) -> Callable[[int], Picture]:
    """Item → (H, W, C) as stored."""
    encoding = pixels.specs[field].encoding
    if encoding == "raw":
        return lambda index: pixels.item(field, index)
    decode = nv12_to_rgb if encoding == "yuv420" else decode_jpeg
    shapes = pixels.stored_shapes

    def read(index: int) -> Picture:
        try:
            picture = decode(pixels.item(field, index))
        except Exception as ex:
            raise pixels.damaged(field, index, f"cannot be decoded: {ex}") from ex
        if picture.shape[:2] != tuple(shapes[index].tolist()):
            what = "decodes to {}x{}, and the file says {}x{}"
            raise pixels.damaged(
                field, index, what.format(*picture.shape[:2], *shapes[index].tolist())
            )
        return picture if picture.flags.writeable else picture.copy()

    return read


def _true_proportions(
    pixels: Pixels, field: str, read: Callable[[int], Picture]
) -> Callable[[int], Picture]:
    """Undo what fitting did to the proportions: stretched is resized, padded is cut out."""
    spec = pixels.specs[field]
    if spec.fit == "pad" and pixels.boxes is not None:
        boxes = pixels.boxes

        def cut(index: int) -> Picture:
            top, left, height, width = boxes[index].tolist()
            return read(index)[top : top + height, left : left + width]

        return cut
    if spec.fit != "stretch" or spec.encoding == "original":
        return read
    shapes = pixels.source_shapes
    # Only ever enlarges, so plain bilinear is what an antialiased one would give.
    filter_ = cv2.INTER_NEAREST_EXACT if spec.interpolation == "nearest" else cv2.INTER_LINEAR

    def resize(index: int) -> Picture:
        stored = read(index)
        size = source_size(stored.shape[:2], tuple(shapes[index].tolist()))
        if size == stored.shape[:2]:
            return stored
        resized = np.empty((*size, stored.shape[2]), np.uint8)
        cv2.resize(stored, size[::-1], dst=resized, interpolation=filter_)
        return resized

    return resize


def _without_channel(read: Callable[[int], Picture]) -> Callable[[int], Picture]:
    def plane(index: int) -> Picture:
        pixels: Picture = read(index)[..., 0]
        return pixels

    return plane


def _as_tensor(picture: Picture) -> torch.Tensor:
    if picture.ndim == 3:
        picture = picture.transpose(2, 0, 1)
    if torch.is_inference_mode_enabled():
        # An inference tensor has no version counter, which would blind the guard against writes.
        with torch.inference_mode(False):
            return torch.from_numpy(picture)
    return torch.from_numpy(picture)


def _as_readonly(picture: Picture) -> Picture:
    view: Picture = picture.view()
    view.flags.writeable = False
    return view
