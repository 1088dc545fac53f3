"""Where a loader stands, as a few values that any other loader over the same data can take up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from h5feed.errors import UsageError

__all__ = ["State", "check_place", "read_state"]

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is written: plain ints and strings, so that any checkpoint holds it."""

    version: int = _VERSION
    fingerprint: str
    """Of the data, all files together."""
    order: str
    """Arrangement.kind."""
    listed: int
    """CRC-32 of what a sampler gave, where there is one."""
    seed: int
    epoch: int
    consumed: int
    """Positions of the epoch delivered to all ranks together."""


def read_state(state: Mapping[str, Any], *, fingerprint: str, order: str) -> State:
    """Return `state` checked; UsageError where it is none, or belongs to other data or order."""
    if not isinstance(state, Mapping):
        raise UsageError(f"state={state!r} is no state of H5Loader; pass what state_dict() gave")
    kinds = {field.name: field.type for field in fields(State)}
    wrong = [k for k, kind in kinds.items() if type(state.get(k)).__name__ != kind]
    if wrong or state["version"] != _VERSION:
        raise UsageError(
            f"state={state!r} is no state of H5Loader, version {_VERSION} "
            f"({', '.join(wrong) or 'version'} is missing or wrong); pass what state_dict() gave"
        )
    found = State(**{name: state[name] for name in kinds})
    if found.fingerprint != fingerprint:
        raise UsageError(
            f"the state belongs to other data: its fingerprint is {found.fingerprint[:12]}…, that "
            f"of this loader's is {fingerprint[:12]}…; open the files it was made with"
        )
    if found.order != order:
        raise UsageError(
            f"the state belongs to the order {found.order!r}, this loader has {order!r}; give it "
            "the same shuffle, block, window, indices and sampler"
        )
    return found


def check_place(state: State, samples: int) -> None:
    """Raise UsageError where `state` stands before or behind an epoch of so many samples."""
    if state.epoch < 0:
        raise UsageError(
            f"state has epoch={state.epoch}, and epochs count from 0; pass what state_dict() gave"
        )
    if not 0 <= state.consumed <= samples:
        raise UsageError(
            f"state has consumed={state.consumed}, and an epoch has {samples} samples; pass what "
            "state_dict() gave, to a loader with the same sampler"
        )
