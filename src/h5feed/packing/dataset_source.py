"""A map-style dataset of (image, label) as a source of images."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5feed.errors import UsageError
from h5feed.packing.decode import DAMAGED, DecodeError, image_to_rgb
from h5feed.system import is_out_of_memory

__all__ = ["DatasetSource"]


class DatasetSource:
    """Presents `dataset[i] == (image, label)` for 0 ≤ i < len(dataset) to packing.

    An image is a PIL image, a uint8 array (H, W, 3) or (H, W), or a uint8 tensor (C, H, W). A
    label is a class number, or numeric targets. Labels are noted as their images are read,
    so `labels` is whole once packing is through. The key of an image is its number.
    """

    def __init__(self, dataset: Any, *, background: tuple[int, int, int]) -> None:
        self.dataset, self._background = dataset, background
        try:
            self._count = len(dataset)
        except TypeError as ex:
            raise UsageError(
                f"source={type(dataset).__name__} is neither a folder's path nor a dataset "
                "with a length: give one of them"
            ) from ex
        if not self._count:
            raise UsageError(f"source={type(dataset).__name__} holds no images")
        self.classes = tuple(str(name) for name in getattr(dataset, "classes", ()))
        self.targets: tuple[str, ...] = ()
        """A dataset's targets have no names."""
        self.labels: npt.NDArray[np.int64] | npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return self._count

    def key(self, index: int) -> bytes:
        """Return the image's number as text."""
        return b"%d" % index

    @property
    def key_offsets(self) -> npt.NDArray[np.int64]:
        """(N+1,) where each key begins in `key_bytes`."""
        return np.cumsum([0, *(len(self.key(index)) for index in range(len(self)))])

    @property
    def key_bytes(self) -> npt.NDArray[np.uint8]:
        """All keys back to back."""
        return np.frombuffer(b"".join(map(self.key, range(len(self)))), np.uint8)

    def rgb(self, index: int) -> npt.NDArray[np.uint8]:
        """Return image `index` as uint8 (H, W, 3), and note its label."""
        try:
            sample = self.dataset[index]
        except Exception as ex:  # whatever a dataset raises for a bad image
            if is_out_of_memory(ex):
                raise
            raise DecodeError("cannot be loaded", f"{type(ex).__name__}: {ex}") from ex
        if not isinstance(sample, Sequence) or len(sample) != 2:
            raise UsageError(f"{self._item(index)} is {_kind(sample)}: (image, label) is needed")
        image, label = sample
        self._note(index, label)
        pixels = np.ascontiguousarray(self._to_rgb(index, image))
        if not pixels.size:
            raise DecodeError(DAMAGED, f"{pixels.shape[0]}x{pixels.shape[1]} pixels")
        return pixels

    def _to_rgb(self, index: int, image: Any) -> npt.NDArray[np.uint8]:
        if isinstance(image, Image.Image):
            return image_to_rgb(image, self._background)
        import torch  # here, as in sizing: pack-h5 --help needs none of it

        if isinstance(image, torch.Tensor):
            pixels = image.numpy(force=True)
            pixels = pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels
        else:
            pixels = np.asarray(image)
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
            raise UsageError(
                f"the image of {self._item(index)} is {_kind(image)}: a PIL image, a uint8 array "
                "(H, W, 3) or a uint8 tensor (3, H, W) is needed; leave out the transform"
            )
        return np.broadcast_to(pixels, (*pixels.shape[:2], 3))

    def _note(self, index: int, label: Any) -> None:
        if isinstance(label, Image.Image) or np.ndim(label) > 1:
            raise UsageError(
                f"the label of {self._item(index)} is {_kind(label)}, a mask by its shape: a class "
                "number or a row of numeric targets is needed; masks are packed from folders, "
                "with masks="
            )
        value = _to_label(label)
        if value is None:
            raise UsageError(
                f"the label of {self._item(index)} is {_kind(label)}: a class number or numeric "
                "targets are needed"
            )
        most = len(self.classes) or 1 << 63
        if isinstance(value, int) and not -1 <= value < most:
            known = f"0 to {most - 1} of its classes" if self.classes else "0 and up"
            raise UsageError(
                f"the label of {self._item(index)} is {value}: −1 or a class number, {known}, "
                "is needed"
            )
        if self.labels is None:
            self.labels = np.zeros((self._count, *np.shape(value)), np.asarray(value).dtype)
        if np.shape(value) != self.labels.shape[1:]:
            raise UsageError(f"the label of {self._item(index)} has another form than the first")
        self.labels[index] = value

    def _item(self, index: int) -> str:
        return f"{type(self.dataset).__name__}[{index}]"


def _to_label(label: Any) -> "int | np.ndarray[Any, Any] | None":
    """Return a class number as int, targets as float32 (K,), None for anything else."""
    try:
        return operator.index(label.item() if getattr(label, "ndim", None) == 0 else label)
    except TypeError:
        pass
    try:
        targets = np.asarray(label, dtype=np.float32).reshape(-1)
    except (TypeError, ValueError):
        return None
    return targets if len(targets) else None


def _kind(value: Any) -> str:
    if isinstance(value, Image.Image):
        return f"an image ({value.height}, {value.width})"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        return f"{type(value).__name__} of {dtype} {tuple(shape)}"
    return f"a {type(value).__name__}"
