"""The training loop, to be read and copied: `train` sets the stage, `run_epochs` is the loop."""

from collections.abc import Callable
from contextlib import nullcontext

from h5feed.train.compiled import for_scoring
from h5feed.train.config import TrainConfig
from h5feed.train.curves import draw_curves, draw_scored
from h5feed.train.data import Data
from h5feed.train.debug import check_gradients, debugging
from h5feed.train.distributed import join_world, start, under_torchrun
from h5feed.train.evaluate import evaluate
from h5feed.train.log import check_folder
from h5feed.train.precision import backends, choose_precision
from h5feed.train.recorder import Summary
from h5feed.train.saver import ScoringCut, save_signal_ignored, weights_are_finite
from h5feed.train.setup import Run, memory_errors_in_words, prepare
from h5feed.train.sources import open_data

__all__ = ["run_epochs", "train"]


def train(config: TrainConfig, data: Data | None = None) -> Summary:
    """Train as `config` says, in one process or several, and return how it went.

    `data` takes the place of the files that `config` names. Writes config.json, metrics.jsonl,
    checkpoints and curves.png into `config.out`. Raises UsageError for what cannot be trained,
    and LossError when the loss becomes NaN; the last good checkpoint is kept then. Signals are
    obeyed after the step they come in, or with several processes at the next --log-every: SIGUSR1
    saves, Ctrl-C and SIGTERM save and raise KeyboardInterrupt or SystemExit(143).
    """
    if config.distributed.gpus > 1 and not under_torchrun():
        with save_signal_ignored():
            return start(train, config, config.distributed.gpus)
    with save_signal_ignored(), join_world(config.device) as world, memory_errors_in_words(config):
        precision = choose_precision(config.speed, world.device)
        check_folder(config)
        data = data or open_data(config, world)
        with (
            backends(precision, config.speed),
            debugging(config.debug.debug, config.out, world.device) as after_step,
        ):
            run = prepare(config, data, world, precision)
            if world.is_main:
                config.out.mkdir(parents=True, exist_ok=True)
            if config.debug.debug == "gradcheck":
                batches = data.train_loader(data.size)
                check_gradients(run.step.net, run.step.task, next(iter(batches)))
            with run.recorder, run.signals:
                run_epochs(run, after_step)
        if world.is_main and config.debug.curves:
            try:
                draw_curves(config.out, run.recorder.summary.metric)
                if (scored := run.recorder.last_scored) is not None:
                    draw_scored(config.out, scored, data.classes, config.loss.ignore_index)
            except ImportError as ex:
                run.recorder.say(f"no curves.png: {ex}")
        return run.recorder.summary


def run_epochs(run: Run, after_step: Callable[[], None]) -> None:
    """Train from where the run stands to the end of its last epoch."""
    config, step = run.config, run.step

    for epoch in range(run.epoch, config.epochs):
        end = (epoch + 1) * run.steps_per_epoch

        batches = run.recorder.waiting(run.loaders.at(epoch))
        while step.count < end:
            coming = step.count + 1
            to_save = is_due(config.debug.save_every, coming) and coming < end
            measure = is_due(config.debug.log_every, coming) or to_save or coming == end
            # Forward, backward, optimizer; waits for nothing.
            loss, score = step(batches, measure=measure)
            run.recorder.add(loss, score)
            after_step()
            if due := is_due(config.debug.log_every, step.count):
                report(run, epoch)
            asked = run.signals.agree(now=due or step.count == end)
            if asked or to_save:
                save(run, epoch)
                run.signals.obey()
        batches.close()

        report(run, epoch)
        try:
            is_best = score_epoch(run, epoch)
        except ScoringCut:
            run.signals.agree(now=True)
            save(run, epoch)
            run.signals.obey()
            raise  # never reached: what cuts the scoring ends the run
        if epoch + 1 < config.epochs:
            run.loaders.at(epoch + 1)  # what is saved now goes on with the next epoch
        save(run, epoch, best=is_best, done=True)
        if run.signals.agree(now=True):
            run.signals.obey()


def is_due(every: int, step: int) -> bool:
    """Whether something done `every` steps comes after `step`; never when `every` is 0."""
    return every > 0 and step % every == 0


def report(run: Run, epoch: int) -> None:
    """Read the losses since the last report: the only moment that waits for the device."""
    run.recorder.report(run.step.count, epoch, run.step.lr, run.step.grad_norm)


def score_epoch(run: Run, epoch: int) -> bool:
    """Score the averaged weights, or the weights; returns whether they are the best so far."""
    if run.data.val_loader is None:
        return False
    step, speed = run.step, run.config.speed
    rounds = run.world.most(run.data.val_loader) if run.config.distributed.fsdp else 0
    with step.ema.swapped_in() if step.ema is not None else nullcontext():
        run.world.align(step.net)
        scored = evaluate(
            for_scoring(step.net, speed.compile_backend, speed.compile),
            run.signals.scoring(run.data.val_loader),
            step.task,
            run.world,
            step.autocast,
            flip=run.config.recipe.test_flip,
            rounds=rounds,
        )
    return run.recorder.scored(step.count, epoch, scored)


def save(run: Run, epoch: int, *, best: bool = False, done: bool = False) -> None:
    """Save the run in or, where it is `done`, after `epoch`; NaN in loss or weights is an error."""
    if run.step.grad_norm is None:  # a signal came off the rhythm: the next reading has these steps
        run.recorder.check_loss(run.step.count, epoch)
    else:
        report(run, epoch)
    broken = run.world.highest(not weights_are_finite(run.step.net))
    run.recorder.check_weights(not broken, run.step.count, epoch)
    progress = {
        "step": run.step.count,
        "epoch": epoch + 1 if done else epoch,
        "best": run.recorder.summary.best,
    }
    run.saver.save(progress, best=best)
