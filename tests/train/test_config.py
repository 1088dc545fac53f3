import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from h5feed.errors import UsageError
from h5feed.train import TrainConfig, read_config, write_config
from train.helpers import make_config


def test_a_saved_config_reads_back_equal(tmp_path):
    config = make_config(tmp_path / "run", lr=0.25, loader="synthetic", mixup=0.2, accumulate=4)
    config = replace(config, train=tmp_path / "train.h5", val=tmp_path / "val.h5")
    write_config(config, tmp_path / "config.json")
    assert read_config(tmp_path / "config.json") == config


def test_its_paths_hold_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(train=Path("data/t.h5"), out=Path("../run"))
    write_config(config, tmp_path / "config.json")
    read = read_config(tmp_path / "config.json")
    assert (read.train, read.out) == (tmp_path / "data/t.h5", tmp_path.parent / "run")
    assert read.val is None


def test_a_config_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_config(make_config(tmp_path), path)
    before = path.read_bytes()

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_config(make_config(tmp_path, lr=0.5), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_option_names_are_unique_so_that_the_command_line_can_be_flat():
    names = []
    for name, value in asdict(TrainConfig(train=Path("t.h5"))).items():
        names += value if isinstance(value, dict) else [name]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"optim": {"speed": 1}}, "config.optim has no option 'speed'; it has clip_norm, "),
        ({"optim": {"lr": "fast"}}, "config.optim.lr='fast' is not a float"),
        ({"epochs": 1.5}, "config.epochs=1.5 is not a int"),
        ({"speed": {"precision": "fp8"}}, "precision='fp8' is not one of auto, torch, fp32, tf32,"),
        ({"optim": 3}, "config.optim=3 is not a table of options"),
        ({"optim": {"lr": -1.0}}, "--lr -1.0 is too small: it must be above 0"),
    ],
)
def test_a_wrong_config_file_is_named_with_its_entry(tmp_path, change, text):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train": "t.h5", **change}))
    with pytest.raises(UsageError) as caught:
        read_config(path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_config_file_without_the_training_file_says_so(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(UsageError, match="config has no 'train', which it needs"):
        read_config(path)


def test_a_config_file_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(UsageError, match=r"config\.json cannot be read as JSON"):
        read_config(path)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("epochs", 0, "--epochs 0 is too small: it must be at least 1"),
        ("batch_size", 0, "--batch-size 0 is too small"),
        ("accumulate", 0, "--accumulate 0 is too small"),
        ("lr", 0.0, "--lr 0.0 is too small: it must be above 0"),
        ("lr", float("nan"), "--lr nan is too small: it must be above 0"),
        ("momentum", 1.0, "--momentum 1.0 is out of range: 0 turns it off, 1 is too much"),
        ("weight_decay", -1.0, "--weight-decay -1.0 is too small"),
        ("clip_norm", -1.0, "--clip-norm -1.0 is too small"),
        ("label_smoothing", 1.0, "--label-smoothing 1.0 is out of range"),
        ("ema", 1.0, "--ema 1.0 is out of range"),
        ("mixup", -0.1, "--mixup -0.1 is too small"),
        ("warmup", 1.5, "--warmup 1.5 is out of range"),
        ("log_every", 0, "--log-every 0 is too small"),
        ("prefetch", 0, "--prefetch 0 is too small"),
        ("workers", -2, "--workers -2 is too small"),
    ],
)
def test_values_out_of_range_are_one_sentence(tmp_path, option, value, text):
    with pytest.raises(UsageError) as caught:
        make_config(tmp_path, **{option: value})
    assert text in str(caught.value)


def test_a_batch_that_does_not_split_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="--batch-size 16 cannot be computed in --accumulate 3"):
        make_config(tmp_path, accumulate=3)
