"""The seventeen published tricks: the switch of each, what it does here, what it was worth.

The list is L. Kuhn's, "Faster Deep Learning Training with PyTorch" (2021), numbered as there. Below
it stand the tricks that train-h5 adds. What a trick was worth comes from ablations (train-h5 ablate
--json); one that changes what is learned, and not the speed of a step, has no such figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from h5feed.bench.ablate import Ablation, Row
from h5feed.bench.report import markdown_table

__all__ = ["OURS", "PUBLISHED", "PublishedTrick", "tricks_table"]


@dataclass(frozen=True, slots=True)
class PublishedTrick:
    """A row."""

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
    PublishedTrick(
        "Another learning rate schedule",
        "`--schedule onecycle\\|cyclic`",
        "moves the rate with every step; `find-lr` looks for its peak",
        why_not=_LEARNS,
    ),
    PublishedTrick(
        "Several workers and pinned memory",
        "`--workers`, `--prefetch`, `--pin-memory`",
        "threads of H5Loader, worker processes of the stock loaders; H5Loader's slots are always "
        "pinned for a GPU",
        "workers, prefetch",
    ),
    PublishedTrick(
        "The largest batch that fits",
        "`train-h5 find-batch`",
        "tries sizes and names the largest that fits and the fastest per image",
        why_not="a search: its own table says what each size is worth",
    ),
    PublishedTrick(
        "Automatic mixed precision",
        "`--precision bf16\\|fp16`",
        "autocast; fp16 with a gradient scaler; bf16 by default on a GPU that has it",
        "AMP, bf16",
    ),
    PublishedTrick(
        "Another optimizer (fused AdamW)",
        "`--optimizer`, `--implementation fused`",
        "AdamW by default, one kernel for all weights",
        "fused optimizer",
    ),
    PublishedTrick(
        "cuDNN's autotuner",
        "`--cudnn-benchmark`",
        "on by default: all batches have one shape",
        "cuDNN autotuner",
    ),
    PublishedTrick(
        "No needless copies between CPU and GPU",
        "`--log-every`, `--augment-on device`",
        "losses stay on the device and are read seldom; copies run on a stream of their own",
        "loss read seldom",
    ),
    PublishedTrick(
        "Gradient checkpointing",
        "`--grad-checkpointing`",
        "keeps each block's input only and computes the rest twice: memory for time",
        "gradient checkpointing",
    ),
    PublishedTrick(
        "Gradient accumulation",
        "`--accumulate`",
        "one step from several parts of a batch: memory for time",
        why_not="saves memory, not time",
    ),
    PublishedTrick(
        "DistributedDataParallel",
        "`--gpus`, `torchrun`",
        "one process per GPU; static graph, gradients as views of DDP's buckets",
        why_not="needs several GPUs",
    ),
    PublishedTrick(
        "Gradients set to None",
        "`--set-to-none`",
        "on by default, as in torch since 2.0",
        "gradients to None",
    ),
    PublishedTrick(
        "`as_tensor` in the place of `tensor`",
        "none needed",
        "images are views of the file's memory; nothing is copied to make a tensor",
        why_not="no switch turns it off",
    ),
    PublishedTrick(
        "Debugging tools off",
        "`--debug off`",
        "off by default; anomaly, profile, gradcheck and nvtx when asked for",
        why_not="off unless asked for",
    ),
    PublishedTrick(
        "Gradient clipping",
        "`--clip-norm`, `--clip-value`",
        "after unscaling, without waiting for the device",
        why_not=_LEARNS,
    ),
    PublishedTrick(
        "No bias before a batch norm",
        "`--drop-biases`",
        "finds and drops such biases in any model",
        "no useless biases",
    ),
    PublishedTrick(
        "No gradients while scoring",
        "none needed",
        "scoring runs in torch's inference mode",
        why_not="no switch turns it off",
    ),
    PublishedTrick(
        "Normalization of input and layers",
        "none needed",
        "mean and deviation of the pixels are part of the model, on the device; ours have batch "
        "norm",
        why_not=_LEARNS,
    ),
)

OURS = (
    PublishedTrick(
        "Packed file",
        "`--loader dataloader`",
        "pixels of the right size, ready in one file",
        "packed file",
    ),
    PublishedTrick("H5Loader", "`--loader h5loader`", "threads, memory used again", "H5Loader"),
    PublishedTrick(
        "Crop on the GPU",
        "`--augment-on device`",
        "bytes are copied, batches augmented there",
        "crop on the GPU",
    ),
    PublishedTrick(
        "Images on the GPU",
        "`--residency auto`",
        "all of them stay there, or in pinned memory",
        "images on the GPU",
    ),
    PublishedTrick("TF32", "`--precision tf32`", "in matrix products, too", "TF32"),
    PublishedTrick(
        "channels_last",
        "`--channels-last`",
        "weights and images in NHWC memory",
        "channels_last",
    ),
    PublishedTrick("torch.compile", "`--compile`", "kernels made for the model", "torch.compile"),
)


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
