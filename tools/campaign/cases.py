"""One case of the campaign: a process of its own, a folder of its own, a seed, and a verdict.

A family is a function of a `Case`. It raises `Wrong` for a wrong result; a deadline, a signal, an
uncaught exception or a traceback in what any of its commands prints are failures without a word
of its own. Everything random comes from `case.random`, so that family and seed repeat a case.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import random
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from h5feed.cli import check, pack, show

if TYPE_CHECKING:
    from material import Kind, Material

__all__ = [
    "Case",
    "CaseResult",
    "Command",
    "Family",
    "Result",
    "Wrong",
    "at_nth_event",
    "check_manners",
    "limit_memory",
    "run_case",
    "wait_for",
]

WRONG, UNCAUGHT = 3, 4  # exit statuses of a case's process
DEADLINE = 120.0  # seconds; a case takes one or less, on slow and busy cores some more
PROGRAMS = {"pack-h5": pack.main, "check-h5": check.main, "show-h5": show.main}
TRACES = ("Traceback (most recent call last)", "Exception ignored in", "Fatal Python error")
_PIPE_BYTES = 1 << 20  # the most that may wait in a pipe; no command says as much
_PR_SET_PDEATHSIG = 1

Family = Callable[["Case"], None]


class Wrong(AssertionError):
    """What a case found wrong, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a command ended: exit status (negative: the signal), and what it printed."""

    status: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line on stderr."""
        return self.err.strip().rpartition("\n")[2]


@dataclass(slots=True)
class Case:
    """What a family is called with."""

    family: str
    seed: int
    folder: Path
    """Empty at first, the case's own; kept where the case fails."""
    material: Material
    deadline: float = DEADLINE
    """Seconds the case may take; each of its commands half as many."""
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.family} {self.seed}")

    def kind(self) -> Kind:
        """Return one of the ways to pack, with the file that it gives."""
        return self.material.kinds[self.random.choice(sorted(self.material.kinds))]

    def out(self) -> Path:
        """Return where to pack to: x.h5 in a folder of its own."""
        folder = self.folder / "out"
        folder.mkdir()
        return folder / "x.h5"

    def copy(self, name: str = "x.h5") -> tuple[Kind, Path]:
        """Return one of the ways to pack, and a copy of its file that may be damaged."""
        kind, path = self.kind(), self.folder / name
        shutil.copyfile(kind.path, path)
        return kind, path

    def workers(self) -> int:
        """Return how many workers are to pack."""
        return self.random.randint(0, 3)

    def note(self, text: object) -> None:
        """Write a line to what is kept of a case that fails."""
        print(text, flush=True)

    def start(
        self, program: str, *args: object, before: Callable[[], None] | None = None
    ) -> Command:
        """Start a command in a forked process; `before` sets limits or hooks there."""
        words = [str(arg) for arg in args]
        self.note(f"{program} {' '.join(words)}")
        return Command(self, program, words, before)

    def run(self, program: str, *args: object, before: Callable[[], None] | None = None) -> Result:
        """Run a command to its end; it has to end well or in one sentence."""
        result = self.start(program, *args, before=before).wait()
        check_manners(program, result)
        return result


class Command:
    """A command in a process group of its own, forked from this one: nothing is imported again."""

    def __init__(
        self, case: Case, program: str, words: Sequence[str], before: Callable[[], None] | None
    ) -> None:
        # Pipes, not files: a limit on the size of files is not to fall on what is said about it.
        pipes = [os.pipe(), os.pipe()]
        for _, write in pipes:
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._case, self._said = case, [read for read, _ in pipes]
        self.pid = os.fork()
        if not self.pid:
            try:
                _become(program, words, [write for _, write in pipes], before)
            finally:
                os._exit(70)
        for read, write in pipes:
            os.close(write)
            os.set_blocking(read, False)
        with suppress(OSError):  # the child does so, too; whoever is first
            os.setpgid(self.pid, self.pid)

    def wait(self) -> Result:
        """Wait for the end; Wrong where it does not come."""
        status = wait_for(self.pid, self._case.deadline / 2)
        if status is None:
            self.kill(signal.SIGABRT)  # faulthandler says where it hangs
            if wait_for(self.pid, 5) is None:
                self.kill()
            raise Wrong(f"a command hangs:\n{self._read(1)}")
        result = Result(status=status, out=self._read(0), err=self._read(1))
        self._case.note(f"status {status}\n{result.out}{result.err}")
        return result

    def kill(self, sig: int = signal.SIGKILL, *, group: bool = True) -> None:
        """Send a signal to the whole group, or to the first process alone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, sig) if group else os.kill(self.pid, sig)

    def workers(self) -> list[int]:
        """Return its children."""
        with suppress(OSError):
            return [
                int(p)
                for p in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            ]
        return []

    def stragglers(self) -> list[int]:
        """Return the processes of its group that still run, after a generous wait for their end."""
        until = time.monotonic() + self._case.deadline / 4
        while (found := _members(self.pid)) and time.monotonic() < until:
            time.sleep(0.005)
        return found

    def _read(self, stream: int) -> str:
        parts = []
        with suppress(BlockingIOError):  # a straggler holds the other end
            while part := os.read(self._said[stream], _PIPE_BYTES):
                parts.append(part)
        os.close(self._said[stream])
        return b"".join(parts).decode(errors="surrogateescape")


def _become(
    program: str, words: Sequence[str], pipes: Sequence[int], before: Callable[[], None] | None
) -> NoReturn:
    """Turn this forked process into a command."""
    status = 70
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        for number, file in zip((1, 2), pipes, strict=True):
            os.dup2(file, number)
            os.close(file)
        _write_to_streams()
        if before is not None:
            before()
        status = PROGRAMS[program](words)
    except SystemExit as ex:
        status = ex.code if isinstance(ex.code, int) else 1
    except BaseException:
        traceback.print_exc()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


def _write_to_streams() -> None:
    """Lead Python's streams, and word of a crash, to what the numbers 1 and 2 are now."""
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)


def check_manners(program: str, result: Result) -> None:
    """Refuse traces, signals, strange statuses and output, and failures without a sentence."""
    if any(trace in result.err for trace in TRACES):
        raise Wrong(f"{program} shows a traceback (status {result.status}):\n{result.err}")
    if result.status < 0:
        raise Wrong(f"{program} dies of {signal.Signals(-result.status).name}:\n{result.err}")
    if result.status not in (0, 1, 2, 130):
        raise Wrong(f"{program} ends with status {result.status}:\n{result.err}")
    for name, text in (("stdout", result.out), ("stderr", result.err)):
        strange = {c for c in text if not c.isprintable() and c not in "\n\r\t"}
        if strange:
            raise Wrong(f"{program} prints {sorted(map(ascii, strange))} on {name}")
    said = result.err + (result.out if program == "check-h5" else "")  # its findings are output
    if result.status and not said.strip():
        raise Wrong(f"{program} fails with status {result.status} and says nothing")
    if result.status == 1 and len(result.last) > 2000:
        raise Wrong(f"{program} fails with {len(result.last)} characters in one line")


def at_nth_event(number: int, prefix: str, act: Callable[[], None]) -> None:
    """Call `act` when Python is about to open, rename, cut or remove a file for the n-th time."""
    left, me = number, os.getpid()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.truncate", "os.remove", "fcntl.flock"):
            file = args[0]
            path = os.fsdecode(file) if isinstance(file, str | bytes | os.PathLike) else prefix
            if path.startswith(prefix) and os.getpid() == me:
                left -= 1
                if left == -1:
                    act()

    sys.addaudithook(hook)


def limit_memory(more: int) -> None:
    """Let this process, and each that it forks, map at most `more` bytes more than it has."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """A case's verdict."""

    family: str
    seed: int
    seconds: float
    failure: str | None
    """What went wrong, the first line being the sentence; None for a case that passed."""


def run_case(
    name: str, family: Family, seed: int, folder: Path, material: Material, deadline: float
) -> CaseResult:
    """Run one case in a forked process; its folder stays where it fails."""
    began = time.monotonic()
    folder.mkdir(parents=True)
    said = folder / "said.txt"
    child = os.fork()
    if not child:
        try:
            _serve(Case(name, seed, folder, material, deadline), family, said)
        finally:
            os._exit(UNCAUGHT)
    status = wait_for(child, deadline + 10)  # by then it has said where it hangs, and left
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    failure = _judge(status, said.read_text(errors="replace"))
    if failure is None:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - began
    return CaseResult(family=name, seed=seed, seconds=seconds, failure=failure)


def _serve(case: Case, family: Family, said: Path) -> NoReturn:
    """Run `family` in this forked process, and leave it with the verdict as status."""
    status = UNCAUGHT
    try:
        os.setsid()
        file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)
        _write_to_streams()
        faulthandler.dump_traceback_later(case.deadline, exit=True)
        family(case)
        status = 0
    except Wrong as ex:
        print(f"WRONG: {ex}", flush=True)
        status = WRONG
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _judge(status: int | None, said: str) -> str | None:
    if status == 0 and not any(trace in said for trace in TRACES):
        return None
    if status is None or "Timeout (" in said:
        first = "hangs"
    elif status < 0:
        first = f"dies of {signal.Signals(-status).name}"
    elif status == WRONG:
        return "WRONG: ".join(reversed(said.partition("WRONG: ")[::2])).strip()
    else:
        last = said.strip().rpartition("\n")[2]
        first = f"shows a traceback: {last}"
    return f"{first}\n{said}"


def wait_for(pid: int, seconds: float) -> int | None:
    """Return a child's exit status (negative: the signal), or None where it still runs then."""
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], seconds)[0]:
            return None
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _members(group: int) -> list[int]:
    """Return the processes of a group that run; zombies wait for their parent and do nothing."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, member = path.read_text().rpartition(")")[2].split()[:3]
            if int(member) == group and state != "Z":
                found.append(int(path.parent.name))
    return found
