"""torchvision for the tools, also where it was built for CUDA and torch was not.

Such a torchvision fails at import because two of its operators are missing; no tool calls them.
"""

import sys

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # its operators live as long as it does

try:
    import torchvision  # noqa: F401
except RuntimeError:
    for _op in ("nms", "qnms"):
        _LIBRARY.define(f"{_op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for _name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[_name]

from torchvision.datasets import ImageFolder  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

__all__ = ["ImageFolder", "v2"]
