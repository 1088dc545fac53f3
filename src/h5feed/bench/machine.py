"""On what was measured: processor, memory, disk, versions."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from h5feed.system import available_cores, total_memory

__all__ = ["describe", "machine", "versions"]

_PACKAGES = ("h5feed", "torch", "torchvision", "numpy", "h5py", "opencv-python-headless", "pillow")


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _disk(path: Path) -> dict[str, Any]:
    """Name and kind of the block device that holds `path`; empty where the system hides it."""
    try:
        device = path.stat().st_dev
        block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
        rotational = next(
            folder / "queue/rotational"
            for folder in (block, block.parent)
            if (folder / "queue/rotational").exists()
        )
        return {"device": block.name, "rotational": rotational.read_text().strip() == "1"}
    except (OSError, StopIteration):
        return {}


def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Versions of those of `packages` that are installed, and Python's."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(data: str | Path) -> dict[str, Any]:
    """Facts about this machine and the disk that holds `data`; nothing that names its owner."""
    cpu = _cpuinfo()
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cores": available_cores(),
        "virtual": "hypervisor" in cpu.get("flags", "").split(),
        "memory_bytes": total_memory(),
        "system": f"{platform.system()} {platform.release()}",
        "disk": _disk(Path(data)),
    }


def describe(facts: dict[str, Any]) -> str:
    """Say the machine in a few words: "2-core AMD EPYC VM, 24 GB"."""
    memory = facts["memory_bytes"]
    size = f", {memory / 1e9:.0f} GB" if memory else ""
    return f"{facts['cores']}-core {facts['cpu']}{' VM' if facts['virtual'] else ''}{size}"
