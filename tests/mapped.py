"""Where in this process a file is mapped, as the kernel tells it."""

from pathlib import Path


def maps_of(path):
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return [(int(first, 16), int(last, 16)) for first, last in spans]


def is_view(path, address, length=1):
    """Whether these bytes of memory are the mapped file's."""
    return any(low <= address and address + length <= high for low, high in maps_of(path))
