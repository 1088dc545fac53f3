"""Several processes that train one model: torchrun's, or our own.

One process a device with DistributedDataParallel (Li et al. 2020, arXiv:2006.15704), which
exchanges gradients while it computes them; DataParallel copies the model at every step. With
--fsdp, fully_shard (Zhao et al. 2023, arXiv:2304.11277) instead: a process holds its share of
each weight, and gathers a block's weights while it computes that block.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, start_processes
from torch.nn.parallel import DistributedDataParallel

from h5feed.errors import H5FeedError, UsageError
from h5feed.train.config import DistributedConfig, TrainConfig

__all__ = [
    "World",
    "check_fsdp",
    "choose_device",
    "gathered",
    "is_main_process",
    "is_shared",
    "join_world",
    "last_only",
    "shared_out",
    "start",
    "under_torchrun",
]

Result = TypeVar("Result")

_PATIENCE = 10.0
"""Seconds for the other processes to end after one was interrupted."""

_GLOO_REST = 0.2
"""Seconds for gloo's threads to drop their last work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A process among those that train together.

    >>> world = World(rank=0, size=1, device=torch.device("cpu"))
    >>> world.is_main, world.gather("a"), world.highest(3)
    (True, ['a'], 3)
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def add_up(self, values: Tensor) -> Tensor:
        """Sum `values` over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def highest(self, value: int) -> int:
        """Return the highest `value` of all processes; waits for the device."""
        if self.size == 1:
            return value
        values = torch.tensor(value, device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return int(values)

    def most(self, batches: Any) -> int:
        """Return the largest len(batches) of all processes; UsageError where one has none."""
        counts: list[int] = self.gather(len(batches))
        if 0 in counts:
            raise UsageError(
                f"--val has no image for process {counts.index(0)} of {self.size}, and with --fsdp "
                "each needs one: give more images, or start fewer processes"
            )
        return max(counts)

    def align(self, net: nn.Module) -> None:
        """Give all processes the main one's buffers: each has batch statistics of its own."""
        if self.size > 1:
            for buffer in net.buffers():
                dist.broadcast(buffer, 0)

    def gather(self, value: Any) -> list[Any]:
        """Return every process's `value` (anything that pickles), by rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def wrap(self, net: nn.Module, config: DistributedConfig, *, parts: int) -> nn.Module:
        """Return `net` as it is to be called in training: in DDP when there are several.

        With several `parts` a batch, no static graph: under `no_sync` torch runs into an internal
        assertion, and past it exchanges no gradients (pytorch #143580, #187732).
        """
        if self.size == 1:
            return net
        return DistributedDataParallel(
            net,
            device_ids=None if self.device.type == "cpu" else [self.device],
            static_graph=config.static_graph and parts == 1,
            gradient_as_bucket_view=config.bucket_view,
        )

    def share_out(self, net: nn.Module, blocks: Iterable[nn.Module]) -> nn.Module:
        """Leave this process its share of `net`, which comes on the CPU and goes to the device.

        In place, block by block: at no time is more than one whole on the device.
        """
        try:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
        except ImportError as ex:
            raise UsageError(
                f"--fsdp needs torch 2.6 or later, and this is {torch.__version__}: leave it out"
            ) from ex
        mesh = init_device_mesh(self.device.type, (self.size,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net

    def synchronize_norms(self, net: nn.Module, config: DistributedConfig) -> nn.Module:
        """Make batch norms see all processes' images, where asked for; UsageError on the CPU."""
        if not config.sync_batchnorm:
            return net
        if self.device.type == "cpu":
            raise UsageError(
                "--sync-batchnorm needs GPUs: torch has no SyncBatchNorm on the CPU. Leave it "
                "out, or take a model without batch norm"
            )
        synchronized: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # type: ignore[no-untyped-call]
        return synchronized


def check_fsdp(config: TrainConfig, world: World, precision: str) -> None:
    """Raise UsageError where --fsdp cannot be had; it always can be left out."""
    if not config.distributed.fsdp:
        return
    if world.size == 1:
        raise UsageError(
            "--fsdp shares a model out among several processes, and this is one: add --gpus N, or "
            "start it by torchrun"
        )
    speed, optimizer = config.speed, config.optim.optimizer
    conflicts = {
        "--ema": config.recipe.ema > 0,
        "--compile": speed.compile != "off",
        "--scoring-backend": speed.scoring_backend != "off",
        "--precision fp16": precision == "fp16",
        f"--optimizer {optimizer}": optimizer not in ("adamw", "sgd"),
        "--debug gradcheck": config.debug.debug == "gradcheck",
    }
    for switch, given in conflicts.items():
        if given:
            raise UsageError(f"--fsdp does not go with {switch}: leave one of them out")


def is_shared(tensor: Tensor) -> bool:
    """Whether this process holds a share of `tensor`: a DTensor, which torch 2.4 hides."""
    return hasattr(tensor, "to_local")


def gathered(state: Any) -> Any:
    """Return a state with its shared-out tensors whole, on the CPU of the main process alone.

    All processes call it together; elsewhere None stands for them.
    """
    if isinstance(state, Tensor) and is_shared(state):
        whole = state.full_tensor()  # type: ignore[attr-defined]
        return whole.cpu() if dist.get_rank() == 0 else None
    if isinstance(state, dict):
        return {name: gathered(value) for name, value in state.items()}
    if isinstance(state, list):
        return [gathered(value) for value in state]
    return state


def shared_out(whole: Tensor, like: Tensor) -> Tensor:
    """Return `whole` as `like` is: shared out as that is, or as it is."""
    if not is_shared(like) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    shared: Any = like
    return distribute_tensor(whole, shared.device_mesh, shared.placements)


def last_only(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Exchange gradients in the last part of a batch alone."""
    if last or not hasattr(model, "no_sync"):
        return nullcontext()
    return model.no_sync()  # type: ignore[no-any-return, operator]


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device for --device `name`; UsageError where there is none such.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as ex:
        raise UsageError(f"--device {name!r} is not a device: cpu, cuda, cuda:N or auto") from ex
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= torch.cuda.device_count():
            needed = f"{index + 1} GPUs" if index else "a GPU"
            raise UsageError(
                f"--device {name} (process {local_rank}) needs {needed}, and torch sees "
                f"{torch.cuda.device_count() or 'none'}"
            )
        return torch.device("cuda", index)
    return device


def under_torchrun() -> bool:
    """Whether this process was started by torchrun or the like."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main_process() -> bool:
    """Whether this process speaks for all: rank 0 under torchrun, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Take this process's place among torchrun's, by its environment; alone without it.

    A process group that exists already is used and left in place, so that several runs can
    follow one another: a second one at the same address may meet what is left of the first.

    >>> with join_world("cpu") as world:
    ...     world.rank, world.size, world.is_main
    (0, 1, True)
    """
    if not under_torchrun():
        chosen = choose_device(device)
        with _current(chosen):
            yield World(rank=0, size=1, device=chosen)
        return
    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    with _current(chosen), _process_group(chosen):
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=chosen)


@contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        yield
        if device.type == "cpu":
            dist.barrier()
            # gloo's threads drop what they reduced last only now, and need Python's lock for it:
            # one that still waits for it when the interpreter ends would abort the process.
            time.sleep(_GLOO_REST)
    finally:
        dist.destroy_process_group()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def start(function: Callable[[Any], Result], config: Any, processes: int) -> Result:
    """Run `function(config)` in `processes` new processes that form a world.

    Returns what rank 0 returns; raises the first H5FeedError that any of them raises, or the
    KeyboardInterrupt or SystemExit of rank 0. Signals to this process alone reach them, too.
    """
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    # They meet in a store of this process, which holds its port from now on: none that was free a
    # moment ago and is another program's when rank 0 has started.
    meeting = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    started = start_processes(  # type: ignore[no-untyped-call]
        _process,
        args=(function, config, processes, meeting.port, results),
        nprocs=processes,
        join=False,
        start_method="spawn",
    )
    try:
        with _passed_on(started.processes):
            while not started.join():
                pass
    except ProcessExitedException as ex:
        said = None if results.empty() else results.get()
        raise said if isinstance(said, BaseException) else ex from None
    except BaseException:  # a signal to this process alone must not leave the others training
        _end(started.processes)
        raise
    result = results.get()
    if isinstance(result, BaseException):
        raise result
    return result  # type: ignore[no-any-return]


@contextmanager
def _passed_on(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Send signals on to `processes`, which decide what becomes of them.

    A second Ctrl-C or SIGTERM does here what it would have done without this.
    """
    before: dict[int, Any] = {}

    def pass_on(number: int, _: object) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)
        if number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
            if (number := getattr(signal, name, None)) is not None:
                before[number] = signal.signal(number, pass_on) or signal.SIG_DFL
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(processes: Sequence[BaseProcess]) -> None:
    """Interrupt processes as Ctrl-C does; those that do not end by themselves are killed."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGINT)
    patience = time.monotonic() + _PATIENCE
    for process in processes:
        process.join(max(0.0, patience - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _process(
    rank: int, function: Callable[[Any], Any], config: Any, size: int, port: int, results: Any
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # as under torchrun: the store is there already
    )
    if os.name == "posix":
        os.setpgrp()  # a terminal's Ctrl-C reaches them once, through the process that started them
    try:
        result: Any = function(config)
    except H5FeedError as ex:
        results.put(ex)
        raise SystemExit(1) from ex
    except (KeyboardInterrupt, SystemExit) as ex:
        result = ex
    if rank == 0:
        results.put(result)
