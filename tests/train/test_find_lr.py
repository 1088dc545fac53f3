import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from h5feed.errors import UsageError
from h5feed.train.find_lr import LrRange, _curve, find_lr, smooth, suggest
from h5feed.train.finder_plots import draw_lr_curve
from train.trials import WORLD, go_on, make_loader, make_step, random_draws

torch.set_num_threads(1)
SHORT = LrRange(steps=40, lowest=1e-5, highest=10)


def test_rates_are_evenly_spaced_on_a_logarithmic_scale():
    rates = LrRange(lowest=1e-4, highest=1.0, steps=11).rates
    assert rates[0] == 1e-4
    assert rates[-1] == pytest.approx(1.0)
    assert [b / a for a, b in pairwise(rates)] == pytest.approx([10**0.4] * 10)


def test_each_step_is_made_at_its_rate(tmp_path):
    step = make_step(tmp_path, optimizer="sgd", momentum=0.0, weight_decay=0.0)
    seen = []
    move = step.optimizer.step
    step.optimizer.step = lambda: (seen.append(step.optimizer.param_groups[0]["lr"]), move())
    curve = find_lr(step, make_loader(), WORLD, SHORT)
    assert seen == SHORT.rates[: len(seen)]
    assert len(curve.rates) == len(curve.losses) == len(curve.smoothed) == len(seen)


def test_the_suggestion_trains_and_ten_times_less_trains_slower(tmp_path):
    curve = find_lr(make_step(tmp_path, optimizer="sgd"), make_loader(), WORLD, SHORT)
    assert curve.suggestion in curve.rates
    assert curve.suggestion < curve.lowest

    def loss_at(lr):
        step = make_step(tmp_path, optimizer="sgd", lr=lr, schedule="constant", warmup=0.0)
        loader, losses = make_loader(), []
        for epoch in range(4):
            loader.set_epoch(epoch)
            losses = go_on(step, iter(loader), 4)
        return sum(losses)

    assert loss_at(curve.suggestion) < loss_at(curve.suggestion / 10)


def test_everything_is_put_back(tmp_path):
    step, loader = make_step(tmp_path, ema=0.9), make_loader()
    batches = iter(loader)
    go_on(step, batches, 2)
    schedule, draws, state = step.schedule, random_draws(), loader.state_dict()
    before = [value.clone() for value in step.net.state_dict().values()]
    find_lr(step, loader, WORLD, SHORT)
    assert all(
        torch.equal(a, b) for a, b in zip(before, step.net.state_dict().values(), strict=True)
    )
    assert step.schedule is schedule
    assert random_draws() == draws
    assert loader.state_dict() == state
    assert step.count == 2
    twin, twin_loader = make_step(tmp_path, ema=0.9), make_loader()
    go_on(twin, iter(twin_loader), 2)
    torch.manual_seed(1)
    ours = go_on(step, iter(loader), 2)
    torch.manual_seed(1)
    assert ours == go_on(twin, iter(twin_loader), 2)


def test_it_stops_where_the_loss_explodes(tmp_path):
    wild = replace(SHORT, lowest=1e-3, highest=1e6)
    step = make_step(tmp_path, optimizer="sgd", weight_decay=0.0)
    curve = find_lr(step, make_loader(), WORLD, wild)
    assert curve.exploded
    assert len(curve.losses) < wild.steps
    assert all(math.isfinite(loss) for loss in curve.losses)


def test_a_loss_that_is_no_number_from_the_start_is_said(tmp_path):
    step = make_step(tmp_path)
    step.net.mean.fill_(math.nan)
    with pytest.raises(UsageError, match=r"not a number at --lowest 1e-05 already"):
        find_lr(step, make_loader(), WORLD, SHORT)


def test_smoothing_does_not_lag():
    step = [1.0] * 50 + [0.0] * 50
    smoothed = smooth(step, 0.9)
    middle = min(range(100), key=lambda k: abs(smoothed[k] - 0.5))
    assert abs(middle - 49.5) <= 1
    assert smooth(step, 0.0) == step


def test_the_suggestion_is_the_steepest_fall_over_the_logarithm():
    rates = LrRange(steps=60, lowest=1e-6, highest=1.0).rates
    centre = math.log(rates[30])
    losses = [2 - 1 / (1 + math.exp(-3 * (math.log(rate) - centre))) for rate in rates]
    losses[50:] = [2 + k for k in range(10)]
    assert suggest(rates, losses) == pytest.approx(rates[30], rel=0.3)


def test_an_explosion_does_not_drown_the_fall_before_it(tmp_path):
    losses = [2.0] * 10 + [2.0 - 0.1 * k for k in range(15)] + [10.0**k for k in range(5)]
    options = LrRange(steps=30)
    curve = _curve(losses, options)
    assert 9 <= curve.rates.index(curve.suggestion) <= 25
    assert max(curve.smoothed) <= 2.5


def test_nothing_is_suggested_where_the_loss_never_falls():
    rates = LrRange(steps=20).rates
    assert suggest(rates, [1.0 + 0.1 * k for k in range(20)]) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lowest": 1.0, "highest": 0.1}, "--lowest 1.0 and --highest 0.1"),
        ({"lowest": 0.0}, "--lowest 0.0"),
        ({"steps": 3}, "--steps 3 is too small"),
        ({"smoothing": 1.0}, "--smoothing 1.0 is out of range"),
    ],
)
def test_wrong_ranges_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        LrRange(**options)


def test_it_draws(tmp_path):
    pytest.importorskip("matplotlib")
    curve = find_lr(make_step(tmp_path), make_loader(), WORLD, SHORT)
    draw_lr_curve(curve, tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
