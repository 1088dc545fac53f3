from dataclasses import replace

import pytest
import torch
from torch import nn

from h5feed.train.config import LossConfig
from h5feed.train.distributed import World
from h5feed.train.precision import make_autocast
from h5feed.train.tasks import evaluate, make_task

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


def test_the_mean_is_over_images_whatever_the_batches():
    task = make_task("classification", LossConfig(), 2)
    parts = list(batches(5, 3, 1))
    images, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    scored = evaluate(Probe(), parts, task, ALONE, PLAIN)
    outputs = images[:, 0, 0, :2]
    assert scored.loss == pytest.approx(nn.functional.cross_entropy(outputs, labels).item())
    assert scored.metric == (outputs.argmax(1) == labels).sum().item() / 9


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
    assert evaluate(Probe(), [(images, labels)], task, ALONE, PLAIN).loss < 0.01
    flipped = evaluate(Probe(), [(images, labels)], task, ALONE, PLAIN, flip=True).loss
    assert flipped == pytest.approx(0.6931, abs=1e-3)  # both outputs alike: log 2


def test_flip_turns_dense_outputs_back():
    task = make_task("segmentation", LossConfig(), 2)
    net = nn.Identity()  # a pixel's two channels are its outputs
    masks = torch.tensor([[[0, 1, 1, 0], [1, 1, 0, 0]]])
    images = nn.functional.one_hot(masks, 2).permute(0, 3, 1, 2).float()
    assert evaluate(net, [(images, masks)], task, ALONE, PLAIN, flip=True).metric == 1.0


def test_it_computes_in_the_number_format_of_the_training():
    seen = []
    net = nn.Sequential(nn.Flatten(), nn.Linear(24, 2))
    net[1].register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    task = make_task("classification", LossConfig(), 2)
    evaluate(net, batches(2), task, ALONE, make_autocast("bf16", CPU))
    assert seen == [torch.bfloat16]


class Told(nn.Module):
    """Outputs are its images' first row."""

    def forward(self, images):
        return images[:, 0, 0]


def test_top5_and_the_confusion_of_classes():
    task = make_task("classification", LossConfig(), 7)
    likeliest = torch.tensor([0, 0, 3, 3, 6])
    labels = torch.tensor([0, 1, 3, 2, 6])
    outputs = torch.arange(7, 0, -1).float().repeat(5, 1)  # 0 is likeliest, 5 and 6 are last
    outputs[torch.arange(5), likeliest] = 9
    outputs[3] = torch.tensor([5.0, 4, 0, 9, 8, 7, 6])  # the true class, 2, comes last
    images = outputs.view(5, 1, 1, 7)
    parts = [(images[:2], labels[:2]), (images[2:], labels[2:])]
    scored = evaluate(Told(), parts, task, ALONE, PLAIN)
    assert scored.metric == pytest.approx(3 / 5)
    assert scored.also == {"top5": pytest.approx(4 / 5)}
    expected = torch.zeros(7, 7)
    for truth, found in zip(labels, likeliest, strict=True):
        expected[truth, found] += 1
    assert torch.equal(scored.confusion, expected)
    assert scored.drawn is None


def test_few_classes_have_no_top5_and_numbers_no_confusion():
    assert make_task("classification", LossConfig(), 5).also == {}
    assert make_task("classification", LossConfig(), 9999).confusion is None
    task = make_task("regression", LossConfig(), 2)
    scored = evaluate(Probe(), [(torch.ones(3, 3, 4, 2), torch.ones(3, 2))], task, ALONE, PLAIN)
    assert (scored.also, scored.confusion, scored.drawn) == ({}, None, None)


def test_scenes_are_kept_to_be_drawn_and_their_pixels_counted():
    task = make_task("segmentation", LossConfig(ignore_index=9), 2)
    masks = torch.tensor([[[0, 1, 1, 9]]]).repeat(8, 1, 1)
    found = torch.tensor([[[0, 0, 1, 1]]]).repeat(8, 1, 1)
    images = nn.functional.one_hot(found, 2).permute(0, 3, 1, 2).float()
    scored = evaluate(nn.Identity(), [(images, masks)] * 2, task, ALONE, PLAIN)
    assert scored.confusion.tolist() == [[16, 0], [16, 16]]
    assert [len(values) for values in scored.drawn] == [6, 6, 6]
    assert torch.equal(scored.drawn[2], found[:6])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_no_pixel_is_lost_beyond_what_float32_counts(dtype):
    """A first batch that counts as 2**24 of it: float32 adds 1 to that in vain."""
    task = make_task("segmentation", LossConfig(), 2)
    weights = iter([2**24, 1] * 2)

    def count(outputs, targets):
        table = task.score(outputs, targets)
        assert table.dtype == torch.int64  # of one batch, too
        return (table * next(weights)).to(dtype)

    images, masks = (
        torch.tensor([1.0, 0.0]).view(1, 2, 1, 1),
        torch.zeros(1, 1, 1, dtype=torch.uint8),
    )
    counted = replace(task, score=count, confusion=None, value=lambda table: table[0].item())
    scored = evaluate(nn.Identity(), [(images, masks)] * 2, counted, ALONE, PLAIN)
    assert scored.metric == 2**24 + 1
    counted = replace(counted, confusion=count, score=task.score)
    scored = evaluate(nn.Identity(), [(images, masks)] * 2, counted, ALONE, PLAIN)
    assert scored.confusion[0, 0] == 2**24 + 1
