import random
from itertools import islice

import numpy as np
import pytest
import torch

from h5feed.errors import H5FeedError, UsageError
from h5feed.train.trial import endless, kept, open_trial
from train.helpers import make_config, make_data
from train.trials import WORLD, go_on, make_loader, make_step, random_draws

torch.set_num_threads(1)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lars", "lamb", "novograd"])
@pytest.mark.parametrize("schedule", ["cosine", "onecycle"])
def test_training_goes_on_as_if_nothing_had_been_tried(tmp_path, optimizer, schedule):
    losses = []
    for disturbed in (False, True):
        step = make_step(tmp_path, optimizer=optimizer, schedule=schedule, ema=0.9)
        loader = make_loader()
        batches = iter(loader)
        go_on(step, batches, 2)
        if disturbed:
            with kept(step, WORLD, loader):
                go_on(step, endless(loader), 5)
                random.random(), np.random.rand()
        torch.manual_seed(3)  # of dropout: how many numbers were drawn before is the next test's
        losses.append((go_on(step, iter(loader), 2), step.count, step.lr))
        losses[-1] += (next(iter(step.ema.state_dict().values())).sum().item(),)
    assert losses[0] == losses[1]


def test_memory_that_runs_out_is_one_sentence(tmp_path):
    config = make_config(tmp_path)
    with (
        pytest.raises(
            H5FeedError, match=r"^out of memory with --batch-size 16 \(the machine has no"
        ),
        open_trial(config, make_data(config)),
    ):
        raise MemoryError


def test_generators_are_put_back(tmp_path):
    step = make_step(tmp_path)
    before = random_draws()
    with kept(step, WORLD):
        go_on(step, endless(make_loader()))
        random.random(), np.random.rand()
        assert random_draws() != before
    assert random_draws() == before


def test_an_error_puts_everything_back_and_passes(tmp_path):
    step = make_step(tmp_path)
    before = {name: value.clone() for name, value in step.net.state_dict().items()}
    with pytest.raises(StopIteration), kept(step, WORLD):
        go_on(step, iter(make_loader()), 5)  # of four batches
    assert step.optimizer.state_dict()["state"] == {}
    assert all(torch.equal(value, before[name]) for name, value in step.net.state_dict().items())
    assert all(weight.grad is None for weight in step.net.parameters())


def test_a_step_broken_off_after_unscaling_leaves_no_mark(tmp_path):
    step = make_step(tmp_path, precision="fp16", clip_norm=1.0)
    with kept(step, WORLD):
        step.scaler.scale(step.net(torch.zeros(2, 3, 8, 8)).sum()).backward()
        step.scaler.unscale_(step.optimizer)
    go_on(step, endless(make_loader()), 1)  # unscale_ once more: an error if the mark were there


def test_endless_goes_through_the_epochs():
    loader = make_loader(count=32)
    first = [batch[1].tolist() for batch in islice(endless(loader), 6)]
    loader.set_epoch(2)
    assert first[4:] == [batch[1].tolist() for batch in loader]
    assert first[:2] != first[2:4]


def test_a_trial_is_built_from_a_configuration_and_saves_nothing(tmp_path):
    config = make_config(tmp_path / "run")
    with open_trial(config, make_data(config)) as trial:
        go_on(trial.step, endless(trial.data.train_loader(8)))
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused(tmp_path):
    config = make_config(tmp_path, gpus=2)
    trial = open_trial(config, make_data(config))
    with pytest.raises(UsageError, match="in one process: leave out --gpus and torchrun"):
        trial.__enter__()
