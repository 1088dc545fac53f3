"""Shards made into a set: are all there, whole, of one packing; then the index over them."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from h5feed.disk import link_or_copy, rename_file
from h5feed.errors import H5FormatError, PackError, UsageError
from h5feed.packing.compact import StoredItems, joint_classes
from h5feed.packing.options import PackOptions
from h5feed.packing.shard_plan import SetFolder, ShardPlan, look_into, shard_name
from h5feed.progress import Progress
from h5feed.store.index import INDEX_NAME, write_index
from h5feed.store.layout import FileIndex, canonical_json
from h5feed.store.read import MappedFile, read_index
from h5feed.text import counted

__all__ = ["MergedSet", "compact_set", "join_sets", "merge_set"]

_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedSet:
    """What a set holds, once its index is written."""

    out: str
    shards: int
    """0 for one file."""
    items: int
    generations: int
    """How many packings it is of: 1, and one more for each that was appended or joined."""

    def __str__(self) -> str:
        where = f" in {counted(self.shards, 'shard')}" if self.shards else ""
        later = f", of {self.generations} packings" if self.generations > 1 else ""
        return f"{self.out}: {counted(self.items, 'image')}{where}{later}"

    def to_json(self) -> str:
        """Return it as one JSON object."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class _Generation:
    """The shards of one packing."""

    number: int
    count: int
    folder: Path
    names: dict[int, str]
    facts: dict[str, Any] | None = None
    """What its first whole shard says of the plan, less its own number."""
    items: int = 0
    fingerprints: list[str] = field(default_factory=list)
    first: FileIndex | None = None
    """One of its shards."""

    @property
    def images(self) -> int:
        """How many positions it takes in the order of the set."""
        return self.items if self.facts is None else int(self.facts["images"])

    @property
    def paths(self) -> list[Path]:
        """Its shards."""
        return [self.folder / self.names[number] for number in range(self.count)]


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
    generations = _whole_generations(folder, progress)
    names = [path.name for one in generations for path in one.paths]
    plan = {"generations": [one.facts or {"images": one.items} for one in generations]}
    number = len(generations) - 1
    write_index(folder, names, generation=number, plan=plan, bases=_bases(generations))
    return MergedSet(
        out=str(out),
        shards=len(names),
        items=sum(one.items for one in generations),
        generations=len(generations),
    )


def join_sets(
    sources: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    progress: bool = False,
) -> MergedSet:
    """Make one set of sets and files: their shards are linked or copied, and never encoded again.

    Items come source by source. Classes are those of the first, then what each other one adds; a
    shard whose classes have other numbers then is written anew with these, its pixels as they are.
    Raises UsageError for what cannot be one set, PackError for a set that is not whole.

    >>> from h5feed import pack
    >>> files = [pack("images", name, size=64, num_workers=0).out for name in ("a.h5", "b.h5")]
    >>> print(join_sets(files, "both"))
    Traceback (most recent call last):
    h5feed.errors.UsageError: a.h5 and b.h5 hold the same shard: leave one of them out
    """
    folder = Path(out)
    found = look_into(folder)
    if not found.is_empty or found.others or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"OUT {folder} exists: give a new folder")
    _check_parent(folder)
    inputs = [_input(Path(source), progress) for source in sources]
    generations = [one for generations in inputs for one in generations]
    _refuse_copies(generations)
    classes = joint_classes([one.first for one in generations if one.first is not None])
    made_folder = not folder.exists()
    folder.mkdir(exist_ok=True)
    total = sum(one.count for one in generations)
    try:
        with Progress(total, "linking", unit="shards", show=progress, brief=True) as bar:
            for number, one in enumerate(generations):
                for shard, path in enumerate(one.paths):
                    _place(path, folder / shard_name(shard, one.count, number), classes)
                    bar.advance()
        return replace(merge_set(folder, progress=progress), out=str(out))
    except BaseException:  # it held nothing of a set before
        for name in (*(left := look_into(folder)).names(), *left.unfinished, INDEX_NAME):
            (folder / name).unlink(missing_ok=True)
        if made_folder:
            folder.rmdir()
        raise


def compact_set(
    sources: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    shards: int | str | None = None,
    order: Literal["random", "source"] | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = False,
) -> MergedSet:
    """Write the items of sets and files anew: into one file, or with `shards` into a new set.

    The bytes of images stay as they are. `shards`, `order` and `seed` are those of `pack`. Raises
    as `join_sets` does.

    >>> from h5feed import pack
    >>> pack("images", "few.set", shards=4, size=64, num_workers=0).shards
    4
    >>> print(compact_set(["few.set"], "few.h5"))
    few.h5: 24 images
    """
    target = Path(out)
    PackOptions(shards=None if shards is None else str(shards), order=order, seed=seed).check()
    if not overwrite and os.path.lexists(target):
        raise UsageError(f"OUT {target} exists: give another name, or --overwrite")
    if target.is_dir():
        raise UsageError(f"OUT {target} is a folder: give the name of a new one, or of a file")
    _check_parent(target)
    generations = [one for path in sources for one in _input(Path(path), progress)]
    _refuse_copies(generations)
    bases = _bases(generations)
    items = StoredItems.of([path for one in generations for path in one.paths], bases)
    provenance = items.provenance()
    if shards is None:
        items.write(target, items.order, provenance, None)
        return MergedSet(out=str(out), shards=0, items=len(items), generations=1)
    options = PackOptions(shards=str(shards), order=order, seed=seed)
    count = options.count_for(len(items), items.mean_bytes())
    plan = ShardPlan(
        identity="",
        images=len(items),
        count=count,
        order=order or "random",
        seed=seed,
    )
    made_of = [name for one in generations for name in one.fingerprints]
    plan = replace(plan, identity=_digest([plan.facts(), made_of, items.classes]))
    sequence = plan.sequence()
    target.mkdir()
    try:
        with Progress(len(items), "writing", show=progress) as bar:
            for shard in range(count):
                positions = sequence[slice(*plan.bounds(shard))]
                said = _share(provenance, shard, len(positions))
                said["set"] = plan.facts() | {"shard": shard}
                stored = items.order[positions]
                items.write(target / plan.name(shard), stored, said, positions)
                bar.advance(len(positions))
        return replace(merge_set(target, progress=progress), out=str(out))
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _check_parent(out: Path) -> None:
    """Refuse to make something where no folder is, or inside a set, which holds nothing else."""
    parent = Path(os.path.realpath(out)).parent
    if not parent.is_dir():
        raise UsageError(f"OUT {out}: the folder {out.parent} does not exist: make it first")
    if not look_into(parent).is_empty:
        raise UsageError(f"OUT {out} lies inside the set {out.parent}: give a path outside of it")


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def _share(provenance: dict[str, Any], shard: int, items: int) -> dict[str, Any]:
    """Return what one of several new shards says: the first has what was skipped."""
    found = dict(provenance["counts"])
    skipped = int(found["found"]) - int(found["packed"]) if shard == 0 else 0
    counts = {"found": items + skipped, "packed": items}
    if shard == 0:
        return provenance | {"counts": counts | {"skipped": found["skipped"]}}
    return provenance | {"counts": counts | {"skipped": {}}, "skipped": []}


def _bases(generations: Sequence[_Generation]) -> list[int]:
    """Return for each shard what stands before its generation in the order of the set."""
    bases, base = [], 0
    for one in generations:
        bases += [base] * one.count
        base += one.images
    return bases


def _input(path: Path, progress: bool) -> list[_Generation]:
    """Return what is to be joined: a set's generations, or a file as the one shard of one."""
    if path.name == INDEX_NAME:
        path = path.parent
    if path.is_dir():
        return _whole_generations(path, progress)
    index = read_index(path)
    if "set" in index.provenance:
        raise UsageError(f"{path} is a shard of a set: give the set's folder")
    return [
        _Generation(
            number=0,
            count=1,
            folder=path.parent,
            names={0: path.name},
            items=len(index),
            fingerprints=[index.fingerprint],
            first=index,
        )
    ]


def _refuse_copies(generations: Sequence[_Generation]) -> None:
    seen: dict[str, Path] = {}
    for one in generations:
        for fingerprint, path in zip(one.fingerprints, one.paths, strict=True):
            other = seen.setdefault(fingerprint, path)
            if other is not path:
                raise UsageError(f"{other} and {path} hold the same shard: leave one of them out")


def _place(path: Path, target: Path, classes: tuple[str, ...]) -> None:
    """Give a shard a name in another set; written anew where its classes have other numbers."""
    index = read_index(path)
    if index.classes != classes[: len(index.classes)] or bool(index.classes) != bool(classes):
        items = StoredItems((MappedFile(path),), classes, np.arange(len(index)))
        items.write(target, items.order, index.provenance, index.positions)
        return
    partial = target.with_name(f"{target.name}.{secrets.token_hex(6)}.partial")
    try:
        link_or_copy(path, partial)
        rename_file(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _whole_generations(folder: Path, progress: bool) -> list[_Generation]:
    """Return the generations of a set, once every shard is found to be whole and in its place."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}: give the folder of a set")
    found = look_into(folder)
    if not found.shards:
        raise PackError(f"{folder} holds no shards: pack some with pack-h5 SRC {folder} --shards N")
    generations = _generations(found)
    total = sum(one.count for one in generations)
    wrong = []
    with Progress(total, "checking", unit="shards", show=progress, brief=True) as bar:
        for generation in generations:
            for problem in _problems(generation):
                wrong += [problem] if problem else []
                bar.advance()
    if wrong:
        shown = wrong[:_LISTED] + ([f"and {len(wrong) - _LISTED:,} more"] * (len(wrong) > _LISTED))
        raise PackError(
            f"{folder} is not a whole set, {len(wrong):,} of {counted(total, 'shard')} missing or "
            "wrong: pack their parts, or bring the shards, then merge-h5 again",
            details="\n".join(f"  {line}" for line in shown),
        )
    return generations


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
        made.append(_Generation(number, count, found.path, names))
    return made


def _problems(generation: _Generation) -> Iterator[str]:
    """Yield for each shard what is wrong with it, "" where nothing is."""
    for number in range(generation.count):
        if number not in generation.names:
            yield f"{shard_name(number, generation.count, generation.number)}: missing"
            continue
        path = generation.folder / generation.names[number]
        try:
            index = read_index(path)
        except H5FormatError as ex:
            yield ex.sentence.partition("; ")[0]
        except OSError as ex:
            yield f"{path.name}: cannot be read ({ex.strerror})"
        else:
            generation.items += len(index)
            generation.fingerprints.append(index.fingerprint)
            generation.first = generation.first or index
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
