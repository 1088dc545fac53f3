import pytest
import torch

from h5feed.train import load_trained, train
from train.helpers import make_config, make_data, make_pictures

torch.set_num_threads(1)


def with_biases(num_outputs):
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(512, num_outputs),
    )


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_loaded_network_scores_what_the_run_scored(tmp_path, ema, channels_last):
    options = {"model": f"{__name__}:with_biases", "ema": ema, "channels_last": channels_last}
    options["drop_biases"] = True  # which is known when it is loaded
    config = make_config(tmp_path, epochs=1, **options)
    summary = train(config, make_data(config))
    net = load_trained(tmp_path / "best.pt")
    assert not net.training
    assert net.model[0].bias is None
    images, labels = make_pictures()
    with torch.no_grad():
        outputs = net(images)
    loss = torch.nn.functional.cross_entropy(outputs, labels).item()
    assert loss == pytest.approx(summary.val["loss"], rel=1e-5)
