"""What every adapter shares: the source folder, the stored size, the augmentation, the protocol.

An adapter runs in its rival's own virtual environment, where h5feed is not installed; the
measuring code is therefore loaded by its path.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pool
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image

SIZE = 256
"""Side of the stored square (variants raw and jpeg): as many pixels as h5feed --size 256 stores."""
QUALITY = 90
"""Of stored JPEGs."""

LabeledFile = tuple[Path, int]

_TOOLS = Path(__file__).resolve().parents[2]
sys.path.append(str(_TOOLS))

from _torchvision import import_torchvision  # noqa: E402


def load_measuring() -> ModuleType:
    """Import src/h5feed/bench under a name of its own and return its `process` module."""
    folder = _TOOLS.parent / "src/h5feed/bench"
    spec = importlib.util.spec_from_file_location(
        "h5feed_bench", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["h5feed_bench"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module("h5feed_bench.process")


def serve(
    factory: Callable[[Mapping[str, Any]], Any],
    convert: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> None:
    """Answer tools/peers/run.py until it says quit."""
    load_measuring().serve(factory, convert)


def labeled_files(source: str | Path) -> list[LabeledFile]:
    """Return (file, class number) of a folder with one folder per class, in sorted order."""
    classes = sorted(entry for entry in Path(source).iterdir() if entry.is_dir())
    return [(file, k) for k, entry in enumerate(classes) for file in sorted(entry.iterdir())]


def resized(path: Path) -> Image.Image:
    """Decode an image and squeeze it into the stored square (bilinear, antialiased)."""
    with Image.open(path) as image:
        return image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)


def jpeg(path: Path) -> bytes:
    """Return the stored square as JPEG bytes."""
    out = io.BytesIO()
    resized(path).save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def _write_file(job: tuple[Path, Path, str]) -> None:
    source, out, variant = job
    if variant == "jpeg":
        out.write_bytes(jpeg(source))
        return
    import numpy as np

    np.save(out, np.asarray(resized(source)))


def write_folder(params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert for rivals that read plain files: a class folder of .jpg or .npy squares.

    variant "original" has nothing to convert: the rival reads the source itself.
    """
    if params["variant"] == "original":
        return {"data": params["source"], "seconds": 0.0, "bytes": 0}
    out, suffix = Path(params["out"]), {"jpeg": ".jpg", "raw": ".npy"}[params["variant"]]
    jobs = []
    for path, _ in labeled_files(params["source"]):
        (out / path.parent.name).mkdir(parents=True, exist_ok=True)
        jobs.append((path, out / path.parent.name / (path.stem + suffix), params["variant"]))
    with Pool(params["workers"]) as pool:
        pool.map(_write_file, jobs, chunksize=16)
    return {"data": str(out)}


def augmentation(crop: int, *, pil: bool) -> Callable[[Any], Any]:
    """RandomResizedCrop + flip to a uint8 (3, crop, crop) tensor, from a PIL image or a tensor.

    torchvision's v2 transforms, bilinear and antialiased (its defaults).
    """
    import_torchvision()
    from torchvision.transforms import v2

    start = [v2.PILToTensor()] if pil else []
    return v2.Compose(
        [v2.RandomResizedCrop(crop, antialias=True), v2.RandomHorizontalFlip(), *start]
    )


class TorchLoader:
    """A subject around a PyTorch DataLoader or one of its kin."""

    dtype = "uint8"
    layout = "NCHW"
    note = ""

    def __init__(self, loader: Any, data: str) -> None:
        self.loader = loader
        self.files = [data]

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield (images, labels) of one epoch."""
        yield from self.loader

    def synchronize(self) -> None:
        """CPU batches are there when they are handed out."""

    def close(self) -> None:
        """Let the workers go."""
        del self.loader


def loader_settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """DataLoader arguments common to all that use one.

    Workers kept between epochs, as PyTorch's documentation advises where starting them is slow;
    https://docs.pytorch.org/docs/stable/data.html
    """
    return {
        "batch_size": params["batch_size"],
        "num_workers": params["workers"],
        "persistent_workers": True,
    }
