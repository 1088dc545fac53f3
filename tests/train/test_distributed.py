import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from h5feed.errors import UsageError
from h5feed.train import load_trained, train
from h5feed.train.checkpoint import load_checkpoint
from h5feed.train.config import DistributedConfig
from h5feed.train.distributed import (
    World,
    check_fsdp,
    choose_device,
    join_world,
    last_only,
    start,
    under_torchrun,
)
from h5feed.train.log import read_metrics
from h5feed.train.tasks import make_task
from h5feed.train.trainer import build_step
from train.helpers import MemoryLoader, make_config, make_data, make_images, tiny

torch.set_num_threads(1)
CPU = torch.device("cpu")
ALONE = DistributedConfig()
COUNT = 79  # images, of which ranks 0 and 1 have 40 and 39


def train_one_rank(config):
    """What each process of a world runs: the memory loader's own part of each batch."""
    torch.set_num_threads(1)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    count = COUNT if config.model.model.endswith("blocks") else 64
    several = config.loss.task == "multi-label"
    train(config, make_data(config, count=count, world=(rank, size), several=several))
    return rank


def results(out):
    weights = load_checkpoint(out / "last.pt")["net"]
    lines = read_metrics(out / "metrics.jsonl")
    metric = "accuracy" if "accuracy" in lines[0] else "mAP"
    return weights, [(m["kind"], m["step"], m["loss"], m[metric]) for m in lines]


def norms(out):
    """The gradients' norms over the steps."""
    lines = read_metrics(out / "metrics.jsonl")
    return [line["grad_norm"] for line in lines if line["kind"] == "train"]


def with_norms(num_outputs):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, num_outputs)
    )


def train_all(configs):
    """Train all, and write down which share of its model each process held under FSDP."""
    share_out = World.share_out

    def watched(world, net, blocks):
        whole = sum(weight.numel() for weight in net.parameters())
        net = share_out(world, net, blocks)
        held = sum(weight.to_local().numel() for weight in net.parameters())
        with (configs[0].out.parent / f"shares-{world.rank}").open("a") as file:
            file.write(f"{held / whole}\n")
        return net

    World.share_out = watched
    with join_world("cpu"):
        return [train_one_rank(config) for config in configs]


FSDP = {
    "schedule": "constant",
    "warmup": 0.0,
    "clip_norm": 1.0,
    "accumulate": 2,
    "model": f"{__name__}:blocks",
}


def blocks(num_outputs):
    """Two blocks, with weights that two processes cannot divide evenly."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 5, 3), nn.GroupNorm(1, 5), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(180, num_outputs)),
    )


def configs_in(root):
    shared = {"optimizer": "sgd", "clip_norm": 1.0}
    return {
        "whole": make_config(root / "whole", **shared),
        "parts": make_config(root / "parts", accumulate=2, **shared),
        "several": make_config(root / "several", task="multi-label", **shared),
        "fsdp": make_config(root / "fsdp", fsdp=True, **FSDP),
        "fsdp resumed": make_config(root / "fsdp resumed", fsdp=True, resume=True, **FSDP),
        "norms": make_config(
            root / "norms", model=f"{__name__}:with_norms", ema=0.9, channels_last=False
        ),
    }


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The folder of runs made by two processes, started once for all: it takes seconds."""
    root = tmp_path_factory.mktemp("two")
    configs = configs_in(root)
    train_one_rank(replace(configs["fsdp resumed"], epochs=1, resume=False, distributed=ALONE))
    assert start(train_all, list(configs.values()), 2) == [0] * len(configs)
    return root


@pytest.mark.parametrize("name", ["whole", "parts", "several"])
def test_two_processes_equal_one_at_the_same_global_batch(two_processes, tmp_path, name):
    train_one_rank(configs_in(tmp_path)[name])
    expected, lines = results(tmp_path / name)
    found, found_lines = results(two_processes / name)
    for weight, value in expected.items():
        torch.testing.assert_close(found[weight], value, msg=weight)
    assert [line[:2] for line in found_lines] == [line[:2] for line in lines]
    for line, other in zip(lines, found_lines, strict=True):
        assert other[2:] == pytest.approx(line[2:], rel=1e-4)


def test_the_score_is_that_of_the_network_that_is_saved(two_processes):
    """With batch norm, processes have statistics of their own until they are aligned."""
    images, labels = make_images()
    with torch.no_grad():
        outputs = load_trained(two_processes / "norms" / "last.pt")(images)
    loss = nn.functional.cross_entropy(outputs, labels).item()
    scored = read_metrics(two_processes / "norms" / "metrics.jsonl")[-1]["loss"]
    assert scored == pytest.approx(loss, rel=1e-5)


def test_fsdp_makes_whole_checkpoints_that_any_number_of_processes_goes_on_from(
    two_processes, tmp_path
):
    """Two shares equal one process; two go on from one, and one goes on from two."""
    config = replace(configs_in(tmp_path)["fsdp"], distributed=ALONE, epochs=3)
    train_one_rank(replace(config, epochs=2))
    expected, lines = results(tmp_path / "fsdp")
    for name in ("fsdp", "fsdp resumed"):
        found, found_lines = results(two_processes / name)
        for weight, value in expected.items():
            torch.testing.assert_close(found[weight], value, msg=weight, rtol=1e-4, atol=1e-5)
        trained = [line[2] for line in lines if line[0] == "train"]
        assert [line[2] for line in found_lines if line[0] == "train"] == pytest.approx(
            trained, rel=1e-3
        )
    assert norms(two_processes / "fsdp") == pytest.approx(norms(tmp_path / "fsdp"), rel=1e-3)
    shutil.copytree(two_processes / "fsdp", tmp_path / "alone")
    train_one_rank(replace(config, resume=True, out=tmp_path / "alone"))
    train_one_rank(replace(config, resume=True))
    expected, _ = results(tmp_path / "fsdp")
    for weight, value in results(tmp_path / "alone")[0].items():
        torch.testing.assert_close(value, expected[weight], msg=weight, rtol=1e-4, atol=1e-5)


def test_under_fsdp_a_process_holds_its_share_of_the_model(two_processes):
    shares = [
        [float(line) for line in (two_processes / f"shares-{rank}").read_text().splitlines()]
        for rank in (0, 1)
    ]
    assert [len(held) for held in shares] == [2, 2]
    for first, second in zip(*shares, strict=True):
        assert first + second == pytest.approx(1)
        assert 0.4 < first < 0.6


def test_under_fsdp_each_image_is_scored_once_whoever_has_more_batches(two_processes):
    """Rank 0 has five batches of eight and rank 1 four: the fifth of rank 1 counts for nothing."""
    images, labels = make_images(COUNT)
    images = torch.cat((images[0::2][:40], images[1::2][:32]))
    labels = torch.cat((labels[0::2][:40], labels[1::2][:32]))
    with torch.no_grad():
        outputs = load_trained(two_processes / "fsdp" / "last.pt")(images)
    scored = read_metrics(two_processes / "fsdp" / "metrics.jsonl")[-1]
    loss = nn.functional.cross_entropy(outputs, labels).item()
    assert scored["loss"] == pytest.approx(loss, rel=1e-4)
    assert scored["accuracy"] == pytest.approx((outputs.argmax(1) == labels).float().mean().item())


@pytest.mark.parametrize(
    ("options", "switch"),
    [
        ({"ema": 0.9}, "--ema"),
        ({"compile": "default"}, "--compile"),
        ({"optimizer": "lamb"}, "--optimizer lamb"),
        ({"precision": "fp16"}, "--precision fp16"),
    ],
)
def test_what_fsdp_does_not_go_with_is_one_sentence(tmp_path, options, switch):
    config = make_config(tmp_path, fsdp=True, **options)
    world = World(rank=0, size=2, device=CPU)
    with pytest.raises(UsageError) as caught:
        check_fsdp(config, world, config.speed.precision)
    assert str(caught.value) == f"--fsdp does not go with {switch}: leave one of them out"
    with pytest.raises(UsageError, match=r"^--fsdp shares a model out among several processes, an"):
        train(config, make_data(config))


def fail_on_rank_one(_):
    if os.environ["RANK"] == "1":
        raise UsageError("--lr 7 is odd")
    import time

    time.sleep(60)


def test_an_error_of_any_process_is_raised_once_and_ends_the_others():
    with pytest.raises(UsageError, match=r"^--lr 7 is odd$"):
        start(fail_on_rank_one, None, 2)


def wait_to_be_ended(folder):
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    import time

    time.sleep(60)


def test_an_interrupt_of_the_parent_alone_ends_the_others(tmp_path):
    def pids():
        written = [tmp_path / rank for rank in "01"]
        return [int(path.read_text() or 0) for path in written if path.exists()]

    def interrupt():
        while len(pids()) < 2 or 0 in pids():
            if done.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    done, before = threading.Event(), signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=interrupt)
    try:
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            start(wait_to_be_ended, tmp_path, 2)
    finally:
        done.set()
        sender.join()
        signal.signal(signal.SIGINT, before)
    for pid in pids():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def train_until_terminated(config):
    """Rank 0 sends SIGTERM, to the parent alone, when it makes its tenth batch."""
    torch.set_num_threads(1)
    rank, made = int(os.environ["RANK"]), []
    data = make_data(config, world=(rank, 2))

    class Ending(MemoryLoader):
        def __iter__(self):
            for batch in super().__iter__():
                made.append(1)
                if len(made) == 10 and rank == 0:
                    os.kill(os.getppid(), signal.SIGTERM)
                yield batch

    def make(side):
        loader = data.train_loader(side)
        loader.__class__ = Ending
        return loader

    train(config, replace(data, train_loader=make))


def test_sigterm_to_the_parent_alone_saves_one_run(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    config = make_config(tmp_path, epochs=10_000, log_every=2)
    with pytest.raises(SystemExit, match="143"):
        start(train_until_terminated, config, 2)
    assert signal.getsignal(signal.SIGTERM) == before
    state = load_checkpoint(tmp_path / "last.pt")
    assert state["progress"]["step"] >= 10
    assert state["progress"]["step"] % 2 == 0
    assert len(state["random"]["ranks"]) == 2


def test_torchrun_starts_the_same_run(tmp_path):
    """By its command, as users do, with each process on its share."""
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from train.helpers import make_config\n"
        "from train.test_distributed import train_one_rank\n"
        "train_one_rank(make_config(Path(sys.argv[1]), epochs=1))\n"
    )
    paths = [str(Path(__file__).parents[1]), *sys.path]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--standalone", str(script), str(tmp_path / "run"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("epoch 1 of 1: train loss") == 1
    assert results(tmp_path / "run")[1][-1][:2] == ("val", 4)


def test_the_switches_reach_ddp(monkeypatch):
    seen = {}

    def recorded(net, **kwargs):
        seen.update(kwargs)
        return net

    monkeypatch.setattr("h5feed.train.distributed.DistributedDataParallel", recorded)
    world = World(rank=0, size=2, device=CPU)
    for value in (True, False):
        config = DistributedConfig(static_graph=value, bucket_view=not value)
        world.wrap(nn.Linear(1, 1), config, parts=1)
        assert seen["static_graph"] is value
        assert seen["gradient_as_bucket_view"] is not value
    world.wrap(nn.Linear(1, 1), DistributedConfig(static_graph=True), parts=2)
    assert seen["static_graph"] is False  # torch fails there


def test_one_process_needs_no_wrapper():
    net = nn.Linear(1, 1)
    assert World(rank=0, size=1, device=CPU).wrap(net, DistributedConfig(), parts=1) is net


def test_gradients_are_exchanged_in_the_last_part_alone(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = DistributedDataParallel(nn.Linear(1, 1))
        exchanged = []
        for last in (False, True):
            with last_only(model, last=last):
                exchanged.append(model.require_backward_grad_sync)
        assert exchanged == [False, True]
    finally:
        torch.distributed.destroy_process_group()


def test_batch_norms_are_synchronized_on_gpus_and_refused_on_the_cpu():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    config = DistributedConfig(sync_batchnorm=True)
    on_gpu = World(rank=0, size=2, device=torch.device("cuda", 0))
    assert isinstance(on_gpu.synchronize_norms(net, config)[1], nn.SyncBatchNorm)
    plain = World(rank=0, size=2, device=CPU).synchronize_norms(net, DistributedConfig())
    assert plain is net
    with pytest.raises(UsageError, match="--sync-batchnorm needs GPUs"):
        World(rank=0, size=2, device=CPU).synchronize_norms(net, config)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == CPU
    with pytest.raises(UsageError, match="--device 'fast' is not a device: cpu, cuda, cuda:N"):
        choose_device("fast")
    with pytest.raises(
        UsageError, match=r"--device cuda \(process 0\) needs a GPU, and torch sees none"
    ):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    with pytest.raises(UsageError, match=r"\(process 2\) needs 3 GPUs, and torch sees 2"):
        choose_device("cuda", 2)


def test_torchrun_is_known_by_its_environment(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not under_torchrun()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert under_torchrun()


def test_each_process_has_dropout_masks_of_its_own(tmp_path):
    config, draws = make_config(tmp_path), []
    task = make_task("classification", config.loss, 4)
    for rank in (0, 1, 1):
        world = World(rank=rank, size=1, device=CPU)
        build_step(config, tiny(4), task, world, "fp32", total_steps=10)
        draws.append(torch.rand(8).tolist())
    assert draws[0] != draws[1] == draws[2]
