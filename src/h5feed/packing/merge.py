"""Shards made into a set: are all there, whole, of one packing; then the index over them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h5feed.errors import H5FormatError, PackError
from h5feed.packing.shard_plan import SetFolder, look_into, shard_name
from h5feed.progress import Progress
from h5feed.store.index import write_index
from h5feed.store.layout import FileIndex
from h5feed.store.read import read_index
from h5feed.text import counted

__all__ = ["MergedSet", "merge_set"]

_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedSet:
    """What a set holds, once its index is written."""

    out: str
    shards: int
    items: int
    generations: int
    """How many packings it is of: 1, and one more for each that was appended."""

    def __str__(self) -> str:
        later = self.generations - 1
        appended = f", {counted(later, 'time')} appended" if later else ""
        return (
            f"{self.out}: {counted(self.items, 'image')} in {counted(self.shards, 'shard')}"
            + appended
        )


@dataclass(slots=True)
class _Generation:
    """The shards of one packing."""

    number: int
    count: int
    names: dict[int, str]
    facts: dict[str, Any] | None = None
    """What its first whole shard says of the plan, less its own number."""
    items: int = 0

    @property
    def images(self) -> int:
        """How many positions it takes in the order of the set."""
        return self.items if self.facts is None else int(self.facts["images"])


def merge_set(out: str | os.PathLike[str], *, progress: bool = False) -> MergedSet:
    """Write the index over all shards in the folder `out`, in place of the one that is there.

    Every shard is opened, and must be whole and of the packing that its name and the others say.
    Raises PackError, which lists what is missing or differs; then the old index stays.

    >>> from h5feed import pack
    >>> pack("images", "images.set", shards=4, size=64, num_workers=0).shards
    4
    >>> print(merge_set("images.set"))
    images.set: 24 images in 4 shards
    """
    folder = Path(out)
    found = look_into(folder)
    if not found.shards:
        raise PackError(f"{folder} holds no shards: pack some with pack-h5 SRC {folder} --shards N")
    generations = _generations(found)
    with Progress(len(found.names()), "checking", unit="shards", show=progress, brief=True) as bar:
        wrong = []
        for generation in generations:
            for problem in _problems(folder, generation):
                wrong += [problem] if problem else []
                bar.advance()
    if wrong:
        shown = wrong[:_LISTED] + ([f"and {len(wrong) - _LISTED:,} more"] * (len(wrong) > _LISTED))
        raise PackError(
            f"{folder} is no whole set, {counted(len(wrong), 'shard')} of "
            f"{sum(one.count for one in generations):,} are missing or wrong: pack their parts, or "
            "bring the shards, then merge-h5 again",
            details="\n".join(f"  {line}" for line in shown),
        )
    bases, base = [], 0
    for generation in generations:
        bases += [base] * generation.count
        base += generation.images
    names = [one.names[number] for one in generations for number in range(one.count)]
    plan = {"generations": [one.facts or {"images": one.items} for one in generations]}
    write_index(folder, names, generation=len(generations) - 1, plan=plan, bases=bases)
    return MergedSet(
        out=str(out),
        shards=len(names),
        items=sum(one.items for one in generations),
        generations=len(generations),
    )


def _generations(found: SetFolder) -> list[_Generation]:
    """Return the generations of a folder, oldest first; PackError where names contradict."""
    last = max(found.shards)
    made = []
    for number in range(last + 1):
        counts = found.shards.get(number)
        if counts is None:
            raise PackError(
                f"{found.path} holds shards that were appended, and none of those before them "
                f"({'shard-g' + format(number, '03') if number else 'shard-00000-of-…'}): bring "
                "them, then merge-h5 again"
            )
        if len(counts) > 1:
            one, other = (sorted(names.values())[0] for _, names in sorted(counts.items())[:2])
            raise PackError(
                f"{found.path} holds shards of two packings ({one} and {other}): remove those of "
                "one, then merge-h5 again"
            )
        ((count, names),) = counts.items()
        made.append(_Generation(number, count, names))
    return made


def _problems(folder: Path, generation: _Generation) -> Iterator[str]:
    """Yield for each shard what is wrong with it, "" where nothing is."""
    for number in range(generation.count):
        if number not in generation.names:
            yield f"{shard_name(number, generation.count, generation.number)}: missing"
            continue
        path = folder / generation.names[number]
        try:
            index = read_index(path)
        except H5FormatError as ex:
            yield ex.sentence.partition("; ")[0]
        except OSError as ex:
            yield f"{path.name}: cannot be read ({ex.strerror})"
        else:
            generation.items += len(index)
            yield _wrong_plan(index, number, generation)


def _wrong_plan(index: FileIndex, number: int, generation: _Generation) -> str:
    """Say how a shard differs from the others of its generation; note what the first says."""
    facts = dict(index.provenance.get("set", {}))
    name = Path(index.path).name
    if not facts:
        same = generation.count == 1
        return "" if same else f"{name}: not packed as a shard"
    shard = facts.pop("shard", None)
    if (shard, facts.get("shards")) != (number, generation.count):
        said = f"shard {shard} of {facts.get('shards')}"
        return f"{name}: holds {said} (swapped or renamed)"
    if generation.facts is None:
        generation.facts = facts
    if facts != generation.facts:
        differ = [key for key, value in facts.items() if generation.facts.get(key) != value]
        return f"{name}: of another packing than the first one (its {', '.join(differ)} differs)"
    return ""
