import gc
from itertools import cycle, islice, product

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from h5feed.train.distributed import World
from h5feed.train.models import Network
from h5feed.train.tasks import make_task
from h5feed.train.trainer import build_step
from train.helpers import make_config, make_images, tiny

CPU = torch.device("cpu")
torch.set_num_threads(1)


def make_step(tmp_path, *, model=None, precision="fp32", steps=1000, device=CPU, **options):
    config = make_config(tmp_path, **options)
    torch.manual_seed(0)
    net = Network(model or tiny(4), (100,) * 3, (50,) * 3)
    task = make_task("classification", config.loss, 4)
    world = World(rank=0, size=1, device=device)
    return build_step(config, net, task, world, precision, steps)


def make_batches(batch, count=64):
    images, labels = make_images(count)
    parts = [(images[k : k + batch], labels[k : k + batch]) for k in range(0, count, batch)]
    return cycle(parts)


def weights(step):
    return torch.cat([weight.detach().flatten() for weight in step.net.parameters()])


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.parametrize(
    ("precision", "accumulate", "clip_norm", "clip_value"),
    list(product(("fp32", "bf16", "fp16"), (1, 4), (0.0, 1.0), (0.0, 0.5))),
)
def test_one_optimizer_step_per_batch_whatever_the_switches(
    tmp_path, monkeypatch, precision, accumulate, clip_norm, clip_value
):
    step = make_step(
        tmp_path,
        precision=precision,
        accumulate=accumulate,
        clip_norm=clip_norm,
        clip_value=clip_value,
        ema=0.9,
    )
    if precision == "fp16":
        step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 256.0})  # no overflow
    calls, norms = [], []
    plain = step.optimizer.step

    def counted(*args, **kwargs):
        calls.append(step.schedule.last_epoch)
        grads = [weight.grad for weight in step.net.parameters()]
        scale = 1.0 if clip_norm or clip_value or precision != "fp16" else 256.0
        norms.append(torch.cat([grad.flatten() for grad in grads]).div(scale))
        return plain(*args, **kwargs)

    monkeypatch.setattr(step.optimizer, "step", counted)
    before = weights(step)
    batches = make_batches(16 // accumulate)
    for _ in range(5):
        step(batches)
    assert calls == [0, 1, 2, 3, 4]
    assert step.count == step.schedule.last_epoch == 5
    assert not torch.equal(weights(step), before)
    for grads in norms:
        assert not clip_norm or grads.norm() <= clip_norm * 1.001
        assert not clip_value or grads.abs().max() <= clip_value


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.parametrize("clip", [{"clip_norm": 100.0}, {"clip_value": 10.0}])
def test_clipping_is_of_unscaled_gradients(tmp_path, monkeypatch, clip):
    """What is far below the limit must not look large for its scale of 4,096."""

    def gradients(step):
        found = []
        plain = step.optimizer.step

        def looked_at(*args, **kwargs):
            found.extend(weight.grad.clone().flatten() for weight in step.net.parameters())
            return plain(*args, **kwargs)

        monkeypatch.setattr(step.optimizer, "step", looked_at)
        step(make_batches(16))
        return torch.cat(found)

    scaled = make_step(tmp_path, precision="fp16", **clip)
    scaled.scaler.load_state_dict({**scaled.scaler.state_dict(), "scale": 4096.0})
    expected = gradients(make_step(tmp_path, precision="fp32"))
    assert 1 < expected.norm() < 10
    torch.testing.assert_close(gradients(scaled), expected, atol=0.02, rtol=0.05)


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
@pytest.mark.parametrize("accumulate", [2, 4, 8])
def test_accumulation_equals_the_large_batch(tmp_path, accumulate, clip_norm):
    options = {"weight_decay": 0.1, "clip_norm": clip_norm, "optimizer": "sgd"}
    whole = make_step(tmp_path, **options)
    parted = make_step(tmp_path, accumulate=accumulate, **options)
    large, small = make_batches(16), make_batches(16 // accumulate)
    for _ in range(4):
        loss, score = whole(large)
        parted_loss, parted_score = parted(small)
        torch.testing.assert_close(parted_loss, loss)
        assert torch.equal(parted_score, score)
    torch.testing.assert_close(weights(parted), weights(whole))


@pytest.mark.parametrize("channels_last", [True, False])
def test_weights_and_images_have_the_memory_order_asked_for(tmp_path, channels_last):
    seen = []
    step = make_step(tmp_path, channels_last=channels_last)
    step.net.model[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    step(make_batches(16))
    weight = step.net.model[0].weight
    for tensor in (seen[0], weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last) is channels_last


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_the_model_computes_in_the_number_format_asked_for(tmp_path, precision, dtype):
    seen = []
    step = make_step(tmp_path, precision=precision)
    step.net.model[0].register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    step(make_batches(16))
    assert seen == [dtype]
    assert {weight.dtype for weight in step.net.parameters()} == {torch.float32}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_forgotten_or_zeroed(tmp_path, set_to_none):
    step = make_step(tmp_path, set_to_none=set_to_none)
    step(make_batches(16))
    grads = [weight.grad for weight in step.net.parameters()]
    assert all(grad is None if set_to_none else not grad.any() for grad in grads)


@pytest.mark.parametrize("recipe", [{"mixup": 1.0}, {"cutmix": 1.0}])
def test_mixed_batches_reach_the_model_and_the_loss(tmp_path, recipe):
    seen = []
    step = make_step(tmp_path, **recipe)
    step.net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for _ in range(2):
        step(make_batches(16))
    images, _ = make_images()
    assert not torch.equal(seen[0], images[:16].float())
    assert not torch.equal(seen[0], seen[1])  # another draw in the next step


def test_label_smoothing_reaches_the_loss(tmp_path):
    plain, _ = make_step(tmp_path)(make_batches(16))
    smooth, _ = make_step(tmp_path, label_smoothing=0.3)(make_batches(16))
    assert smooth != plain


def test_the_average_of_the_weights_follows(tmp_path):
    step = make_step(tmp_path, ema=0.99)
    before = weights(step)
    for _ in range(3):
        step(make_batches(16))
    with step.ema.swapped_in():
        average = weights(step)
    assert not torch.equal(average, before)
    assert not torch.equal(average, weights(step))


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device: a tensor's value taken to Python."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "ema": 0.9, "mixup": 0.2}])
def test_no_step_takes_a_tensors_value_to_python(tmp_path, options):
    step = make_step(tmp_path, precision="bf16", accumulate=2, **options)
    batches = make_batches(8)
    step(batches)
    with Reads() as reads:
        for _ in range(3):
            loss, _ = step(batches)
        assert reads.count == 0
        loss.item()
    assert reads.count == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "ema": 0.9, "mixup": 0.2}])
def test_the_bf16_step_waits_for_nothing_on_cuda(tmp_path, options):
    cuda = torch.device("cuda", 0)
    step = make_step(tmp_path, precision="bf16", accumulate=2, device=cuda, **options)
    parts = [(images.cuda(), labels.cuda()) for images, labels in islice(make_batches(8), 8)]
    batches = cycle(parts)
    for _ in range(3):
        step(batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def live_bytes():
    gc.collect()
    tensors = [value for value in gc.get_objects() if torch.is_tensor(value)]
    return sum(value.untyped_storage().nbytes() for value in tensors)


def test_memory_is_flat_over_a_thousand_steps(tmp_path):
    """Tensors alive, in bytes: losses that keep their graph would add a few kB a step."""
    step = make_step(tmp_path, model=nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(12, 4)))
    batches = make_batches(16)
    total = torch.zeros(())
    for number in range(1000):
        loss, score = step(batches)
        assert not loss.requires_grad
        assert not score.requires_grad
        total += loss
        if number == 10:
            early = live_bytes()
    assert live_bytes() <= early + 1024


def test_compile_is_called_with_its_mode(tmp_path, monkeypatch):
    calls = []

    def compile_(model, **kwargs):
        calls.append(kwargs)
        return model

    monkeypatch.setattr(torch, "compile", compile_)
    make_step(tmp_path)
    assert calls == []
    make_step(tmp_path, compile="max-autotune")
    assert calls == [{"mode": "max-autotune"}]


def test_a_compiled_step_learns_the_same(tmp_path, monkeypatch):
    """By dynamo and autograd alone ("aot_eager"), since code generation takes half a minute."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode: plain(model, backend="aot_eager"))
    compiled = make_step(tmp_path, compile="default", ema=0.9)
    eager = make_step(tmp_path, ema=0.9)
    for _ in range(2):
        compiled(make_batches(16)), eager(make_batches(16))
    assert compiled.model is not compiled.net
    torch.testing.assert_close(weights(compiled), weights(eager))
    assert list(compiled.net.state_dict()) == list(eager.net.state_dict())


def test_the_measured_norm_is_of_the_unscaled_gradient(tmp_path):
    norms = []
    for scale in (1.0, 1024.0):
        step = make_step(tmp_path)
        step.scaler = GradScaler("cpu", init_scale=scale)
        step(make_batches(16), measure=True)
        norms.append(step.grad_norm.item())
        step(make_batches(16))
        assert step.grad_norm is None  # costs nothing where nobody reads it
    assert norms[1] == pytest.approx(norms[0])
