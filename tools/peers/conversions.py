"""The source folder, and what each rival makes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from _common import SIZE, labeled_files
from PIL import Image
from rivals import Rival

from h5feed.bench.process import Remote
from h5feed.bench.system import files_below

__all__ = ["convert", "prepare_source"]


def prepare_source(images: Path, times: int, work: Path) -> Path:
    """Return a folder with every image `times` times: real copies, so that cold is cold."""
    if times == 1:
        return images
    out = work / "sources" / f"{images.name}-x{times}"
    for path, _ in labeled_files(images):
        (out / path.parent.name).mkdir(parents=True, exist_ok=True)
        for copy in range(times):
            to = out / path.parent.name / f"{path.stem}-{copy}{path.suffix}"
            if not to.exists():
                shutil.copyfile(path, to)
    return out


def _source_pixels(source: Path) -> float:
    """Mean pixels of a source image."""
    total = 0
    files = labeled_files(source)
    for path, _ in files:
        with Image.open(path) as image:
            total += image.width * image.height
    return total / len(files)


def convert(
    rival: Rival, variant: str, source: Path, *, work: Path, peers: Path, workers: int
) -> dict[str, Any]:
    """Convert with the rival's own means; return what an earlier run did where there is one.

    Returns: data (path), files (all that it reads), seconds, bytes (of these files), pixels (mean
    of a stored image).

    Raises:
        SubjectError: The adapter failed.
    """
    out = work / "converted" / source.name / Path(rival.adapter).stem / variant
    note = out / "converted.json"
    if note.exists():
        return dict(json.loads(note.read_text()))
    shutil.rmtree(out, ignore_errors=True)
    (out / "data").mkdir(parents=True)
    params = {
        "source": str(source.resolve()),
        "out": str((out / "data").resolve()),
        "variant": variant,
        "workers": workers,
    }
    with Remote(rival.command(peers)) as remote:
        told = dict(remote.ask({"do": "convert", "params": params}, timeout=3600))
    told.setdefault("files", [told["data"]])
    files = files_below(told["files"])
    told["bytes"] = sum(file.stat().st_size for file in files)
    told.setdefault("pixels", _source_pixels(source) if variant == "original" else SIZE * SIZE)
    note.write_text(json.dumps(told))
    return told
