"""Everything a run needs to go on, saved so that a kill never costs the previous save."""

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from h5feed.errors import UsageError
from h5feed.train.distributed import World

__all__ = ["RandomState", "Stateful", "capture", "load_checkpoint", "restore", "save_checkpoint"]


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
    return {"progress": progress, **{name: part.state_dict() for name, part in parts.items()}}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write what `capture` returned to `path`.

    That name holds the old or the new checkpoint at every moment, whole: the new one is written
    beside it, forced to the disk, and renamed over it.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    if os.name == "posix":
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, as data: nothing in it is executed.

    Raises UsageError when there is none, or when it cannot be read.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as ex:
        raise UsageError(f"--resume finds no checkpoint {path}: leave --resume out") from ex
    except Exception as ex:  # torch.load raises RuntimeError, pickle's, zipfile's and more
        raise UsageError(f"{path} cannot be read as a checkpoint: {ex}") from ex
    if not isinstance(state, dict) or "progress" not in state:
        raise UsageError(f"{path} is not a checkpoint of train-h5")
    return state


def restore(state: Mapping[str, Any], parts: Mapping[str, Stateful], path: Path) -> None:
    """Give each of `parts` its saved state; UsageError names a part that does not fit."""
    for name, part in parts.items():
        if name not in state:
            raise UsageError(f"{path} holds no {name}: resume with the options it was begun with")
        try:
            part.load_state_dict(state[name])
        except (RuntimeError, KeyError, ValueError) as ex:
            raise UsageError(
                f"{path} does not fit this {name}: resume with the options it was begun with ({ex})"
            ) from ex
