import copy

import pytest
import torch
from torch import nn

from h5feed.train.tricks import drop_biases, useless_biases

torch.set_num_threads(1)


class Mixed(nn.Module):
    """One bias that a norm subtracts, one that a sum uses too, one with no norm behind."""

    def __init__(self):
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.summed, self.summed_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.plain = nn.Conv2d(4, 4, 1)
        self.drop = nn.Dropout(0.5)

    def forward(self, images):
        values = self.drop(self.first_norm(self.first(images)).relu())
        values = self.summed(values)
        values = self.summed_norm(values) + values
        return self.plain(values)


def test_only_biases_that_nothing_notices_are_named():
    model = Mixed()
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    assert useless_biases(model.eval(), torch.randn(2, 3, 8, 8)) == {"first": "first_norm"}
    assert not model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    torch.randn(2, 3, 8, 8)
    torch.set_rng_state(random)


def test_dropping_changes_no_output_in_either_mode():
    torch.manual_seed(0)
    model = Mixed()
    model.drop.p = 0.0
    with torch.no_grad():
        model.first.bias.add_(2.0)
        for _ in range(20):
            model(torch.randn(4, 3, 8, 8))  # running statistics
    images = torch.randn(4, 3, 8, 8)
    expected = copy.deepcopy(model).eval()(images), copy.deepcopy(model).train()(images)
    assert drop_biases(model, images) == ["first"]
    assert model.first.bias is None
    torch.testing.assert_close(model.eval()(images), expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.train()(images), expected[1], atol=1e-4, rtol=1e-4)


def test_torchvisions_vgg_has_eight_of_them():
    models = pytest.importorskip("torchvision.models")
    model = models.vgg11_bn(num_classes=2)
    model.classifier = nn.Linear(512 * 49, 2)
    names = drop_biases(model, torch.randn(2, 3, 32, 32))
    assert names == [f"features.{n}" for n in (0, 4, 8, 11, 15, 18, 22, 25)]


class ManyOutputs(nn.Module):
    """Wraps what `Mixed` returns, as models do that return more than a tensor."""

    def __init__(self, wrap):
        super().__init__()
        self.inner, self.wrap = Mixed(), wrap

    def forward(self, images):
        return self.wrap(self.inner(images))


class Opaque:
    def __init__(self, values):
        self.values = values


@pytest.mark.parametrize(
    ("wrap", "found"),
    [
        (lambda values: {"out": values, "name": "a", "count": 3}, ["inner.first"]),
        (lambda values: (values.argmax(1), [values]), ["inner.first"]),
        (Opaque, []),  # what cannot be looked into may need every bias
    ],
)
def test_models_that_return_dicts_and_tuples(wrap, found):
    assert drop_biases(ManyOutputs(wrap), torch.randn(2, 3, 8, 8)) == found
