import importlib
import math

import pytest
import torch
from torch import nn

from h5feed.errors import UsageError
from h5feed.train.config import OptimConfig, ScheduleConfig, scale_lr
from h5feed.train.distributed import World
from h5feed.train.models import Network, build_model
from h5feed.train.optim import (
    LAMB,
    LARS,
    NovoGrad,
    clip_gradients,
    go_to_step,
    make_optimizer,
    make_schedule,
    parameter_groups,
)
from h5feed.train.tasks import make_task
from h5feed.train.trainer import build_step
from train.helpers import make_config, tiny


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def step_with_zero_gradients(model, config):
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.data += 1
        weight.grad = torch.zeros_like(weight)
    make_optimizer(model, config).step()
    return {
        name
        for name, weight in model.named_parameters()
        if not torch.equal(weight, before[name] + 1)
    }


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weight_decay_moves_matrices_only(model, optimizer):
    moved = step_with_zero_gradients(model, OptimConfig(optimizer=optimizer, lr=0.1))
    assert moved == {"0.weight", "3.weight"}


def test_decay_norms_moves_everything(model):
    moved = step_with_zero_gradients(model, OptimConfig(lr=0.1, decay_norms=True))
    assert moved == {name for name, _ in model.named_parameters()}


class Transformer(nn.Module):
    """The weights of vision transformers that have several dimensions and are no matrices."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.anchors = nn.Parameter(torch.zeros(2, 2))
        self.head = nn.Linear(4, 2)

    def no_weight_decay(self):
        return {"anchors"}


def test_tokens_positions_and_what_a_model_names_do_not_decay():
    model = nn.ModuleDict({"model": Transformer()})
    assert step_with_zero_gradients(model, OptimConfig(lr=0.1)) == {"model.head.weight"}
    everything = step_with_zero_gradients(model, OptimConfig(lr=0.1, decay_norms=True))
    assert everything == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("optimizer", "decay"),
    [("adamw", 0.05), ("lamb", 0.01), ("sgd", 5e-4), ("lars", 1e-4), ("novograd", 1e-3)],
)
def test_weight_decay_is_the_optimizers_usual_one_unless_given(model, optimizer, decay):
    usual = make_optimizer(model, OptimConfig(optimizer=optimizer)).param_groups[0]
    assert usual["weight_decay"] == decay
    config = OptimConfig(optimizer=optimizer, weight_decay=0.0)
    assert make_optimizer(model, config).param_groups[0]["weight_decay"] == 0.0


def test_frozen_weights_are_left_out(model):
    model[0].weight.requires_grad_(False)
    weights = [w for g in parameter_groups(model, OptimConfig()) for w in g["params"]]
    assert len(weights) == 5
    assert all(w is not model[0].weight for w in weights)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_the_implementation_is_the_one_asked_for(model, optimizer, implementation):
    config = OptimConfig(optimizer=optimizer, implementation=implementation)
    made = make_optimizer(model, config)
    assert made.defaults["fused"] is (implementation == "fused")
    assert made.defaults["foreach"] is (implementation == "foreach")


def test_momentum_is_handed_on(model):
    assert make_optimizer(model, OptimConfig(momentum=0.8)).defaults["betas"] == (0.8, 0.999)
    sgd = make_optimizer(model, OptimConfig(optimizer="sgd", momentum=0.8)).defaults
    assert (sgd["momentum"], sgd["nesterov"]) == (0.8, True)
    plain = make_optimizer(model, OptimConfig(optimizer="sgd", momentum=0.0)).defaults
    assert (plain["momentum"], plain["nesterov"]) == (0.0, False)


def gradients(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_clipping_by_norm_and_by_value(model):
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 2.0)
    clip_gradients(model, OptimConfig())
    assert gradients(model).max() == 2
    clip_gradients(model, OptimConfig(clip_value=1.5))
    assert gradients(model).max() == 1.5
    clip_gradients(model, OptimConfig(clip_norm=0.5))
    assert gradients(model).norm() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_layer_decay_gives_the_rates_of_timm(name):
    factory = pytest.importorskip("timm.optim")
    model = build_model(f"timm:{name}", 3)
    expected = {}
    for group in factory.param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.7):
        expected |= {id(weight): group["lr_scale"] for weight in group["params"]}
    config = OptimConfig(lr=0.5, layer_decay=0.7)
    net = Network(model, (0,) * 3, (1,) * 3)
    found = {}
    for group in parameter_groups(net, config):
        found |= {id(weight): group["lr"] / 0.5 for weight in group["params"]}
    assert found == pytest.approx(expected)
    assert len(set(found.values())) > 3
    assert max(found.values()) == 1  # the head's


def test_layer_decay_keeps_apart_what_decays(model):
    groups = parameter_groups(model, OptimConfig(lr=0.5, weight_decay=0.1, layer_decay=0.5))
    found = {
        name: (group["lr"], group["weight_decay"])
        for group in groups
        for name, weight in model.named_parameters()
        if any(weight is one for one in group["params"])
    }
    assert found == {
        "0.weight": (0.25, 0.1), "0.bias": (0.25, 0.0), "1.weight": (0.25, 0.0),
        "1.bias": (0.25, 0.0), "3.weight": (0.5, 0.1), "3.bias": (0.5, 0.0),
    }  # fmt: skip


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_a_layer_decay_out_of_range_is_refused(value):
    with pytest.raises(UsageError, match=f"--layer-decay {value} is too"):
        OptimConfig(layer_decay=value)


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
