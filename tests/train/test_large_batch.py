import importlib
import math

import pytest
import torch
from torch import nn

from h5feed.errors import UsageError
from h5feed.train.config import OptimConfig, scale_lr
from h5feed.train.distributed import World
from h5feed.train.optim import LAMB, LARS, NovoGrad, make_optimizer
from h5feed.train.tasks import make_task
from h5feed.train.trainer import build_step
from train.helpers import make_config, tiny

WEIGHT = [[3.0, 4.0]]  # norm 5
FIRST, SECOND = [[0.6, 0.8]], [[0.0, 2.0]]  # norms 1 and 2


def two_steps(optimizer_of, weight=WEIGHT, grads=(FIRST, SECOND)):
    parameter = nn.Parameter(torch.tensor(weight, dtype=torch.float64))
    optimizer = optimizer_of([parameter])
    seen = []
    for grad in grads:
        parameter.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        seen.append(parameter.detach().clone())
    return seen


def near(*values):
    return pytest.approx(values, rel=1e-12)


def test_lars_takes_the_steps_of_algorithm_1():
    first, second = two_steps(lambda p: LARS(p, 2.0, momentum=0.5, weight_decay=0.1, trust=0.01))
    # λ = 0.01 · 5 / (1 + 0.1 · 5) = 1/30; v = 2 · λ · (g + 0.1 w) = (0.9, 1.2) / 15
    assert first.flatten().tolist() == near(3 - 0.06, 4 - 0.08)
    # ‖w‖ = 4.9; λ = 0.049 / (2 + 0.49); v = 0.5 · (0.06, 0.08) + 2 λ (0.294, 2.392)
    rate = 2 * 0.049 / 2.49
    assert second.flatten().tolist() == near(2.94 - 0.03 - rate * 0.294, 3.92 - 0.04 - rate * 2.392)


def test_lamb_takes_the_steps_of_algorithm_2():
    first, second = two_steps(lambda p: LAMB(p, 0.1, betas=(0.5, 0.75), weight_decay=0.5, eps=0.0))
    # m̂ / √v̂ = (1, 1); + 0.5 w = (2.5, 3), norm √15.25; times 0.1 · 5 / √15.25
    rate = 0.5 / math.sqrt(15.25)
    w = (3 - rate * 2.5, 4 - rate * 3)
    assert first.flatten().tolist() == near(*w)
    # m = (0.15, 1.2), m̂ = m / 0.75; v = (0.0675, 1.12), v̂ = v / 0.4375
    r = [m / 0.75 / math.sqrt(v / 0.4375) for m, v in ((0.15, 0.0675), (1.2, 1.12))]
    u = [r[0] + 0.5 * w[0], r[1] + 0.5 * w[1]]
    rate = 0.1 * math.hypot(*w) / math.hypot(*u)
    assert second.flatten().tolist() == near(w[0] - rate * u[0], w[1] - rate * u[1])


def test_novograd_takes_the_steps_of_algorithm_1():
    first, second = two_steps(
        lambda p: NovoGrad(p, 0.1, betas=(0.5, 0.75), weight_decay=0.1, eps=0.0)
    )
    # v = 1; m = g + 0.1 w = (0.9, 1.2)
    assert first.flatten().tolist() == near(2.91, 3.88)
    # v = 0.75 · 1 + 0.25 · 4 = 1.75; m = 0.5 m + g / √v + 0.1 w
    m = (0.45 + 0.291, 0.6 + 2 / math.sqrt(1.75) + 0.388)
    assert second.flatten().tolist() == near(2.91 - 0.1 * m[0], 3.88 - 0.1 * m[1])


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_biases_and_norms_take_plain_steps(kind):
    (step,) = two_steps(lambda p: kind(p, 0.1), weight=[3.0, 4.0], grads=[[0.6, 0.8]])
    moved = (0.06, 0.08) if kind is LARS else (0.1 * 0.6 / (0.6 + 1e-6), 0.1 * 0.8 / (0.8 + 1e-6))
    assert step.tolist() == pytest.approx([3 - moved[0], 4 - moved[1]], rel=1e-9)


@pytest.mark.parametrize("kind", [LARS, LAMB, NovoGrad])
def test_zero_weights_and_zero_gradients_stay_numbers(kind):
    for weight, grad in (([[0.0, 0.0]], FIRST), (WEIGHT, [[0.0, 0.0]])):
        for step in two_steps(lambda p: kind(p, 0.1), weight=weight, grads=[grad, FIRST]):
            assert step.isfinite().all()


@pytest.mark.parametrize("kind", [LARS, LAMB, NovoGrad])
def test_a_saved_state_goes_on_as_if_never_saved(kind):
    whole = two_steps(lambda p: kind(p, 0.1, weight_decay=0.1))[-1]
    parameter = nn.Parameter(torch.tensor(WEIGHT, dtype=torch.float64))
    before = kind([parameter], 0.1, weight_decay=0.1)
    parameter.grad = torch.tensor(FIRST, dtype=torch.float64)
    before.step()
    after = kind([parameter], 0.5)
    after.load_state_dict(before.state_dict())
    parameter.grad = torch.tensor(SECOND, dtype=torch.float64)
    after.step()
    assert torch.equal(parameter.detach(), whole)


def timm_optimizers():
    try:
        return importlib.import_module("timm.optim")
    except (ImportError, RuntimeError) as ex:  # RuntimeError: a torchvision for another torch
        pytest.skip(f"timm cannot be imported: {ex}")


@pytest.fixture
def in_float64():
    """timm's NovoGrad keeps its norms in torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("kind", "theirs", "shared", "theirs_alone"),
    [
        (LARS, "Lars", {"momentum": 0.9}, {"eps": 0.0}),
        (LAMB, "Lamb", {"betas": (0.9, 0.99), "eps": 1e-6}, {"max_grad_norm": None}),
        (NovoGrad, "NvNovoGrad", {"betas": (0.95, 0.98), "eps": 1e-8}, {}),
    ],
)
def test_they_equal_timms_for_thirty_steps(in_float64, kind, theirs, shared, theirs_alone):
    other = getattr(timm_optimizers(), theirs)
    shapes = {"filters": (4, 3, 3, 3), "matrix": (5, 7), "bias": (5,)}
    draws = torch.Generator().manual_seed(0)

    def groups():
        weights = {name: torch.linspace(-1, 2, math.prod(s)).view(s) for name, s in shapes.items()}
        parameters = [nn.Parameter(weight) for weight in weights.values()]
        return parameters, [
            {"params": parameters[:2], "weight_decay": 0.1},
            {"params": parameters[2:], "weight_decay": 0.0},
        ]

    (ours, our_groups), (expected, their_groups) = groups(), groups()
    optimizers = (
        kind(our_groups, 0.05, **shared),
        other(their_groups, 0.05, **shared, **theirs_alone),
    )
    for _ in range(30):
        for mine, its in zip(ours, expected, strict=True):
            mine.grad = torch.randn(mine.shape, generator=draws)
            its.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        for mine, its in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "kind"), [("lars", LARS), ("lamb", LAMB), ("novograd", NovoGrad)])
def test_the_trainer_makes_them(name, kind):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    made = make_optimizer(model, OptimConfig(optimizer=name, momentum=0.8, weight_decay=0.3))
    assert type(made) is kind
    assert [group["weight_decay"] for group in made.param_groups] == [0.3, 0.0]
    assert made.defaults.get("momentum", made.defaults.get("betas", [0])[0]) == 0.8


def test_rates_scale_with_the_batch():
    assert scale_lr(0.1, "off", 1024, 256) == 0.1
    assert scale_lr(0.1, "linear", 1024, 256) == pytest.approx(0.4)
    assert scale_lr(0.1, "sqrt", 1024, 256) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("schedule", "expected"), [("constant", [0.1, 0.2, 0.2]), ("onecycle", [0.008, 0.2])]
)
def test_the_scaled_rate_is_the_schedule_s_peak(tmp_path, schedule, expected):
    config = make_config(
        tmp_path, lr=0.1, lr_scaling="linear", lr_batch=8, batch_size=16, schedule=schedule
    )
    assert config.peak_lr == pytest.approx(0.2)
    world = World(rank=0, size=1, device=torch.device("cpu"))
    task = make_task("classification", config.loss, 4)
    step = build_step(config, tiny(4), task, world, "fp32", total_steps=10)
    rates = []
    for _ in expected:
        rates.append(step.schedule.get_last_lr()[0])
        step.optimizer.step()
        step.schedule.step()
    assert rates == pytest.approx(expected)


def test_scaling_without_a_warm_up_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--lr-scaling sqrt with --warmup 0 diverges"):
        make_config(tmp_path, lr_scaling="sqrt", warmup=0.0)
