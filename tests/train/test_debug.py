import json

import pytest
import torch
from torch import nn

from h5feed.errors import H5FeedError, UsageError
from h5feed.train import LossError, train
from train.helpers import make_config, make_data, tiny

torch.set_num_threads(1)


def run(out, **options):
    config = make_config(out, epochs=1, **options)
    return train(config, make_data(config, count=128))


def test_everything_is_off_unless_asked_for(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a debug tool ran")

    for name in ("profiler.profile", "autograd.set_detect_anomaly", "autograd.profiler.emit_nvtx"):
        monkeypatch.setattr(f"torch.{name}", refuse)
    monkeypatch.setattr("h5feed.train.debug.gradcheck", refuse)
    run(tmp_path)
    assert not (tmp_path / "trace.json").exists()


def test_profile_writes_a_trace_and_a_table(tmp_path):
    run(tmp_path, debug="profile")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum(name == "aten::conv2d" for name in names) == 3  # the steps that are profiled
    assert "aten::convolution" in (tmp_path / "top-ops.txt").read_text()


class Root(nn.Module):
    """The square root of 0 · x, whose gradient is NaN."""

    def __init__(self, num_outputs):
        super().__init__()
        self.inner = tiny(num_outputs)

    def forward(self, images):
        outputs = self.inner(images)
        return outputs + (outputs * 0).square().sum().sqrt()


def test_anomaly_names_the_function_that_made_a_nan(tmp_path):
    options = {"model": f"{__name__}:Root"}
    with pytest.raises(LossError, match=r"--debug anomaly: Function '.*' returned nan values"):
        run(tmp_path / "a", debug="anomaly", **options)
    with pytest.raises(LossError, match="loss is nan"):
        run(tmp_path / "b", **options)
    assert not torch.is_anomaly_enabled()


class Wrong(torch.autograd.Function):
    """Says that the derivative of 2x is 3."""

    @staticmethod
    def forward(ctx, values):
        return values * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class WrongModel(nn.Module):
    def __init__(self, num_outputs):
        super().__init__()
        self.inner = tiny(num_outputs)

    def forward(self, images):
        return Wrong.apply(self.inner(images))


def test_gradcheck_finds_a_wrong_backward(tmp_path):
    with pytest.raises(H5FeedError, match="--debug gradcheck: a backward pass is wrong"):
        run(tmp_path / "wrong", debug="gradcheck", model=f"{__name__}:WrongModel")
    assert run(tmp_path / "wrong-but-unchecked", model=f"{__name__}:WrongModel").steps == 8


def test_gradcheck_looks_at_a_model_with_checkpointing(tmp_path):
    options = {"debug": "gradcheck", "grad_checkpointing": True, "model": "resnet9-small"}
    assert run(tmp_path, **options).steps == 8


def with_dropout(num_outputs):
    return nn.Sequential(tiny(8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, num_outputs))


def test_gradcheck_passes_a_right_one_and_changes_no_loss(tmp_path):
    losses = [
        run(tmp_path / tool, debug=tool, model=f"{__name__}:with_dropout").train["loss"]
        for tool in ("gradcheck", "off")
    ]
    assert losses[0] == losses[1]


def test_nvtx_needs_a_gpu(tmp_path):
    with pytest.raises(UsageError, match="--debug nvtx marks ranges for Nsight on a GPU, and runs"):
        run(tmp_path, debug="nvtx")
