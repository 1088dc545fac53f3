"""What "agrees" means for pixels, and two samples for "are drawn alike"."""

import numpy as np
import torch

from h5feed.augment import Pipeline
from images import smooth


def make_images(count, height, width, seed=0):
    """Soft images, one of pure noise and one of hard edges: uint8 (count, H, W, 3)."""
    made = np.stack([smooth(height, width, seed + k) for k in range(count)])
    made[0] = np.random.default_rng(seed).integers(0, 256, made[0].shape)
    y, x = np.mgrid[0:height, 0:width]
    made[1:2] = np.where((x // 7 + y // 5) % 2, 255, 0)[..., None]
    return made


def planar(image):
    """(H, W, C) array to (C, H, W) tensor."""
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)


def assert_close(ours, theirs, *, most=2, mean=0.5):
    """uint8 (…, H, W, C) agree within `most` levels, and `mean` on average."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    off = np.abs(ours.astype(int) - theirs.astype(int))
    assert off.max() <= most, f"max {off.max()}, mean {off.mean():.3f}"
    assert off.mean() <= mean, f"mean {off.mean():.3f}"


def run(ops, images, draws, *, stored=None, source=None, boxes=None, nv12=False, **options):
    """Bind, draw and run on the CPU: the pipeline, its parameters, its output (n, H, W, C)."""
    pipeline = Pipeline(ops, **options)
    height, width = images[0].shape[:2]
    height = height * 2 // 3 if nv12 else height
    one_size = len({image.shape for image in images}) == 1
    pipeline.bind(
        (height, width) if one_size else None, encoding="yuv420" if nv12 else "raw", num_classes=10
    )
    if stored is None:
        stored = np.array([image.shape[:2] for image in images])
        stored[:, 0] = stored[:, 0] * 2 // 3 if nv12 else stored[:, 0]
    params = pipeline.draw(draws, stored, stored if source is None else source, boxes)
    out = np.zeros((len(images), *pipeline.out_shape), pipeline.row_dtype)
    pipeline.run_cpu(params, 0, list(images), out)
    return pipeline, params, out


def on_device(pipeline, params, images, view=0):
    """The same on the "device", here the CPU through torch: (n, H, W, C)."""
    made = pipeline.run_device(params, torch.from_numpy(np.asarray(images)), view=view)
    assert made.is_contiguous(memory_format=torch.channels_last)
    return made.permute(0, 2, 3, 1)


def ks_distance(a, b):
    """Two-sample Kolmogorov-Smirnov statistic."""
    both = np.sort(np.concatenate([a, b]))
    below_a = np.searchsorted(np.sort(a), both, side="right") / len(a)
    below_b = np.searchsorted(np.sort(b), both, side="right") / len(b)
    return np.abs(below_a - below_b).max()


def ks_limit(n, m):
    """Its value that samples of one distribution exceed once in 10,000 times."""
    return np.sqrt(-np.log(0.0001 / 2) / 2) * np.sqrt((n + m) / (n * m))


def assert_drawn_alike(ours, theirs):
    ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
    distance, limit = ks_distance(ours, theirs), ks_limit(len(ours), len(theirs))
    assert distance < limit, f"Kolmogorov-Smirnov {distance:.4f}, limit {limit:.4f}"


def assert_independent(*columns):
    """No two columns of draws go together: correlation within 4 standard deviations of 0."""
    off = np.corrcoef(np.array(columns, float)) - np.eye(len(columns))
    assert np.abs(off).max() < 4 / np.sqrt(len(columns[0])), off
