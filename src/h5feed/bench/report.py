"""What was measured, as a whole: outcomes side by side, and JSON values of them.

The same report serves bench-h5 and tools/peers; it needs nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .outcomes import Cold, Outcome

__all__ = ["SMOKE_BATCHES", "Report", "as_dict", "from_dict", "is_ours", "utilization"]

_OURS = ("H5Loader", "H5Dataset", "DaliLoader", "h5feed")

_TUPLES = ("rates", "cpu_per_image", "epoch_rates")  # of an outcome: lists in JSON
SMOKE_BATCHES = 4  # fewer batches in an epoch measure how epochs start, not how images flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Outcomes that belong side by side: same images, same batch size, same workers."""

    title: str
    """What was done, in one line."""
    kind: Literal["loading", "training"] = "loading"
    """Which columns the table has."""
    outcomes: tuple[Outcome, ...]
    images: int
    """In one epoch."""
    batch_size: int
    machine: str
    """In words."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Machine, versions, options: everything needed to do it again."""
    left_out: tuple[str, ...] = ()
    """Who was not measured, and why."""

    @property
    def is_smoke(self) -> bool:
        """Whether the set is too small to mean anything."""
        return self.images < SMOKE_BATCHES * self.batch_size

    @property
    def loaders(self) -> list[Outcome]:
        """Those who were measured, without the ceilings."""
        return [o for o in self.outcomes if not o.ceiling and o.rate is not None]

    @property
    def baseline(self) -> Outcome | None:
        """The first one: what the others are compared with."""
        return self.loaders[0] if self.loaders else None

    @property
    def ceiling(self) -> Outcome | None:
        """The first ceiling: what nobody can pass by much."""
        return next((o for o in self.outcomes if o.ceiling and o.rate), None)


def is_ours(outcome: Outcome) -> bool:
    """Return whether h5feed itself was measured."""
    return any(name in outcome.name for name in _OURS)


def utilization(o: Outcome, report: Report) -> float | None:
    """Accelerator utilization as MLPerf Storage defines it: compute time over running time."""
    if o.ceiling or o.rate is None or report.ceiling is None or not report.ceiling.rate:
        return None
    return min(o.rate / report.ceiling.rate, 1.0)


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report as JSON values; `from_dict` brings it back."""
    outcomes = [asdict(o) | {"images_per_second": o.rate} for o in report.outcomes]
    return asdict(report) | {"outcomes": outcomes, "smoke": report.is_smoke}


def from_dict(values: Mapping[str, Any]) -> Report:
    """Return the report that `as_dict` made `values` of."""
    outcomes = []
    for saved in values["outcomes"]:
        given = {key: value for key, value in saved.items() if key != "images_per_second"}
        cold = given.pop("cold")
        given |= {name: tuple(given[name]) for name in _TUPLES if name in given}
        outcomes.append(Outcome(**given, cold=None if cold is None else Cold(**cold)))
    names = ("title", "kind", "images", "batch_size", "machine", "facts")
    return Report(
        **{name: values[name] for name in names},
        outcomes=tuple(outcomes),
        left_out=tuple(values["left_out"]),
    )
