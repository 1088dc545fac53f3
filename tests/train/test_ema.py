import torch
from torch import nn

from h5feed.train.tricks import Ema


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
