"""A small step to try things with, and everything that it changes, as numbers."""

import random

import numpy as np
import torch

from h5feed.train.distributed import World
from h5feed.train.models import Network
from h5feed.train.tasks import make_task
from h5feed.train.trainer import build_step
from train.helpers import MemoryLoader, make_config, make_images

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


def net_with_everything(outputs):
    """Batch norm has buffers, dropout draws random numbers."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(32, outputs),
    )


def make_step(out, *, precision="fp32", **options):
    config = make_config(out, **options)
    torch.manual_seed(0)
    net = Network(net_with_everything(4), (100,) * 3, (50,) * 3)
    task = make_task("classification", config.loss, 4)
    return build_step(config, net, task, WORLD, precision, 100)


def make_loader(count=64, batch=16):
    return MemoryLoader(*make_images(count), batch)


def random_draws():
    """The next number of each global generator; they are left as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    draws = random.random(), np.random.rand(), torch.rand(()).item()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return draws


def go_on(step, batches, steps=3):
    """The losses of the next steps: the same when nothing was changed."""
    return [step(batches)[0].item() for _ in range(steps)]
