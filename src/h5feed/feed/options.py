"""What a loader's arguments mean on this machine and for this file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import cv2
import numpy as np
import torch
from torch import distributed

from h5feed.augment import Op, Pipeline
from h5feed.augment.cpu import SMALL
from h5feed.augment.device import CompiledBatch
from h5feed.errors import UsageError
from h5feed.feed.device import DeviceTransfer
from h5feed.feed.files import PackedFiles
from h5feed.feed.processes import unknown_to_workers
from h5feed.store import FieldSpec
from h5feed.system import available_cores

__all__ = [
    "AugmentOn",
    "EngineChoice",
    "EngineName",
    "Io",
    "OnError",
    "Shuffle",
    "Tail",
    "bind_pipeline",
    "block_length",
    "check_choices",
    "check_ranks",
    "check_whole",
    "choose_engine",
    "choose_files",
    "choose_nodes",
    "choose_pipeline",
    "choose_ranks",
    "choose_workers",
    "compile_ops",
    "explain_decoding",
    "leave_cores_to_loader",
]

Shuffle = bool | Literal["block", "shards"]
"""True: all samples; "block": blocks, and samples within a window of blocks; "shards": shards on
streams, and samples within a window of a stream's shards; False: none."""
Tail = Literal["pad", "drop"]
OnError = Literal["raise", "skip"]
AugmentOn = Literal["cpu", "device", "auto"]
Io = Literal["map", "read"]
EngineName = Literal["thread", "process", "auto"]

_BLOCK_BYTES = 8 << 20
_CV2_SPLITS = 1 << 16  # pixels of an image above which cv2 shares it among threads of its own
_MOST_WORKERS = 16
_FEW = 2  # workers that never wait long for Python's lock
# Of the time in which threads make images, that in which one of them holds Python's lock. From here
# on they wait for it: on simulated cores 4 threads make 6 % less than 4 processes (JPEG, 0.4), 8
# make 38 % less (JPEG, 0.7) and 7 % less (raw, 0.5); 16 make less than 8 did.
_BUSY = 1 / 3
_HAND_OVER_US = 4_000  # of work in a batch, which pays for handing it to processes (0.7 ms)
# What an image takes on one core, measured with tools/bench_loader.py and, without kernels, by
# bench.ceilings.python_seconds: µs in which Python's lock is held, and µs a pixel without it.
_LOCK_US = {"raw": 4.0, "yuv420": 6.0, "jpeg": 18.0, "original": 18.0}
_LOCK_SMALL_US = 0.5  # of images that numpy takes many at a time
_DECODE_US = {"raw": 0.0, "yuv420": 0.0002, "jpeg": 0.002, "original": 0.0045}  # a stored pixel
_CROP_US = 0.0012  # an output pixel
_OP_US = 0.0008  # an output pixel and further op, which also takes
_OP_LOCK_US = 6.0
_PROBED = 100  # items whose size is looked at


def check_choices(*, tail: str, on_error: str, lookahead: int) -> None:
    """Refuse a value that is not among the choices, and a negative number of bytes."""
    for name, value, choices in (
        ("tail", tail, get_args(Tail)),
        ("on_error", on_error, get_args(OnError)),
    ):
        if value not in choices:
            raise UsageError(f"{name}={value!r} is none of {', '.join(choices)}")
    if not isinstance(lookahead, int) or lookahead < 0:
        raise UsageError(f"lookahead={lookahead!r} must be a number of bytes, 0 for none")


def check_ranks(rank: int | None, world_size: int | None) -> None:
    """Refuse one without the other, and what are no numbers or no place among so many."""
    if (rank is None) != (world_size is None):
        raise UsageError(f"rank={rank} and world_size={world_size}: give both or neither")
    if rank is not None and world_size is not None:
        check_whole(0, rank=rank, world_size=world_size)
        if rank >= world_size:
            raise UsageError(f"rank={rank} is not in 0 to world_size-1={world_size - 1}")


def choose_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world size), where they are not given those of torch.distributed at present.

    Raises UsageError where the environment tells of several processes that are no group yet: each
    would take itself for the only one, and read everything.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    several = os.environ.get("WORLD_SIZE", "1")
    if several.isdecimal() and int(several) > 1:
        raise UsageError(
            f"WORLD_SIZE={several} in the environment, and torch.distributed has no process group: "
            "call torch.distributed.init_process_group() before the first pass or len(), or give "
            "the loader rank and world_size (0 and 1 where each process is to read everything)"
        )
    return 0, 1


def choose_nodes(world_size: int) -> int:
    """Return among how many machines the processes that share an epoch are divided evenly.

    torchrun tells how many there are, and all processes the same. What others set may differ from
    process to process, and samples would be lost: then each process is a machine of its own.
    """
    nodes = os.environ.get("GROUP_WORLD_SIZE", "")
    if nodes.isdecimal() and int(nodes) > 0 and world_size % int(nodes) == 0:
        return int(nodes)
    return world_size


def choose_workers(num_workers: int | str, device: torch.device) -> int:
    """Return how many workers make batches: a number, or "auto" by the cores there are.

    0, which a DataLoader takes, is one: somebody has to make them.
    """
    if isinstance(num_workers, int) and not isinstance(num_workers, bool) and num_workers >= 0:
        return max(1, num_workers)
    if num_workers != "auto":
        raise UsageError(
            f'num_workers={num_workers!r} must be "auto" or a whole number of at least 0'
        )
    share = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type != "cpu":
        share -= 1  # the trainer launches kernels from a core of its own
    return max(1, min(share, _MOST_WORKERS))


class EngineChoice(NamedTuple):
    """What a loader's workers are."""

    name: Literal["thread", "process"]
    threads: int
    """Of each worker process."""
    reason: str


def choose_engine(
    engine: str,
    workers: int,
    files: PackedFiles,
    pipeline: Pipeline | None,
    *,
    batch_size: int,
    fills: bool,
) -> EngineChoice:
    """Return what workers should be; UsageError for what is none or cannot be here.

    pipeline: what the workers do to images; None where they copy. fills: whether they have
    anything to do.
    """
    if engine not in get_args(EngineName):
        raise UsageError(f"engine={engine!r} is none of {', '.join(get_args(EngineName))}")
    has_sockets = sys.platform == "linux"
    if engine == "process" and not has_sockets:
        raise UsageError(
            f'engine="process" needs sockets that {sys.platform} does not have: use engine="thread"'
        )
    lock_us, image_us = _estimated_us(files, pipeline)
    each = 2 if workers > 1 and 2 * lock_us <= _BUSY * image_us else 1
    if engine == "thread":
        return EngineChoice("thread", each, "as asked")
    if engine == "process":
        return EngineChoice("process", each, "as asked")
    encoded = files.specs["images"].is_encoded
    why_threads = None
    held = (
        f"{workers} threads would hold Python's lock {min(workers * lock_us / image_us, 1):.0%} of "
        f"the time ({lock_us:.0f} of {image_us:.0f} µs an image)"
    )
    if not fills:
        why_threads = "the device does it all"
    elif workers <= _FEW:
        why_threads = f"so few as {workers} seldom wait for Python's lock"
    elif pipeline is None and not encoded:
        why_threads = "copying holds no lock"
    elif workers * lock_us <= _BUSY * image_us:
        why_threads = f"{held}, so that they seldom wait for it"
    elif batch_size * image_us <= _HAND_OVER_US:
        why_threads = (
            f"a batch takes {batch_size * image_us / 1000:.1f} ms, and handing it to processes "
            "about as long"
        )
    elif pipeline is not None and pipeline.uses_batch and not encoded:
        why_threads = "whole batches are mixed in this process"
    elif not has_sockets:
        why_threads = f"{sys.platform} lacks what processes need"
    elif pipeline is not None and (op := unknown_to_workers(pipeline)) is not None:
        why_threads = f"worker processes cannot import {op!r}"
    if why_threads is not None:
        return EngineChoice("thread", each, why_threads)
    if pipeline is not None and (own := _own_op(pipeline)) is not None:
        held = (
            f"{own!r} may hold Python's lock as long as it takes, and {workers} threads would wait"
        )
    return EngineChoice("process", each, held)


def _estimated_us(files: PackedFiles, pipeline: Pipeline | None) -> tuple[float, float]:
    """Return how long an image holds Python's lock, and how long it takes altogether, in µs."""
    spec = files.specs["images"]
    together = pipeline is None or (spec.is_fixed and spec.item_bytes <= SMALL)
    if pipeline is not None:  # those that are resized are taken one by one
        firsts = [op for plan in pipeline.plans for _, op in plan.first.ops]
        together = together and not any(op.resizes for op in firsts)
    probe = np.linspace(0, len(files) - 1, min(len(files), _PROBED)).astype(np.int64)
    stored = files.stored_shapes[probe].prod(axis=1, dtype=np.int64).mean() if len(files) else 0
    lock = _LOCK_SMALL_US if together and not spec.is_encoded else _LOCK_US[spec.encoding]
    took = lock + _DECODE_US[spec.encoding] * float(stored)
    if pipeline is None:
        return lock, took
    for view, (plan, (height, width, _)) in enumerate(
        zip(pipeline.plans, pipeline.out_shapes, strict=True)
    ):
        further = len(plan.all_stages) - 1 + (plan.floats is not None)
        held = further * _OP_LOCK_US + (_LOCK_US["raw"] if view else 0)
        lock += held
        took += held + (_CROP_US + further * _OP_US) * height * width
    return (lock if _own_op(pipeline) is None else took), took


def _own_op(pipeline: Pipeline) -> Op | None:
    """Return an op that is not h5feed's: nobody knows how long it holds Python's lock."""
    return next((op for op in pipeline.ops if not type(op).__module__.startswith("h5feed.")), None)


def block_length(files: PackedFiles) -> int:
    """Return how many items make about 8 MB, what a disk reads in one go without losing time."""
    probe = range(0, len(files), max(1, len(files) // 100))
    mean = files.item_bytes(probe).mean() if len(probe) else 1
    return max(1, round(_BLOCK_BYTES / max(1, mean)))


def choose_pipeline(
    files: PackedFiles,
    augment: Sequence[Op],
    *,
    views: int | Sequence[Any],
    antialias: Any,
    on: AugmentOn,
    transfer: DeviceTransfer,
) -> tuple[Pipeline | None, bool, str]:
    """Return the pipeline, bound; whether it runs on the device; and why.

    No pipeline where images are delivered as they are stored: no ops, and RGB of one size.
    """
    if on not in get_args(AugmentOn):
        raise UsageError(f'augment_on={on!r} is none of "cpu", "device" and "auto"')
    spec = files.specs["images"]
    one_size = spec.common_size is not None
    on_device, reason = _where(on, one_size, transfer, spec)
    pipeline = Pipeline(augment, antialias=antialias, views=views)
    if not augment and views == 1 and one_size and spec.encoding != "yuv420":
        return None, on_device, reason
    if pipeline.uses_batch and len(files.specs) > 1:
        raise UsageError(f"augment={pipeline.ops!r} mixes labels, and this file has masks instead")
    bind_pipeline(pipeline, files)
    return pipeline, on_device, reason


def bind_pipeline(pipeline: Pipeline, files: PackedFiles) -> None:
    """Tell the pipeline what images it gets; UsageError where it would leave several sizes."""
    spec = files.specs["images"]
    pipeline.bind(
        spec.common_size,
        encoding="yuv420" if spec.encoding == "yuv420" else "raw",
        num_classes=len(files.classes) or None,
    )


def compile_ops(pipeline: Pipeline | None, *, on_device: bool) -> CompiledBatch | None:
    """Have the pipeline's ops compiled, where there are any; UsageError where the CPU runs them."""
    if not on_device:
        raise UsageError(
            "compile=True is for ops that run on the device, and these run in the loader's "
            'threads: give augment_on="device", or leave compile out'
        )
    return None if pipeline is None else pipeline.compile_device()


def choose_files(files: PackedFiles, io: str, residency: str) -> PackedFiles:
    """Return the items, read in the way that `io` names; UsageError for a wrong `io`."""
    if io not in get_args(Io):
        raise UsageError(f"io={io!r} is none of {', '.join(get_args(Io))}")
    if io == "map":
        return files
    if residency != "stream":
        raise UsageError(
            f'io="read" reads each batch, and residency="{residency}" copies the mapped files '
            "beforehand: leave one of them out"
        )
    return files.reading()


def explain_decoding(files: PackedFiles, transfer: DeviceTransfer) -> str:
    """Return who decodes the images, and why."""
    spec = files.specs["images"]
    if not spec.is_encoded:
        return f"nobody: store={spec.encoding} is pixels"
    if transfer.device.type == "cpu":
        return "loader threads: batches stay on the CPU"
    # torchvision creates nvJPEG without NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION, and waits for
    # the device in every batch (its decode_jpegs_cuda.cpp); deprecated since torchvision 0.29.
    return (
        "loader threads: torchvision's GPU decoder repeats colors where libjpeg interpolates them, "
        "so that images would depend on the device; DaliLoader decodes on a GPU, interpolating"
    )


def leave_cores_to_loader(pipeline: Pipeline | None, threads: int) -> None:
    """Turn cv2's own threads off where they would compete with the loader's.

    They cost 15 % at 448x448 pixels on two cores, more on more, and cv2 can only be told so for
    the whole process. Below 256x256 it uses none, and is left alone.
    """
    if pipeline is not None and threads > 1:
        pixels = max(height * width for height, width, _ in pipeline.out_shapes)
        if pixels > _CV2_SPLITS and cv2.getNumThreads() > 1:
            cv2.setNumThreads(1)


def _where(
    on: AugmentOn, one_size: bool, transfer: DeviceTransfer, spec: FieldSpec
) -> tuple[bool, str]:
    stored = f"store={spec.encoding}, fit={spec.fit}"
    if on == "device" and not one_size:
        raise UsageError(
            f'augment_on="device" needs images of one size, and {stored} keeps each in its own: '
            'use augment_on="cpu", or pack with another fit'
        )
    if on != "auto":
        return on == "device", "as asked"
    if transfer.device.type == "cpu":
        return False, "batches stay on the CPU"
    if not one_size:
        return False, f"{stored} has images of several sizes"
    return True, f"{transfer.device} is faster at it than the loader's threads"


def check_whole(least: int | None = 1, /, **numbers: Any) -> None:
    """Refuse anything but ints of at least `least` (None: any); True and 2.0 are not ints here."""
    for name, value in numbers.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or (least is not None and value < least):
            limit = "" if least is None else f" of at least {least}"
            raise UsageError(f"{name}={value!r} must be a whole number{limit}")
