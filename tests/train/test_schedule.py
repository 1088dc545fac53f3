import math

import pytest
import torch

from h5feed.errors import UsageError
from h5feed.train.config import OptimConfig, ScheduleConfig
from h5feed.train.optim import go_to_step, make_optimizer, make_schedule


def rates(total, optimizer="sgd", **options):
    weight = torch.nn.Parameter(torch.zeros(1))
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    kwargs = {"momentum": 0.9} if optimizer == "sgd" else {}
    opt = kinds[optimizer]([weight], lr=1.0, **kwargs)
    schedule = make_schedule(opt, ScheduleConfig(**options), 1.0, total)
    found = []
    for _ in range(total):
        found.append(opt.param_groups[0]["lr"])
        opt.step()
        schedule.step()
    return found


def test_constant_climbs_and_stays():
    assert rates(8, schedule="constant", warmup=0.5) == [0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1]


def test_cosine_falls_along_half_a_wave():
    expected = [0.5 * (1 + math.cos(math.pi * k / 10)) for k in range(10)]
    assert rates(10, schedule="cosine", warmup=0.0) == pytest.approx(expected)


def test_linear_falls_straight_after_the_warm_up():
    expected = [1 / 3, 2 / 3, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert rates(10, schedule="linear", warmup=0.2) == pytest.approx(expected)


def test_step_multiplies_again_and_again():
    found = rates(10, schedule="step", warmup=0.0, step_every=0.4, step_factor=0.5)
    assert found == pytest.approx([1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_onecycle_climbs_to_its_peak_at_the_end_of_the_warm_up(optimizer):
    found = rates(20, optimizer, schedule="onecycle", warmup=0.25)
    assert found[0] == pytest.approx(1 / 25)
    assert found.index(max(found)) == 4
    assert max(found) == pytest.approx(1.0)
    assert found[-1] < 1e-5


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_cyclic_goes_up_and_down_and_halves(optimizer):
    found = rates(16, optimizer, schedule="cyclic", cycles=2)
    assert [half.index(max(half)) for half in (found[:8], found[8:])] == [4, 4]
    assert found[4] == pytest.approx(1.0)
    assert found[12] == pytest.approx(1 / 25 + (1 - 1 / 25) / 2)
    assert found[8] == pytest.approx(1 / 25)


@pytest.mark.parametrize("schedule", ["onecycle", "cyclic"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars", "novograd"])
@pytest.mark.parametrize(
    ("momentum", "lowest", "highest"), [(0.9, 0.85, 0.95), (0.5, 0.25, 0.75), (0.0, 0.0, 0.0)]
)
def test_momentum_moves_around_the_one_given(schedule, optimizer, momentum, lowest, highest):
    config = OptimConfig(optimizer=optimizer, momentum=momentum, lr=1.0)
    opt = make_optimizer(torch.nn.Linear(1, 1), config)
    moved = make_schedule(opt, ScheduleConfig(schedule=schedule, cycles=1), 1.0, 20)
    seen = []
    for _ in range(20):
        group = opt.param_groups[0]
        seen.append(group["betas"][0] if "betas" in group else group["momentum"])
        opt.step()
        moved.step()
    assert (min(seen), max(seen)) == pytest.approx((lowest, highest), abs=0.02)


def test_a_warm_up_of_cyclic_is_refused_and_the_default_is_not():
    assert ScheduleConfig(schedule="cyclic").climb == ScheduleConfig().climb == 0.1
    with pytest.raises(UsageError, match=r"^--warmup 0\.2 does nothing with --schedule cyclic, "):
        ScheduleConfig(schedule="cyclic", warmup=0.2)


@pytest.mark.parametrize("name", ["constant", "onecycle", "cyclic", "cosine", "linear", "step"])
def test_a_run_of_one_step_works(name):
    assert len(rates(1, schedule=name)) == 1


def test_a_schedule_goes_on_from_its_state():
    def fresh():
        opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
        return opt, make_schedule(opt, ScheduleConfig(schedule="onecycle"), 1.0, 10)

    first, schedule = fresh()
    for _ in range(4):
        first.step()
        schedule.step()
    second, other = fresh()
    second.load_state_dict(first.state_dict())
    other.load_state_dict(schedule.state_dict())
    first.step(), schedule.step(), second.step(), other.step()
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]


@pytest.mark.parametrize("schedule", ["constant", "onecycle", "cyclic", "cosine", "linear", "step"])
def test_a_schedule_goes_to_any_step_at_once(schedule):
    def made():
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        return make_schedule(optimizer, ScheduleConfig(schedule=schedule), 0.1, 20)

    walked = made()
    for step in range(1, 21):
        walked.optimizer.step()
        walked.step()
        jumped = made()
        go_to_step(jumped, step)
        for there, here in zip(
            walked.optimizer.param_groups, jumped.optimizer.param_groups, strict=True
        ):
            assert (here["lr"], here["momentum"]) == (there["lr"], there["momentum"])
        assert jumped.get_last_lr() == walked.get_last_lr()


@pytest.mark.parametrize("name", ["constant", "cosine", "onecycle", "cyclic"])
def test_layers_keep_their_share_of_the_rate(name):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    opt = make_optimizer(model, OptimConfig(lr=0.1, layer_decay=0.5))
    schedule = make_schedule(opt, ScheduleConfig(schedule=name), 0.1, 10)
    highest = 0.0
    for _ in range(9):
        front, head = (
            next(group["lr"] for group in opt.param_groups if weight is group["params"][0])
            for weight in (model[0].weight, model[1].weight)
        )
        assert front == pytest.approx(0.5 * head)
        highest = max(highest, head)
        opt.step()
        schedule.step()
    assert highest == pytest.approx(0.1, rel=0.3)
