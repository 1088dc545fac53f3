"""Put every figure of the pages into its place, from what benchmarks/ holds.

    python tools/pages.py                 write the tables of README.md and docs/
    python tools/pages.py --check         exit 1, and name what differs from benchmarks/
    python tools/pages.py ablate JSON     print the table of another file: ablate, loader or peers
        --into PAGE                       put it into a page instead
        --plot PATH                       draw it as well

A table stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. A figure in a sentence is
compared, and changed by hand. benchmarks/README.md says which command wrote which file. What looks
wrong among peers and is not explained makes no table (see tools/peers/results.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench_loader import markdown as loader_table
from clients.run import table as clients_table
from h5feed.bench.ablate import Ablation, Row
from h5feed.bench.report import (
    Comparison,
    as_markdown,
    from_dict,
    markdown_table,
    save_plot,
)
from peers import results as peers
from simulate_cluster import TABLES as cluster_tables
from simulate_cluster import as_markdown as cluster_table

__all__ = ["differences", "main", "put_into"]

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def _read(name: str) -> Any:
    return json.loads((BENCHMARKS / name).read_text())


def _ablation(path: Path = BENCHMARKS / "ablate.json") -> Ablation:
    return from_dict(Ablation, json.loads(path.read_text()))


def _measured(name: str) -> str:
    """Return what was compared, and in one sentence what came of it."""
    found = from_dict(Comparison, _read(name))
    return f"{found.title} ({found.machine}): {found.headline()}"


def _loader(path: Path = BENCHMARKS / "loader.json") -> str:
    return loader_table(json.loads(path.read_text()))


def _peers(path: Path = BENCHMARKS / "peers.json") -> str:
    found = peers.load(path)
    if doubts := peers.unexplained(found, path):
        raise SystemExit("\n".join(f"not explained: {doubt}" for doubt in doubts))
    return peers.table(found, path)


def _campaign() -> str:
    """Return what was tried against the library, how often, and how much of it failed."""
    found = _read("campaign.json")
    failed = f"{found['failed']:,}" if found["failed"] else "none"
    lines = [
        f"{found['cases']:,} cases in {found['minutes']:g} minutes ({found['machine']}); {failed} "
        "wrong, hung or with a traceback:",
        "",
        "| family | cases | what is done, and what has to hold |",
        "|---|---:|---|",
    ]
    for name, tally in found["families"].items():
        lines.append(f"| {name} | {tally['cases']:,} | {tally['what']} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class PublishedTrick:
    """A row of docs/tricks.md: the switch, what it does here, what it was worth.

    That comes from ablations (train-h5 ablate --json); a trick that changes what is learned, and
    not the speed of a step, has no such figure.
    """

    name: str
    switch: str
    """Of train-h5, as code; or what takes its place."""
    does: str
    measured: str | None = None
    """Its name in ablations."""
    why_not: str = ""
    """Why an ablation has no figure."""


_LEARNS = "changes what is learned, not the speed of a step"
PUBLISHED = (
    PublishedTrick("Another learning rate schedule", "`--schedule onecycle\\|cyclic`",
        "moves the rate with every step; `find-lr` looks for its peak", why_not=_LEARNS),
    PublishedTrick("Several workers and pinned memory", "`--workers`, `--prefetch`, `--pin-memory`",
        "threads of H5Loader, worker processes of the stock loaders; H5Loader's slots are always"
        " pinned for a GPU", "workers, prefetch"),
    PublishedTrick("The largest batch that fits", "`train-h5 find-batch`",
        "tries sizes and names the largest that fits and the fastest per image",
        why_not="a search: its own table says what each size is worth"),
    PublishedTrick("Automatic mixed precision", "`--precision bf16\\|fp16`",
        "autocast; fp16 with a gradient scaler; bf16 by default on a GPU that has it", "AMP, bf16"),
    PublishedTrick("Another optimizer (fused AdamW)", "`--optimizer`, `--implementation fused`",
        "AdamW by default, one kernel for all weights", "fused optimizer"),
    PublishedTrick("cuDNN's autotuner", "`--cudnn-benchmark`",
        "on by default: all batches have one shape", "cuDNN autotuner"),
    PublishedTrick("No needless copies between CPU and GPU", "`--log-every`, `--augment-on device`",
        "losses stay on the device and are read seldom; copies run on a stream of their own",
        "loss read seldom"),
    PublishedTrick("Gradient checkpointing", "`--grad-checkpointing`",
        "keeps each block's input only and computes the rest twice: memory for time",
        "gradient checkpointing"),
    PublishedTrick("Gradient accumulation", "`--accumulate`",
        "one step from several parts of a batch: memory for time",
        why_not="saves memory, not time"),
    PublishedTrick("DistributedDataParallel", "`--gpus`, `torchrun`",
        "one process per GPU; static graph, gradients as views of DDP's buckets",
        why_not="needs several GPUs"),
    PublishedTrick("Gradients set to None", "`--set-to-none`",
        "on by default, as in torch since 2.0", "gradients to None"),
    PublishedTrick("`as_tensor` in the place of `tensor`", "none needed",
        "images are views of the file's memory; nothing is copied to make a tensor",
        why_not="no switch turns it off"),
    PublishedTrick("Debugging tools off", "`--debug off`",
        "off by default; anomaly, profile, gradcheck and nvtx when asked for",
        why_not="off unless asked for"),
    PublishedTrick("Gradient clipping", "`--clip-norm`, `--clip-value`",
        "after unscaling, without waiting for the device", why_not=_LEARNS),
    PublishedTrick("No bias before a batch norm", "`--drop-biases`",
        "finds and drops such biases in any model", "no useless biases"),
    PublishedTrick("No gradients while scoring", "none needed",
        "scoring runs in torch's inference mode", why_not="no switch turns it off"),
    PublishedTrick("Normalization of input and layers", "none needed",
        "mean and deviation of the pixels are part of the model, on the device; ours have batch "
        "norm", why_not=_LEARNS),
)  # fmt: skip
"""L. Kuhn's list, "Faster Deep Learning Training with PyTorch" (2021), numbered as there."""
OURS = (
    PublishedTrick("Packed file", "`--loader dataloader`",
        "pixels of the right size, ready in one file", "packed file"),
    PublishedTrick("H5Loader", "`--loader h5loader`", "threads, memory used again", "H5Loader"),
    PublishedTrick("Crop on the GPU", "`--augment-on device`",
        "bytes are copied, batches augmented there", "crop on the GPU"),
    PublishedTrick("Images on the GPU", "`--residency auto`",
        "all of them stay there, or in pinned memory", "images on the GPU"),
    PublishedTrick("TF32", "`--precision tf32`", "in matrix products, too", "TF32"),
    PublishedTrick("channels_last", "`--channels-last`", "weights and images in NHWC memory",
        "channels_last"),
    PublishedTrick("torch.compile", "`--compile`", "kernels made for the model", "torch.compile"),
)  # fmt: skip
"""The tricks that train-h5 adds."""


def tricks_table(ablations: Sequence[Ablation]) -> str:
    """Return the Markdown table, with a foot that says on what hardware each run was."""
    heads = ["", "trick", "switch", "what it does here", "worth", "on"]
    rows = [
        [number, trick.name, trick.switch, trick.does, *_worth(trick, ablations)]
        for number, trick in (
            *((str(k), trick) for k, trick in enumerate(PUBLISHED, 1)),
            *(("+", trick) for trick in OURS),
        )
    ]
    foot = (
        f"[{chr(ord('a') + k)}] {a.machine}: {a.title}; spread of the windows ±"
        f"{max((row.spread or 0.0) for row in a.rows):.0%} at most.  "
        for k, a in enumerate(ablations)
    )
    said = (
        "worth: speed with the trick over the speed without it, added to those above it in the "
        "ablation, and in brackets left out of all. What is worth less than the spread is worth "
        "nothing there."
    )
    return "\n".join([*markdown_table(heads, rows, range(6)), "", said, "", *foot])


def _worth(trick: PublishedTrick, ablations: Sequence[Ablation]) -> tuple[str, str]:
    """Return what the trick was worth in each ablation that has it, and which these are."""
    if trick.measured is None:
        return f"– ({trick.why_not})", "–"
    said, where = [], []
    for number, ablation in enumerate(ablations):
        if figures := _figures(trick.measured, ablation.rows):
            said.append(figures)
            where.append(f"[{chr(ord('a') + number)}]")
    if said:
        return "; ".join(said), " ".join(where)
    reasons = (line for a in ablations for line in a.left_out)
    named = (line.partition(": ")[2] for line in reasons if line.startswith(f"{trick.measured}: "))
    return f"– ({next(named, 'not measured yet')})", "–"


def _figures(name: str, rows: Sequence[Row]) -> str:
    ratios = {row.name: row.ratio for row in rows if row.ratio is not None}
    added = ratios.get(f"+ {name}", ratios.get(f"all and {name}"))
    missed = ratios.get(f"all but {name}")
    said = "" if added is None else f"{added:.2f}×"
    return f"{said} ({missed:.2f}×)".strip() if missed is not None else said


TABLES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"gain": lambda: peers.gain(peers.load(BENCHMARKS / "peers.json"))},
    "docs/benchmarks.md": {
        "peers": _peers,
        "loader": _loader,
        "bench": lambda: _measured("bench.json"),
        "train": lambda: _measured("train.json"),
        "campaign": _campaign,
    },
    "docs/clients.md": {"clients": lambda: clients_table(_read("clients.json"))},
    "docs/clusters.md": {
        name: partial(lambda name: cluster_table(_read("clusters.json"), name), name)
        for name in cluster_tables
    },
    "docs/tricks.md": {
        "tricks": lambda: tricks_table([_ablation()]),
        "ablate": lambda: as_markdown(_ablation()),
    },
}
"""By page, then by mark. The table of a GPU is tools/gpu_run.py's."""


def _accuracy() -> str:
    found = _read("accuracy.json")
    files, packed, difference, width = (
        100 * found[key] for key in ("files_mean", "packed_mean", "difference", "half_width_95")
    )
    both = f"{files:.1f} % both" if f"{files:.1f}" == f"{packed:.1f}" else f"{files:.1f} %"
    return f"({both}): packed − files = {difference:+.2f} ± {width:.2f} points"


def _trained(name: str, said: Callable[[Mapping[str, Any]], str]) -> Callable[[], str]:
    """Return what a recipe of the README reached, and in how many seconds, over all runs."""

    def sentence() -> str:
        found = [run["recipes"][name] for run in _read("training.json")]
        times = sorted(round(recipe["seconds"]) for recipe in found)
        span = f"{times[0]}" if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
        return f"{said(found[-1])}{span} seconds"

    return sentence


SENTENCES: Mapping[str, Sequence[Callable[[], str]]] = {
    "docs/benchmarks.md": [_accuracy],
    "docs/training.md": [
        _trained("samples", lambda _: ""),
        _trained("cifar", lambda found: f"{100 * found['val']['accuracy']:.1f} % after "),
        _trained(
            "scenes", lambda found: f"mean IoU {found['val']['mean IoU']:.2f} after 12 epochs, "
        ),
    ],
}
"""By page: words that must stand in it, line breaks apart."""


def differences(root: Path = ROOT) -> Iterator[str]:
    """Say what in the pages is not what benchmarks/ holds."""
    for page, tables in TABLES.items():
        text = (root / page).read_text()
        for name, made in tables.items():
            whole = f"<!-- {name}: begin -->\n{made()}\n<!-- {name}: end -->"
            if whole not in text:
                yield f"{page}: the table {name!r} is another one: run python tools/pages.py"
    for page, sentences in SENTENCES.items():
        text = " ".join((root / page).read_text().split())
        for said in (made() for made in sentences):
            if said not in text:
                yield f"{page} lacks the words {said!r}, which benchmarks/ gives"


def put_into(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- name: begin -->` and `<!-- name: end -->` of `page`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    whole = page.read_text()
    if whole.count(begin) != 1 or whole.count(end) != 1:
        raise SystemExit(f"{page} lacks the lines {begin} and {end}: add them where it belongs")
    head, _, rest = whole.partition(begin)
    tail = rest.partition(end)[2]
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


Drawn = Callable[[Path, Path], None]
OF_A_FILE: Mapping[str, tuple[Callable[[Path], str], Drawn | None]] = {
    "ablate": (
        lambda file: as_markdown(_ablation(file)),
        lambda file, plot: save_plot(_ablation(file), plot),
    ),
    "loader": (_loader, None),
    "peers": (_peers, lambda file, plot: peers.save_plot(peers.load(file), plot)),
}
"""By kind of file: its table, and its plot."""


def main(given: Sequence[str] | None = None) -> int:
    """Write the tables, compare them, or make one of another file."""
    options = read_options(given)
    if options.table:
        made, drawn = OF_A_FILE[options.table]
        text = made(options.file)
        if options.into is None:
            print(text)
        else:
            put_into(options.into, options.table, text)
        if options.plot is not None and drawn is not None:
            drawn(options.file, options.plot)
        return 0
    for page, tables in {} if options.check else TABLES.items():
        for name, table in tables.items():
            put_into(ROOT / page, name, table())
    found = list(differences())
    print("\n".join(found) or "every figure is the one that benchmarks/ holds")
    return 1 if found else 0


def read_options(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", choices=OF_A_FILE, help="what the file holds")
    parser.add_argument("file", nargs="?", type=Path, metavar="JSON")
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the table between its marks")
    parser.add_argument("--plot", type=Path, help="draw the file's plot here")
    options = parser.parse_args(given)
    if bool(options.table) != bool(options.file):
        parser.error("give a kind of table and its JSON file, or neither")
    if (options.into or options.plot) and not options.table:
        parser.error("--into and --plot are for one table: name it, and its JSON file")
    if options.plot and OF_A_FILE[options.table][1] is None:
        parser.error(f"{options.table} has no plot: leave out --plot")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
