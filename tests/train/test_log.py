import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from h5feed.errors import H5FeedError, UsageError
from h5feed.train.distributed import World
from h5feed.train.log import MetricsLog, read_metrics
from h5feed.train.plots import _windows, draw_curves
from h5feed.train.tasks import class_columns
from h5feed.train.trainer import train
from train.helpers import make_config, make_data

torch.set_num_threads(1)
CPU = torch.device("cpu")


def test_lines_after_the_resumed_step_are_taken_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    world = World(rank=0, size=1, device=CPU)
    log = MetricsLog(make_config(tmp_path), world, step=0)
    log.begin()
    for step in (1, 2, 3):
        log.write("train", step, 0, {"loss": 1.0 / step})
    with path.open("a") as file:
        file.write('{"kind": "tr')  # killed while writing
    resumed = MetricsLog(make_config(tmp_path, resume=True), world, step=2)
    resumed.begin()
    resumed.write("train", 3, 0, {"loss": 9.0})
    assert [(m["step"], m["loss"]) for m in read_metrics(path)] == [(1, 1.0), (2, 0.5), (3, 9.0)]


def test_other_processes_write_nothing(tmp_path):
    config = make_config(tmp_path, tensorboard=True)
    log = MetricsLog(config, World(rank=1, size=2, device=CPU), step=0)
    log.begin()
    log.write("train", 1, 0, {"loss": 1.0})
    log.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["{garbled", "[1, 2]", '{"kind": "train"}', '{"step": "a"}'])
def test_a_garbled_line_is_named_before_anything_is_done(tmp_path, line):
    config = make_config(tmp_path)
    train(config, make_data(config))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], f"{line}\n", *lines[2:]]))
    with pytest.raises(UsageError) as caught:
        train(replace(config, resume=True), make_data(config))
    assert str(caught.value) == (
        f"line 3 of {path} is not what train-h5 writes ({line!r}): take that line out of the file"
    )
    assert train(replace(config, overwrite=True), make_data(config)).steps == 8


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    log = MetricsLog(config, World(rank=0, size=1, device=CPU), step=0)
    log.begin()

    def full(self, mode):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(
        H5FeedError, match=r"metrics\.jsonl could not be written: No space left on "
    ):
        log.write("train", 1, 0, {"loss": 1.0})


def test_a_full_disk_at_the_beginning_leaves_the_old_run(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    train(config, make_data(config))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(H5FeedError, match=r"^--out .* could not be written: No space left on devi"):
        train(replace(config, overwrite=True, epochs=1), make_data(config))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_tensorboard_gets_the_same_numbers(tmp_path):
    event = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = make_config(tmp_path, epochs=1, tensorboard=True)
    summary = train(config, make_data(config))
    board = event.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    scalars = board.Scalars("train/loss")
    assert [scalar.step for scalar in scalars] == [1, 2, 3, 4]
    assert scalars[-1].value == pytest.approx(summary.train["loss"])


def test_without_tensorboard_it_trains_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    config = make_config(tmp_path, epochs=1, tensorboard=True)
    assert train(config, make_data(config)).steps == 4
    assert not (tmp_path / "tensorboard").exists()


class FakeWandB(ModuleType):
    """What is used of wandb."""

    def __init__(self):
        super().__init__("wandb")
        self.calls, self.logged, self.finished = [], [], 0

    def init(self, **options):
        self.calls.append(options)
        return self

    id = "abc123"

    def define_metric(self, name, step_metric=None):
        self.axis = step_metric

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished += 1


def test_weights_and_biases_gets_the_same_numbers_and_goes_on_with_the_same_run(
    tmp_path, monkeypatch
):
    wandb = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = make_config(tmp_path / "plain", epochs=1)
    train(config, make_data(config))
    assert wandb.calls == []
    config = make_config(tmp_path / "run", epochs=1, wandb="flowers")
    train(config, make_data(config))
    (call,) = wandb.calls
    assert (call["project"], call["name"], call["id"]) == ("flowers", "run", None)
    assert call["config"]["optim"]["lr"] == 0.01
    assert wandb.axis == "step"
    train(replace(config, epochs=2, resume=True), make_data(config))
    assert wandb.calls[1]["id"] == "abc123"
    assert wandb.finished == 2
    told = []
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        kind, step, _ = (line.pop(name) for name in ("kind", "step", "epoch"))
        told.append({"step": step, **{f"{kind}/{name}": value for name, value in line.items()}})
    assert wandb.logged == told
    train(replace(config, overwrite=True), make_data(config))
    assert wandb.calls[2]["id"] is None


def test_without_wandb_one_sentence_comes_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = make_config(tmp_path / "run", wandb="flowers")
    with pytest.raises(ImportError) as caught:
        train(config, make_data(config))
    assert str(caught.value) == (
        'wandb is not installed, and this needs it: pip install "h5feed[wandb]"'
    )
    assert list((tmp_path / "run").glob("*")) == []


@pytest.mark.parametrize("val", [True, False])
def test_curves_are_drawn_after_the_run(tmp_path, val):
    pytest.importorskip("matplotlib")
    config = make_config(tmp_path, curves=True)
    data = make_data(config) if val else make_data(config, val_loader=None)
    train(config, data)
    head = (tmp_path / "curves.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(head[16:20], "big") == 2200


def test_the_curves_show_what_was_logged(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn = []
    plain = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, x, y, **kw: drawn.append((x, y)) or plain(self, x, y, **kw)
    )
    config = make_config(tmp_path, curves=False)
    train(config, make_data(config))
    assert drawn == []
    draw_curves(tmp_path, "accuracy")
    lines = read_metrics(tmp_path / "metrics.jsonl")
    train_lines = [line for line in lines if line["kind"] == "train"]
    assert drawn[0] == (
        tuple(line["step"] for line in train_lines),
        tuple(line["loss"] for line in train_lines),
    )
    assert len(drawn) == 6


def test_the_few_steps_left_over_at_an_epochs_end_are_no_point_of_their_own():
    """20 + 20 + 6 steps, then 14 more until the next reading: they would jump about."""
    read = [
        {"kind": "train", "step": step, "loss": loss, "images_per_s": rate}
        for step, loss, rate in [
            (20, 2.0, 100.0), (40, 2.0, 100.0), (46, 5.0, 10.0), (60, 2.0, 100.0), (63, 9.0, 100.0)
        ]
    ]  # fmt: skip
    windows, steps = _windows(read)
    assert steps == 20
    assert [line["step"] for line in windows] == [20, 40, 63]
    assert [line["loss"] for line in windows[:2]] == [2.0, 2.0]
    assert windows[2]["loss"] == pytest.approx((6 * 5 + 14 * 2 + 3 * 9) / 23)
    assert windows[2]["images_per_s"] == pytest.approx(23 / (6 / 10 + 17 / 100))
    assert _windows([]) == ([], 0)


def test_a_long_run_is_drawn_with_some_hundred_points():
    read = [{"kind": "train", "step": k, "loss": 1.0} for k in range(1, 5001)]
    windows, steps = _windows(read)
    assert (len(windows), steps) == (200, 25)


def test_without_matplotlib_the_finished_run_says_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    config = make_config(tmp_path, epochs=1, curves=True)
    assert train(config, make_data(config)).steps == 4
    assert "no curves.png: matplotlib is not installed" in capsys.readouterr().err


def test_a_line_for_each_class(tmp_path):
    config = make_config(tmp_path)
    log = MetricsLog(config, World(rank=0, size=1, device=torch.device("cpu")), step=0)
    table = torch.tensor([[3.0, 1, 0], [1, 4, 0], [0, 0, 0]])
    log.write_per_class(class_columns(table, dense=False), ("cat, small", "dog"))
    assert (tmp_path / "per_class.csv").read_text() == (
        "class,images,precision,recall,f1\n"
        '"cat, small",4,0.7500,0.7500,0.7500\ndog,5,0.8000,0.8000,0.8000\n2,0,,,\n'
    )
    log.write_per_class(class_columns(table, dense=True), ())
    assert (tmp_path / "per_class.csv").read_text().splitlines()[:2] == [
        "class,pixels,precision,recall,iou",
        "0,4,0.7500,0.7500,0.6000",
    ]
    other = MetricsLog(config, World(rank=1, size=2, device=torch.device("cpu")), step=0)
    (tmp_path / "per_class.csv").unlink()
    other.write_per_class(class_columns(table, dense=True), ())  # the main process alone writes
    assert not (tmp_path / "per_class.csv").exists()
