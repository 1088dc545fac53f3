"""What every test needs before torchvision is imported."""

import sys

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # its operators live as long as it does

try:
    import torchvision
except RuntimeError:
    # A torchvision built for CUDA beside a CPU-only torch: its import looks these two
    # operators up and finds neither. No test of ours calls them.
    for _op in ("nms", "qnms"):
        _LIBRARY.define(f"{_op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for _name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[_name]
    import torchvision
except ImportError:
    pass  # the tests that need it say so themselves
