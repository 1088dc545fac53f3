"""Processes that tests start must be able to import what tests can."""

import os
import sys
from pathlib import Path

import torch

_SITE = """
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for op in ("nms", "qnms"):
    library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def importable(folder: Path, monkeypatch) -> None:
    """Let new processes find this one's modules, and torchvision as conftest.py lets tests."""
    places = [path for path in sys.path if path]
    if not hasattr(torch.ops.torchvision, "roi_align"):  # torchvision's own operators are missing
        (folder / "sitecustomize.py").write_text(_SITE)
        places.insert(0, str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
