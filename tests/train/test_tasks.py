import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from h5feed.errors import UsageError
from h5feed.train.config import LossConfig
from h5feed.train.distributed import World
from h5feed.train.precision import make_autocast
from h5feed.train.tasks import average_precision, evaluate, make_task


def test_classification_counts_hits_over_batches():
    task = make_task("classification", LossConfig(), 3)
    outputs = torch.tensor([[2.0, 1, 0], [0, 1, 2], [0, 3, 0], [1, 0, 0]])
    first = task.score(outputs[:3], torch.tensor([0, 0, 1]))
    second = task.score(outputs[3:], torch.tensor([0]))
    assert task.value(first + second) == 0.75
    assert task.num_classes == 3


def test_classification_scores_mixed_targets_by_their_stronger_class():
    task = make_task("classification", LossConfig(), 2)
    score = task.score(torch.tensor([[1.0, 0], [1, 0]]), torch.tensor([[0.7, 0.3], [0.4, 0.6]]))
    assert score.tolist() == [1, 2]


def test_label_smoothing_spreads_the_target():
    outputs, targets = torch.tensor([[3.0, 0, 0, 0]]), torch.tensor([0])
    plain = make_task("classification", LossConfig(), 4).loss(outputs, targets)
    smooth = make_task("classification", LossConfig(label_smoothing=0.2), 4).loss(outputs, targets)
    share = torch.tensor([[0.85, 0.05, 0.05, 0.05]])
    assert smooth == pytest.approx(-(share * outputs.log_softmax(1)).sum().item())
    assert smooth > plain


def test_label_smoothing_spreads_the_targets_of_pixels():
    outputs = torch.tensor([3.0, 0, 0, 0]).view(1, 4, 1, 1)
    task = make_task("segmentation", LossConfig(label_smoothing=0.2), 4)
    share = torch.tensor([0.85, 0.05, 0.05, 0.05]).view(1, 4, 1, 1)
    loss = task.loss(outputs, torch.zeros(1, 1, 1, dtype=torch.uint8))
    assert loss == pytest.approx(-(share * outputs.log_softmax(1)).sum().item())


def test_regression_is_a_squared_loss_and_an_absolute_score():
    task = make_task("regression", LossConfig(), 2)
    outputs, targets = torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[1.0, 0], [3, 8]])
    assert task.loss(outputs, targets) == 5
    assert task.value(task.score(outputs, targets)) == 1.5
    assert not task.higher_is_better


def test_segmentation_scores_mean_iou_without_what_is_ignored():
    task = make_task("segmentation", LossConfig(ignore_index=9), 3)
    truth = torch.tensor([[[0, 0, 1], [1, 9, 9]]])
    found = torch.tensor([[[0, 1, 1], [1, 1, 0]]])
    outputs = functional.one_hot(found, 3).permute(0, 3, 1, 2).float() * 5
    assert task.value(task.score(outputs, truth)) == pytest.approx((1 / 2 + 2 / 3) / 2)
    kept = outputs.clone()
    outputs[0, :, 1, 1:] = torch.randn(3, 2)  # where the mask says 9
    assert torch.equal(task.loss(outputs, truth), task.loss(kept, truth))
    assert math.isfinite(task.loss(outputs, truth))


def test_a_users_own_task(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text(
        "from h5feed.train import Task\n"
        "def make(config, num_outputs):\n"
        "    return Task(name='mine', loss=lambda o, t: o.sum(), metric='sum',\n"
        "                score=lambda o, t: o.sum()[None], value=lambda score: score.item())\n"
        "def wrong(config, num_outputs):\n    return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert make_task("my_task:make", LossConfig(), 3).metric == "sum"
    with pytest.raises(UsageError, match="--task my_task:wrong returned int, not a Task"):
        make_task("my_task:wrong", LossConfig(), 3)


def test_an_unknown_task_lists_what_there_is():
    with pytest.raises(UsageError, match="--task 'detection' is not one of classification, mult"):
        make_task("detection", LossConfig(), 3)


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_is_timms(threshold, smoothing):
    losses = pytest.importorskip("timm.loss")
    config = LossConfig(loss="bce", label_smoothing=smoothing, bce_target_thresh=threshold)
    task = make_task("classification", config, 4)
    theirs = losses.BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
    outputs, labels = torch.randn(5, 4), torch.tensor([0, 3, 1, 1, 2])
    assert task.loss(outputs, labels) == pytest.approx(theirs(outputs, labels).item())
    # Mixed targets are smoothed by timm's Mixup, before its loss.
    shares = torch.tensor([[0.7, 0.3, 0, 0], [0.1, 0, 0, 0.9], [1, 0, 0, 0]])
    mixed = outputs[:3]
    smooth = shares * (1 - smoothing) + smoothing / 4
    assert task.loss(mixed, shares) == pytest.approx(theirs(mixed, smooth).item())
    one_hot = functional.one_hot(labels, 4).float()
    plain = functional.binary_cross_entropy_with_logits(outputs, one_hot)
    assert task.val_loss(outputs, labels) == plain


def test_bce_where_it_does_nothing_is_refused():
    with pytest.raises(UsageError, match="--loss bce is for classification and multi-l"):
        make_task("regression", LossConfig(loss="bce"), 2)
    with pytest.raises(UsageError, match=r"--loss cross-entropy is for classification and s"):
        make_task("multi-label", LossConfig(loss="cross-entropy"), 2)
    with pytest.raises(UsageError, match=r"--bce-target-thresh 0\.2 does nothing with --loss"):
        LossConfig(bce_target_thresh=0.2)


def labels_and_scores(count=60, classes=5, *, ties=True):
    draws = torch.Generator().manual_seed(3)
    scores = torch.randn(count, classes, generator=draws)
    if ties:
        scores = (scores * 3).round() / 3
    targets = (torch.rand(count, classes, generator=draws) < 0.3).float()
    targets[:, 2] = 0  # a class that no image has
    return scores, targets


@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_is_torchmetrics(ties):
    metrics = pytest.importorskip("torchmetrics.functional.classification")
    scores, targets = labels_and_scores(ties=ties)
    known = [0, 1, 3, 4]
    # Of probabilities: of logits it would make some itself.
    theirs = metrics.multilabel_average_precision(
        scores[:, known].double().sigmoid(), targets[:, known].long(), 4, average=None
    )
    ours = average_precision(scores.numpy(), targets.numpy())
    assert ours[known] == pytest.approx(theirs.numpy(), abs=1e-6)
    assert np.isnan(ours[2])


def test_average_precision_by_its_definition():
    """Precision at each threshold times what the recall gains there, written out."""
    scores, targets = labels_and_scores()
    found = average_precision(scores.numpy(), targets.numpy())
    for number in (0, 1, 3, 4):
        before, total = 0.0, 0.0
        for threshold in sorted(set(scores[:, number].tolist()), reverse=True):
            said = scores[:, number] >= threshold
            hits = targets[said, number].sum().item()
            recall = hits / targets[:, number].sum().item()
            total += (recall - before) * hits / said.sum().item()
            before = recall
        assert found[number] == pytest.approx(total)


def test_several_classes_an_image_are_learned_by_bce_and_scored_by_map():
    task = make_task("multi-label", LossConfig(), 5)
    scores, targets = labels_and_scores()
    plain = functional.binary_cross_entropy_with_logits(scores, targets)
    assert task.loss(scores, targets) == plain
    images = scores.view(60, 1, 1, 5)
    parts = [(images[:25], targets[:25]), (images[25:], targets[25:])]
    scored = evaluate(Told(), parts, task, ALONE, PLAIN)
    exact = average_precision(scores.numpy(), targets.numpy())
    assert scored.metric == pytest.approx(np.nanmean(exact))
    assert scored.loss == pytest.approx(plain.item())
    said = scores > 0
    hits = (said & (targets > 0)).sum()
    assert scored.also["f1"] == pytest.approx((2 * hits / (said.sum() + targets.sum())).item())
    assert list(scored.per_class) == ["images", "average_precision", "precision", "recall", "f1"]
    assert scored.per_class["images"].tolist() == targets.sum(0).tolist()
    assert (scored.confusion, scored.drawn) == (None, None)
    # What training states, summed over batches, is as near as its steps are fine.
    binned = task.value(sum(task.score(x[:, 0, 0], y) for x, y in parts))
    assert binned == pytest.approx(scored.metric, abs=0.01)


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
