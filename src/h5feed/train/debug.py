"""Tools for looking closer, each off unless asked for: they cost much of the speed."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck

from h5feed.errors import H5FeedError, UsageError
from h5feed.train.config import DebugTool
from h5feed.train.loaders import Batch
from h5feed.train.log import LossError
from h5feed.train.tasks import Task
from h5feed.train.tricks import plain_blocks

__all__ = ["check_gradients", "debugging"]


@contextmanager
def debugging(tool: DebugTool, out: Path, device: torch.device) -> Iterator[Callable[[], None]]:
    """Switch `tool` on for as long as the block lasts; yields what to call after each step.

    >>> with debugging("anomaly", Path("run"), torch.device("cpu")) as after_step:
    ...     after_step()  # after each step; --debug profile counts them
    """
    if tool == "anomaly":
        with _anomaly():
            yield _nothing
    elif tool == "profile":
        with _profile(out, device) as profiler:
            yield profiler.step
    elif tool == "nvtx":
        if device.type != "cuda":
            raise UsageError(f"--debug nvtx marks ranges for Nsight on a GPU, and runs on {device}")
        with torch.autograd.profiler.emit_nvtx():  # type: ignore[no-untyped-call]
            yield _nothing
    else:
        yield _nothing


def _nothing() -> None:
    pass


@contextmanager
def _anomaly() -> Iterator[None]:
    try:
        with torch.autograd.set_detect_anomaly(True):
            yield
    except RuntimeError as ex:
        if "returned nan values" not in str(ex):
            raise
        raise LossError(f"--debug anomaly: {ex} The call that made it is traced above") from ex


def _profile(out: Path, device: torch.device) -> torch.profiler.profile:
    """Profile three steps, after one that warms up and one that warms the profiler up."""

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(out / "trace.json"))
        table = profiler.key_averages().table(
            sort_by=f"self_{device.type}_time_total", row_limit=20
        )
        (out / "top-ops.txt").write_text(table + "\n")

    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=write,
        profile_memory=True,
    )


def check_gradients(net: nn.Module, task: Task, batch: Batch) -> None:
    """Compare a step's gradients with finite differences, in float64 on two images.

    `net` is copied and not touched. Raises H5FeedError with torch's comparison when they differ.
    """
    twin = copy.deepcopy(net).double().train()
    plain_blocks(
        twin
    )  # torch's checkpoint takes no functional_call, and the gradients are the same
    for module in twin.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()  # another mask in each pass is not a derivative
    images = batch[0][:2].double().requires_grad_()
    targets = batch[1][:2]
    targets = targets.double() if targets.is_floating_point() else targets
    weights = dict(twin.named_parameters())

    def loss(images: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(weights, values, strict=True))
        return task.loss(torch.func.functional_call(twin, named, (images,)), targets)

    try:
        gradcheck(loss, (images, *weights.values()), fast_mode=True)
    except GradcheckError as ex:
        raise H5FeedError(f"--debug gradcheck: a backward pass is wrong: {ex}") from ex
