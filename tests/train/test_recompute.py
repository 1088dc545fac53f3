import copy

import pytest
import torch
from torch import nn

from h5feed.train.models import build_model
from h5feed.train.tricks import checkpoint_blocks

torch.set_num_threads(1)


def gradients(model, images):
    torch.manual_seed(1)  # the same dropout
    outputs = model(images)
    outputs.square().mean().backward()
    return outputs.detach(), [weight.grad for weight in model.parameters()]


def kept_bytes(model, images):
    """Bytes that autograd keeps between forward and backward, each storage once."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: alive.append(t) or pack(t), lambda t: t
    ):
        model(images)
    return sum(sizes.values())


class Flat(nn.Module):
    """One long Sequential of bare layers, some of which overwrite their input."""

    def __init__(self, outputs):
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True)]
        for _ in range(5):
            layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers, nn.Dropout(0.1))
        self.head = nn.Linear(8, outputs)

    def forward(self, images):
        return self.head(self.features(images).mean((2, 3)))


@pytest.mark.parametrize(
    "name", ["resnet9", "resnet18", "unet", "torchvision:mobilenet_v2", f"{__name__}:Flat"]
)
def test_results_gradients_and_statistics_stay_and_memory_falls(name):
    if name.startswith("torchvision"):
        pytest.importorskip("torchvision")
    torch.manual_seed(0)
    plain = build_model(name, 3)
    saving = copy.deepcopy(plain)
    assert checkpoint_blocks(saving)
    assert list(saving.state_dict()) == list(plain.state_dict())
    images = torch.randn(2, 3, 32, 32)
    outputs, expected = gradients(plain, images)
    found, grads = gradients(saving, images)
    torch.testing.assert_close(found, outputs)
    torch.testing.assert_close(grads, expected)
    for name_, value in plain.state_dict().items():
        torch.testing.assert_close(saving.state_dict()[name_], value, msg=name_)
    assert kept_bytes(saving, images) < 0.8 * kept_bytes(plain, images)


def test_it_compiles_and_moves_statistics_once():
    torch.manual_seed(0)
    plain = build_model("resnet9-small", 3)
    saving = copy.deepcopy(plain)
    checkpoint_blocks(saving)
    images = torch.randn(2, 3, 16, 16)
    outputs, expected = gradients(plain, images)
    found, grads = gradients(torch.compile(saving, backend="aot_eager"), images)
    torch.testing.assert_close(found, outputs)
    torch.testing.assert_close(grads, expected)
    torch.testing.assert_close(saving.state_dict(), plain.state_dict())


def test_a_copy_runs_its_own_weights():
    model = build_model("resnet9", 3)
    checkpoint_blocks(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.body.parameters():
            weight.zero_()
    images = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(twin(images), model(images))


def test_each_block_runs_twice_in_training_and_once_in_scoring():
    calls = []

    class Counted(nn.Linear):
        def forward(self, values):
            calls.append(1)
            return super().forward(values)

    model = nn.Sequential(nn.Sequential(nn.Sequential(Counted(4, 4), nn.ReLU())), nn.Linear(4, 2))
    assert checkpoint_blocks(model) == ["0.0"]
    model(torch.randn(2, 4)).sum().backward()
    assert len(calls) == 2
    model.eval()(torch.randn(2, 4))
    assert len(calls) == 3


def test_a_model_without_sequentials_is_checkpointed_by_its_children():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, values):
            return self.two(self.one(values).relu())

    assert checkpoint_blocks(Flat()) == ["one", "two"]
