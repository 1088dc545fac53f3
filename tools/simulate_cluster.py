"""What an order costs a cluster, simulated: bytes, shards, exactness, mixing.

    python tools/simulate_cluster.py                           the report of docs/clusters.md
        --json PATH, --plot PATH                               write it, draw it
    python tools/simulate_cluster.py --nodes 6 12 --items 5000000 --streams 48
                                                               the reading table of your cluster

Order, shares of ranks and states are those of H5Loader: its base class, over a set that has no
pixels. An epoch that is too long to be walked is sampled: some machines, and of these some steps
spread over the epoch; its rows say so. Of network and cache only what has to pass and what has to
be held is counted: shards, not seconds.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from h5feed.bench.report import markdown_table, text_table
from h5feed.feed.loader import PackedLoader
from h5feed.feed.options import Shuffle
from h5feed.feed.order import permute
from h5feed.plotting import COLORS, OTHERS, saved_figure

__all__ = [
    "Cluster",
    "main",
    "mixing",
    "mixing_table",
    "reading",
    "reading_table",
    "resume",
    "resume_table",
    "simulate",
    "sizes_table",
]

IMAGENET, RAW, JPEG = 1_281_167, 256 * 256 * 3, 20_600  # items; bytes of one
SHARD = 256 << 20
NODES = (1, 2, 3, 8, 12, 64, 256, 1024)
LONGEST = 3_000_000  # items of an epoch that is walked whole
CALLS = 60_000  # batches of an epoch that is sampled
MACHINES = 8  # of those that it has

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Machines that share the epochs of a set."""

    nodes: int
    ranks: int = 8
    """Of each machine."""
    batch: int = 32
    """Of each rank."""
    items: int = IMAGENET
    item_bytes: int = RAW
    classes: int = 1000
    shuffle: Shuffle = "shards"
    streams: int = 64
    window: int = 4

    @property
    def world_size(self) -> int:
        """Ranks of all machines."""
        return self.nodes * self.ranks

    @property
    def counts(self) -> I64:
        """Items of each shard: 256 MiB of them."""
        full = SHARD // self.item_bytes
        return np.minimum(full, self.items - np.arange(0, self.items, full))


class PixellessLoader(PackedLoader):
    """The loader of one rank, which delivers where its samples are stored."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        files = SimpleNamespace(
            labels=np.empty(0), fingerprint="none", shards=(cluster.counts, None)
        )
        super().__init__(
            range(cluster.items),
            cluster.batch,
            shuffle=cluster.shuffle,
            drop_last=False,
            tail="pad",
            seed=0,
            rank=rank,
            world_size=cluster.world_size,
            sampler=None,
            indices=None,
            block=1,
            window=cluster.window,
            streams=cluster.streams,
            whole=SimpleNamespace(files=files),  # type: ignore[arg-type]
        )

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError("walk() goes through the batches of all ranks together")

    def close(self) -> None:
        """Nothing is held."""


class Walked(NamedTuple):
    """What some ranks took in some steps: (B,) each."""

    node: I64
    step: I64
    sample: I64
    """Where it is stored."""
    padding: int
    """How many of them only filled a step."""
    whole: bool
    """Whether these are all ranks and steps."""
    state: Mapping[str, Any]
    """Behind the last step."""


def walk(
    cluster: Cluster,
    *,
    epoch: int = 0,
    state: Mapping[str, Any] | None = None,
    stop: float = 1.0,
) -> Walked:
    """Go through an epoch, or what `state` left of it, or this and that of a long one.

    stop: the part of its steps to go.
    """
    whole = cluster.items <= LONGEST
    machines = cluster.nodes if whole else min(cluster.nodes, MACHINES)
    chosen = np.linspace(0, cluster.nodes - 1, machines).astype(int)
    ranks = (chosen[:, None] * cluster.ranks + np.arange(cluster.ranks)).ravel().tolist()
    node = np.repeat(chosen, cluster.ranks)
    with patch.dict(os.environ, GROUP_WORLD_SIZE=str(cluster.nodes)):  # as torchrun does
        loaders = [PixellessLoader(cluster, rank) for rank in ranks]
        for loader in loaders:
            loader.set_epoch(epoch)
            if state is not None:
                loader.load_state_dict(state)
        cursor, order, _ = loaders[0]._begin()  # the same on all ranks
        everyone = [loader._steps(cursor.consumed) for loader in loaders]
    count = len(everyone[0])
    last = count if stop == 1 else int(stop * count)
    numbers = np.arange(last)
    if not whole:
        last -= 1  # which may be filled up
        numbers = np.unique(np.linspace(0, last - 1, CALLS // len(ranks)).astype(int))
    samples, steps, nodes, padding = [], [], [], 0
    for step in numbers.tolist():
        positions = [one.positions(step) for one in everyone]
        samples.append(order(np.concatenate(positions)))
        steps.append(np.full(len(samples[-1]), step))
        nodes.append(np.repeat(node, len(positions[0])))
        padding += sum(one.repeats(step) for one in everyone) if step == count - 1 else 0
        cursor.advance(everyone[0].consumed(step + 1))
    parts = (np.concatenate(part) for part in (nodes, steps, samples))
    return Walked(*parts, padding, whole, loaders[0].state_dict())


def shards_of(cluster: Cluster, samples: I64) -> I64:
    """Return the shard of each sample."""
    return samples // (SHARD // cluster.item_bytes)


# --- what is read -------------------------------------------------------------------------------


def reading(cluster: Cluster) -> dict[str, Any]:
    """Return what an epoch makes the machines read, and whether every sample comes once."""
    walked = walk(cluster)
    read, held = shards_read(cluster, walked)
    lost, repeated = _exactness(cluster, walked)
    return asdict(cluster) | {
        "shards": len(cluster.counts),
        "whole": walked.whole,
        "walked": len(walked.sample),
        "lost": lost,
        "repeated": repeated,
        "padding": walked.padding,
        "times_read": float(read.mean() * cluster.nodes / cluster.items),
        "gigabytes": float(read.mean() * cluster.item_bytes / 1e9),
        "most_gigabytes": float(read.max() * cluster.item_bytes / 1e9),
        "held_shards": held,
    }


def shards_read(cluster: Cluster, walked: Walked) -> tuple[I64, int]:
    """Return the items of the shards that each machine reads, and how many it needs at once.

    A shard is held from the first step that needs a sample of it to the last.
    """
    counts = cluster.counts
    key = walked.node * len(counts) + shards_of(cluster, walked.sample)
    order = np.argsort(key, kind="stable")
    steps = walked.step[order]
    begin = np.flatnonzero(np.diff(key[order], prepend=-1))
    end = np.append(begin[1:], len(key)) - 1
    node, shard = np.divmod(key[order][begin], len(counts))
    held = [_most_at_once(steps[begin[at]], steps[end[at]]) for at in _groups(node)]
    return np.array([counts[shard[at]].sum() for at in _groups(node)]), max(held)


def _groups(node: I64) -> list[slice]:
    """Return the runs of equal numbers."""
    begin = np.flatnonzero(np.diff(node, prepend=-1)).tolist()
    return [slice(a, b) for a, b in zip(begin, [*begin[1:], len(node)], strict=True)]


def _most_at_once(first: I64, last: I64) -> int:
    """Return how many of the spans [first, last] overlap at most."""
    at = np.concatenate([first, last + 1])
    change = np.repeat([1, -1], len(first))
    return int(np.cumsum(change[np.lexsort((change, at))]).max())


def _exactness(cluster: Cluster, walked: Walked) -> tuple[int | None, int]:
    """Return how many samples were lost (None: not all was walked), and how many came again."""
    if not walked.whole:
        return None, len(walked.sample) - len(np.unique(walked.sample))
    times = np.bincount(walked.sample, minlength=cluster.items)
    again = int((times[times > 1] - 1).sum())
    return int((times == 0).sum()), again - walked.padding


# --- how well it mixes --------------------------------------------------------------------------


def mixing(cluster: Cluster) -> dict[str, Any]:
    """Return how alike batches are to those of a full shuffle, for two ways to fill the shards."""
    first, second = walk(cluster), walk(cluster, epoch=1)
    random = permute(first.sample, cluster.items, 1)  # which item is stored there
    found = {
        "again": _meet_again(cluster, first, second),
        "held_shards": shards_read(cluster, first)[1],
    }
    for name, items in (("random", random), ("sorted", first.sample)):
        labels = items * cluster.classes // cluster.items
        found[f"{name}_entropy"] = _entropy(first.step, labels, cluster.classes)
        found[f"{name}_correlation"] = _correlation(first, items)
    return asdict(cluster) | {"shards": len(cluster.counts)} | found


def _entropy(step: I64, labels: I64, classes: int) -> float:
    """Return the mean entropy, in bits, of the classes of a batch of all ranks."""
    table = np.bincount(step * classes + labels, minlength=(step.max() + 1) * classes)
    table = table.reshape(-1, classes)[:-1]  # the last may be short
    share = table / table.sum(axis=1, keepdims=True)
    bits = share * np.log2(share, out=np.zeros_like(share), where=share > 0)
    return float(-bits.sum(axis=1).mean())


def _correlation(walked: Walked, items: I64) -> float:
    """Return the correlation of two samples of one rank's batch, as places in class order."""
    assert walked.whole, "one rank a machine, and every sample"
    batch = walked.step * (walked.node.max() + 1) + walked.node
    value = (items - items.mean()) / items.std()
    pairs = np.bincount(batch, value) ** 2 - np.bincount(batch, value**2)
    count = np.bincount(batch)
    return float(pairs.sum() / (count * (count - 1)).sum())


def _meet_again(cluster: Cluster, first: Walked, second: Walked) -> float:
    """Return how often two samples of a batch share one in the next epoch, 1.0: as by chance."""
    steps = []
    for walked in (first, second):
        step = np.empty(cluster.items, np.int64)
        step[walked.sample] = walked.step
        steps.append(step)
    cells = np.unique(steps[0] * (steps[1].max() + 1) + steps[1], return_counts=True)[1]
    pairs = [np.bincount(step).astype(float) for step in steps]
    chance = float(np.prod([(n * (n - 1)).sum() for n in pairs]))
    return float((cells * (cells - 1)).sum()) * cluster.items * (cluster.items - 1) / chance


# --- going on elsewhere -------------------------------------------------------------------------


def resume(cluster: Cluster, nodes: int, stop: float = 0.4) -> dict[str, Any]:
    """Return what becomes of an epoch that `nodes` machines finish."""
    before = walk(cluster, stop=stop)
    state = json.loads(json.dumps(before.state))
    other = replace(cluster, nodes=nodes)
    after = walk(other, state=state)
    times = np.bincount(before.sample, minlength=cluster.items)
    times += np.bincount(after.sample, minlength=cluster.items)
    read = sum(
        len(np.unique(walked.node * len(cluster.counts) + shards_of(cluster, walked.sample)))
        for walked in (before, after)
    )
    return {
        "nodes": cluster.nodes,
        "then": nodes,
        "state_bytes": len(json.dumps(state)),
        "lost": int((times == 0).sum()),
        "repeated": int((times[times > 1] - 1).sum()) - after.padding,
        "padding": after.padding,
        "times_read": read / len(cluster.counts),
    }


# --- the report ---------------------------------------------------------------------------------


def simulate(base: Cluster, nodes: Sequence[int] = NODES) -> dict[str, Any]:
    """Return the whole report."""
    wide = replace(base, streams=1024)
    full = replace(base, shuffle=True)
    many = (1, 1_000, IMAGENET, 10**9)
    return {
        "reading": [
            reading(replace(one, nodes=number))
            for one in (full, base, wide)
            for number in nodes
            if one.streams == base.streams or number > base.streams
        ],
        "sizes": [
            reading(replace(base, items=items, item_bytes=JPEG, nodes=number))
            for items in many
            for number in (1, 64, 1024)
        ],
        "mixing": [mixing(replace(full, nodes=8, ranks=1, batch=256))]
        + [
            mixing(replace(base, nodes=8, ranks=1, batch=256, streams=streams, window=window))
            for streams in (16, 64, 256)
            for window in (1, 2, 4, 8, 16)
        ],
        "resume": [
            resume(replace(base, nodes=before), after)
            for before, after in ((1, 8), (8, 1), (8, 12), (12, 64), (64, 3), (64, 1024))
        ],
    }


def _held(row: Mapping[str, Any]) -> str:
    return f"{row['held_shards']:,} ({row['held_shards'] * SHARD / 1e9:,.0f} GB)"


def _order(row: Mapping[str, Any]) -> str:
    if row["shuffle"] is True:
        return "`True`"
    return f'`"shards"`, {row["streams"]:,} streams, window {row["window"]}'


def _exact(row: Mapping[str, Any]) -> str:
    if row["whole"]:
        return f"{row['lost']} / {row['repeated']}"
    return f"– / {row['repeated']} of {row['walked']:,} sampled"


Table = tuple[list[str], list[list[str]], set[int]]


def reading_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return what machines read, by order and by their number."""
    heads = ["order", "machines", "the set is read", "GB a machine", "the most"]
    heads += ["shards held at once", "lost / repeated"]
    cells = [
        [
            _order(row),
            f"{row['nodes']:,}",
            f"{row['times_read']:,.2f}×",
            f"{row['gigabytes']:,.1f}",
            f"{row['most_gigabytes']:,.1f}",
            _held(row),
            _exact(row),
        ]
        for row in rows
    ]
    return heads, cells, {0}


def sizes_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the same for sets of other sizes."""
    heads = ["items", "shards", "machines", "the set is read", "shards held at once"]
    cells = [
        [
            f"{row['items']:,}",
            f"{row['shards']:,}",
            f"{row['nodes']:,}",
            f"{row['times_read']:,.2f}×",
            _held(row),
            _exact(row),
        ]
        for row in rows
    ]
    return [*heads, "lost / repeated"], cells, set()


def mixing_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return how well batches are mixed, by streams and window."""
    full = rows[0]
    heads = ["streams", "window", "shards held at once", "met again"]
    heads += ["random: classes", "correlation", "sorted: classes", "correlation"]
    cells = [
        [
            "full shuffle" if row["shuffle"] is True else f"{row['streams']:,}",
            "" if row["shuffle"] is True else f"{row['window']}",
            _held(row),
            f"{row['again']:.3f}×",
            *(
                cell
                for name in ("random", "sorted")
                for cell in (
                    f"{row[f'{name}_entropy'] / full[f'{name}_entropy']:.3f}",
                    f"{round(row[f'{name}_correlation'], 4) + 0.0:.4f}",  # no -0.0000
                )
            ),
        ]
        for row in rows
    ]
    return heads, cells, set()


def resume_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return what became of an epoch that other machines finished."""
    heads = ["machines", "then", "lost / repeated", "filled up", "the set is read", "state, bytes"]
    cells = [
        [
            f"{row['nodes']:,}",
            f"{row['then']:,}",
            f"{row['lost']} / {row['repeated']}",
            f"{row['padding']:,}",
            f"{row['times_read']:.2f}×",
            f"{row['state_bytes']}",
        ]
        for row in rows
    ]
    return heads, cells, set()


TABLES = {
    "reading": reading_table,
    "sizes": sizes_table,
    "mixing": mixing_table,
    "resume": resume_table,
}


def as_markdown(found: Mapping[str, Any], name: str) -> str:
    """Return a table of the report for a page."""
    return "\n".join(markdown_table(*TABLES[name](found[name])))


def save_plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw how often the set is read, what a machine holds, and how batches mix."""
    with saved_figure(
        path,
        extra="bench",
        title="Each machine reads its own shards: what that costs, and how it mixes",
        caption="ImageNet as raw 256x256 pixels, 939 shards of 256 MiB, 8 ranks a machine with 32 "
        "samples each. Simulated with the loader's own order: python tools/simulate_cluster.py",
        width=11,
        height=4,
        columns=3,
    ) as (_, panels):
        _draw_reading(panels, found["reading"])
        _draw_mixing(panels[2], found["mixing"])


def _draw_reading(panels: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> None:
    kinds = dict.fromkeys((row["shuffle"], row["streams"]) for row in rows)
    for color, kind in zip((OTHERS, *COLORS), kinds, strict=False):
        mine = [row for row in rows if (row["shuffle"], row["streams"]) == kind]
        name = "full shuffle" if kind[0] is True else f"shards, {kind[1]:,} streams"
        nodes = [row["nodes"] for row in mine]
        panels[0].plot(nodes, [row["times_read"] for row in mine], "o-", color=color, label=name)
        held = [row["held_shards"] * SHARD / 1e9 for row in mine]
        panels[1].plot(nodes, held, "o-", color=color)
    panels[0].set_title("The set is read so many times")
    panels[1].set_title("GB that a machine holds at once")
    for panel in panels[:2]:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("machines")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    panels[0].legend()


def _draw_mixing(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    full = rows[0]["sorted_entropy"]
    for color, streams in zip(COLORS, dict.fromkeys(r["streams"] for r in rows[1:]), strict=False):
        mine = [row for row in rows[1:] if row["streams"] == streams]
        windows = [row["window"] for row in mine]
        shares = [row["sorted_entropy"] / full for row in mine]
        panel.plot(windows, shares, "o-", color=color, label=f"{streams} streams")
    panel.axhline(1, color=OTHERS)
    panel.set_title("Classes of a batch, sorted shards")
    panel.set_xlabel("window: shards of a stream")
    panel.set_ylabel("entropy, full shuffle = 1")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.legend()


def main(given: Sequence[str] | None = None) -> int:
    """Simulate, print, and write what was asked for."""
    options = read_options(given)
    base = Cluster(nodes=1, items=options.items, streams=options.streams, window=options.window)
    if options.nodes:
        base = replace(base, ranks=options.ranks, batch=options.batch)
        found = {"reading": [reading(replace(base, nodes=number)) for number in options.nodes]}
    else:
        found = simulate(base)
    for name, rows in found.items():
        print(f"\n{name}\n", *text_table(*TABLES[name](rows)), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot is not None:
        save_plot(found, options.plot)
    return 0


def read_options(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Cluster(nodes=1)
    parser.add_argument("--nodes", type=int, nargs="+", help="machines; the reading table alone")
    parser.add_argument("--ranks", type=int, default=default.ranks, help="of a machine")
    parser.add_argument("--batch", type=int, default=default.batch, help="of a rank")
    parser.add_argument("--items", type=int, default=default.items)
    parser.add_argument("--streams", type=int, default=default.streams)
    parser.add_argument("--window", type=int, default=default.window)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw it here")
    options = parser.parse_args(given)
    if options.plot and options.nodes:
        parser.error("--plot is for the whole report: leave out --nodes")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
