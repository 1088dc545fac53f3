"""A run's config.json: written from the typed tree, and read back into it."""

import json
import os
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from h5feed.disk import replaced
from h5feed.errors import UsageError
from h5feed.train.config import TrainConfig

__all__ = ["read_config", "write_config"]


def write_config(config: TrainConfig, path: Path) -> None:
    """Write `config` as JSON that `read_config` reads back equal, its paths absolute.

    So the run can be gone on with from another working directory.
    """
    values = asdict(config)
    model = values["model"]
    for tree, name in ((values, "train"), (values, "val"), (values, "out"), (model, "init")):
        if tree[name] is not None:
            tree[name] = os.path.abspath(tree[name])
    with replaced(path) as file:
        file.write((json.dumps(values, indent=2) + "\n").encode())


def read_config(path: Path) -> TrainConfig:
    """Read a run's config.json; UsageError names the file and the entry that is wrong."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as ex:
        raise UsageError(f"--config {path} cannot be read as JSON: {ex}") from ex
    try:
        config = _convert(values, TrainConfig, "config")
    except UsageError as ex:
        raise UsageError(f"--config {path}: {ex}") from ex
    assert isinstance(config, TrainConfig)
    return config


def _convert(value: Any, kind: Any, name: str) -> Any:
    """`value`, as JSON gives it, as the annotated type `kind`."""
    if is_dataclass(kind):
        return _convert_tree(value, kind, name)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"{name}={value!r} is not one of {', '.join(get_args(kind))}")
        return value
    if get_origin(kind) in (Union, types.UnionType):
        inner = next(part for part in get_args(kind) if part is not type(None))
        return None if value is None else _convert(value, inner, name)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is not kind:
        raise UsageError(f"{name}={value!r} is not a {kind.__name__}")
    return value


def _convert_tree(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name}={value!r} is not a table of options")
    known = {entry.name for entry in fields(kind)}
    if unknown := sorted(set(value) - known):
        raise UsageError(f"{name} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    needed = (entry.name for entry in fields(kind) if _has_no_default(entry))
    if missing := [entry for entry in needed if entry not in value]:
        raise UsageError(f"{name} has no {missing[0]!r}, which it needs")
    hints = get_type_hints(kind)
    return kind(**{key: _convert(item, hints[key], f"{name}.{key}") for key, item in value.items()})


def _has_no_default(entry: "Field[Any]") -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING
