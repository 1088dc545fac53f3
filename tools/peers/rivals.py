"""Who is compared. As a command it installs each of them into a virtual environment of its own.

    python tools/peers/rivals.py [--into .venv-peers] [ffcv dali …]

One folder per rival, because they do not agree on versions. A rival that cannot be installed is
named with the last lines of pip's answer and the script exits 1; the others are installed all the
same, and tools/peers/run.py reports the missing ones as missing.

FFCV compiles against OpenCV and TurboJPEG: on Debian and Ubuntu first
`apt-get install build-essential pkg-config libopencv-dev libturbojpeg0-dev`. SPDL decodes with the
system's FFmpeg libraries: `apt-get install ffmpeg`.
To choose the PyTorch build, set pip's own PIP_CONSTRAINT or PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CEILINGS", "ENVIRONMENTS", "RIVALS", "Rival", "install"]

_ADAPTERS = Path(__file__).resolve().parent / "adapters"
_PLAIN = ("torch", "numpy", "pillow")
_TORCH = ("torch", "torchvision", "numpy", "pillow")
_ENCODED = ("jpeg", "original")


@dataclass(frozen=True, slots=True)
class Rival:
    """A loader with an adapter."""

    name: str
    """As the table prints it."""
    adapter: str
    """File below adapters/."""
    distribution: str = "h5feed"
    """Whose version is reported."""
    environment: str | None = None
    """Folder of its virtual environment; None: the Python that runs this (h5feed's)."""
    packages: tuple[str, ...] = ()
    """What pip installs there, in this order: FFCV is built with the torch that it finds."""
    variants: tuple[str, ...] = ("raw", *_ENCODED)
    """What it can store or read."""

    def python(self, into: Path) -> Path:
        """Return the interpreter that runs its adapter."""
        return Path(sys.executable) if self.environment is None else _python(into, self.environment)

    def command(self, into: Path) -> tuple[str, ...]:
        """Return the command that starts its adapter."""
        return (str(self.python(into)), str(_ADAPTERS / self.adapter))


RIVALS = (
    # name, adapter, distribution, environment, packages
    Rival("torchvision, PIL", "torchvision_loader.py", "torchvision", "torchvision", _TORCH),
    # FFCV's setup.py imports setuptools and pkg-config's answers at build time.
    Rival("FFCV", "ffcv_loader.py", "ffcv", "ffcv",
        (*_PLAIN, "setuptools<80", "wheel", "ffcv==1.0.2")),
    Rival("DALI (CPU)", "dali_cpu.py", "nvidia-dali-cuda120", "dali",
        (*_PLAIN, "nvidia-dali-cuda120==2.4.0")),
    Rival("torchvision v2, tensors", "torchvision_loader.py", "torchvision", "torchvision",
        _TORCH, variants=_ENCODED),
    Rival("LitData", "litdata_loader.py", "litdata", "litdata", (*_TORCH, "litdata")),
    Rival("MosaicML Streaming", "streaming_loader.py", "mosaicml-streaming", "streaming",
        (*_TORCH, "mosaicml-streaming")),
    Rival("WebDataset", "webdataset_loader.py", "webdataset", "webdataset",
        (*_TORCH, "webdataset")),
    Rival("SPDL", "spdl_loader.py", "spdl", "spdl", (*_PLAIN, "spdl"), variants=_ENCODED),
    Rival("Hugging Face datasets", "datasets_loader.py", "datasets", "datasets",
        (*_TORCH, "datasets")),
    Rival("h5feed", "h5feed_loader.py"),
)  # fmt: skip
CEILINGS = (
    Rival("bare crop loop", "h5feed_loader.py", variants=("raw",)),
    Rival("whole-decode loop", "h5feed_loader.py", variants=_ENCODED),
    Rival("region-decode loop", "h5feed_loader.py", variants=("jpeg",)),
)
"""cv2 in a thread pool over h5feed's packed file: what is left when the loader is taken away."""
ENVIRONMENTS = {rival.environment: rival.packages for rival in RIVALS if rival.environment}


def _python(into: Path, environment: str) -> Path:
    return into / environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def install(name: str, packages: tuple[str, ...], into: Path) -> str | None:
    """Make the environment `name` below `into`; return None, or why it could not be made."""
    venv.create(into / name, with_pip=True)
    for package in packages:
        command = [str(_python(into, name)), "-m", "pip", "install", "--quiet", package]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            tail = "\n    ".join(done.stderr.strip().splitlines()[-5:])
            return f"pip install {package}:\n    {tail}"
    return None


def main() -> int:
    """Install the rivals named on the command line, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[], help="rivals to install (default: all)")
    parser.add_argument("--into", type=Path, default=Path(".venv-peers"), help="parent folder")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ENVIRONMENTS):
        known = ", ".join(ENVIRONMENTS)
        parser.error(f"no such rival: {', '.join(sorted(unknown))}; known: {known}")
    failed = 0
    for name in options.names or ENVIRONMENTS:
        start = time.monotonic()
        why = install(name, ENVIRONMENTS[name], options.into)
        failed += why is not None
        print(f"{name}: {why or f'installed in {time.monotonic() - start:.0f} s'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
