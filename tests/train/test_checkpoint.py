import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from h5feed.errors import UsageError
from h5feed.train.checkpoint import (
    RandomState,
    capture,
    load_checkpoint,
    restore,
    save_checkpoint,
)
from h5feed.train.distributed import World
from train.helpers import error_on_full_disk

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_all_generators_go_on_where_they_were(tmp_path):
    random_state = RandomState(ALONE)
    save_checkpoint(tmp_path / "c.pt", capture({"random": random_state}, {}))
    expected = draw(), draw()
    restore(load_checkpoint(tmp_path / "c.pt"), {"random": random_state}, tmp_path / "c.pt")
    assert (draw(), draw()) == expected


def test_another_number_of_processes_keeps_its_own_generators():
    state = RandomState(ALONE).state_dict()
    state["ranks"] *= 2
    torch.manual_seed(5)
    RandomState(ALONE).load_state_dict(state)
    assert torch.initial_seed() == 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_killed_while_saving_the_previous_checkpoint_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"progress": {"step": 1}, "big": torch.ones(100_000)})

    def save_half(state, file):
        file.write(b"x" * 100_000)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(torch, "save", save_half)
        save_checkpoint(path, {"progress": {"step": 2}})
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (tmp_path / "last.pt.partial").stat().st_size == 100_000
    assert load_checkpoint(path)["progress"] == {"step": 1}
    save_checkpoint(path, {"progress": {"step": 3}})
    assert load_checkpoint(path)["progress"] == {"step": 3}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.pt"]


def test_the_new_checkpoint_is_on_the_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, Path.replace

    def synced(handle):
        done.append("fsync")
        fsync(handle)

    def renamed(self, target):
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    save_checkpoint(tmp_path / "last.pt", {"progress": {}})
    assert done[:2] == ["fsync", "rename"]


def test_a_missing_a_foreign_and_a_broken_checkpoint_are_one_sentence_each(tmp_path):
    with pytest.raises(UsageError, match=r"--resume finds no checkpoint .*last\.pt: leave"):
        load_checkpoint(tmp_path / "last.pt")
    torch.save([1, 2], tmp_path / "foreign.pt")
    with pytest.raises(UsageError, match=r"foreign\.pt is not a checkpoint of train-h5"):
        load_checkpoint(tmp_path / "foreign.pt")
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"broken\.pt cannot be read as a checkpoint"):
        load_checkpoint(tmp_path / "broken.pt")


def test_a_flipped_byte_is_found(tmp_path):
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"progress": {}, "net": {"weight": torch.randn(10_000)}})
    saved = bytearray(path.read_bytes())
    saved[20_000] ^= 1
    path.write_bytes(saved)
    with pytest.raises(
        UsageError, match=r"last\.pt is damaged: .*data/0 in it is not what was sav"
    ):
        load_checkpoint(path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_full_disk_is_one_sentence_and_leaves_the_previous_checkpoint(tmp_path):
    """As far as a process is concerned: its files may have no more bytes than that."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"progress": {"step": 1}})
    larger = {"progress": {"step": 2}, "big": torch.ones(100_000)}
    assert error_on_full_disk(50_000, lambda: save_checkpoint(path, larger)) == (
        f"H5FeedError: {path} could not be saved: File too large. What was saved before is whole: "
        "make room, and go on with --resume"
    )
    assert load_checkpoint(path)["progress"] == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.pt"]


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil",))


def test_a_checkpoint_is_data_and_never_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"progress": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UsageError, match="cannot be read as a checkpoint"):
        load_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "evil").exists()


def test_a_part_that_does_not_fit_is_named(tmp_path):
    state = {"progress": {}, "net": nn.Linear(2, 2).state_dict()}
    with pytest.raises(UsageError, match=r"c\.pt does not fit this net: resume with the options"):
        restore(state, {"net": nn.Linear(3, 2)}, tmp_path / "c.pt")
    with pytest.raises(UsageError, match=r"c\.pt holds no ema: resume with the options"):
        restore(state, {"ema": nn.Linear(3, 2)}, tmp_path / "c.pt")
