"""Who is compared: names, adapters, environments."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from install import environment

__all__ = ["CEILINGS", "RIVALS", "Rival"]

_ADAPTERS = Path(__file__).resolve().parent / "adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A loader with an adapter."""

    name: str
    """As the table prints it."""
    adapter: str
    """File below adapters/."""
    environment: str | None
    """Folder of its virtual environment; None: the Python that runs this (h5feed's)."""
    distribution: str
    """Whose version is reported."""
    variants: tuple[str, ...] = ("raw", "jpeg", "original")
    """What it can store or read."""

    def python(self, into: Path) -> Path:
        """Return the interpreter that runs its adapter."""
        return (
            Path(sys.executable)
            if self.environment is None
            else environment(self.environment, into)
        )

    def command(self, into: Path) -> tuple[str, ...]:
        """Return the command that starts its adapter."""
        return (str(self.python(into)), str(_ADAPTERS / self.adapter))


_ENCODED = ("jpeg", "original")

RIVALS = (
    Rival(
        name="torchvision, PIL",
        adapter="torchvision_pil.py",
        environment="torchvision",
        distribution="torchvision",
    ),
    Rival(name="FFCV", adapter="ffcv_loader.py", environment="ffcv", distribution="ffcv"),
    Rival(
        name="DALI (CPU)",
        adapter="dali_cpu.py",
        environment="dali",
        distribution="nvidia-dali-cuda120",
    ),
    Rival(
        name="torchvision v2, tensors",
        adapter="torchvision_v2.py",
        environment="torchvision",
        distribution="torchvision",
        variants=_ENCODED,
    ),
    Rival(
        name="LitData",
        adapter="litdata_loader.py",
        environment="litdata",
        distribution="litdata",
    ),
    Rival(
        name="MosaicML Streaming",
        adapter="streaming_loader.py",
        environment="streaming",
        distribution="mosaicml-streaming",
    ),
    Rival(
        name="WebDataset",
        adapter="webdataset_loader.py",
        environment="webdataset",
        distribution="webdataset",
    ),
    Rival(
        name="SPDL",
        adapter="spdl_loader.py",
        environment="spdl",
        distribution="spdl",
        variants=_ENCODED,
    ),
    Rival(
        name="Hugging Face datasets",
        adapter="datasets_loader.py",
        environment="datasets",
        distribution="datasets",
    ),
    Rival(name="h5feed", adapter="h5feed_loader.py", environment=None, distribution="h5feed"),
)

CEILINGS = tuple(
    Rival(
        name=name,
        adapter="bare_loop.py",
        environment=None,
        distribution="h5feed",
        variants=variants,
    )
    for name, variants in (
        ("bare crop loop", ("raw",)),
        ("whole-decode loop", _ENCODED),
        ("region-decode loop", ("jpeg",)),
    )
)
"""cv2 in a thread pool over h5feed's packed file: what is left when the loader is taken away."""
