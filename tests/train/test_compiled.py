import importlib.util
import sys

import pytest
import torch
from torch import nn

from h5feed.errors import UsageError
from h5feed.train import precision, train
from h5feed.train.precision import check_backend, for_scoring
from train.helpers import make_config, make_data

torch.set_num_threads(1)
CPU = torch.device("cpu")


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
        config = make_config(tmp_path / name, compile_backend=backend, epochs=2)
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
    config = make_config(tmp_path / "run", compile_backend="magic")
    with pytest.raises(UsageError, match=r"--compile-backend 'magic' is not known .* inductor"):
        train(config, make_data(config))


@pytest.mark.skipif(
    importlib.util.find_spec("torch_tensorrt") is not None, reason="it is installed here"
)
def test_tensorrt_is_missed_in_one_sentence():
    with pytest.raises(UsageError) as caught:
        check_backend("tensorrt", CPU)
    assert str(caught.value) == (
        "--compile-backend tensorrt needs torch_tensorrt, which is not installed: pip install "
        "torch-tensorrt, or take --compile-backend inductor"
    )


def test_tensorrt_wants_a_gpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setitem(sys.modules, "torch_tensorrt", object())
    with pytest.raises(UsageError, match="runs on GPUs, and this is on cpu"):
        check_backend("tensorrt", CPU)
