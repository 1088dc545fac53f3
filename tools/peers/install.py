"""Install every rival into a virtual environment of its own.

    python tools/peers/install.py [--into .venv-peers] [ffcv dali …]

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
from pathlib import Path

TORCH = ("torch", "torchvision", "numpy", "pillow")

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "torchvision": TORCH,
    # FFCV's setup.py imports setuptools and pkg-config's answers at build time.
    "ffcv": ("torch", "numpy", "pillow", "setuptools<80", "wheel", "ffcv==1.0.2"),
    "dali": ("torch", "numpy", "pillow", "nvidia-dali-cuda120==2.4.0"),
    "webdataset": (*TORCH, "webdataset"),
    "streaming": (*TORCH, "mosaicml-streaming"),
    "litdata": (*TORCH, "litdata"),
    "spdl": ("torch", "numpy", "pillow", "spdl"),
    "datasets": (*TORCH, "datasets"),
}


def environment(name: str, into: Path) -> Path:
    """Return the Python of the rival `name`'s environment below the folder `into`."""
    return into / name / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def install(name: str, into: Path) -> str | None:
    """Install the rival `name` below `into`; return None, or why it could not be installed."""
    venv.create(into / name, with_pip=True)
    command = [str(environment(name, into)), "-m", "pip", "install", "--quiet"]
    # In this order: a package built from source (FFCV) finds torch and numpy already there.
    for requirement in REQUIREMENTS[name]:
        done = subprocess.run([*command, requirement], capture_output=True, text=True)
        if done.returncode:
            tail = "\n    ".join(done.stderr.strip().splitlines()[-5:])
            return f"pip install {requirement}:\n    {tail}"
    return None


def main() -> int:
    """Install the rivals named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[], help="rivals to install (default: all)")
    parser.add_argument("--into", type=Path, default=Path(".venv-peers"), help="parent folder")
    options = parser.parse_args()
    unknown = set(options.names) - set(REQUIREMENTS)
    if unknown:
        parser.error(
            f"no such rival: {', '.join(sorted(unknown))}; known: {', '.join(REQUIREMENTS)}"
        )
    failed = 0
    for name in options.names or REQUIREMENTS:
        start = time.monotonic()
        why = install(name, options.into)
        failed += why is not None
        print(f"{name}: {why or f'installed in {time.monotonic() - start:.0f} s'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
