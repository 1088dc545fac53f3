"""More images for a set that is there: what they have to share with it, and their place in it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from h5feed.errors import UsageError
from h5feed.packing.items import ImageSource
from h5feed.packing.options import PackOptions, field_specs
from h5feed.packing.shard_plan import ShardPlan, look_into, plan_shards
from h5feed.store.index import SetIndex, open_index
from h5feed.store.layout import IMAGES, FieldSpec
from h5feed.store.read import read_index
from h5feed.text import counted

__all__ = ["plan_append"]

_OPTION_OF = {"encoding": "store", "fit": "fit", "height": "size", "width": "size"}


def plan_append(
    source: ImageSource, folder: Path, options: PackOptions
) -> tuple[ImageSource, tuple[FieldSpec, ...], ShardPlan]:
    """Return the images with the set's class numbers, their pixel fields, and their shards.

    New classes go on after those of the set. Raises UsageError, by name, for what the set has
    otherwise, and for images that it holds already.
    """
    index = open_index(folder)
    specs = _same_fields(index, options)
    _check_columns(source, index)
    numbered = _numbered(source, index)
    plan = plan_shards(numbered, specs, options, generation=index.generation + 1)
    goes_on = options.resume or options.part is not None
    for generation, facts in enumerate(index.plan.get("generations", ())):
        if facts.get("plan") == plan.identity:
            if goes_on:
                return numbered, specs, replace(plan, generation=generation)
            raise UsageError(f"OUT {folder} holds these very images already: nothing to append")
    if look_into(folder).shards.get(plan.generation) and not goes_on:
        raise UsageError(
            f"OUT {folder} holds shards of an append that was not finished: --resume makes those "
            "that are missing"
        )
    _refuse_known(numbered, index, folder)
    return numbered, specs, plan


def _same_fields(index: SetIndex, options: PackOptions) -> tuple[FieldSpec, ...]:
    """Return the set's pixel fields, which must be those that the options ask for."""
    images = index.specs[IMAGES]
    size = None if options.store == "original" else (images.height, images.width)
    if options.size != "auto" and size is not None:
        wanted = [int(side) for side in options.size.lower().split("x") if side.isdigit()]
        if tuple(wanted * (3 - len(wanted))) != size:
            raise UsageError(
                f"size={options.size}, and the set has {size[0]}x{size[1]}: append the same"
            )
    if (options.masks is not None) != (len(index.specs) > 1):
        has = "has masks" if len(index.specs) > 1 else "has none"
        raise UsageError(f"masks={options.masks}, and the set {has}: append the same")
    theirs = images.attributes()
    asked = {"encoding": options.store, "fit": options.fit}
    if options.store == "original":
        del asked["fit"]
    for name, value in asked.items():
        if theirs[name] != value:
            option = _OPTION_OF[name]
            raise UsageError(f"{option}={value}, and the set has {theirs[name]}: append the same")
    return field_specs(options, size)


def _check_columns(source: ImageSource, index: SetIndex) -> None:
    """Refuse other further fields, and another kind of labels."""
    for name, values in source.fields.items():
        if index.fields.get(name) != values.type:
            raise UsageError(f"field={name!r} is not one of the set's, or of another type there")
    if missing := sorted(index.fields.keys() - source.fields.keys()):
        raise UsageError(f"the set has the field {missing[0]!r}: give it for these images as well")
    targets = tuple(read_index(index.paths[0]).provenance.get("targets", ()))
    if source.targets != targets:
        mine, theirs = (", ".join(names) or "none" for names in (source.targets, targets))
        raise UsageError(f"targets={mine}, and the set has {theirs}: append the same")
    labels = index.columns["labels"]
    if source.labels.ndim != labels.ndim:
        raise UsageError(
            "these images have one class each and the set's several, or the other way round: pack "
            "them in the same form"
        )


def _numbered(source: ImageSource, index: SetIndex) -> ImageSource:
    """Return the source with the set's class numbers, and new classes behind them."""
    if source.classes == index.classes:
        return source
    if source.labels.ndim == 1 and not source.classes and source.labels.max() < 0:
        return replace(source, classes=index.classes)
    new = tuple(name for name in source.classes if name not in index.classes)
    classes = index.classes + new
    boxes = any(values.type.kind == "boxes" for values in source.fields.values())
    what = None
    if not source.classes or not index.classes:
        what = "class numbers without names" if index.classes else "classes, and the set has none"
    elif source.labels.ndim > 1 and new:
        what = f"new classes ({_few(new)}), and the set has a column for each of its own"
    elif boxes and source.classes != classes[: len(source.classes)]:
        what = "boxes whose classes have other numbers than the set's"
    if what is not None:
        raise UsageError(f"these images have {what}: pack them in a set of their own")
    number = {name: k for k, name in enumerate(classes)}
    numbers = np.array([number[name] for name in source.classes], np.int64)
    if source.labels.ndim > 1:
        labels = np.zeros((len(source), len(classes)), np.float32)
        labels[:, numbers] = source.labels
        return replace(source, classes=classes, labels=labels)
    note = (f"{counted(len(new), 'new class', 'new classes')}: {_few(new)}",) if new else ()
    made = np.append(numbers, -1)[source.labels]
    return replace(source, classes=classes, labels=made, notes=(*source.notes, *note))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _refuse_known(source: ImageSource, index: SetIndex, folder: Path) -> None:
    """Refuse images whose keys the set has: the same folder, grown, would be packed twice."""
    mine = {source.key(item) for item in range(len(source))}
    known: set[bytes] = set()
    for shard in range(len(index.paths)):
        index.check_rows(shard, ("keys", "key_bytes"))
        columns = index.items(shard)
        blob, ends = columns.key_bytes.tobytes(), columns.key_offsets.tolist()
        known |= mine.intersection(blob[a:b] for a, b in pairwise(ends))
    if known:
        some = os.fsdecode(min(known))
        raise UsageError(
            f"OUT {folder} holds {counted(len(known), 'of these images', 'of these images')} "
            f"already, such as {some!r}: give a SRC of new ones"
        )
