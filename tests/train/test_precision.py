import importlib.util
import os
import sys

import pytest
import torch
from torch import nn

from h5feed.errors import H5FeedError, UsageError
from h5feed.train import precision, train
from h5feed.train.config import SpeedConfig
from h5feed.train.precision import (
    backends,
    check_backend,
    choose_precision,
    for_scoring,
    make_autocast,
    make_scaler,
)
from train.helpers import make_config, make_data

CPU = torch.device("cpu")


def switches():
    cudnn = torch.backends.cudnn
    return cudnn.benchmark, cudnn.allow_tf32, torch.get_float32_matmul_precision()


@pytest.mark.parametrize("benchmark", [True, False])
@pytest.mark.parametrize(
    ("precision", "tf32", "matmul"),
    [
        ("fp32", False, "highest"),
        ("tf32", True, "high"),
        ("bf16", True, "high"),
        ("torch", *switches()[1:]),
    ],
)
def test_backends_are_switched_and_put_back(precision, tf32, matmul, benchmark):
    before = switches()
    with backends(precision, SpeedConfig(cudnn_benchmark=benchmark)):
        assert switches() == (benchmark, tf32, matmul)
    assert switches() == before


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_autocast_computes_in_the_number_format(precision, dtype):
    layer = torch.nn.Linear(2, 2)
    with make_autocast(precision, CPU):
        assert layer(torch.zeros(1, 2)).dtype == dtype
    assert layer(torch.zeros(1, 2)).dtype == torch.float32


def test_only_fp16_scales_its_gradients():
    enabled = {name: make_scaler(name, CPU).is_enabled() for name in ("fp32", "bf16", "fp16")}
    assert enabled == {"fp32": False, "bf16": False, "fp16": True}


def test_auto_on_the_cpu_is_fp32_and_tf32_is_one_sentence():
    assert choose_precision(SpeedConfig(), CPU) == "fp32"
    assert choose_precision(SpeedConfig(precision="bf16"), CPU) == "bf16"
    with pytest.raises(UsageError, match=r"--precision tf32 needs a GPU .* cpu is none: use fp32"):
        choose_precision(SpeedConfig(precision="tf32"), CPU)


@pytest.mark.parametrize(
    ("capability", "wanted", "result"),
    [((8, 0), "auto", "bf16"), ((7, 5), "auto", "fp32"), ((9, 0), "tf32", "tf32")],
)
def test_gpus_by_their_capability(monkeypatch, capability, wanted, result):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = SpeedConfig(precision=wanted)
    assert choose_precision(config, torch.device("cuda:0")) == result


@pytest.mark.parametrize(("wanted", "advice"), [("bf16", "use fp16"), ("tf32", "use fp32")])
def test_older_gpus_are_told_what_to_take(monkeypatch, wanted, advice):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UsageError, match=f"cuda:0 is none: {advice}"):
        choose_precision(SpeedConfig(precision=wanted), torch.device("cuda:0"))


def determinism():
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


def test_determinism_is_asked_for_during_the_run_only(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # to be as it was afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    before = determinism()
    with backends("fp32", SpeedConfig()):
        assert determinism() == (False, False, True)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with backends("fp32", SpeedConfig(deterministic=True)):
        assert determinism() == (True, True, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert determinism() == before


def test_an_operation_that_is_not_deterministic_is_one_sentence():
    with (
        pytest.raises(H5FeedError) as caught,
        backends("fp32", SpeedConfig(deterministic=True)),
    ):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    assert str(caught.value) == (
        "--deterministic: put_ does not have a deterministic implementation: leave it out, or take "
        "a model without that operation"
    )
    assert not torch.are_deterministic_algorithms_enabled()


torch.set_num_threads(1)


@pytest.fixture
def counting():
    """A backend that counts its compilations and keeps the weights it saw, as TensorRT does."""
    seen = []

    def backend(graph, _inputs):
        seen.append(graph)
        return graph.forward

    yield backend, seen
    torch.compiler.reset()


@pytest.fixture
def registered(counting):
    backend, seen = counting
    torch._dynamo.register_backend(backend, name="counting")
    yield seen
    del torch._dynamo.backends.registry._COMPILER_FNS["counting"]
    torch._dynamo.backends.registry._BACKENDS.pop("counting", None)


def test_off_changes_nothing():
    net = nn.Linear(2, 2)
    assert for_scoring(net, "off") is net
    check_backend("off", CPU)


def test_scoring_is_compiled_once_and_sees_the_weights_of_today(registered):
    net = nn.Linear(2, 2).eval()
    images = torch.randn(3, 2)
    with torch.inference_mode():
        first = for_scoring(net, "counting")(images)
    with torch.no_grad():
        net.weight.mul_(2)
    with torch.inference_mode():
        second = for_scoring(net, "counting")(images)
        assert torch.equal(second, net(images))
    assert not torch.equal(first, second)
    assert len(registered) == 1


def test_a_backend_that_builds_weights_in_compiles_anew(registered, monkeypatch):
    monkeypatch.setattr(precision, "_FREEZING", ("counting",))
    net = nn.Linear(2, 2).eval()
    for _ in range(2):
        with torch.inference_mode():
            for_scoring(net, "counting")(torch.randn(3, 2))
    assert len(registered) == 2


def test_a_run_scores_through_the_backend_and_trains_without(registered, tmp_path):
    scores = []
    for name, backend in (("plain", "off"), ("compiled", "counting")):
        config = make_config(tmp_path / name, scoring_backend=backend, epochs=2)
        scores.append(train(config, make_data(config)).val)
    assert scores[0] == pytest.approx(scores[1])
    assert len(registered) >= 1
    assert all(not node.requires_grad for graph in registered for node in graph.buffers())


def test_compile_reaches_training_and_scoring(tmp_path, monkeypatch):
    seen = []

    def recorded(net, **how):
        seen.append((net.training, how))
        return net

    monkeypatch.setattr(torch, "compile", recorded)
    config = make_config(tmp_path, compile="max-autotune", epochs=2)
    train(config, make_data(config))
    assert seen == [(True, {"mode": "max-autotune"})] * 3  # the step, and each epoch's scoring


def test_an_unknown_backend_is_refused_before_training(tmp_path):
    config = make_config(tmp_path / "run", scoring_backend="magic")
    with pytest.raises(UsageError, match=r"--scoring-backend 'magic' is not known .* inductor"):
        train(config, make_data(config))


@pytest.mark.skipif(
    importlib.util.find_spec("torch_tensorrt") is not None, reason="it is installed here"
)
def test_tensorrt_is_missed_in_one_sentence():
    with pytest.raises(UsageError) as caught:
        check_backend("tensorrt", CPU)
    assert str(caught.value) == (
        "--scoring-backend tensorrt needs torch_tensorrt, which is not installed: pip install "
        "torch-tensorrt, or take --scoring-backend inductor"
    )


def test_tensorrt_wants_a_gpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setitem(sys.modules, "torch_tensorrt", object())
    with pytest.raises(UsageError, match="runs on GPUs, and this is on cpu"):
        check_backend("tensorrt", CPU)
