"""Images for tests: made, never measured against themselves."""

import io

import numpy as np
from PIL import Image

ORIENTATION = 0x0112


def smooth(height, width, seed=0):
    """Soft shapes with a little noise: uint8 (H, W, 3), no symmetry in any direction."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    waves = [np.sin(a * x + b * y + c) for a, b, c in rng.uniform(1, 7, (3, 3))]
    pixels = 128 + 100 * np.stack(waves, -1) + rng.normal(0, 3, (height, width, 3))
    return pixels.clip(0, 255).astype(np.uint8)


def encoded(image, kind, **options):
    """Return a Pillow image's file as bytes."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_orientation(orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def jpeg_bytes(pixels, *, mode="RGB", orientation=None, quality=95, **options):
    if orientation is not None:
        options["exif"] = with_orientation(orientation)
    return encoded(Image.fromarray(pixels).convert(mode), "JPEG", quality=quality, **options)


def psnr(a, b):
    return 10 * np.log10(255**2 / np.mean((a.astype(float) - b) ** 2))
