"""Packing that is killed and resumed, or done by several at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from cases import Case, Command, Result, Wrong, at_nth_event, check_manners
from material import Kind, sha256

__all__ = ["check_alone", "check_out", "concurrent", "kill"]


def kill(case: Case) -> None:
    """Killed once to three times, anywhere; resumed by other worker counts; the same bytes."""
    kind, out = case.kind(), case.out()
    for _ in range(case.random.randint(1, 3)):
        _interrupt(case, kind, out)
        if out.exists() and sha256(out) != kind.sha256:
            raise Wrong("a killed run left another file at OUT")
    _resume(case, kind, out)


def concurrent(case: Case) -> None:
    """Several runs at one OUT, some killed: whoever says it is done has made the file."""
    kinds, out = [case.kind(), case.kind()], case.out()
    running: list[tuple[Kind, Command]] = []
    for _ in range(case.random.randint(2, 4)):
        kind = case.random.choice(kinds)
        flag = case.random.choice(
            [(), ("--overwrite",), ("--resume",), ("--resume", "--overwrite")]
        )
        command = case.start(
            "pack-h5", *kind.args, out, *flag, "--workers", case.random.randint(0, 2)
        )
        running.append((kind, command))
        time.sleep(case.random.choice([0.0, 0.0, case.random.uniform(0, 0.2)]))
    victim = case.random.choice(running)[1] if case.random.random() < 0.3 else None
    if victim is not None:
        time.sleep(case.random.uniform(0, 0.3))
        victim.kill()
    results = [(kind, command, command.wait()) for kind, command in running]
    for _, command, result in results:
        if command is not victim or result.status != -signal.SIGKILL:
            check_manners("pack-h5", result)
    done = {kind.sha256 for kind, _, result in results if result.status <= 0}
    if out.exists() and sha256(out) not in done:
        raise Wrong("several runs at once left a file that none of them makes")
    if not out.exists() and any(result.status == 0 for _, _, result in results):
        raise Wrong("a run said it was done, and OUT is not there")
    last = case.run("pack-h5", *kinds[0].args, out, "--overwrite", "--workers", 0)
    check_out(kinds[0], out, last, done=True)


# How a run is interrupted --------------------------------------------------------------------


def _interrupt(case: Case, kind: Kind, out: Path) -> None:
    """Start a run, or go on with one, and end it somewhere on its way."""
    how = case.random.choice([_at_event, _at_event, _at_event, _at_a_moment])
    args = kind.args
    if _has_journal(out):
        args += ("--resume",)
    elif out.exists():
        return
    elif out.with_name("x.h5.partial").exists():
        args += (case.random.choice(["--resume", "--overwrite"]),)
    command = how(case, args, out)
    result = command.wait()
    if left := command.stragglers():
        raise Wrong(f"the workers {left} outlive a run that ended with {result.status}")
    if result.status not in (-signal.SIGKILL, -signal.SIGTERM):
        check_manners("pack-h5", result)
        if result.status and "worker" not in result.err and "interrupted" not in result.err:
            raise Wrong(f"an undisturbed run fails: {result.err}")


def _at_event(case: Case, args: tuple[Any, ...], out: Path) -> Command:
    """Have the run kill itself, or all of its group, at the n-th thing it does beside OUT."""
    number = case.random.choice([*range(16), case.random.randint(10, 60)])
    group, sig = (
        case.random.random() < 0.5,
        case.random.choice([signal.SIGKILL] * 4 + [signal.SIGINT]),
    )
    case.note(f"{sig.name} at event {number}, {group=}")

    def before() -> None:
        at_nth_event(number, str(out), lambda: _end_myself(sig, group=group))

    return case.start("pack-h5", *args, out, "--workers", case.workers(), before=before)


def _end_myself(sig: int, *, group: bool) -> None:
    if group:
        os.killpg(0, sig)
    else:
        os.kill(os.getpid(), sig)


def _at_a_moment(case: Case, args: tuple[Any, ...], out: Path) -> Command:
    """Kill the run, one of its workers or all of its group, after some time."""
    whom = case.random.choice(["run", "worker", "group"])
    sig = case.random.choice([signal.SIGKILL] * 3 + [signal.SIGINT, signal.SIGTERM])
    delay = case.random.uniform(0, 0.35)
    case.note(f"{sig.name} to the {whom} after {delay:.3f} s")
    command = case.start("pack-h5", *args, out, "--workers", case.workers())
    time.sleep(delay)
    workers = command.workers()
    if whom == "worker" and workers:
        os.kill(case.random.choice(workers), signal.SIGKILL)
    else:
        command.kill(sig, group=whom == "group")
    return command


# What has to hold ----------------------------------------------------------------------------


def _has_journal(out: Path) -> bool:
    path = out.with_name("x.h5.partial.journal")
    return path.exists() and path.stat().st_size > 0


def _resume(case: Case, kind: Kind, out: Path) -> None:
    if out.exists() and not _has_journal(out):
        return check_alone(out)
    result = case.run("pack-h5", *kind.args, out, "--resume", "--workers", case.workers())
    return check_out(kind, out, result, done=True)


def check_out(kind: Kind, out: Path, result: Result, *, done: bool = False) -> None:
    """Refuse an OUT that is not what `result` promises."""
    if result.status == 0 and (not out.exists() or sha256(out) != kind.sha256):
        raise Wrong("a run exits with 0, and OUT does not have the bytes of an undisturbed run")
    if out.exists() and sha256(out) != kind.sha256:
        raise Wrong("OUT is not the file of an undisturbed run")
    if done and result.status:
        raise Wrong(f"what was interrupted cannot be finished: {result.err}")
    if result.status == 0 and done:
        check_alone(out)


def check_alone(out: Path) -> None:
    """Refuse what a finished run has left beside OUT."""
    if (found := sorted(path.name for path in out.parent.iterdir())) != [out.name]:
        raise Wrong(f"besides OUT there are left: {found}")
