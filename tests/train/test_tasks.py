import math
import sys

import pytest
import torch
from torch.nn import functional

from h5feed.errors import UsageError
from h5feed.train.config import LossConfig
from h5feed.train.tasks import make_task


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
    with pytest.raises(UsageError, match="--task 'detection' is not one of classification, regr"):
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
    with pytest.raises(UsageError, match="--loss bce is for classification, and the task is regr"):
        make_task("regression", LossConfig(loss="bce"), 2)
    with pytest.raises(UsageError, match=r"--bce-target-thresh 0\.2 does nothing with --loss"):
        LossConfig(bce_target_thresh=0.2)
