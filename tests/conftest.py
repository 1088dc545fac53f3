"""What torchvision needs before it is imported, and what several tests begin with."""

import signal
import sys

import pytest
import torch

from packing.folders import make_folder

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


@pytest.fixture(autouse=True, scope="session")
def ctrl_c():
    """Let Ctrl-C be heard: a shell that starts the tests in the background has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def folder(tmp_path):
    """Two classes of twelve images each."""
    return make_folder(tmp_path / "source_images")


@pytest.fixture
def out(tmp_path):
    """A packed file that is not there yet, alone in its folder."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "x.h5"
