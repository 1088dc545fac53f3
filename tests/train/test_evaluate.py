import pytest
import torch
from torch import nn

from h5feed.train.config import LossConfig
from h5feed.train.distributed import World
from h5feed.train.evaluate import evaluate
from h5feed.train.precision import make_autocast
from h5feed.train.tasks import make_task

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, device=CPU)
PLAIN = make_autocast("fp32", CPU)


class Probe(nn.Module):
    """Outputs are pixels; remembers how it was run."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Dropout().eval()
        self.other = nn.Dropout()
        self.seen = []

    def forward(self, images):
        self.seen.append((self.training, self.other.training, torch.is_inference_mode_enabled()))
        return images.float()[:, 0, 0, :2]


def batches(*sizes):
    draws = torch.Generator().manual_seed(0)
    for size in sizes:
        yield torch.randn(size, 3, 4, 2, generator=draws), torch.arange(size) % 2


def test_the_mean_is_over_pictures_whatever_the_batches():
    task = make_task("classification", LossConfig(), 2)
    parts = list(batches(5, 3, 1))
    images, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    loss, metric = evaluate(Probe(), parts, task, ALONE, PLAIN)
    outputs = images[:, 0, 0, :2]
    assert loss == pytest.approx(nn.functional.cross_entropy(outputs, labels).item())
    assert metric == (outputs.argmax(1) == labels).sum().item() / 9


def test_it_runs_in_eval_mode_without_gradients_and_restores_each_module():
    net = Probe()
    evaluate(net, batches(2), make_task("classification", LossConfig(), 2), ALONE, PLAIN)
    assert net.seen == [(False, False, True)]
    assert (net.training, net.other.training, net.frozen.training) == (True, True, False)


def test_the_modes_are_restored_after_an_error():
    net = Probe()
    with pytest.raises(AttributeError):
        evaluate(net, [(None, None)], make_task("classification", LossConfig(), 2), ALONE, PLAIN)
    assert (net.training, net.other.training, net.frozen.training) == (True, True, False)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_flip_averages_with_the_mirror_image():
    task = make_task("classification", LossConfig(), 2)
    images = torch.tensor([[5.0, 0.0], [0.0, 5.0]]).view(2, 1, 1, 2)
    labels = torch.tensor([0, 1])
    assert evaluate(Probe(), [(images, labels)], task, ALONE, PLAIN)[0] < 0.01
    flipped = evaluate(Probe(), [(images, labels)], task, ALONE, PLAIN, flip=True)[0]
    assert flipped == pytest.approx(0.6931, abs=1e-3)  # both outputs alike: log 2


def test_flip_turns_dense_outputs_back():
    task = make_task("segmentation", LossConfig(), 2)
    net = nn.Identity()  # a pixel's two channels are its outputs
    masks = torch.tensor([[[0, 1, 1, 0], [1, 1, 0, 0]]])
    images = nn.functional.one_hot(masks, 2).permute(0, 3, 1, 2).float()
    assert evaluate(net, [(images, masks)], task, ALONE, PLAIN, flip=True)[1] == 1.0


def test_it_computes_in_the_number_format_of_the_training():
    seen = []
    net = nn.Sequential(nn.Flatten(), nn.Linear(24, 2))
    net[1].register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    task = make_task("classification", LossConfig(), 2)
    evaluate(net, batches(2), task, ALONE, make_autocast("bf16", CPU))
    assert seen == [torch.bfloat16]
