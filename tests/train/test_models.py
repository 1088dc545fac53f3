import sys

import pytest
import torch
from torch import nn

from h5feed.errors import UsageError
from h5feed.optional import require
from h5feed.train.models import OWN_MODELS, Network, ResNet9, UNet, build_model
from h5feed.train.tricks import useless_biases

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("name", "size", "shape"),
    [("resnet9", 32, (2, 5)), ("resnet18", 64, (2, 5)), ("unet", 32, (2, 5, 32, 32))],
)
def test_our_models_give_an_output_per_class(name, size, shape):
    with torch.no_grad():
        assert build_model(name, 5)(torch.zeros(2, 3, size, size)).shape == shape


@pytest.mark.parametrize("name", sorted(OWN_MODELS))
def test_our_models_have_no_bias_before_a_batch_norm(name):
    assert useless_biases(build_model(name, 5), torch.randn(2, 3, 32, 32)) == {}


def test_resnet18_has_the_published_number_of_weights():
    count = sum(weight.numel() for weight in build_model("resnet18", 1000).parameters())
    assert count == 11_689_512  # He et al. 2016, as counted by torchvision


def test_the_network_normalizes_with_the_given_numbers():
    net = Network(nn.Identity(), mean=(10, 20, 30), std=(1, 2, 4))
    images = torch.full((1, 3, 2, 2), 30, dtype=torch.uint8)
    assert net(images)[0, :, 0, 0].tolist() == [20, 5, 0]
    assert net(images).dtype == torch.float32
    assert {"mean", "std"} < set(Network(ResNet9(2, 4), (1,) * 3, (1,) * 3).state_dict())


def test_the_network_takes_torchvisions_out_and_refuses_other_structures():
    class Structured(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.make = make

        def forward(self, images):
            return self.make(images)

    picked = Network(Structured(lambda x: {"out": x, "aux": None}), (0,) * 3, (1,) * 3)
    assert picked(torch.ones(1, 3, 1, 1)).sum() == 3
    with pytest.raises(UsageError, match="--model returns tuple, not a tensor: wrap it"):
        Network(Structured(lambda x: (x, x)), (0,) * 3, (1,) * 3)(torch.ones(1, 3, 1, 1))


def test_torchvision_by_name():
    pytest.importorskip("torchvision")
    model = build_model("torchvision:mobilenet_v3_small", 7)
    with torch.no_grad():
        assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    with pytest.raises(UsageError, match="--model torchvision:resnet19: torchvision has no such"):
        build_model("torchvision:resnet19", 7)


def test_timm_by_name():
    pytest.importorskip("timm")
    model = build_model("timm:test_resnet", 7)
    with torch.no_grad():
        assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    with pytest.raises(UsageError, match="--model timm:resnet19: timm has no such model"):
        build_model("timm:resnet19", 7)


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r'timm is not installed.*pip install "h5feed\[train\]"'):
        build_model("timm:resnet18", 7)


@pytest.mark.parametrize("error", ["RuntimeError", "OSError", "ImportError"])
def test_a_library_built_for_another_torch_is_one_sentence(tmp_path, monkeypatch, error):
    text = "operator torchvision::nms does not exist"
    (tmp_path / "built_for_another.py").write_text(f"raise {error}({text!r})")
    (tmp_path / "its_user.py").write_text("import built_for_another")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("built_for_another.models", "its_user"):
        with pytest.raises(ImportError) as caught:
            require(module, "train")
        assert str(caught.value) == (
            f"{module.removesuffix('.models')} is installed and cannot be imported ({text}): "
            "install the builds of it, and of what it imports, that were made for this torch"
        )


def test_a_library_that_lacks_another_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "incomplete.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as caught:
        require("incomplete", "train")
    assert str(caught.value) == (
        "incomplete is installed and lacks something (No module named 'what_it_needs'): "
        'pip install "h5feed[train]"'
    )


def test_a_users_own_function(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(
        "import torch\n"
        "def make(num_outputs):\n    return torch.nn.Linear(3, num_outputs)\n"
        "def wrong(num_outputs):\n    return num_outputs\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert build_model("my_model:make", 7).out_features == 7
    with pytest.raises(UsageError, match=r"my_model:wrong returned int, not a torch\.nn\.Module"):
        build_model("my_model:wrong", 7)
    with pytest.raises(UsageError, match="my_model:other: my_model has no 'other'"):
        build_model("my_model:other", 7)
    with pytest.raises(UsageError, match="there is no module 'no_model' to import"):
        build_model("no_model:make", 7)


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(
        UsageError, match="'resnet' is not known: it is resnet9, resnet9-small, resnet18, "
    ):
        build_model("resnet", 7)


def test_unet_learns_from_coarse_and_fine():
    torch.manual_seed(0)
    model = UNet(2, width=4)
    outputs = model(torch.randn(2, 3, 32, 32))
    outputs.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_drop_path_of_torchvision_grows_to_the_rate():
    stochastic_depth = pytest.importorskip("torchvision.ops").StochasticDepth
    with torch.device("meta"):
        model = build_model("torchvision:convnext_tiny", 7, drop_path=0.4)
        usual = build_model("torchvision:convnext_tiny", 7)
        off = build_model("torchvision:convnext_tiny", 7, drop_path=0.0)
    found, before, none = (
        [part.p for part in one.modules() if isinstance(part, stochastic_depth)]
        for one in (model, usual, off)
    )
    assert found == pytest.approx([4 * rate for rate in before])  # its own highest is 0.1
    assert (found[0], found[-1], max(none)) == (0.0, pytest.approx(0.4), 0.0)


def test_drop_path_of_timm_and_of_a_users_function(tmp_path, monkeypatch):
    pytest.importorskip("timm")
    model = build_model("timm:test_vit", 7, drop_path=0.3)
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)
    (tmp_path / "deep.py").write_text(
        "from torch.nn import Dropout\n"
        "def make(num_outputs, drop_path=0.0):\n    return Dropout(drop_path)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert build_model("deep:make", 7, drop_path=0.3).p == 0.3
    assert build_model("deep:make", 7).p == 0.0


@pytest.mark.parametrize(
    "name", ["resnet18", "torchvision:resnet18", "timm:vgg11", "train.test_finetune:small"]
)
def test_models_without_stochastic_depth_are_named(name):
    for library in ("torchvision", "timm"):
        if name.startswith(library):
            pytest.importorskip(library)
    with torch.device("meta"), pytest.raises(UsageError) as caught:
        build_model(name, 7, drop_path=0.1)
    assert str(caught.value).startswith(
        f"--drop-path 0.1: --model {name} has no stochastic depth. Leave it out, or take a model"
    )
