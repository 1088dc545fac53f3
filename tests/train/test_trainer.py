import json
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from h5feed.errors import H5FeedError, UsageError
from h5feed.feed.sheet import class_colors
from h5feed.train import LossError, load_trained, read_config, train, trainer
from h5feed.train.checkpoint import load_checkpoint
from h5feed.train.distributed import World
from h5feed.train.loaders import AugmentedSamples, StockLoader
from h5feed.train.log import Recorder, read_metrics
from h5feed.train.plots import draw_scored
from h5feed.train.tasks import Scored, make_task
from train.helpers import MemoryLoader, make_config, make_data, make_images, tiny

torch.set_num_threads(1)


def run(out, *, data=None, **options):
    config = make_config(out, **options)
    return train(config, data or make_data(config))


def losses(out, kind="train"):
    return [
        (m["step"], m["loss"]) for m in read_metrics(out / "metrics.jsonl") if m["kind"] == kind
    ]


def weights(out, name="last.pt"):
    return load_checkpoint(out / name)["net"]


def test_the_loss_falls_and_the_summary_says_so(tmp_path):
    summary = run(tmp_path, epochs=6)
    train_losses = [loss for _, loss in losses(tmp_path)]
    assert train_losses[-1] < 0.3 * train_losses[0]
    assert (summary.steps, summary.metric) == (24, "accuracy")
    assert summary.best == summary.val["accuracy"] == 1.0
    assert summary.val["loss"] == losses(tmp_path, "val")[-1][1]
    assert set(summary.train) == {
        "loss", "accuracy", "lr", "images_per_s", "data_wait", "memory_mb", "grad_norm"
    }  # fmt: skip
    assert summary.train["images_per_s"] > 0
    assert 0 < summary.train["data_wait"] < 1
    assert summary.train["memory_mb"] > 50


def test_the_run_saves_its_configuration(tmp_path):
    run(tmp_path, lr=0.02)
    config = make_config(tmp_path, lr=0.02)
    config = replace(config, train=config.train.absolute())
    assert read_config(tmp_path / "config.json") == config


def plain_loop(config, data):
    """Ten lines of torch, as people write them: the losses of its steps, and its accuracy."""
    torch.manual_seed(config.seed)
    model = tiny(4)
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=config.optim.lr, momentum=0.9, nesterov=True)
    loader, found = data.train_loader(data.size), []
    total = len(loader) * config.epochs
    for epoch in range(config.epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            done = max(0, len(found) - 2) / (total - 2)  # a tenth of the steps climbs
            factor = (len(found) + 1) / 3 if len(found) < 2 else (1 + math.cos(math.pi * done)) / 2
            for group in optimizer.param_groups:
                group["lr"] = config.optim.lr * factor
            outputs = model((images - 100.0) / 50.0)
            loss = torch.nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    with torch.no_grad():
        hits = [(model((x - 100.0) / 50.0).argmax(1) == y).float() for x, y in data.val_loader]
    return found, torch.cat(hits).mean().item()


@pytest.mark.parametrize("seed", range(3))
def test_it_does_what_a_plain_loop_does(tmp_path, seed):
    config = make_config(
        tmp_path, seed=seed, epochs=5, lr=0.05, optimizer="sgd", label_smoothing=0.1
    )
    data = make_data(config)
    summary = train(config, data)
    expected, accuracy = plain_loop(config, data)
    assert [loss for _, loss in losses(tmp_path)] == pytest.approx(expected, rel=1e-4)
    assert summary.val["accuracy"] == pytest.approx(accuracy)


class Killed(Exception):
    pass


def killed_after(data, batches):
    """The same data, whose training loader dies after so many batches."""

    class Dying(MemoryLoader):
        def __iter__(self):
            for batch in super().__iter__():
                if self.left == 0:
                    raise Killed
                self.left -= 1
                yield batch

    def make(side):
        loader = data.train_loader(side)
        loader.__class__ = Dying
        loader.left = batches
        return loader

    return replace(data, train_loader=make)


class Noisy(torch.nn.Module):
    """Dropout, so that the random state matters; batch norm, so that buffers do."""

    def __init__(self, num_outputs):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.Dropout(0.3)
        )
        self.head = torch.nn.Linear(8, num_outputs)

    def forward(self, images):
        return self.head(self.body(images).relu().mean((2, 3)))


@pytest.mark.parametrize("schedule", ["onecycle", "cyclic", "cosine"])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw", "ema": 0.9, "mixup": 0.3, "precision": "bf16"},
        {"optimizer": "sgd", "accumulate": 2, "cutmix": 1.0, "progressive": 8, "precision": "fp16"},
    ],
)
def test_resume_in_mid_epoch_gives_the_losses_of_the_uninterrupted_run(tmp_path, schedule, options):
    options = {**options, "schedule": schedule, "model": f"{__name__}:Noisy", "epochs": 3}
    options["save_every"] = 3
    config = make_config(tmp_path / "cut", **options)
    data = make_data(config, size=16)
    run(tmp_path / "whole", data=data, **options)
    with pytest.raises(Killed):
        train(config, killed_after(data, 7 * config.speed.accumulate))
    assert losses(tmp_path / "cut")[-1][0] == (7 if "progressive" not in options else 11)
    torch.manual_seed(99)
    train(replace(config, resume=True), data)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert losses(tmp_path / "cut", "val") == losses(tmp_path / "whole", "val")
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(value, expected[k]) for k, value in weights(tmp_path / "cut").items())


def signalled(batches, numbers, *, at):
    """The same batches; each of the signals is sent before the one that is counted `at`."""

    class Signalling:
        left = at

        def __iter__(self):
            for batch in batches:
                self.left -= 1
                if self.left == 0:
                    for number in numbers:
                        os.kill(os.getpid(), number)
                yield batch

        def __getattr__(self, name):
            return getattr(batches, name)

        def __len__(self):
            return len(batches)

    return Signalling()


@pytest.mark.parametrize(
    ("where", "at", "saved"),
    [("train", 3, (3, 0)), ("train", 4, (4, 0)), ("val", 3, (4, 0)), ("val", 11, (8, 1))],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_and_lose_nothing(tmp_path, capfd, where, at, saved, number):
    """Within an epoch, at its last step, and while it is scored (eight batches)."""
    options = {"model": f"{__name__}:Noisy", "epochs": 3}
    run(tmp_path / "whole", **options)
    config = make_config(tmp_path / "cut", **options)
    data = make_data(config)
    if where == "val":
        cut = replace(data, val_loader=signalled(data.val_loader, [number], at=at))
    else:
        cut = replace(
            data, train_loader=lambda side: signalled(data.train_loader(side), [number], at=at)
        )
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        train(config, cut)
    assert isinstance(caught.value, SystemExit) == (number == signal.SIGTERM)
    assert caught.value.args == ((143,) if number == signal.SIGTERM else ())
    assert "saving after this step, then ending; once more ends at once" in capfd.readouterr().err
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    progress = load_checkpoint(tmp_path / "cut" / "last.pt")["progress"]
    assert (progress["step"], progress["epoch"]) == saved
    train(replace(config, resume=True), data)
    for kind in ("train", "val"):
        assert losses(tmp_path / "cut", kind) == losses(tmp_path / "whole", kind)


def test_sigusr1_saves_and_goes_on(tmp_path):
    config = make_config(tmp_path, keep_last=9)
    data, number = make_data(config), signal.SIGUSR1
    summary = train(
        config,
        replace(data, train_loader=lambda side: signalled(data.train_loader(side), [number], at=6)),
    )
    assert summary.steps == 8
    kept = [path.name for path in sorted(tmp_path.glob("step-*"))]
    assert kept == ["step-00000004.pt", "step-00000006.pt", "step-00000008.pt"]


def test_sigusr1_is_ignored_before_the_first_step_and_after_the_last(tmp_path, monkeypatch):
    """Its default action would end the process; processes started then inherit that it is not."""
    config, found = make_config(tmp_path, curves=True), []
    data = make_data(config)

    def look(*_):
        found.append(signal.getsignal(signal.SIGUSR1))

    def train_loader(side):  # in prepare
        look()
        return data.train_loader(side)

    monkeypatch.setattr(trainer, "draw_curves", look)
    monkeypatch.setattr(trainer, "draw_scored", look)
    monkeypatch.setattr(trainer, "start", look)
    train(config, replace(data, train_loader=train_loader))
    train(replace(config, distributed=replace(config.distributed, gpus=2)))
    assert found == [signal.SIG_IGN] * 4
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize("higher", [True, False])
def test_nan_and_ties_are_not_the_best(tmp_path, higher):
    config = make_config(tmp_path)
    task = replace(make_task("classification", config.loss, 4), higher_is_better=higher)
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    with Recorder(config, task, alone, done=0, total=9, best=None) as recorder:

        def is_best(metric):
            found = Scored(loss=1.0, metric=metric, also={}, confusion=None, drawn=None)
            return recorder.scored(1, 0, found)

        better, worse = (0.75, 0.25) if higher else (0.25, 0.75)
        metrics = [math.nan, 0.5, 0.5, math.nan, worse, better, better]
        assert [is_best(metric) for metric in metrics] == [
            False, True, False, False, False, True, False
        ]  # fmt: skip
        assert recorder.summary.best == better


def test_a_run_resumed_in_its_scoring_begins_its_folder_with_it(tmp_path):
    event = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = make_config(tmp_path, epochs=1)
    data = make_data(config)
    cut = replace(data, val_loader=signalled(data.val_loader, [signal.SIGTERM], at=3))
    with pytest.raises(SystemExit):
        train(config, cut)
    train(make_config(tmp_path, epochs=1, resume=True, log_every=9, tensorboard=True), data)
    assert read_config(tmp_path / "config.json").debug.log_every == 9
    board = event.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [scalar.step for scalar in board.Scalars("val/loss")] == [4]
    assert len(losses(tmp_path)) == 4
    assert len(losses(tmp_path, "val")) == 1


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    config = make_config(tmp_path)
    data, numbers = make_data(config), [signal.SIGINT, signal.SIGINT]
    loader = signalled(data.train_loader(data.size), numbers, at=3)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(config, replace(data, train_loader=lambda side: loader))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "last.pt").exists()


def test_in_another_thread_signals_are_left_alone(tmp_path):
    config, before = make_config(tmp_path, epochs=1), signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train, config, make_data(config)).result().steps == 4
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_resume_through_a_stock_loader_draws_the_same_dropout(tmp_path, monkeypatch):
    options = {"model": f"{__name__}:Noisy", "epochs": 3, "save_every": 3, "workers": 0}
    images, labels = make_images()
    samples = [(image, int(label)) for image, label in zip(images, labels, strict=True)]

    def train_in(out, **more):
        config = make_config(out, **options, **more)
        alone = World(rank=0, size=1, device=torch.device("cpu"))
        source = AugmentedSamples(samples, lambda image: image, seed=0, masks=False)

        def make(side):
            return StockLoader(source, len(samples), 16, config.data, alone, seed=0)

        train(config, make_data(config, train_loader=make))

    train_in(tmp_path / "whole")
    plain, saved = trainer.Trainer.save, []

    def killed_after_the_third(run, epoch, **how):
        plain(run, epoch, **how)
        saved.append(run.step.count)
        if len(saved) == 3:
            raise Killed

    monkeypatch.setattr(trainer.Trainer, "save", killed_after_the_third)
    with pytest.raises(Killed):
        train_in(tmp_path / "cut")
    assert saved == [3, 4, 6]  # of four steps an epoch
    monkeypatch.setattr(trainer.Trainer, "save", plain)
    train_in(tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
@pytest.mark.parametrize("before", [True, False])
def test_a_resume_in_another_memory_format_goes_on_alike(tmp_path, optimizer, before):
    options = {"optimizer": optimizer, "save_every": 2, "channels_last": before}
    run(tmp_path / "whole", **options)
    config = make_config(tmp_path / "cut", **options)
    with pytest.raises(Killed):
        train(config, killed_after(make_data(config), 2))
    run(tmp_path / "cut", **{**options, "channels_last": not before}, resume=True)
    expected = [loss for _, loss in losses(tmp_path / "whole")]
    assert [loss for _, loss in losses(tmp_path / "cut")] == pytest.approx(expected, abs=1e-5)


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    summary = run(tmp_path, resume=True)
    assert (summary.steps, summary.best) == (8, 1.0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("schedule", ["constant", "onecycle", "cyclic", "cosine"])
def test_more_epochs_on_resume_go_on_at_the_rates_of_the_longer_run(tmp_path, schedule):
    options = {"schedule": schedule, "warmup": 0.0 if schedule == "constant" else None}
    run(tmp_path / "long", epochs=4, **options)
    run(tmp_path / "more", epochs=2, **options)
    assert run(tmp_path / "more", epochs=4, resume=True, **options).steps == 16

    def rates(name):
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        return [line["lr"] for line in lines if line["kind"] == "train"]

    assert rates("more")[8:] == rates("long")[8:]
    assert (rates("more")[:8] == rates("long")[:8]) == (schedule == "constant")
    if schedule == "constant":
        assert losses(tmp_path / "more") == losses(tmp_path / "long")
    assert read_config(tmp_path / "more" / "config.json").epochs == 4
    with pytest.raises(UsageError) as caught:
        run(tmp_path / "more", epochs=3, resume=True, **options)
    assert str(caught.value) == (
        f"--epochs 3 is less than the 4 that the run in {tmp_path / 'more'} has done: resume with "
        "as many or more"
    )


@pytest.mark.parametrize("links", [True, False])
def test_the_last_checkpoints_are_kept_where_asked_for(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError("no links here")))

    def kept():
        return [path.name for path in sorted(tmp_path.glob("step-*"))]

    run(tmp_path, epochs=1, save_every=1)
    assert kept() == []
    run(tmp_path, epochs=2, save_every=3, keep_last=2, overwrite=True)  # saved at 3, 4, 6, 8
    assert kept() == ["step-00000006.pt", "step-00000008.pt"]
    for step in (6, 8):
        progress = load_checkpoint(tmp_path / f"step-{step:08}.pt")["progress"]
        assert progress["step"] == step
    # Going on from the older one takes the newer one out, which is made again.
    (tmp_path / "last.pt").write_bytes((tmp_path / "step-00000006.pt").read_bytes())
    whole = losses(tmp_path)
    run(tmp_path, epochs=2, save_every=1, keep_last=2, resume=True)
    assert kept() == ["step-00000007.pt", "step-00000008.pt"]
    assert losses(tmp_path) == whole
    run(tmp_path, epochs=1, overwrite=True)
    assert kept() == []


def test_the_best_is_kept_over_a_resume(tmp_path):
    run(tmp_path, epochs=4)
    best = load_checkpoint(tmp_path / "best.pt")["progress"]
    assert best["best"] == max(
        m["accuracy"] for m in read_metrics(tmp_path / "metrics.jsonl") if m["kind"] == "val"
    )


def test_a_resume_with_another_recipe_is_one_sentence(tmp_path):
    run(tmp_path, lr=0.01)
    with pytest.raises(UsageError, match=r"last\.pt was made with --lr 0\.01, and now it is 0\.02"):
        run(tmp_path, lr=0.02, resume=True)


def test_a_resume_on_other_data_is_one_sentence(tmp_path):
    run(tmp_path)
    config = make_config(tmp_path, resume=True)
    with pytest.raises(UsageError, match="has 4 steps an epoch, and this data 2"):
        train(config, make_data(config, count=32))


def test_a_folder_with_a_run_is_not_overwritten_unasked(tmp_path):
    run(tmp_path)
    before = (tmp_path / "last.pt").read_bytes()
    with pytest.raises(UsageError, match="holds a run already: go on with --resume, replace it"):
        run(tmp_path)
    assert (tmp_path / "last.pt").read_bytes() == before
    assert run(tmp_path, overwrite=True, epochs=1).steps == 4
    assert len(losses(tmp_path)) == 4


def no_memory(data):
    """The same data, at whose first batch memory is full."""

    def make(side):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd so on.")

    return replace(data, train_loader=make)


def wide(num_outputs):
    return tiny(num_outputs + 1)


def flat(num_outputs):
    return torch.nn.Sequential(tiny(1), torch.nn.Flatten(0))


@pytest.mark.parametrize(
    ("options", "change", "text"),
    [
        ({"model": "resnet99"}, None, "--model 'resnet99' is not known"),
        ({"model": f"{__name__}:wide"}, None, "--model returns outputs of shape (16, 5), and"),
        ({"model": f"{__name__}:flat"}, None, "of shape (16,), and classification of 4 outputs"),
        ({}, no_memory, "out of memory with --batch-size 16 (CUDA out of memory. Tried to alloc"),
        ({"lr": 0.5, "resume": True}, None, "was made with --lr 0.01, and now it is 0.5"),
        ({"debug": "nvtx"}, None, "--debug nvtx marks ranges"),
    ],
)
def test_nothing_of_an_old_run_goes_before_the_new_one_has_begun(tmp_path, options, change, text):
    config = make_config(tmp_path)
    train(config, make_data(config))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    config = make_config(tmp_path, **{"overwrite": True, **options})
    data = make_data(config)
    with pytest.raises(H5FeedError) as caught:
        train(config, change(data) if change else data)
    assert text in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert run(tmp_path, resume=True).steps == 8


def test_out_of_memory_says_what_to_do(tmp_path):
    config = make_config(tmp_path, accumulate=2)
    with pytest.raises(H5FeedError) as caught:
        train(config, no_memory(make_data(config)))
    assert str(caught.value) == (
        "out of memory with --batch-size 16 (CUDA out of memory. Tried to allocate 2 GiB.): try "
        "--accumulate 4, --grad-checkpointing or --precision bf16; "
        "train-h5 find-batch finds what fits"
    )


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match=r"^--out .*out is a file: name a folder$"):
        run(tmp_path / "out")


def test_a_run_that_saved_nothing_is_not_to_be_resumed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(UsageError, match="holds a run already: replace it with --overwrite, or"):
        run(tmp_path)


def poisoned(data, batch):
    """The same data, in whose `batch` a target is out of this world."""

    def make(side):
        loader = data.train_loader(side)
        plain = type(loader).__iter__

        class Poisoned(MemoryLoader):
            def __iter__(self):
                for number, (images, targets) in enumerate(plain(self)):
                    images = images.float()
                    yield images * float("nan") if number == batch else images, targets

        loader.__class__ = Poisoned
        return loader

    return replace(data, train_loader=make)


def test_a_nan_loss_is_one_error_and_the_last_good_checkpoint_is_kept(tmp_path):
    config = make_config(tmp_path, save_every=2, log_every=4)
    with pytest.raises(LossError) as caught:
        train(config, poisoned(make_data(config), 2))
    assert str(caught.value) == (
        f"loss is nan at step 4 (epoch 1): the last good checkpoint is {tmp_path / 'last.pt'}. "
        "A smaller --lr, --clip-norm 1, or with fp16 --precision bf16 may cure it; --debug anomaly "
        "shows where it begins"
    )
    assert load_checkpoint(tmp_path / "last.pt")["progress"]["step"] == 2
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


def test_nan_weights_under_a_finite_loss_are_not_saved(tmp_path):
    """The step that breaks the weights has a finite loss; saving right then must not happen."""

    class Breaking(torch.nn.Module):
        def __init__(self, num_outputs):
            super().__init__()
            self.inner = tiny(num_outputs)
            self.calls = 0

        def forward(self, images):
            self.calls += self.training
            outputs = self.inner(images)
            if self.calls == 4:
                outputs.register_hook(lambda grad: grad * float("inf"))
            return outputs

    globals()["Breaking"] = Breaking
    config = make_config(tmp_path, save_every=2, log_every=2, model=f"{__name__}:Breaking")
    with pytest.raises(LossError, match=r"a weight is NaN or infinite at step 4 .*last\.pt"):
        train(config, replace(make_data(config), val_loader=None))
    assert load_checkpoint(tmp_path / "last.pt")["progress"]["step"] == 2


def test_nothing_saved_yet_is_said(tmp_path):
    config = make_config(tmp_path)
    with pytest.raises(LossError, match="nothing was saved yet"):
        train(config, poisoned(make_data(config), 0))


def test_log_every_reads_seldom(tmp_path):
    run(tmp_path, log_every=3, epochs=2)
    assert [step for step, _ in losses(tmp_path)] == [3, 4, 6, 8]


def test_progressive_resizing_shows_the_model_small_images_first(tmp_path):
    seen = []

    class Watching(torch.nn.Module):
        def __init__(self, num_outputs):
            super().__init__()
            self.inner = tiny(num_outputs)

        def forward(self, images):
            seen.append((self.training, images.shape[-1]))
            return self.inner(images)

    globals()["Watching"] = Watching
    config = make_config(tmp_path, epochs=3, progressive=8, model=f"{__name__}:Watching")
    train(config, make_data(config, size=16))
    assert {size for training, size in seen if training} == {8, 16}
    assert {size for training, size in seen if not training} == {16}
    with pytest.raises(UsageError, match="--progressive 32 starts above the full size, which is 8"):
        run(tmp_path / "other", progressive=32)


def test_the_score_is_of_the_averaged_weights_and_of_mirrored_images(tmp_path):
    scores = {}
    for name, options in {"plain": {}, "ema": {"ema": 0.9}, "flip": {"test_flip": True}}.items():
        run(tmp_path / name, epochs=1, **options)
        scores[name] = losses(tmp_path / name, "val")
    assert scores["ema"] != scores["plain"]
    assert scores["flip"] != scores["plain"]
    assert losses(tmp_path / "ema") == losses(tmp_path / "plain")


def test_gradient_checkpointing_is_switched_on_and_changes_no_loss(tmp_path, monkeypatch):
    from torch.utils import checkpoint

    from h5feed.train import tricks

    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["use_reentrant"])
        return checkpoint.checkpoint(*args, **kwargs)

    monkeypatch.setattr(tricks, "checkpoint", counted)
    run(tmp_path / "plain", model="resnet9", epochs=1)
    assert not calls
    run(tmp_path / "saving", model="resnet9", epochs=1, grad_checkpointing=True)
    assert set(calls) == {False}
    assert losses(tmp_path / "plain") == losses(tmp_path / "saving")


def biased(num_outputs):
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, num_outputs),
    )  # fmt: skip


def test_biases_before_norms_are_dropped_and_named_where_asked_for(tmp_path, capsys):
    run(tmp_path / "dropped", model=f"{__name__}:biased", epochs=1, drop_biases=True)
    assert "dropped 1 biases that a batch norm follows: 0\n" in capsys.readouterr().err
    assert "model.0.bias" not in weights(tmp_path / "dropped")
    run(tmp_path / "kept", model=f"{__name__}:biased", epochs=1)
    assert "model.0.bias" in weights(tmp_path / "kept")


def test_backends_are_set_during_the_run_only(tmp_path):
    seen = []
    config = make_config(tmp_path, cudnn_benchmark=True)
    data = make_data(config)

    def make(side):
        seen.append(torch.backends.cudnn.benchmark)
        return data.train_loader(side)

    train(config, replace(data, train_loader=make))
    assert seen == [True]
    assert not torch.backends.cudnn.benchmark


def test_mixing_without_classes_is_one_sentence(tmp_path):
    config = make_config(tmp_path, mixup=0.2)
    data = make_data(config, task="regression")
    with pytest.raises(UsageError, match="--mixup and --cutmix mix class labels, and the task is"):
        train(config, data)


def test_a_wrong_model_name_leaves_the_folder_free(tmp_path):
    with pytest.raises(UsageError, match="'resnet5' is not known"):
        run(tmp_path, model="resnet5")
    assert run(tmp_path).steps == 8


def test_several_classes_an_image_are_learned_mixed_and_resumed(tmp_path):
    config = make_config(tmp_path / "whole", epochs=6, mixup=0.2, cutmix=1.0, lr=0.02)
    names = tuple("abcd")
    summary = train(config, make_data(config, several=True, classes=names))
    assert summary.metric == "mAP"
    assert set(summary.val) == {"loss", "mAP", "f1"}
    assert summary.val["mAP"] > 0.8
    assert summary.best == max(
        line["mAP"] for line in read_metrics(config.out / "metrics.jsonl") if line["kind"] == "val"
    )
    lines = (config.out / "per_class.csv").read_text().splitlines()
    assert lines[0] == "class,images,average_precision,precision,recall,f1"
    assert [line.split(",")[:2] for line in lines[1:]] == [[name, "32"] for name in names]
    cut = replace(config, out=tmp_path / "cut")
    data = make_data(cut, several=True, classes=names)
    loader = signalled(data.train_loader(data.size), [signal.SIGTERM], at=6)
    with pytest.raises(SystemExit):
        train(cut, replace(data, train_loader=lambda side: loader))
    train(replace(cut, resume=True), data)
    assert losses(cut.out) == losses(config.out)


def test_regression_and_segmentation_learn(tmp_path):
    images, labels = make_images()
    targets = {
        "regression": torch.stack((labels.float(), -labels.float()), 1),
        "segmentation": (images[:, 0] > 130).long(),
    }
    for task, target in targets.items():
        model = {"regression": f"{__name__}:pair", "segmentation": f"{__name__}:pixels"}[task]
        config = make_config(tmp_path / task, epochs=8, model=model, lr=0.05)
        data = make_data(
            config,
            task=task,
            num_outputs=2,
            train_loader=lambda side, target=target: MemoryLoader(images, target, 16),
            val_loader=list(MemoryLoader(images, target, 16, shuffle=False)),
        )
        train(config, data)
        found = [loss for _, loss in losses(tmp_path / task, "val")]
        assert found[-1] < 0.5 * found[0], task


def pair(num_outputs):
    return tiny(num_outputs)


def pixels(num_outputs):
    return torch.nn.Conv2d(3, num_outputs, 1)


def test_the_loss_of_scoring_is_without_label_smoothing(tmp_path):
    config = make_config(tmp_path, label_smoothing=0.5, epochs=1)
    data = make_data(config)
    summary = train(config, data)
    net = load_trained(tmp_path / "last.pt")
    images, labels = (torch.cat(parts) for parts in zip(*data.val_loader, strict=True))
    with torch.no_grad():
        plain = torch.nn.functional.cross_entropy(net(images), labels)
    assert summary.val["loss"] == pytest.approx(plain.item(), rel=1e-4)


def test_metrics_lines_are_json_with_what_the_readme_names(tmp_path):
    run(tmp_path, epochs=1)
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert {"kind", "step", "epoch", "loss", "accuracy", "lr", "images_per_s"} < set(first)
    assert first["lr"] == pytest.approx(0.01)


SMALL = "train.test_finetune:small"


def test_fine_tuning_begins_with_a_checkpoint_and_trains_the_head_alone(tmp_path, capsys):
    run(tmp_path / "a", model=SMALL, ema=0.9, drop_biases=True)
    saved = load_checkpoint(tmp_path / "a" / "last.pt")
    options = {"model": SMALL, "init": tmp_path / "a" / "last.pt", "freeze": "backbone"}
    config = make_config(tmp_path / "b", epochs=1, **options)
    other = make_data(config, mean=(9.0,) * 3, num_outputs=5)
    train(config, other)
    tuned = weights(tmp_path / "b")
    head = {"model.5.weight", "model.5.bias"}
    expected = {**saved["net"], **saved["ema"]}  # the averaged weights, as in scoring
    changed = {name for name in expected if not torch.equal(tuned[name], expected[name])}
    assert changed == head  # running statistics, mean and std stay, too
    said = capsys.readouterr().err
    assert "the head is new: 5.bias, 5.weight" in said
    assert "--freeze backbone: 9 of 11 weight tensors are frozen, and 3 batch norms keep" in said
    assert load_trained(tmp_path / "b" / "last.pt").model[5].out_features == 5


def test_a_resumed_run_does_not_read_the_weights_it_began_with(tmp_path):
    first = tmp_path / "first.pt"
    torch.save(tiny(4).state_dict(), first)
    whole = make_config(tmp_path / "whole", init=first)
    train(whole, make_data(whole))
    config = make_config(tmp_path / "cut", init=first)
    with pytest.raises(Killed):
        train(config, killed_after(make_data(config), 5))
    first.unlink()
    train(replace(config, resume=True), make_data(config))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert read_config(tmp_path / "cut" / "config.json").model.init == first


def test_both_sources_of_weights_are_one_too_many(tmp_path):
    with pytest.raises(UsageError, match=r"--pretrained and --init a\.pt both say where weights"):
        make_config(tmp_path, pretrained=True, init="a.pt")
    with pytest.raises(UsageError, match=r"--drop-path 1\.0 is out of range"):
        make_config(tmp_path, drop_path=1.0)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1e-3}, {"accumulate": 4}])
def test_the_norm_of_the_gradient_is_logged_before_clipping(tmp_path, options):
    config = make_config(tmp_path, epochs=1, **options)
    data = make_data(config)
    torch.manual_seed(config.seed)
    model = tiny(4)
    loader = data.train_loader(data.size)
    loader.set_epoch(0)
    parts = [next(iter(loader)) for _ in range(config.speed.accumulate)]
    images, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    torch.nn.functional.cross_entropy(model((images - 100.0) / 50.0), labels).backward()
    expected = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm()
    train(config, data)
    first = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert first["grad_norm"] == pytest.approx(expected.item(), rel=1e-4)


def test_every_line_of_training_has_the_norm(tmp_path):
    run(tmp_path, epochs=2, log_every=3)  # of 4 steps an epoch: readings at 3, 4, 6, 8
    lines = [m for m in read_metrics(tmp_path / "metrics.jsonl") if m["kind"] == "train"]
    assert [line["step"] for line in lines] == [3, 4, 6, 8]
    assert all(line["grad_norm"] > 0 for line in lines)


def test_a_save_off_the_rhythm_writes_no_line_without_the_norm(tmp_path):
    """--save-every measures it, and what SIGUSR1 saves is left to the next reading."""
    config = make_config(tmp_path, epochs=2, log_every=9, save_every=3, keep_last=9)
    data = make_data(config)  # of 4 steps an epoch
    asking = signalled(data.train_loader(8), [signal.SIGUSR1], at=2)
    train(config, replace(data, train_loader=lambda side: asking))
    lines = [m for m in read_metrics(tmp_path / "metrics.jsonl") if m["kind"] == "train"]
    assert [line["step"] for line in lines] == [3, 4, 6, 8]
    assert all(line["grad_norm"] > 0 for line in lines)
    assert (tmp_path / "step-00000002.pt").exists()
    train(make_config(tmp_path / "each", epochs=2), data)  # a line for each step
    each = [loss for _, loss in losses(tmp_path / "each")]
    expected = [sum(each[:3]) / 3, each[3], sum(each[4:6]) / 2, sum(each[6:]) / 2]
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("save", [{"save_every": 2}, {}])
def test_a_save_off_the_rhythm_saves_no_broken_loss(tmp_path, save):
    config = make_config(tmp_path, epochs=1, log_every=9, **save)
    data = poisoned(make_data(config), 1)
    asking = signalled(data.train_loader(8), [signal.SIGUSR1], at=2)
    with pytest.raises(LossError, match=r"^loss is nan at step 2 \(epoch 1\): nothing was saved"):
        train(config, replace(data, train_loader=lambda side: asking))
    assert not (tmp_path / "last.pt").exists()


def test_the_last_scoring_is_drawn_and_told_by_class(tmp_path):
    pytest.importorskip("matplotlib")
    names = ("bottom", "left", "right", "top", "fifth", "sixth")
    config = make_config(tmp_path, epochs=1, curves=True)
    data = make_data(config, num_outputs=6, classes=names)
    summary = train(config, data)
    assert set(summary.val) == {"loss", "accuracy", "top5"}
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["top5"] == summary.val["top5"]
    lines = (tmp_path / "per_class.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["class", *names]
    assert sum(int(line.split(",")[1]) for line in lines[1:]) == 64
    assert (tmp_path / "confusion.png").stat().st_size > 10_000
    assert not (tmp_path / "predictions.png").exists()
    run(tmp_path, overwrite=True, epochs=1)  # curves=False: nothing of the old run stays
    assert not (tmp_path / "confusion.png").exists()


def test_predicted_masks_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    images = torch.randint(0, 255, (2, 3, 8, 12), dtype=torch.uint8)
    masks = torch.tensor([0, 1, 2, 9]).repeat(2, 8, 3)
    scored = Scored(
        loss=1.0,
        metric=0.5,
        also={},
        confusion=torch.eye(3),
        drawn=(images, masks, masks.clamp(max=2)),
    )
    draw_scored(tmp_path, scored, (), ignore_index=9)
    with Image.open(tmp_path / "predictions.png") as drawn:
        colors = {color for _, color in drawn.convert("RGB").getcolors(1 << 24)}
    for number in (1, 2):
        assert tuple(class_colors()[number].tolist()) in colors
    assert tuple(class_colors()[9].tolist()) not in colors  # what is not scored is black
    assert (tmp_path / "confusion.png").exists()
