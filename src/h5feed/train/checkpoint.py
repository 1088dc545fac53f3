"""What is saved so that a run can go on: when, into which files, and how it is brought back.

A kill never costs the previous save, and a signal is obeyed once the run is saved.
"""

import os
import random
import shutil
import signal
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from h5feed.disk import replaced
from h5feed.errors import H5FeedError, UsageError
from h5feed.train.config import TrainConfig, flag
from h5feed.train.distributed import World, gathered, is_shared, shared_out
from h5feed.train.log import BEST, LAST, kept_checkpoints

__all__ = [
    "RandomState",
    "Saver",
    "ScoringCut",
    "Signals",
    "Stateful",
    "Terminated",
    "capture",
    "disk_error",
    "load_checkpoint",
    "read_saved",
    "restore",
    "save_checkpoint",
    "save_signal_ignored",
    "weights_are_finite",
]


class Stateful(Protocol):
    """Anything whose state is a dict: module, optimizer, schedule, scaler, loader."""

    def state_dict(self) -> Any:
        """Return the state: tensors and plain Python values."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Go back to a state."""
        ...


class RandomState:
    """The global generators of Python, NumPy and torch, in every process."""

    def __init__(self, world: World) -> None:
        self._world = world

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each process, by rank; all processes must call it together."""
        numpy_state: Any = np.random.get_state(legacy=False)
        key = numpy_state["state"].pop("key")
        mine: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": numpy_state,
            "numpy_key": torch.from_numpy(key.astype(np.int64)),
            "torch": torch.get_rng_state(),
        }
        if self._world.device.type == "cuda":
            mine["cuda"] = torch.cuda.get_rng_state(self._world.device)
        return {"ranks": self._world.gather(mine)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set this process's generators; left alone where the world has another size now."""
        if len(state["ranks"]) != self._world.size:
            return
        mine = state["ranks"][self._world.rank]
        random.setstate(mine["python"])
        key = mine["numpy_key"].numpy().astype(np.uint32)
        numpy_state = {**mine["numpy"], "state": {**mine["numpy"]["state"], "key": key}}
        np.random.set_state(numpy_state)
        torch.set_rng_state(mine["torch"])
        if "cuda" in mine and self._world.device.type == "cuda":
            torch.cuda.set_rng_state(mine["cuda"], self._world.device)


def capture(parts: Mapping[str, Stateful], progress: dict[str, Any]) -> dict[str, Any]:
    """Return the state of `parts`, and `progress` as it is; all processes call it together."""
    states = {name: gathered(part.state_dict()) for name, part in parts.items()}
    return {"progress": progress, **states}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write what `capture` returned to `path`, which holds the old or the new one at every moment.

    Raises H5FeedError where it cannot be written: the disk is full, for one.

    >>> layer = nn.Linear(3, 2)
    >>> save_checkpoint(Path("layer.pt"), capture({"net": layer}, {"step": 7}))
    >>> load_checkpoint(Path("layer.pt"))["progress"]
    {'step': 7}
    """
    try:
        with replaced(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as ex:
        if (cause := disk_error(ex)) is None:
            raise
        raise H5FeedError(
            f"{path} could not be saved: {cause.strerror}. What was saved before is whole: make "
            "room, and go on with --resume"
        ) from ex


def disk_error(error: Exception) -> OSError | None:
    """Return the OSError by which torch could not write a file; None where it was another.

    Its writer fails a second time when it is closed, and that RuntimeError is what it raises.
    """
    cause = error.__context__ if isinstance(error, RuntimeError) else error
    return cause if isinstance(cause, OSError) else None


def load_checkpoint(path: Path, asked: str = "--resume") -> dict[str, Any]:
    """Read a checkpoint onto the CPU, as data: nothing in it is executed.

    `asked` names what asked for it. Raises UsageError when there is none, when it cannot be read,
    or when it is not the bytes that were saved.
    """
    try:
        state = read_saved(path)
    except FileNotFoundError as ex:
        if asked == "--resume":
            raise UsageError(f"--resume finds no checkpoint {path}: leave --resume out") from ex
        raise UsageError(f"{asked} {path} does not exist: name a run's best.pt or last.pt") from ex
    if not isinstance(state, dict) or "progress" not in state:
        raise UsageError(f"{path} is not a checkpoint of train-h5")
    return state


def read_saved(path: Path) -> Any:
    """Read what torch saved onto the CPU, as data: nothing in it is executed.

    Raises FileNotFoundError, and UsageError where it is not what torch saved.
    """
    try:
        _check_bytes(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, UsageError):
        raise
    except Exception as ex:  # torch.load raises RuntimeError, pickle's, zipfile's and more
        raise UsageError(f"{path} cannot be read as a checkpoint: {ex}") from ex


def _check_bytes(path: Path) -> None:
    """Raise UsageError unless each part of a checkpoint has its checksum.

    torch writes the checksums of the zip format, and does not look at them when it loads.
    """
    if not zipfile.is_zipfile(path):
        return  # torch says what is wrong with it
    with zipfile.ZipFile(path) as parts:
        damaged = parts.testzip()
    if damaged is not None:
        raise UsageError(
            f"{path} is damaged: {damaged} in it is not what was saved. Go on from another "
            "checkpoint of the run (best.pt, or a copy) under this name, or start again"
        )


def restore(state: Mapping[str, Any], parts: Mapping[str, Stateful], path: Path) -> None:
    """Give each of `parts` its saved state; UsageError names a part that does not fit."""
    for name, part in parts.items():
        if name not in state:
            raise UsageError(f"{path} holds no {name}: resume with the options it was begun with")
        try:
            part.load_state_dict(_shared_out_like(part, state[name]))
            if isinstance(part, Optimizer):
                _lay_out_like_weights(part)
        except (RuntimeError, KeyError, ValueError) as ex:
            raise UsageError(
                f"{path} does not fit this {name}: resume with the options it was begun with ({ex})"
            ) from ex


def _shared_out_like(part: Stateful, state: Any) -> Any:
    """Return a saved `state` with each tensor shared out as its weight in `part` is (--fsdp)."""
    if isinstance(part, nn.Module):
        weights = part.state_dict()
        return {
            name: shared_out(value, weights[name]) if name in weights else value
            for name, value in state.items()
        }
    if isinstance(part, Optimizer):
        in_order = [weight for group in part.param_groups for weight in group["params"]]
        return {
            **state,
            "state": {
                number: {
                    name: shared_out(value, in_order[number])
                    if isinstance(value, Tensor)
                    else value
                    for name, value in values.items()
                }
                for number, values in state["state"].items()
                if number < len(in_order)
            },
        }
    return state


def _lay_out_like_weights(optimizer: Optimizer) -> None:
    """Give momenta their weights' memory order, which the saved run need not have had.

    Fused kernels go through the memory of both side by side, and would mix up their elements.
    """
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


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
    """Whether no weight (or share of one) here is NaN or infinite; waits for the device once.

    >>> weights_are_finite(nn.Linear(3, 2))
    True
    """
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
