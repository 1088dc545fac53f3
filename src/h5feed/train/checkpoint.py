"""Everything a run needs to go on, saved so that a kill never costs the previous save."""

import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from h5feed.disk import replaced
from h5feed.errors import H5FeedError, UsageError
from h5feed.train.distributed import World, gathered, shared_out

__all__ = [
    "RandomState",
    "Stateful",
    "capture",
    "disk_error",
    "load_checkpoint",
    "read_saved",
    "restore",
    "save_checkpoint",
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
            "checkpoint of the run (best.pt, or a copy) under this name, or begin anew"
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
