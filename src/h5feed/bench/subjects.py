"""Who is compared by bench-h5: ways to feed PyTorch with the same images, same augmentation.

Every subject takes the same parameters: `file` (the packed file), `images` (the folder it was
packed from, or None), `workers`, `batch_size`, `crop`, `device`. The augmentation is
RandomResizedCrop and flip; where a subject has none of its own, the crop is drawn as torchvision
does: area 8 to 100 %, aspect 3/4 to 4/3 drawn in its logarithm, up to ten tries, then the largest
centered crop.
https://github.com/pytorch/vision/blob/main/torchvision/transforms/v2/_geometry.py
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from h5feed import H5Dataset, augment, make_dataloader
from h5feed.feed.files import PackedFiles
from h5feed.feed.loader import H5Loader
from h5feed.feed.options import AugmentOn, EngineName
from h5feed.jpeg import encode_jpeg

__all__ = [
    "Box",
    "Folder",
    "FolderOfSmall",
    "FolderOfTensors",
    "LoaderByDali",
    "LoaderOfProcesses",
    "LoaderOfThreads",
    "LoaderOnCpu",
    "LoaderOnDevice",
    "PillowCrop",
    "ReadyMade",
    "SwappedIn",
    "TensorCrop",
    "UsualH5py",
    "crop_ops",
    "draw_box",
    "imagefolder_class",
]

Box = tuple[int, int, int, int]
"""top, left, height, width in pixels."""


def draw_box(height: int, width: int) -> Box:
    """Draw a crop of an image of this size, from the generator that DataLoader workers seed."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        aspect = math.exp(random.uniform(-1.0, 1.0) * math.log(4 / 3))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


@dataclass(slots=True)
class TensorCrop:
    """RandomResizedCrop + flip of a (C, H, W) tensor, uint8 or float.

    torch's own kernel, bilinear and antialiased: what torchvision's v2 transforms call.
    """

    size: int

    def __call__(self, image: Tensor) -> Tensor:
        """Return a (C, size, size) tensor of the same dtype."""
        top, left, height, width = draw_box(image.shape[-2], image.shape[-1])
        part = image[..., top : top + height, left : left + width].unsqueeze(0)
        # Bilinear of uint8 is fastest in channels_last memory, as torchvision arranges it.
        part = part.contiguous(memory_format=torch.channels_last)
        size = [self.size, self.size]
        out = functional.interpolate(part, size, mode="bilinear", antialias=True).squeeze(0)
        return out.flip(-1) if random.random() < 0.5 else out


@dataclass(slots=True)
class PillowCrop:
    """RandomResizedCrop + flip of a PIL image, Pillow's bilinear, to a (3, H, W) uint8 tensor."""

    size: int

    def __call__(self, image: Image.Image) -> Tensor:
        """Return a (3, size, size) tensor."""
        top, left, height, width = draw_box(image.height, image.width)
        box = (left, top, left + width, top + height)
        size = (self.size, self.size)
        out = image.resize(size, Image.Resampling.BILINEAR, box=box)
        if random.random() < 0.5:
            out = out.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        flat = torch.frombuffer(bytearray(out.tobytes()), dtype=torch.uint8)
        return flat.view(self.size, self.size, 3).permute(2, 0, 1).contiguous()


Params = Mapping[str, Any]
_BLACK = np.zeros((8, 8, 3), np.uint8)


class _LoaderSubject:
    """Batches of a loader, brought to the device."""

    dtype = "uint8"
    layout = "NCHW"
    note = ""

    def __init__(self, loader: Any, params: Params, *, files: list[str]) -> None:
        self.loader = loader
        self.files = files
        self._device = torch.device(params["device"])

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield (images, labels) of one epoch."""
        for images, labels in self.loader:
            yield self._there(images), self._there(labels)

    def _there(self, batch: Tensor) -> Tensor:
        return batch.to(self._device, non_blocking=True)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Let workers and threads go."""
        self.loader = None


def _stock_loader(dataset: Dataset[Any], params: Params) -> DataLoader[Any]:
    """A DataLoader as people set it up: workers kept, pinned for a GPU, nothing else."""
    return DataLoader(
        dataset,
        batch_size=params["batch_size"],
        shuffle=True,
        num_workers=params["workers"],
        persistent_workers=params["workers"] > 0,
        pin_memory=params["device"] != "cpu",
    )


def imagefolder_class() -> Any:
    """Return torchvision's ImageFolder, or None where torchvision cannot be imported."""
    try:
        from torchvision.datasets import ImageFolder
    except (ImportError, RuntimeError):  # RuntimeError: built for another torch
        return None
    return ImageFolder


class _PillowFolder(Dataset[tuple[Tensor, int]]):
    """ImageFolder's work without torchvision: open, decode, transform."""

    def __init__(self, samples: list[tuple[str, Any]], transform: PillowCrop) -> None:
        self.samples = samples
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        path, target = self.samples[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), target


class Folder(_LoaderSubject):
    """The source folder: torchvision's ImageFolder, or the like of it, in a stock DataLoader."""

    def __init__(self, params: Params) -> None:
        packed = PackedFiles([params["file"]])
        paths = [str(Path(params["images"]) / key) for key in packed.keys()]  # noqa: SIM118 - no dict
        crop = PillowCrop(params["crop"])
        kind = imagefolder_class() if len(packed.classes) else None
        dataset: Dataset[Any]
        if kind is None:
            dataset = _PillowFolder(list(zip(paths, packed.labels, strict=True)), crop)
        else:
            dataset = kind(params["images"], crop, is_valid_file=set(paths).__contains__)
        super().__init__(_stock_loader(dataset, params), params, files=paths)


class FolderOfSmall(_LoaderSubject):
    """The same loop over `params["small"]`: a folder of the stored size's JPEGs, made for this."""

    def __init__(self, params: Params) -> None:
        dataset = _small_folder(params, PillowCrop(params["crop"]))
        super().__init__(_stock_loader(dataset, params), params, files=[params["small"]])


def _small_folder(params: Params, transform: Any, **options: Any) -> Dataset[Any]:
    kind = imagefolder_class()
    if kind is not None:
        return cast("Dataset[Any]", kind(params["small"], transform, **options))
    paths = sorted(Path(params["small"]).rglob("*.jpg"))
    return _PillowFolder([(str(path), int(path.parent.name)) for path in paths], transform)


class FolderOfTensors(_LoaderSubject):
    """torchvision the fast way: decoded to tensors, v2 transforms on uint8, over either folder.

    https://docs.pytorch.org/vision/stable/transforms.html#performance-considerations
    """

    def __init__(self, params: Params) -> None:
        from torchvision.transforms import v2

        transform = v2.Compose(
            [v2.RandomResizedCrop(params["crop"], antialias=True), v2.RandomHorizontalFlip()]
        )
        dataset: Any
        if params.get("tensors_of") == "small":
            dataset, files = _small_folder(params, transform, loader=_decoded), [params["small"]]
        else:
            packed = PackedFiles([params["file"]])
            files = [str(Path(params["images"]) / key) for key in packed.keys()]  # noqa: SIM118
            dataset = imagefolder_class()(
                params["images"], transform, loader=_decoded, is_valid_file=set(files).__contains__
            )
        super().__init__(_stock_loader(dataset, params), params, files=files)
        if not _torchvision_decodes():
            self.note = "decoded by Pillow: torchvision's decoders cannot be loaded here"


def _decoded(path: str) -> Tensor:
    from torchvision.io import ImageReadMode, decode_image, read_file
    from torchvision.transforms.v2.functional import pil_to_tensor

    if _torchvision_decodes():
        return cast("Tensor", decode_image(read_file(path), mode=ImageReadMode.RGB))
    with Image.open(path) as image:
        return cast("Tensor", pil_to_tensor(image.convert("RGB")))


@functools.cache
def _torchvision_decodes() -> bool:
    """Return whether torchvision's own decoders are there: one built for another torch has none."""
    from torchvision.io import decode_image

    try:
        decode_image(torch.frombuffer(bytearray(encode_jpeg(_BLACK, 90)), dtype=torch.uint8))
    except RuntimeError:
        return False
    return True


class _UsualDataset(Dataset[tuple[Tensor, int]]):
    """The HDF5 dataset of the tutorials: file opened in each worker, indexed, made float."""

    def __init__(self, path: str, transform: TensorCrop) -> None:
        self.path = path
        self.transform = transform
        self.file: h5py.File | None = None
        with h5py.File(path) as file:
            self.length = len(file["labels"])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        if self.file is None:
            self.file = h5py.File(self.path)
        pixels = self.file["images"][index].astype(np.float32) / 255
        image = torch.from_numpy(pixels.transpose(2, 0, 1))
        return self.transform(image), self.file["labels"][index]


class UsualH5py(_LoaderSubject):
    """h5py the usual way, for store=raw."""

    dtype = "float32"
    note = "float32 in 0…1, as in the tutorials"

    def __init__(self, params: Params) -> None:
        dataset = _UsualDataset(params["file"], TensorCrop(params["crop"]))
        super().__init__(_stock_loader(dataset, params), params, files=[params["file"]])


def _swapped(params: Params) -> H5Dataset:
    """Return the images in ImageFolder's proportions, for a crop that is not h5feed's own."""
    return H5Dataset(params["file"], TensorCrop(params["crop"]), output="tensor", aspect="source")


class SwappedIn(_LoaderSubject):
    """H5Dataset in ImageFolder's place, the rest of the script as it was."""

    def __init__(self, params: Params) -> None:
        dataset = _swapped(params)
        super().__init__(_stock_loader(dataset, params), params, files=[params["file"]])


class ReadyMade(_LoaderSubject):
    """make_dataloader around the same dataset."""

    def __init__(self, params: Params) -> None:
        dataset = _swapped(params)
        loader = make_dataloader(
            dataset, params["batch_size"], shuffle=True, num_workers=params["workers"]
        )
        super().__init__(loader, params, files=[params["file"]])


def crop_ops(side: int) -> tuple[augment.Op, ...]:
    """Return what all of them do to images, as h5feed's own ops."""
    return augment.RandomResizedCrop(side), augment.RandomHorizontalFlip()


class _FastLoader(_LoaderSubject):
    """H5Loader with h5feed's own ops."""

    augment_on: AugmentOn = "cpu"
    engine: EngineName = "auto"

    def __init__(self, params: Params) -> None:
        loader = H5Loader(
            H5Dataset(params["file"]),
            params["batch_size"],
            shuffle=True,
            augment=crop_ops(params["crop"]),
            device=params["device"],
            augment_on=self.augment_on,
            engine=self.engine,
            num_workers=params["workers"] or 1,
        )
        super().__init__(loader, params, files=[params["file"]])

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield (images, labels) of the next epoch: every pass is another one."""
        yield from self.loader

    def close(self) -> None:
        """End the loader's workers."""
        self.loader.close()


class LoaderOnCpu(_FastLoader):
    """H5Loader as it is, crops made by the CPU."""


class LoaderOfThreads(_FastLoader):
    """H5Loader, crops made by threads however many they are."""

    engine = "thread"


class LoaderOfProcesses(_FastLoader):
    """H5Loader, crops made by worker processes."""

    engine = "process"


class LoaderOnDevice(_FastLoader):
    """H5Loader, whole images gathered and cropped on the device."""

    augment_on = "device"


class LoaderByDali(_LoaderSubject):
    """The batches of H5Loader, made by NVIDIA DALI."""

    def __init__(self, params: Params) -> None:
        from h5feed.interop.dali import DaliLoader

        loader = DaliLoader(
            H5Dataset(params["file"]),
            params["batch_size"],
            shuffle=True,
            augment=crop_ops(params["crop"]),
            device=params["device"],
            num_workers=params["workers"],
        )
        super().__init__(loader, params, files=[params["file"]])

    def close(self) -> None:
        """End the loader's workers."""
        self.loader.close()
