"""Packing that is killed, resumed, changed beneath, damaged, or done by several at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import time
import zlib
from pathlib import Path
from typing import Any

from cases import Case, Command, Result, Wrong, at_nth_event, check_manners
from material import Kind, make_image, sha256

__all__ = ["changed_source", "check_alone", "check_out", "concurrent", "damaged_journal", "kill"]


def kill(case: Case) -> None:
    """Killed once to three times, anywhere; resumed by other worker counts; the same bytes."""
    kind, out = _kind(case), _out(case)
    for _ in range(case.random.randint(1, 3)):
        _interrupt(case, kind, out)
        if out.exists() and sha256(out) != kind.sha256:
            raise Wrong("a killed run left another file at OUT")
    _resume(case, kind, out)


def changed_source(case: Case) -> None:
    """What changed since the kill is refused, or does not matter; beginning anew takes it in."""
    source, out = case.folder / "images", _out(case)
    kind = case.material.kinds[case.random.choice(["raw", "keep", "jpeg", "original"])]
    shutil.copytree(kind.source, source, copy_function=shutil.copy2)
    args = (source, *kind.options)
    _interrupt(case, kind, out, source=source)
    if out.exists():
        return
    change = case.random.choice([_add, _remove, _touch, _rewrite, _rename, _options])
    begun = _has_journal(out)
    options = change(case, source)
    case.note(f"{change.__name__} {options}")
    result = case.run("pack-h5", *args, out, *options, "--resume", "--workers", _workers(case))
    if result.status == 0 and begun:
        raise Wrong("resumed over another source or other options as if nothing had changed")
    if result.status and not begun:
        raise Wrong(f"nothing was begun, and --resume does not begin: {result.err}")
    if result.status:
        case.run("pack-h5", *args, out, *options, "--overwrite", "--workers", _workers(case))
    fresh = out.with_name("fresh.h5")
    case.run("pack-h5", *args, fresh, *options, "--workers", 0)
    if sha256(fresh) != sha256(out):
        raise Wrong("after the change, beginning anew gave other bytes than a fresh run")
    fresh.unlink()
    check_alone(out)


def damaged_journal(case: Case) -> None:
    """What an interrupted run left is cut, flipped, forged or swapped: right bytes or a refusal."""
    kind, out = _kind(case), _out(case)
    _interrupt(case, kind, out, how=_at_event)
    left = [path for path in sorted(out.parent.iterdir()) if path != out]
    if not left:
        return
    victim = case.folder / "victim"
    victim.write_bytes(b"precious")
    for path in case.random.sample(left, min(len(left), case.random.randint(1, 2))):
        damage = case.random.choice([_cut, _flip, _erase, _swap, _link, _stretch, _forge, _fifo])
        case.note(f"{damage.__name__} {path.name}")
        damage(case, path, victim)
    result = case.run("pack-h5", *kind.args, out, "--resume", "--workers", _workers(case))
    check_out(kind, out, result)
    again = case.run("pack-h5", *kind.args, out, "--overwrite", "--workers", _workers(case))
    check_out(kind, out, again)
    if victim.read_bytes() != b"precious":
        raise Wrong("a link at a temporary name was written through")


def concurrent(case: Case) -> None:
    """Several runs at one OUT, some killed: whoever says it is done has made the file."""
    kinds, out = [_kind(case), _kind(case)], _out(case)
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


def _interrupt(
    case: Case, kind: Kind, out: Path, *, source: Path | None = None, how: Any = None
) -> None:
    """Start a run, or go on with one, and end it somewhere on its way."""
    how = how or case.random.choice([_at_event, _at_event, _at_event, _at_a_moment])
    args = (source or kind.source, *kind.options)
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

    return case.start("pack-h5", *args, out, "--workers", _workers(case), before=before)


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
    command = case.start("pack-h5", *args, out, "--workers", _workers(case))
    time.sleep(delay)
    workers = command.workers()
    if whom == "worker" and workers:
        os.kill(case.random.choice(workers), signal.SIGKILL)
    else:
        command.kill(sig, group=whom == "group")
    return command


# What changes, and what is damaged -----------------------------------------------------------


def _an_image(case: Case, source: Path) -> Path:
    return case.random.choice(sorted(source.rglob("*.jpg")))


def _add(case: Case, source: Path) -> tuple[str, ...]:
    make_image(40, 40, 99).save(_an_image(case, source).with_name("new.jpg"))
    return ()


def _remove(case: Case, source: Path) -> tuple[str, ...]:
    _an_image(case, source).unlink()
    return ()


def _touch(case: Case, source: Path) -> tuple[str, ...]:
    os.utime(_an_image(case, source), (1, case.random.randint(1, 10**9)))
    return ()


def _rewrite(case: Case, source: Path) -> tuple[str, ...]:
    make_image(50, 40, 98).save(_an_image(case, source))
    return ()


def _rename(case: Case, source: Path) -> tuple[str, ...]:
    path = _an_image(case, source)
    path.rename(path.with_name("renamed.jpg"))
    return ()


def _options(case: Case, source: Path) -> tuple[str, ...]:
    return ("--background", "1", "2", "3")


def _cut(case: Case, path: Path, victim: Path) -> None:
    if path.exists():
        size = path.stat().st_size
        most = case.random.choice([1, 40, 4096, size])
        os.truncate(path, max(0, size - case.random.randint(0, most)))


def _stretch(case: Case, path: Path, victim: Path) -> None:
    with path.open("ab") as file:
        file.write(case.random.randbytes(case.random.choice([1, 16, 5000])))


def _flip(case: Case, path: Path, victim: Path) -> None:
    data = bytearray(path.read_bytes() if path.exists() else b"")
    for _ in range(case.random.randint(1, 4)):
        if data:
            data[case.random.randrange(len(data))] ^= 1 << case.random.randrange(8)
    path.write_bytes(data)


def _erase(case: Case, path: Path, victim: Path) -> None:
    path.unlink(missing_ok=True)


def _swap(case: Case, path: Path, victim: Path) -> None:
    files = [other for other in sorted(path.parent.iterdir()) if other.is_file()]
    other = case.random.choice(files)
    path.write_bytes(other.read_bytes() if case.random.random() < 0.7 else b"something else")


def _link(case: Case, path: Path, victim: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(case.random.choice([victim, victim.with_name("nowhere")]))


def _fifo(case: Case, path: Path, victim: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _forge(case: Case, path: Path, victim: Path) -> None:
    """Change a number or a word of the journal's JSON and make its checksums right again."""
    frame, data, made = struct.Struct("<4sIII"), path.read_bytes(), b""
    at, frames = 0, []
    while len(data) - at >= frame.size and data[at : at + 4] == b"h5fj":
        _, text, rows, _ = frame.unpack_from(data, at)
        at += frame.size + text + rows
        frames.append((data[at - text - rows : at - rows], data[at - rows : at]))
    chosen = case.random.randrange(len(frames)) if frames else -1
    for number, (text_bytes, row_bytes) in enumerate(frames):
        if number == chosen:
            text_bytes = _edit(case, text_bytes)
        check = zlib.crc32(row_bytes, zlib.crc32(text_bytes))
        made += frame.pack(b"h5fj", len(text_bytes), len(row_bytes), check) + text_bytes + row_bytes
    if made:
        path.write_bytes(made)


def _edit(case: Case, text: bytes) -> bytes:
    facts = json.loads(text)
    name = case.random.choice(sorted(facts))
    strange: list[Any] = [None, -1, 0, 5, 2**62, "x", [], {}, [[1]], 1.5, True, ["a", 2, None]]
    how = case.random.random()
    if how < 0.2:
        del facts[name]
    elif how < 0.3:
        facts["more"] = 1
    elif how < 0.4:
        return case.random.choice([b"[]", b"1", b"null", b"{", b"[" * 100_000, b"\xff"])
    else:
        facts[name] = case.random.choice(strange)
    return json.dumps(facts).encode()


# What has to hold ----------------------------------------------------------------------------


def _kind(case: Case) -> Kind:
    return case.material.kinds[case.random.choice(sorted(case.material.kinds))]


def _out(case: Case) -> Path:
    folder = case.folder / "out"
    folder.mkdir()
    return folder / "x.h5"


def _workers(case: Case) -> int:
    return case.random.randint(0, 3)


def _has_journal(out: Path) -> bool:
    path = out.with_name("x.h5.partial.journal")
    return path.exists() and path.stat().st_size > 0


def _resume(case: Case, kind: Kind, out: Path) -> None:
    if out.exists() and not _has_journal(out):
        return check_alone(out)
    result = case.run("pack-h5", *kind.args, out, "--resume", "--workers", _workers(case))
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
