"""When a run is saved, by itself or by a signal, and from what it goes on."""

import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from h5feed.disk import replaced
from h5feed.errors import UsageError
from h5feed.train.checkpoint import (
    Stateful,
    capture,
    load_checkpoint,
    restore,
    save_checkpoint,
)
from h5feed.train.config import TrainConfig
from h5feed.train.distributed import World, is_shared
from h5feed.train.limits import flag
from h5feed.train.log import BEST, LAST, kept_checkpoints

__all__ = [
    "Saver",
    "ScoringCut",
    "Signals",
    "Terminated",
    "save_signal_ignored",
    "weights_are_finite",
]

Item = TypeVar("Item")

_RECIPE = ("batch_size", "seed", "model", "loss", "recipe", "optim", "schedule")
"""What a resumed run must keep; epochs, loaders, devices and precision may change."""


class Saver:
    """Saves `parts` of a run into its folder, and brings them back."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        parts: Mapping[str, Stateful],
        facts: Mapping[str, Any],
    ) -> None:
        """`facts` are saved as they are: what it takes to build the network again."""
        self._recipe = {name: value for name, value in asdict(config).items() if name in _RECIPE}
        del self._recipe["model"]["init"]  # a resumed run has its weights
        self._out, self._world = config.out, world
        self._keep_last = config.debug.keep_last
        self._parts, self._facts = parts, facts

    def save(self, progress: Mapping[str, Any], *, best: bool = False) -> None:
        """Save as last.pt, and as best.pt too where it is; all processes call it together."""
        state = capture(self._parts, {**self._facts, "recipe": self._recipe, **progress})
        if self._world.is_main:
            save_checkpoint(self._out / LAST, state)
            if best:
                save_checkpoint(self._out / BEST, state)
            if self._keep_last:
                keep_checkpoint(self._out, progress["step"], self._keep_last)

    def resume(self) -> dict[str, Any]:
        """Restore last.pt and return its progress; UsageError where the recipe is another."""
        path = self._out / LAST
        state = load_checkpoint(path)
        self._check_recipe(state["progress"]["recipe"], path)
        self._check_data(state["progress"]["steps_per_epoch"], path)
        restore(state, self._parts, path)
        progress: dict[str, Any] = state["progress"]
        return progress

    def _check_recipe(self, saved: dict[str, Any], path: Path) -> None:
        for name, before, now in _differences(saved, self._recipe):
            raise UsageError(
                f"--resume: {path} was made with {flag(name)} {before}, and now it is {now}: give "
                f"the options it was begun with, as in --config {self._out / 'config.json'} "
                "--resume"
            )

    def _check_data(self, before: int, path: Path) -> None:
        if before != (now := self._facts["steps_per_epoch"]):
            raise UsageError(
                f"--resume: {path} has {before} steps an epoch, and this data {now}: resume on the "
                "files it was begun with"
            )


def keep_checkpoint(out: Path, step: int, count: int) -> None:
    """Keep last.pt under its `step` as well; of all those that are kept, the last `count` stay."""
    path = out / f"step-{step:08}.pt"
    path.unlink(missing_ok=True)
    try:
        os.link(out / LAST, path)  # last.pt is replaced whole, so what the link names stays
    except OSError:  # a file system without hard links
        with replaced(path) as file, (out / LAST).open("rb") as saved:
            shutil.copyfileobj(saved, file)
    for old in kept_checkpoints(out)[:-count]:
        old.unlink()


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    found = []
    for name, value in now.items():
        if isinstance(value, dict):
            found += _differences(saved.get(name, {}), value)
        elif saved.get(name) != value:
            found.append((name, saved.get(name), value))
    return found


def weights_are_finite(net: nn.Module) -> bool:
    """Whether no weight (or share of one) here is NaN or infinite; waits for the device once."""
    here = [
        weight.to_local() if is_shared(weight) else weight for weight in net.state_dict().values()
    ]
    finite = [weight.isfinite().all() for weight in here]
    return bool(torch.stack(finite).all())


class Terminated(SystemExit):
    """SIGTERM came, and the run is saved; ends the process as a shell has it: with 143."""


class ScoringCut(Exception):
    """Scoring was given up because the run is to be saved and ended."""


_SAVE = getattr(signal, "SIGUSR1", None)
_SIGNALS = (None, _SAVE, signal.SIGINT, signal.SIGTERM)
"""By what they ask for: nothing, a checkpoint, one and the end, one and the end with 143."""
_INTERRUPT, _TERMINATE = 2, 3


@contextmanager
def save_signal_ignored() -> Iterator[None]:
    """Ignore SIGUSR1 in the block, wherever `Signals` does not note it.

    Before the first step and after the last there is nothing to save, and by default the signal
    would end the process. Processes started in the block ignore it, too.
    """
    if (
        _SAVE is None
        or threading.current_thread() is not threading.main_thread()
        or signal.getsignal(_SAVE) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(_SAVE, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(_SAVE, signal.SIG_DFL)


class Signals:
    """Ctrl-C, SIGTERM and SIGUSR1, kept until a step is done and the run can be saved.

    A context manager: the handlers of before are back after the block, and for Ctrl-C and SIGTERM
    already after the first, so that a second one ends the run at once. Outside of the main thread,
    where Python has no handlers, nothing changes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked = self._agreed = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number is None:
                    continue
                if number != _SAVE and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # ignored in the background of a shell, for one
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._before):
            self._give_back(number)

    def agree(self, *, now: bool) -> bool:
        """Whether the run is to be saved, in all processes alike.

        Several processes ask each other only `now` and then: it waits for the device.
        """
        if self._world.size == 1:
            self._agreed = self._asked
        elif now:
            self._agreed = self._world.highest(self._asked)
        return self._agreed > 0

    def obey(self) -> None:
        """Go on, or raise KeyboardInterrupt or Terminated: the run is saved now."""
        agreed, self._agreed = self._agreed, 0
        if self._asked <= agreed:
            self._asked = 0
        if agreed == _INTERRUPT:
            raise KeyboardInterrupt
        if agreed == _TERMINATE:
            raise Terminated(128 + signal.SIGTERM)

    def scoring(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield from `batches`; a process alone raises ScoringCut when the run is to end."""
        for batch in batches:
            if self._world.size == 1 and self._asked >= _INTERRUPT:
                raise ScoringCut
            yield batch

    def _note(self, number: int, _: object) -> None:
        self._asked = max(self._asked, _SIGNALS.index(number))
        if number == _SAVE:
            return
        self._give_back(number)
        if self._world.is_main:
            with suppress(OSError):  # written past Python's buffers, which may be in use
                os.write(2, b"\nsaving after this step, then ending; once more ends at once\n")

    def _give_back(self, number: int) -> None:
        handler = self._before.pop(number, None)
        if handler is not None:
            signal.signal(number, handler)
