import copy

import numpy as np
import pytest
import torch
from torch import nn

from h5feed.augment import CutMix, MixUp
from h5feed.augment.mixing import mix_labels, mix_rows
from h5feed.train.config import RecipeConfig
from h5feed.train.models import build_model
from h5feed.train.tricks import (
    Ema,
    EpochLoaders,
    checkpoint_blocks,
    drop_biases,
    image_size,
    mix_batch,
    useless_biases,
)

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


def test_the_average_follows_its_formula_and_spares_the_model():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    ema = Ema(model, decay=0.9)
    expected = model[0].weight.detach().clone()
    for step in range(200):
        with torch.no_grad():
            model[0].weight += 1
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model[0].weight.detach()
        ema.update(step)
    trained = model[0].weight.detach().clone()
    with ema.swapped_in():
        torch.testing.assert_close(model[0].weight.detach(), expected)
    assert torch.equal(model[0].weight.detach(), trained)


def test_float_statistics_are_averaged_and_counters_left():
    model = nn.BatchNorm1d(2)
    ema = Ema(model, decay=0.5)
    model(torch.randn(8, 2) + 5)
    ema.update(0)
    running = model.running_mean.clone()
    with ema.swapped_in():
        torch.testing.assert_close(model.running_mean, 0.9 * running)
        assert model.num_batches_tracked == 1


def test_the_state_has_the_models_names():
    model = nn.Linear(2, 2)
    ema = Ema(model, decay=0.5)
    with torch.no_grad():
        model.weight += 1
    ema.update(0)
    saved = {name: value.clone() for name, value in ema.state_dict().items()}
    assert list(saved) == list(model.state_dict())
    other = Ema(nn.Linear(2, 2), decay=0.5)
    other.load_state_dict(saved)
    assert torch.equal(other.state_dict()["weight"], saved["weight"])


IMAGES = torch.arange(4).view(4, 1, 1, 1).expand(4, 3, 16, 16).to(torch.uint8) * 40
LABELS = torch.tensor([0, 1, 2, 3])


def test_mixup_adds_shares_of_images_and_targets():
    images, targets = mix_batch(IMAGES, LABELS, RecipeConfig(mixup=1.0), 4, (1, 2))
    share = targets[1, 1].item()
    assert 0 < share < 1
    assert targets[1].tolist() == pytest.approx([1 - share, share, 0, 0])
    assert images[1].unique().item() == pytest.approx(40 * share, rel=1e-5)
    assert images[0].unique().item() == pytest.approx(120 * (1 - share), rel=1e-5)


def test_cutmix_pastes_a_box_and_weighs_by_its_area():
    for seed in range(20):
        images, targets = mix_batch(IMAGES, LABELS, RecipeConfig(cutmix=1.0), 4, (seed,))
        assert images.dtype == torch.uint8
        kept = (images[1] == 40).float().mean().item()
        pasted = (images[1] == 0).float().mean().item()
        assert kept + pasted == pytest.approx(1)
        assert targets[1].tolist() == pytest.approx([pasted, kept, 0, 0], abs=1e-6)
    assert IMAGES[1].unique().item() == 40  # what came in is as it was


def test_with_both_a_batch_takes_one_of_them():
    both = RecipeConfig(mixup=1.0, cutmix=1.0)
    kinds = {mix_batch(IMAGES, LABELS, both, 4, (seed,))[0].dtype for seed in range(20)}
    assert kinds == {torch.uint8, torch.float32}


def test_the_draw_is_a_function_of_the_seed():
    config = RecipeConfig(mixup=0.4)
    one, two, other = (mix_batch(IMAGES, LABELS, config, 4, seed) for seed in ((1,), (1,), (2,)))
    assert torch.equal(one[0], two[0])
    assert not torch.equal(one[1], other[1])


def test_a_label_that_is_no_class_is_refused():
    with pytest.raises(RuntimeError, match="MixUp or CutMix met a label outside of 0 to 2"):
        mix_batch(IMAGES, LABELS, RecipeConfig(mixup=1.0), 3, (1,))


@pytest.mark.parametrize("recipe", [RecipeConfig(mixup=0.4), RecipeConfig(cutmix=1.0)])
def test_batches_are_mixed_as_h5loaders_are(recipe):
    op = MixUp(alpha=0.4) if recipe.mixup else CutMix(alpha=1.0)
    images, targets = mix_batch(IMAGES, LABELS, recipe, 4, (5,))
    drawn = op.draw(np.random.default_rng((5,)).random(3), (16, 16))
    rows = IMAGES.permute(0, 2, 3, 1).contiguous().numpy()
    mix_rows(rows, drawn, torch.uint8)
    expected = torch.from_numpy(rows).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(images.float(), expected, atol=0.51, rtol=0)
    torch.testing.assert_close(targets, mix_labels(LABELS, float(drawn[0]), 4))


def sizes(start, full, epochs):
    return [image_size(start, full, epochs, epoch) for epoch in range(epochs)]


def test_sizes_grow_and_reach_the_full_one_for_the_last_quarter():
    assert sizes(128, 224, 8) == [128, 160, 160, 192, 192, 224, 224, 224]
    assert sizes(16, 32, 4) == [16, 24, 32, 32]
    assert sizes(48, 64, 4) == [48, 64, 64, 64]


@pytest.mark.parametrize(("start", "full"), [(0, 224), (224, 224)])
def test_off_or_equal_means_full_images(start, full):
    assert set(sizes(start, full, 5)) == {full}


def test_the_last_epoch_is_always_full():
    assert [sizes(128, 224, epochs)[-1] for epochs in (1, 2, 3)] == [224] * 3


class Recorded:
    def __init__(self, size):
        self.size, self.calls, self.state = size, [], None

    def __len__(self):
        return 3

    def set_epoch(self, epoch):
        self.calls.append(epoch)

    def state_dict(self):
        return {"at": len(self.calls)}

    def load_state_dict(self, state):
        self.state = state


def test_a_loader_is_made_anew_only_when_the_size_changes():
    made = []

    def make(size):
        made.append(Recorded(size))
        return made[-1]

    loaders = EpochLoaders(make, lambda epoch: 8 if epoch < 2 else 16)
    first = loaders.at(0)
    assert loaders.at(1) is first
    assert loaders.at(1) is first
    assert first.calls == [0, 1]
    assert loaders.at(2).size == 16
    assert [loader.size for loader in made] == [8, 16]
    assert loaders.state_dict() == {"epoch": 2, "loader": {"at": 1}}


def test_a_loaded_state_is_not_set_back_by_the_loop():
    loaders = EpochLoaders(Recorded, lambda epoch: 8 if epoch < 2 else 16)
    loaders.load_state_dict({"epoch": 2, "loader": {"at": 5}})
    loader = loaders.at(2)
    assert (loader.size, loader.calls, loader.state) == (16, [2], {"at": 5})
