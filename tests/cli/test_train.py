import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from h5feed import pack
from h5feed.cli import ablate, find_batch, find_lr, train
from h5feed.cli._training import RunOptions, run_training_command
from h5feed.cli.train import main
from h5feed.train import TrainConfig, read_config, write_config
from h5feed.train.config import OptimConfig
from h5feed.train.log import read_metrics
from h5feed.train.recipes import RECIPES
from train.files import write_classes, write_folder, write_scenes

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    return {
        "train": str(write_classes(root / "train.h5", 64)),
        "val": str(write_classes(root / "val.h5", 16)),
        "other": str(write_classes(root / "other.h5", classes=("a", "b", "c", "d"))),
        "scenes": str(write_scenes(root / "scenes.h5")),
    }


def arguments(paths, out, *more):
    return [
        paths["train"], "--val", paths["val"], "--out", str(out), "--model", "resnet9-small",
        "--device", "cpu", "--batch-size", "16", "--epochs", "2", "--lr", "0.01", *more,
    ]  # fmt: skip


def losses(out):
    return [(m["kind"], m["step"], m["loss"]) for m in read_metrics(out / "metrics.jsonl")]


def test_a_run_says_what_it_reached(paths, tmp_path, capsys):
    assert main(arguments(paths, tmp_path, "--no-curves", "--json")) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["steps"] == 8
    assert result["val"]["loss"] == losses(tmp_path)[-1][2]
    assert "epoch 2 of 2: train loss" in captured.err
    assert main(arguments(paths, tmp_path, "--no-curves", "--overwrite")) == 0
    words = capsys.readouterr().out
    assert words.startswith(f"{tmp_path}: 8 steps, ")
    assert f"val accuracy {result['val']['accuracy']:.4f} (best {result['best']:.4f})" in words


def test_several_classes_an_image_from_a_table_to_their_precisions(tmp_path, capsys):
    root = write_folder(tmp_path / "images", 32)
    keys = sorted(str(path.relative_to(root)) for path in root.rglob("*.png"))
    # The folder "top left" as the two classes top and left.
    rows = [f"{key},{key.partition('/')[0]}" for key in keys]
    (tmp_path / "tags.csv").write_text("\n".join(["path,tags", *rows]))
    options = {"manifest": tmp_path / "tags.csv", "label_column": "tags", "label_delimiter": " "}
    pack(root, tmp_path / "tags.h5", size=16, any_size=True, **options)
    paths = {"train": str(tmp_path / "tags.h5"), "val": str(tmp_path / "tags.h5")}
    assert main(arguments(paths, tmp_path / "run", "--no-curves", "--cutmix", "1")) == 0
    assert ", val mAP " in capsys.readouterr().out
    lines = (tmp_path / "run" / "per_class.csv").read_text().splitlines()
    assert lines[0] == "class,images,average_precision,precision,recall,f1"
    names = ["bottom", "left", "right", "top"]
    assert [line.split(",")[:2] for line in lines[1:]] == [[name, "16"] for name in names]
    assert main(arguments(paths, tmp_path / "other", "--balance")) == 2
    assert "--balance needs one class an image, and " in capsys.readouterr().err


def test_a_runs_config_is_read_back_and_can_be_changed(paths, tmp_path):
    assert main(arguments(paths, tmp_path / "a", "--no-curves", "--no-flip")) == 0
    config = str(tmp_path / "a" / "config.json")
    again = ["--config", config, "--out", str(tmp_path / "b"), "--lr", "0.02", "--flip"]
    assert main(again) == 0
    first, second = (read_config(tmp_path / name / "config.json") for name in "ab")
    assert (first.optim.lr, second.optim.lr) == (0.01, 0.02)
    assert (first.data.flip, second.data.flip) == (False, True)
    assert (second.train, second.epochs) == (first.train, 2)
    assert main([f"--config={config}", "--resume", "--epochs", "2"]) == 0


def test_a_config_read_back_neither_overwrites_nor_resumes_unasked(paths, tmp_path, capsys):
    assert main(arguments(paths, tmp_path, "--no-curves", "--overwrite")) == 0
    config = str(tmp_path / "config.json")
    assert main(["--config", config]) == 2
    assert "holds a run already: go on with --resume" in capsys.readouterr().err
    assert main(["--config", config, "--resume"]) == 0
    assert main(["--config", config, "--out", str(tmp_path / "new"), "--epochs", "1"]) == 0


def test_the_last_config_counts(paths, tmp_path):
    for name, epochs in (("a", 1), ("b", 2)):
        made = TrainConfig(train=Path(paths["train"]), out=tmp_path / name, epochs=epochs)
        write_config(made, tmp_path / f"{name}.json")
    a, b = (str(tmp_path / f"{name}.json") for name in "ab")
    seen = []
    options = {"prog": "train-h5", "args": ["--config", b, f"--config={a}"]}
    assert run_training_command(RunOptions, seen.append, **options) == 0
    assert seen[0].run == read_config(tmp_path / "a.json")
    assert seen[0].config == tmp_path / "a.json"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fills_the_options_and_what_is_given_counts_more(tmp_path, name):
    seen = []
    args = ["t.h5", "--recipe", name, "--epochs", "3", "--no-flip", "--no-alternating-flip"]
    assert run_training_command(RunOptions, seen.append, prog="p", args=args) == 0
    run = seen[0].run
    assert (run.train, run.epochs, run.data.flip) == (Path("t.h5"), 3, False)
    assert run.recipe.recipe == name
    trees = [run, run.model, run.loss, run.data, run.recipe, run.optim, run.schedule]
    found = {k: v for tree in trees for k, v in asdict(tree).items()}
    expected = {**RECIPES[name].options, "epochs": 3, "alternating_flip": False}
    assert {k: found[k] for k in expected} == expected
    write_config(run, tmp_path / "config.json")
    again = ["--config", str(tmp_path / "config.json"), "--lr", "0.125"]
    assert run_training_command(RunOptions, seen.append, prog="p", args=again) == 0
    assert seen[1].run.recipe == run.recipe
    assert (seen[1].run.optim.lr, seen[1].run.epochs) == (0.125, 3)
    args = [*again, f"--recipe={name}"]  # beside --config it counts more than what that says
    assert run_training_command(RunOptions, seen.append, prog="p", args=args) == 0
    assert seen[2].run.epochs == RECIPES[name].options["epochs"]


def test_an_unknown_recipe_lists_what_there_is(capsys):
    assert main(["t.h5", "--recipe", "mine"]) == 2
    assert capsys.readouterr().err == (
        "train-h5: --recipe 'mine' is not known: take torchvision-resnet50, timm-a3, "
        "cifar-airbench or none\n"
    )


def test_a_run_says_what_its_recipe_is(paths, tmp_path, capsys):
    options = ["--recipe", "cifar-airbench", "--no-curves"]
    assert main(arguments(paths, tmp_path, *options, "--epochs", "1")) == 0
    assert "recipe cifar-airbench, of Jordan 2024, arXiv:2404.00498;" in capsys.readouterr().err
    config = read_config(tmp_path / "config.json")
    assert (config.recipe.recipe, config.data.padding_mode) == ("cifar-airbench", "reflect")
    assert (config.optim.lr, config.batch_size) == (0.01, 16)  # given in arguments()


@pytest.mark.parametrize(
    "command",
    [
        train._TrainCommand,
        find_lr._FindLrCommand,
        find_batch._FindBatchCommand,
        ablate._AblateCommand,
    ],
)
def test_what_is_not_given_is_the_default(command):
    """No placeholder of the command line's parser may reach a run."""
    seen = []
    assert run_training_command(command, seen.append, prog="p", args=["t.h5", "--lr", "0.5"]) == 0
    expected = TrainConfig(train=Path("t.h5"), optim=OptimConfig(lr=0.5))
    assert seen == [command(run=expected)]


def test_without_the_file_to_train_on_it_is_asked_for(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--epochs", "2"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "Missing from train-h5" in said
    assert "TRAIN" in said


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        (["--model", "resnet5"], 2, "train-h5: --model 'resnet5' is not known: it is resnet9"),
        (["--val", "other"], 2, "have not the same classes; in one of them only: a, b, bottom "),
        (["--val", "gone.h5"], 1, "gone.h5"),
        (["--device", "cuda:99"], 2, "train-h5: --device cuda:99 (process 0) needs 100 GPUs"),
        (["--num-outputs", "3"], 2, "train-h5: --num-outputs 3 is too small: "),
        (["--precision", "tf32"], 2, "train-h5: --precision tf32 needs a GPU of compute capab"),
        (["--batch-size", "400"], 2, "train-h5: --batch-size 400 is more than the 64 images"),
        (["--config", "gone.json"], 2, "train-h5: --config gone.json cannot be read as JSON"),
        (["--resume"], 2, "train-h5: --resume finds no checkpoint"),
        (["--accumulate", "3"], 2, "--batch-size 16 cannot be computed in --accumulate 3"),
        (["--lr", "1e20", "--optimizer", "sgd"], 1, "the last good checkpoint is"),
    ],
)
def test_errors_are_one_sentence(paths, tmp_path, capsys, more, status, text):
    more = [paths.get(word, word) for word in more]
    if status == 1 and "--lr" in more:
        text = "nothing was saved yet. A smaller --lr"
    assert main(arguments(paths, tmp_path, "--no-curves", *more)) == status
    lines = capsys.readouterr().err.splitlines()
    assert text in lines[-1]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--lr", "-1"], "--lr -1.0 is too small: it must be above 0"),
        (["--lr", "fast"], "--lr"),
        (["--loader", "magic"], "magic"),
        (["--workers", "-2"], "--workers -2 is too small: it must be at least -1"),
    ],
)
def test_what_the_command_line_refuses_exits_with_2(paths, tmp_path, capsys, more, text):
    with pytest.raises(SystemExit) as caught:
        main(arguments(paths, tmp_path, *more))
    assert caught.value.code == 2
    assert text in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "config.json").exists()


def test_a_unet_on_masks(paths, tmp_path, capsys):
    command = [
        paths["scenes"], "--val", paths["scenes"], "--out", str(tmp_path), "--model", "unet",
        "--batch-size", "16", "--epochs", "3", "--lr", "0.01", "--no-curves", "--device", "cpu",
    ]  # fmt: skip
    assert main(command) == 0
    found = [m["mean IoU"] for m in read_metrics(tmp_path / "metrics.jsonl") if m["kind"] == "val"]
    assert found[-1] > 0.7
    assert "val mean IoU" in capsys.readouterr().out


def test_ctrl_c_says_how_to_go_on(paths, tmp_path, capsys, monkeypatch):
    from h5feed.train import trainer

    plain, calls = trainer.Trainer.save, []

    def interrupted(run, epoch, **options):
        plain(run, epoch, **options)
        calls.append(epoch)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.Trainer, "save", interrupted)
    assert main(arguments(paths, tmp_path, "--no-curves")) == 130
    resume = f"--config {tmp_path / 'config.json'} --resume"
    assert capsys.readouterr().err.endswith(
        f"train-h5: interrupted; go on with train-h5 {resume}\n"
    )
    monkeypatch.setattr(trainer.Trainer, "save", plain)
    assert main(resume.split()) == 0
    assert losses(tmp_path)[-1][:2] == ("val", 8)


def test_ctrl_c_before_the_first_step_advises_no_old_run(paths, tmp_path, capsys, monkeypatch):
    from h5feed.train import trainer

    assert main(arguments(paths, tmp_path, "--no-curves")) == 0
    monkeypatch.setattr(trainer, "prepare", Mock(side_effect=KeyboardInterrupt))
    capsys.readouterr()
    assert main(arguments(paths, tmp_path, "--no-curves", "--overwrite")) == 130
    assert capsys.readouterr().err == "train-h5: interrupted\n"
    assert main(["--config", str(tmp_path / "config.json"), "--resume"]) == 130
    assert capsys.readouterr().err.endswith("/config.json --resume\n")


def test_sigterm_saves_and_says_how_to_go_on(paths, tmp_path, capsys, monkeypatch):
    from h5feed.train import trainer

    assert main(arguments(paths, tmp_path / "whole", "--no-curves", "--log-every", "3")) == 0
    plain, sent = trainer.Trainer.report, []

    def terminated(run, epoch):
        plain(run, epoch)
        if not sent:  # a second one would end this very process
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    monkeypatch.setattr(trainer.Trainer, "report", terminated)
    assert main(arguments(paths, tmp_path / "cut", "--no-curves", "--log-every", "3")) == 143
    resume = f"--config {tmp_path / 'cut' / 'config.json'} --resume"
    said = f"train-h5: terminated and saved; go on with train-h5 {resume}\n"
    assert capsys.readouterr().err.endswith(said)
    monkeypatch.setattr(trainer.Trainer, "report", plain)
    assert losses(tmp_path / "cut")[-1][:2] == ("train", 3)
    assert main(resume.split()) == 0
    assert losses(tmp_path / "cut")[-1] == losses(tmp_path / "whole")[-1]


def test_killed_at_any_moment_it_resumes_to_the_same_losses(paths, tmp_path):
    more = ["--epochs", "6", "--save-every", "3", "--log-every", "1", "--no-curves"]
    assert main(arguments(paths, tmp_path / "whole", *more)) == 0
    command = [sys.executable, "-m", "h5feed.cli.train", *arguments(paths, tmp_path / "cut", *more)]
    metrics = tmp_path / "cut" / "metrics.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment) as process:
        while process.poll() is None and len(read_metrics(metrics)) < 9:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert len(losses(tmp_path / "cut")) < len(losses(tmp_path / "whole"))
    config = str(tmp_path / "cut" / "config.json")
    assert main(["--config", config, "--resume"]) == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_dali_makes_the_same_batches(paths, tmp_path):
    pytest.importorskip("nvidia.dali")
    flags = ["--no-curves", "--loader", "dali"]
    assert main(arguments(paths, tmp_path / "a", *flags)) == 0
    assert main(arguments(paths, tmp_path / "b", "--no-curves", "--loader", "h5loader")) == 0
    dali, own = losses(tmp_path / "a"), losses(tmp_path / "b")
    for made, expected in zip(dali, own, strict=True):
        assert made[:2] == expected[:2]
        assert made[2] == pytest.approx(expected[2], abs=0.05)  # images agree within 2 of 255


def test_without_dali_one_sentence_names_the_extra(paths, tmp_path):
    code = "import sys; sys.modules['nvidia'] = None; from h5feed.cli.train import main; "
    code += "sys.exit(main(sys.argv[1:]))"
    given = arguments(paths, tmp_path, "--loader", "dali")
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith('nvidia is not installed, and this needs it: pip install "h5feed[dali]"')
    assert "Traceback" not in done.stderr
