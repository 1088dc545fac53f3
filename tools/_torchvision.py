"""torchvision for the tools, also where it was built for CUDA and torch was not.

Such a torchvision fails at import because two of its operators are missing; no tool calls them.
tools/site does it for processes that import torchvision on their own.
"""

import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["import_torchvision"]

_SITE = Path(__file__).parent / "site/sitecustomize.py"
_made: dict[str, Any] = {}  # operators live as long as the library they were defined in


def import_torchvision() -> ModuleType:
    """Import torchvision; where that fails, once more with the two operators defined."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        _made.update(runpy.run_path(str(_SITE)))
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        return importlib.import_module("torchvision")
