"""Which shard of a set holds which images: a pure function of the source and the options.

So any part of a set can be packed anywhere, and again, and gives the same bytes. What lies in the
folder of a set is told from the names of its files alone.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5feed.errors import PackError, UsageError
from h5feed.packing.items import ImageSource
from h5feed.packing.options import PackOptions
from h5feed.packing.output import versions
from h5feed.store.layout import FieldSpec, canonical_json
from h5feed.text import printable

__all__ = [
    "SetFolder",
    "ShardPlan",
    "expected_bytes",
    "find_part",
    "look_into",
    "plan_shards",
    "shard_name",
]

_NAME = re.compile(r"shard-(?:g(\d{3,6})-)?(\d{5,6})-of-(\d{5,6})\.h5")
_UNFINISHED = re.compile(r"(?:shard-.*|index)\.h5\..*partial.*")
_INDEX = "index.h5"
_LISTED = 5
_JPEG_QUALITIES = (1, 50, 75, 90, 95, 100)
_JPEG_BYTES = (0.08, 0.16, 0.22, 0.33, 0.45, 0.81)
"""Bytes a pixel of photos of 256x256 at these qualities, restart segments included (measured)."""
_SMALLER = 0.22
"""A pixel of a smaller image takes more, by this power of the ratio: 1.8 times as much at 64x64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The shards of one packing.

    >>> plan = ShardPlan(identity="", images=10, count=3, order="source")
    >>> [plan.bounds(shard) for shard in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    >>> plan.name(2)
    'shard-00002-of-00003.h5'
    """

    identity: str
    """SHA-256 (hex) of the list of images, their labels, and all that decides the bytes; not of
    the images' own bytes, times or folders, so that it is the same on every machine."""
    images: int
    """Images of the source, also those that turn out to be damaged."""
    count: int
    """Shards."""
    order: str
    """"random" or "source"."""
    seed: int = 0
    generation: int = 0
    """How many packings the set had before."""

    def bounds(self, shard: int) -> tuple[int, int]:
        """Return (first, behind the last) of a shard's images, by place in the set's order."""
        return self.images * shard // self.count, self.images * (shard + 1) // self.count

    def name(self, shard: int) -> str:
        """Return the file name of a shard."""
        return shard_name(shard, self.count, self.generation)

    def facts(self) -> dict[str, Any]:
        """Return what each shard, and the index, says of the plan."""
        return {
            "plan": self.identity,
            "images": self.images,
            "shards": self.count,
            "order": self.order,
            "seed": self.seed,
        }

    def sequence(self) -> npt.NDArray[np.int64]:
        """Return (images,) the position in the source of each image in the set's order."""
        if self.order == "source":
            return np.arange(self.images)
        # Raw bits: numpy promises that a bit generator's stream never changes.
        return np.argsort(np.random.Philox(key=self.seed).random_raw(self.images), kind="stable")


def shard_name(shard: int, count: int, generation: int = 0) -> str:
    """Return the file name of shard `shard` of `count`.

    >>> shard_name(3, 32), shard_name(0, 4, generation=1)
    ('shard-00003-of-00032.h5', 'shard-g001-00000-of-00004.h5')
    """
    later = f"g{generation:03}-" if generation else ""
    return f"shard-{later}{shard:05}-of-{count:05}.h5"


def plan_shards(
    source: ImageSource, specs: Sequence[FieldSpec], options: PackOptions, *, generation: int = 0
) -> ShardPlan:
    """Return the plan of a set; UsageError where there are fewer images than shards."""
    images = len(source)
    count = options.count_for(images, expected_bytes(source, specs, options))
    plan = ShardPlan(
        identity="",
        images=images,
        count=count,
        order=options.order or "random",
        seed=options.seed,
        generation=generation,
    )
    digest = source.listing()
    made = [[spec.name, spec.attributes()] for spec in specs]
    digest.update(canonical_json([plan.facts(), made, options.content(), versions()]).encode())
    return replace(plan, identity=digest.hexdigest())


def expected_bytes(source: ImageSource, specs: Sequence[FieldSpec], options: PackOptions) -> float:
    """Return about how many bytes an image will take: a rule, for nothing is packed yet.

    Fixed sizes are exact. With fit=keep images count as 4:3, with store=jpeg as photos of this
    quality, and with store=original they have the mean size of those that size=auto
    would look at.
    """
    images = specs[0]
    if images.encoding == "original":
        some = range(0, len(source), -(-len(source) // source.sampled))
        return max(1.0, float(np.mean([source.bytes_of(index) for index in some])))
    total = 0.0
    for spec in specs:
        pixels = spec.height * spec.width * (4 / 3 if spec.fit == "keep" else 1)
        each = {"raw": float(spec.channels), "yuv420": 1.5}.get(spec.encoding)
        if each is None:
            each = float(np.interp(options.quality, _JPEG_QUALITIES, _JPEG_BYTES))
            each *= (256 * 256 / pixels) ** _SMALLER
        total += pixels * each
    return total


# --- which part of a set this process is to pack


def find_part(text: str, environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (part from 0, parts) that `text` names: I/N, auto or auto/N.

    >>> find_part("3/8")
    (2, 8)
    >>> find_part("auto", {"RANK": "1", "WORLD_SIZE": "4"})
    (1, 4)
    """
    found = re.fullmatch(r"(auto|\d+)(?:/(\d+))?", text.strip())
    if found is None or (found[1] != "auto" and found[2] is None):
        raise UsageError(f"part={text!r} is not I/N, such as 3/8, nor auto, nor auto/N")
    if found[1] != "auto":
        part, parts = int(found[1]), int(found[2])
        if not 1 <= part <= parts:
            raise UsageError(f"part={text} is not a part: give 1/{parts} to {parts}/{parts}")
        return part - 1, parts
    said = _parts_of_the_environment(environ)
    index = environ.get("JOB_COMPLETION_INDEX", "")
    if found[2] is not None and index.isdigit():  # Kubernetes tells the index, and not of how many
        said["JOB_COMPLETION_INDEX"] = int(index), int(found[2])
    if not said:
        more = ", and Kubernetes needs the number: auto/N" if index and found[2] is None else ""
        raise UsageError(
            f"part={text}: no Slurm array, srun, torchrun or indexed job of Kubernetes says which "
            f"part this is{more}; give I/N"
        )
    if len(set(said.values())) > 1:
        what = ", ".join(f"{name} {part + 1}/{parts}" for name, (part, parts) in said.items())
        raise UsageError(f"part={text}: several say which part this is ({what}); give I/N")
    (name, (part, parts)), *_ = said.items()
    if not 0 <= part < parts:
        raise UsageError(f"part={text}: {name} is {part} of {parts}, which is not a part; give I/N")
    if found[2] is not None and parts != int(found[2]):
        raise UsageError(f"part={text}, and {name} is one of {parts}; give auto, or I/N")
    return part, parts


def _parts_of_the_environment(environ: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Return (part from 0, parts) by the variable that says it, where there are several parts."""

    def number(name: str, default: int | None = None) -> int | None:
        text = environ.get(name, "")
        return int(text) if re.fullmatch(r"-?\d+", text) else default

    said: dict[str, tuple[int, int]] = {}
    task, first = number("SLURM_ARRAY_TASK_ID"), number("SLURM_ARRAY_TASK_MIN", 0)
    last, count = number("SLURM_ARRAY_TASK_MAX"), number("SLURM_ARRAY_TASK_COUNT")
    step = number("SLURM_ARRAY_TASK_STEP", 1)
    if task is not None and count is not None and first is not None and step:
        if last is not None and first + (count - 1) * step != last:
            raise UsageError(
                f"part=auto: the Slurm array has {count} tasks from {first} to {last}, which are "
                "not evenly spaced; give --array=1-N, or part=I/N"
            )
        said["SLURM_ARRAY_TASK_ID"] = (task - first) // step, count
    for name, of in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        one, all_ = number(name), number(of)
        if one is not None and all_ is not None:
            said[name] = one, all_
    several = {name: part for name, part in said.items() if part[1] > 1}
    return several or said


# --- what lies in the folder of a set


@dataclass(slots=True)
class SetFolder:
    """What the folder of a set holds, by the names of its files."""

    path: Path
    shards: dict[int, dict[int, dict[int, str]]] = field(default_factory=dict)
    """Names by generation, by count of shards, by number."""
    unfinished: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """What no set has; hidden files do not count."""
    has_index: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is no shard and no index."""
        return not self.shards and not self.has_index

    def names(self) -> list[str]:
        """Return all shards, in the order of their generations and numbers."""
        return [
            name
            for _, counts in sorted(self.shards.items())
            for _, names in sorted(counts.items())
            for _, name in sorted(names.items())
        ]

    def strays(self, plan: ShardPlan) -> list[str]:
        """Return the shards of the plan's generation that have another number of shards."""
        counts = self.shards.get(plan.generation, {})
        return [
            name
            for count, names in counts.items()
            if count != plan.count
            for name in names.values()
        ]

    def missing(self, plan: ShardPlan) -> tuple[str, ...]:
        """Return the names of the plan's shards that are not there."""
        there = self.shards.get(plan.generation, {}).get(plan.count, {})
        return tuple(plan.name(k) for k in range(plan.count) if k not in there)


def look_into(folder: Path) -> SetFolder:
    """Return what lies in the folder of a set; PackError where it cannot be read."""
    found = SetFolder(folder)
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return found
    except OSError as ex:
        raise PackError(f"cannot read the folder {str(folder)!r}: {ex.strerror}") from ex
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            generation, shard, count = int(match[1] or 0), int(match[2]), int(match[3])
            if shard < count and name == shard_name(shard, count, generation):
                found.shards.setdefault(generation, {}).setdefault(count, {})[shard] = name
                continue
        if name == _INDEX:
            found.has_index = True
        elif _UNFINISHED.fullmatch(name):
            found.unfinished.append(name)
        elif not name.startswith("."):
            found.others.append(printable(name))
    return found
