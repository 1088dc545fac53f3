import json
from pathlib import Path

import pytest
import torch

from h5feed.bench.ablate import AblateOptions, Ablation, Row
from h5feed.bench.process import SubjectError
from h5feed.cli import ablate
from h5feed.cli.train import main
from h5feed.train import TrainConfig, write_config
from h5feed.train.config import ModelConfig
from h5feed.train.find_batch import BatchSizes, BatchTrial
from packed import random_images, write_packed

torch.set_num_threads(1)
MODEL = ModelConfig(model="train.trials:net_with_everything")
SMALL = ["--model", MODEL.model, "--batch-size", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return str(write_packed(tmp_path_factory.mktemp("tools") / "a.h5", random_images(16, (16, 16))))


def test_find_lr_prints_json_and_draws(packed, tmp_path, capsys):
    image = tmp_path / "lr.png"
    args = ["find-lr", packed, *SMALL, "--steps", "12", "--json", "--plot", str(image)]
    assert main(args) == 0
    curve = json.loads(capsys.readouterr().out)
    assert len(curve["rates"]) == len(curve["losses"]) <= 12
    assert image.exists()


def test_the_tools_take_a_runs_options_from_its_config(packed, tmp_path, capsys):
    config = TrainConfig(train=Path(packed), device="cpu", batch_size=4, model=MODEL)
    write_config(config, tmp_path / "config.json")
    args = ["find-batch", "--config", str(tmp_path / "config.json"), "--batch-size", "8"]
    assert main([*args, "--smallest", "2", "--largest", "2", "--steps", "1"]) == 0
    assert "meant for batches of 8?" in capsys.readouterr().out


def test_find_lr_says_what_to_try_or_that_it_has_nothing(packed, capsys):
    assert main(["find-lr", packed, *SMALL, "--steps", "12"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(("try --lr ", "no suggestion: the loss never clearly fell over "))


def test_find_batch_names_a_size_and_the_option_that_scales_the_rate(packed, capsys):
    args = ["find-batch", packed, *SMALL, "--smallest", "2", "--largest", "4", "--steps", "1"]
    assert main(args) == 0
    streams = capsys.readouterr()
    assert "batch of 2: " in streams.err
    assert "4 is the largest tried, and it fits" in streams.out
    assert streams.out.rstrip().endswith("Then add --lr-scaling sqrt --lr-batch 4")


def test_find_batch_in_json(packed, capsys):
    args = ["find-batch", packed, *SMALL, "--smallest", "2", "--largest", "4", "--json"]
    assert main(args) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["largest"] == 4
    assert [trial["batch_size"] for trial in found["trials"]] == [2, 4]


def test_no_batch_is_larger_than_the_set_and_time_that_is_over_is_said(packed, capsys, monkeypatch):
    assert main(["find-batch", packed, *SMALL, "--steps", "1", "--smallest", "5"]) == 0
    streams = capsys.readouterr()
    assert [line.partition(":")[0] for line in streams.err.splitlines()] == [
        "batch of 5", "batch of 10", "batch of 16"
    ]  # fmt: skip
    assert "16 is the largest tried, and it fits." in streams.out
    assert main(["find-batch", packed, *SMALL, "--smallest", "99", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest"] == 16
    trial = BatchTrial(batch_size=8, images_per_second=1.0, memory_bytes=None)
    sizes = BatchSizes(trials=(trial,), full=False, in_time=False)
    monkeypatch.setattr("h5feed.cli.find_batch.find_batch", lambda *_: sizes)
    assert main(["find-batch", packed, *SMALL, "--seconds", "9"]) == 0
    said = "8 is the largest tried, and it fits (a further one would take longer than --seconds 9 "
    assert f"{said}leave). " in capsys.readouterr().out


def test_wrong_use_is_exit_2_and_one_sentence(packed, capsys):
    assert main(["find-lr", packed, *SMALL, "--gpus", "2"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "train-h5 find-lr: this is tried out in one process: leave out --gpus and torchrun\n"
    )


@pytest.mark.parametrize("tool", ["find-lr", "find-batch", "ablate"])
def test_a_drawing_that_cannot_be_written_is_refused_before_any_work(
    packed, tmp_path, capsys, monkeypatch, tool
):
    for work in ("find_lr.open_trial", "find_batch.open_trial", "ablate.ablate"):
        monkeypatch.setattr(f"h5feed.cli.{work}", lambda *_: pytest.fail("work was begun"))
    said = f"train-h5 {tool}: --plot {tmp_path / 'a.gif'} does not end in .png or .svg or .pdf"
    assert main([tool, packed, *SMALL, "--plot", str(tmp_path / "a.gif")]) == 2
    assert capsys.readouterr().err == f"{said}: give a name that does\n"
    same = tmp_path / "a.png"
    same.hardlink_to(packed)
    assert main([tool, packed, *SMALL, "--plot", str(same)]) == 2
    assert "a.png is a file that is read here" in capsys.readouterr().err


def test_ablate_measures_no_endless_windows(packed, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["ablate", packed, *SMALL, "--seconds", "inf"])
    assert "--seconds inf is too large: it must be at most 300" in capsys.readouterr().err


def test_ablate_prints_one_form(packed, capsys):
    assert main(["ablate", packed, *SMALL, "--json", "--markdown"]) == 2
    assert "json and markdown are two forms of one output" in capsys.readouterr().err


def test_ablate_hands_its_options_on_and_says_what_was_found(packed, tmp_path, capsys, monkeypatch):
    seen = []

    def measured(config, options, tell):
        seen.append((config, options))
        row = Row(name="the plain loop", group="cumulative", tricks=(), rates=(100.0,))
        return Ablation(title="a title", rows=(row,), images=9, batch_size=4, machine="a machine")

    monkeypatch.setattr(ablate, "ablate", measured)
    args = ["ablate", packed, *SMALL, "--only", "fused", "AMP", "--no-leave-one-out"]
    assert main(args) == 0
    assert "a title" in capsys.readouterr().out
    assert main([*args, "--markdown", "--images", str(tmp_path)]) == 0
    assert "| the plain loop | 100 |" in capsys.readouterr().out
    assert main([*args, "--json", "--plot", str(tmp_path / "a.png")]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["images_per_second"] == 100.0
    assert (tmp_path / "a.png").exists()
    config, options = seen[1]
    assert config.batch_size == 4
    assert options == AblateOptions(images=tmp_path, only=("fused", "AMP"), leave_one_out=False)


def test_ablate_says_what_the_plain_loop_failed_of(packed, capsys, monkeypatch):
    def failed(*_):
        raise SubjectError("the plain loop: out\nof memory", trace="File x, line 1\nboom\n")

    monkeypatch.setattr(ablate, "ablate", failed)
    assert main(["ablate", packed, *SMALL]) == 1
    assert capsys.readouterr().err == (
        "train-h5 ablate: the plain loop: out\\nof memory\nFile x, line 1\nboom\n"
    )
