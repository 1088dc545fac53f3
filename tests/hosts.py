"""Processes that tests start must be able to import what tests can."""

import os
import sys
from pathlib import Path

import torch

_SITE = Path(__file__).parents[1] / "tools/site"


def importable(monkeypatch) -> None:
    """Let new processes find this one's modules, and torchvision as conftest.py lets tests."""
    places = [path for path in sys.path if path]
    if not hasattr(torch.ops.torchvision, "roi_align"):  # torchvision's own operators are missing
        places.insert(0, str(_SITE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
