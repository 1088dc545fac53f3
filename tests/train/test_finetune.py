import re

import pytest
import torch
from torch import nn

from h5feed.errors import H5FeedError, UsageError
from h5feed.train.finetune import (
    Weights,
    fit_weights,
    freeze,
    frozen_norms,
    head_names,
    parameter_layers,
    pretrained_weights,
    read_weights,
)
from h5feed.train.models import Network, build_model

torch.set_num_threads(1)


def small(num_outputs):
    """A stem, two blocks and a head, with batch norms and dropout."""
    block = [
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        for _ in range(2)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Sequential(*block),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, num_outputs),
    )


SMALL = "train.test_finetune:small"
HEAD = {"5.weight", "5.bias"}


def test_the_head_is_what_another_number_of_outputs_changes():
    assert head_names(SMALL, 4, small(4)) == HEAD  # four channels everywhere: not known by shape
    assert head_names("unet", 3, build_model("unet", 3)) == {"head.weight", "head.bias"}
    model, before = small(3), torch.get_rng_state()
    head_names(SMALL, 3, model)
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_go_from_the_stem_to_the_head():
    assert parameter_layers(small(3)) == [
        ["0.weight", "1.weight", "1.bias"],
        ["2.0.0.weight", "2.0.1.weight", "2.0.1.bias"],
        ["2.1.0.weight", "2.1.1.weight", "2.1.1.bias"],
        ["5.weight", "5.bias"],
    ]
    inner = parameter_layers(small(3))
    net = Network(small(3), (0,) * 3, (1,) * 3)
    assert parameter_layers(net) == [[f"model.{name}" for name in layer] for layer in inner]


@pytest.mark.parametrize(
    ("name", "library", "count", "stem", "head"),
    [
        ("resnet18", "", 10, "stem.0.weight", {"head.weight", "head.bias"}),
        ("torchvision:resnet18", "torchvision", 10, "conv1.weight", {"fc.weight", "fc.bias"}),
        ("torchvision:vit_b_16", "torchvision", 14, "class_token",
         {"heads.head.weight", "heads.head.bias"}),
        ("timm:test_vit", "timm", 8, "cls_token", {"head.weight", "head.bias"}),
    ],
)  # fmt: skip
def test_layers_of_known_models(name, library, count, stem, head):
    if library:
        pytest.importorskip(library)
    with torch.device("meta"):
        model = build_model(name, 10)
    layers = parameter_layers(model)
    assert (len(layers), layers[0][0], set(layers[-1])) == (count, stem, head)
    names = [weight for layer in layers for weight in layer]
    assert sorted(names) == sorted(weight for weight, _ in model.named_parameters())
    assert head_names(name, 10, model) == head


def test_freezing_by_number_by_name_and_all_but_the_head():
    def frozen(wanted):
        model = small(3)
        named = freeze(model, wanted, frozenset(HEAD))
        assert named == [n for n, weight in model.named_parameters() if not weight.requires_grad]
        return set(named), frozen_norms(model)

    assert frozen("1") == ({"0.weight", "1.weight", "1.bias"}, {"1"})
    assert frozen("2.1,0") == (
        {"2.1.0.weight", "2.1.1.weight", "2.1.1.bias", "0.weight"},
        {"2.1.1"},
    )
    everything = {name for name, _ in small(3).named_parameters()}
    assert frozen("backbone") == (everything - HEAD, {"1", "2.0.1", "2.1.1"})
    assert frozen("2.1.1.bias")[1] == frozenset()  # its weight is trained: so are its statistics


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("4", "--freeze 4 is not a number of layers to freeze: --model has 4, and the last must "
              "stay free"),
        ("0", "--freeze 0 is not a number of layers"),
        ("2.1,layer9", "--freeze 'layer9' begins no weight's name: --model has 0, 1, 2, 5, whose "),
        ("0,1,2,5", "--freeze 0,1,2,5 freezes every weight: nothing is left to train"),
    ],
)  # fmt: skip
def test_what_cannot_be_frozen_is_said(wanted, said):
    with pytest.raises(UsageError, match="^" + re.escape(said)):
        freeze(small(3), wanted, frozenset(HEAD))


def test_frozen_batch_norms_stay_in_eval_mode():
    net = Network(small(3), (0,) * 3, (1,) * 3)
    freeze(net.model, "1", frozenset(HEAD))
    net.keep_in_eval_mode(frozen_norms(net.model))
    for mode in (None, False, True):
        if mode is not None:
            net.train(mode)
        assert not net.model[1].training
        assert net.model[2][0][1].training is (mode is not False)
    before = {name: value.clone() for name, value in net.named_buffers()}
    net(torch.rand(2, 3, 8, 8) * 255)
    moved = {name for name, value in net.named_buffers() if not torch.equal(value, before[name])}
    assert {name.rpartition(".")[0] for name in moved} == {"model.2.0.1", "model.2.1.1"}


def fitted(state, *, outputs=3, **facts):
    model = small(outputs)
    said = fit_weights(model, Weights(state=state, source="--init x.pt", **facts), frozenset(HEAD))
    return model.state_dict(), said


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.model."])
def test_weights_are_taken_whatever_stands_before_their_names(prefix):
    state = {prefix + name: value for name, value in small(3).state_dict().items()}
    got, said = fitted(state)
    assert all(torch.equal(got[name.removeprefix(prefix)], state[name]) for name in state)
    assert said == "--init x.pt: 20 of 20 tensors taken"


def test_a_head_of_another_size_stays_new_and_is_said():
    torch.manual_seed(1)
    state = small(5).state_dict()
    torch.manual_seed(2)
    got, said = fitted({**state, "neck.weight": torch.ones(1)})
    torch.manual_seed(2)
    fresh = small(3).state_dict()
    assert all(torch.equal(got[name], fresh[name]) for name in HEAD)
    assert all(torch.equal(got[name], state[name]) for name in state.keys() - HEAD)
    assert said == (
        "--init x.pt: 18 of 20 tensors taken, the head is new: 5.bias, 5.weight, 1 of the file not "
        "used (neck.weight)"
    )
    backbone = {name: value for name, value in state.items() if name not in HEAD}
    assert "the head is new" in fitted(backbone)[1]
    # A bias of the old head is not put under the weights of the new one.
    half = {**state, "5.bias": torch.full((3,), 9.0)}
    assert fitted(half)[0]["5.bias"].max() < 9


def test_weights_of_another_model_are_refused():
    state = small(3).state_dict()
    missing = {name: value for name, value in state.items() if name != "2.1.0.weight"}
    with pytest.raises(UsageError) as caught:
        fitted(missing)
    assert str(caught.value) == (
        "--init x.pt has no '2.1.0.weight', which --model needs; it has 0.weight, 1.weight, "
        "1.bias, ...: give weights of the same model"
    )
    with pytest.raises(UsageError) as caught:
        fitted({**state, "0.weight": torch.zeros(8, 3, 3, 3)})
    assert str(caught.value) == (
        "--init x.pt has '0.weight' of shape (8, 3, 3, 3), and --model (4, 3, 3, 3): give weights "
        "of the same model"
    )


def test_weights_are_read_from_what_training_scripts_save(tmp_path):
    state = {name: value + 1 for name, value in small(3).state_dict().items()}
    path = tmp_path / "a.pt"
    for saved in (state, {"state_dict": state, "epoch": 3}, {"model": {"state_dict": state}},
                  {"model": small(3).state_dict(), "model_ema": state}):  # fmt: skip
        torch.save(saved, path)
        weights = read_weights(path)
        assert set(weights.state) == set(state)
        assert torch.equal(weights.state["0.weight"], state["0.weight"])
        assert weights.mean is None
    exported = Network(small(3), (1, 2, 3), (4, 5, 6)).state_dict()
    torch.save(exported, path)
    weights = read_weights(path)
    assert (weights.mean, weights.std) == ([1, 2, 3], [4, 5, 6])
    assert fitted(weights.state)[1] == "--init x.pt: 20 of 20 tensors taken"


def test_safetensors_are_read(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "a.safetensors"
    safetensors.save_file(small(3).state_dict(), path)
    assert set(read_weights(path).state) == set(small(3).state_dict())
    path.write_bytes(b"none")
    with pytest.raises(UsageError, match=r"a\.safetensors cannot be read as safetensors: "):
        read_weights(path)
    with pytest.raises(UsageError, match=r"b\.safetensors: there is no such file"):
        read_weights(tmp_path / "b.safetensors")


def test_files_without_weights_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--init .*none\.pt: there is no such file"):
        read_weights(tmp_path / "none.pt")
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"a\.pt holds no weights: give a checkpoint of"):
        read_weights(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"x" * 99)
    with pytest.raises(UsageError, match=r"b\.pt cannot be read as a checkpoint"):
        read_weights(tmp_path / "b.pt")


def test_pretrained_of_torchvision(monkeypatch):
    models = pytest.importorskip("torchvision.models")
    state = models.get_model("resnet18").state_dict()
    asked = []

    def fetched(url, **options):
        asked.append((url, options["check_hash"]))
        return state

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetched)
    weights = pretrained_weights("torchvision:resnet18", 7)
    assert asked[0][0].endswith(".pth")
    assert asked[0][1] is True
    assert weights.mean == pytest.approx((123.675, 116.28, 103.53))  # ImageNet's, as published
    assert weights.std == pytest.approx((58.395, 57.12, 57.375))
    model = build_model("torchvision:resnet18", 7)
    head = head_names("torchvision:resnet18", 7, model)
    assert fit_weights(model, weights, head) == (
        "--pretrained ResNet18_Weights.IMAGENET1K_V1: 120 of 122 tensors taken, the head is new: "
        "fc.bias, fc.weight"
    )
    assert torch.equal(model.layer4[1].conv2.weight, state["layer4.1.conv2.weight"])


def test_pretrained_of_timm(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm")
    source = timm.create_model("test_resnet", num_classes=1000)
    torch.save(source.state_dict(), tmp_path / "a.pth")
    create = timm.create_model

    def from_file(name, **options):
        return create(name, pretrained_cfg_overlay={"file": str(tmp_path / "a.pth")}, **options)

    monkeypatch.setattr(timm, "create_model", from_file)
    weights = pretrained_weights("timm:test_resnet", 7)
    model = build_model("timm:test_resnet", 7)
    said = fit_weights(model, weights, head_names("timm:test_resnet", 7, model))
    assert said.startswith("--pretrained test_resnet.r160_in1k: ")
    assert said.endswith("the head is new: fc.bias, fc.weight")
    assert torch.equal(model.layer1[0].conv1.weight, source.layer1[0].conv1.weight)
    assert weights.mean == pytest.approx([255 * value for value in source.default_cfg["mean"]])
    whole = build_model("timm:test_resnet", 1000)
    fit_weights(
        whole, pretrained_weights("timm:test_resnet", 1000), frozenset({"fc.weight", "fc.bias"})
    )
    assert torch.equal(whole.fc.weight, source.fc.weight)


def test_pretrained_weights_that_cannot_be_had_are_one_sentence(monkeypatch):
    pytest.importorskip("torchvision")

    def offline(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with pytest.raises(H5FeedError) as caught:
        pretrained_weights("torchvision:resnet18", 7)
    assert str(caught.value) == (
        "--pretrained: the weights of torchvision:resnet18 could not be had (no route to host): "
        "mend the network, or fetch them elsewhere and give the file with --init PATH"
    )
    with pytest.raises(UsageError, match=r"--pretrained is for torchvision:NAME and timm:NAME, and "
                       r"--model is resnet18: give weights with --init PATH"):  # fmt: skip
        pretrained_weights("resnet18", 7)
