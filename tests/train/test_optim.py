import pytest
import torch
from torch import nn

from h5feed.errors import UsageError
from h5feed.train.config import OptimConfig
from h5feed.train.models import Network, build_model
from h5feed.train.optim import clip_gradients, make_optimizer, parameter_groups


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def step_with_zero_gradients(model, config):
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.data += 1
        weight.grad = torch.zeros_like(weight)
    make_optimizer(model, config).step()
    return {
        name
        for name, weight in model.named_parameters()
        if not torch.equal(weight, before[name] + 1)
    }


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weight_decay_moves_matrices_only(model, optimizer):
    moved = step_with_zero_gradients(model, OptimConfig(optimizer=optimizer, lr=0.1))
    assert moved == {"0.weight", "3.weight"}


def test_decay_norms_moves_everything(model):
    moved = step_with_zero_gradients(model, OptimConfig(lr=0.1, decay_norms=True))
    assert moved == {name for name, _ in model.named_parameters()}


class Transformer(nn.Module):
    """The weights of vision transformers that have several dimensions and are no matrices."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.anchors = nn.Parameter(torch.zeros(2, 2))
        self.head = nn.Linear(4, 2)

    def no_weight_decay(self):
        return {"anchors"}


def test_tokens_positions_and_what_a_model_names_do_not_decay():
    model = nn.ModuleDict({"model": Transformer()})
    assert step_with_zero_gradients(model, OptimConfig(lr=0.1)) == {"model.head.weight"}
    everything = step_with_zero_gradients(model, OptimConfig(lr=0.1, decay_norms=True))
    assert everything == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("optimizer", "decay"),
    [("adamw", 0.05), ("lamb", 0.01), ("sgd", 5e-4), ("lars", 1e-4), ("novograd", 1e-3)],
)
def test_weight_decay_is_the_optimizers_usual_one_unless_given(model, optimizer, decay):
    usual = make_optimizer(model, OptimConfig(optimizer=optimizer)).param_groups[0]
    assert usual["weight_decay"] == decay
    config = OptimConfig(optimizer=optimizer, weight_decay=0.0)
    assert make_optimizer(model, config).param_groups[0]["weight_decay"] == 0.0


def test_frozen_weights_are_left_out(model):
    model[0].weight.requires_grad_(False)
    weights = [w for g in parameter_groups(model, OptimConfig()) for w in g["params"]]
    assert len(weights) == 5
    assert all(w is not model[0].weight for w in weights)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_the_implementation_is_the_one_asked_for(model, optimizer, implementation):
    config = OptimConfig(optimizer=optimizer, implementation=implementation)
    made = make_optimizer(model, config)
    assert made.defaults["fused"] is (implementation == "fused")
    assert made.defaults["foreach"] is (implementation == "foreach")


def test_momentum_is_handed_on(model):
    assert make_optimizer(model, OptimConfig(momentum=0.8)).defaults["betas"] == (0.8, 0.999)
    sgd = make_optimizer(model, OptimConfig(optimizer="sgd", momentum=0.8)).defaults
    assert (sgd["momentum"], sgd["nesterov"]) == (0.8, True)
    plain = make_optimizer(model, OptimConfig(optimizer="sgd", momentum=0.0)).defaults
    assert (plain["momentum"], plain["nesterov"]) == (0.0, False)


def gradients(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_clipping_by_norm_and_by_value(model):
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 2.0)
    clip_gradients(model, OptimConfig())
    assert gradients(model).max() == 2
    clip_gradients(model, OptimConfig(clip_value=1.5))
    assert gradients(model).max() == 1.5
    clip_gradients(model, OptimConfig(clip_norm=0.5))
    assert gradients(model).norm() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_layer_decay_gives_the_rates_of_timm(name):
    factory = pytest.importorskip("timm.optim")
    model = build_model(f"timm:{name}", 3)
    expected = {}
    for group in factory.param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.7):
        expected |= {id(weight): group["lr_scale"] for weight in group["params"]}
    config = OptimConfig(lr=0.5, layer_decay=0.7)
    net = Network(model, (0,) * 3, (1,) * 3)
    found = {}
    for group in parameter_groups(net, config):
        found |= {id(weight): group["lr"] / 0.5 for weight in group["params"]}
    assert found == pytest.approx(expected)
    assert len(set(found.values())) > 3
    assert max(found.values()) == 1  # the head's


def test_layer_decay_keeps_apart_what_decays(model):
    groups = parameter_groups(model, OptimConfig(lr=0.5, weight_decay=0.1, layer_decay=0.5))
    found = {
        name: (group["lr"], group["weight_decay"])
        for group in groups
        for name, weight in model.named_parameters()
        if any(weight is one for one in group["params"])
    }
    assert found == {
        "0.weight": (0.25, 0.1), "0.bias": (0.25, 0.0), "1.weight": (0.25, 0.0),
        "1.bias": (0.25, 0.0), "3.weight": (0.5, 0.1), "3.bias": (0.5, 0.0),
    }  # fmt: skip


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_a_layer_decay_out_of_range_is_refused(value):
    with pytest.raises(UsageError, match=f"--layer-decay {value} is too"):
        OptimConfig(layer_decay=value)
