import os

import pytest
import torch

from h5feed.errors import H5FeedError, UsageError
from h5feed.train.config import SpeedConfig
from h5feed.train.precision import backends, choose_precision, make_autocast, make_scaler

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
