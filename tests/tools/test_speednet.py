from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

torch.set_num_threads(1)
TOOLS = str(Path(__file__).parents[2] / "tools")


@pytest.fixture
def speednet(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    from gpu import speednet

    return speednet


def correlated(count=64, size=8):
    """Images whose channels and neighbours go together, as in photographs."""
    draws = torch.Generator().manual_seed(0)
    coarse = torch.randn(count, 1, size // 2, size // 2, generator=draws)
    fine = torch.randn(count, 3, size, size, generator=draws)
    return torch.nn.functional.interpolate(coarse, size) + 0.3 * fine


def test_the_first_layer_whitens(speednet):
    net, images = speednet.small(10), correlated()
    net.whiten(images)
    found = torch.nn.functional.conv2d(images, net.whitening.weight, stride=2)
    rows = found[:, :12].permute(0, 2, 3, 1).reshape(-1, 12)
    torch.testing.assert_close(rows.T.cov(), torch.eye(12), atol=0.02, rtol=0)
    torch.testing.assert_close(found[:, 12:], -found[:, :12])
    assert not net.whitening.weight.requires_grad


def test_convolutions_begin_as_the_identity(speednet):
    block = speednet.SpeedNet(10).blocks[1]
    values = torch.randn(2, 64, 6, 6)
    torch.testing.assert_close(block.first(values)[:, :64], values)


def test_a_shift_moves_64_times_as_fast_as_a_bias(speednet):
    net = speednet.small(10)
    norm = net.blocks[0].norms[0]
    values = torch.randn(4, 16, 5, 5)
    before = norm(values)
    before.sum().backward()
    with torch.no_grad():
        norm.shift -= 0.01 * norm.shift.grad
    moved = norm(values) - before
    torch.testing.assert_close(moved, torch.full_like(moved, -64 * 0.01 * 4 * 5 * 5))
    assert [name for name, _ in norm.named_parameters()] == ["shift"]


def test_it_has_the_work_it_says(speednet):
    with FlopCounterMode(display=False) as counter:
        speednet.SpeedNet(10)(torch.zeros(1, 3, 32, 32))
    assert counter.get_total_flops() / 2 == pytest.approx(118e6, rel=0.01)


def test_it_learns(speednet):
    torch.manual_seed(0)
    net, images = speednet.small(2), correlated(32, 32)
    labels = torch.arange(32) % 2
    images[labels == 1, 0] += 1
    net.whiten(images)
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=0.05, momentum=0.85, nesterov=True)
    losses = []
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 < losses[0]
