"""One subject in a process of its own, asked and answering in lines of JSON.

A process each, so that CPU seconds and memory are the subject's own and no loader's thread
settings reach another one. `Host` answers in that process, `Remote` asks from the one that
measures. The same lines are spoken by our own subjects and by the rivals' adapters in tools/peers,
whose Python is another one.

    {"do": "open", "params": {…}, "expected": {…}}   → {"dtype", "layout", "note", "bytes"}
    {"do": "verify", "seconds": s}                   → fields of measure.Check
    {"do": "warm", "seconds": s, "settle": s}        → fields of measure.Window, "idle"
    {"do": "epochs", "seconds": s}                   → {"rates", "cpu_per_image": of each, "idle"}
    {"do": "cold", "seconds": s}                     → fields of measure.Window
    {"do": "extra"}                                  → what the subject's own extra() tells
    {"do": "convert", "params": {…}}                 → whatever the adapter tells of its conversion
    {"do": "quit"}

An answer is {"ok": …} or {"error": "one line", "dishonest": bool, "trace": "…"}.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TextIO

from . import measure, system

__all__ = ["Host", "Remote", "SubjectError", "main", "serve"]

Factory = Callable[[Mapping[str, Any]], measure.Subject]
Converter = Callable[[Mapping[str, Any]], dict[str, Any]]


class Host:
    """Answers requests about one subject."""

    def __init__(self, factory: Factory, convert: Converter | None = None) -> None:
        self._factory = factory
        self._convert = convert
        self._subject: measure.Subject | None = None
        self._expected: measure.Expectation | None = None

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Do what `request` asks and return what is to be sent back."""
        verbs: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "open": self._open,
            "verify": self._verify,
            "warm": self._warm,
            "epochs": self._epochs,
            "cold": self._cold,
            "extra": self._extra,
            "convert": self._converted,
        }
        return verbs[request["do"]](request)

    def close(self) -> None:
        """Close the subject if one is open."""
        if self._subject is not None:
            self._subject.close()

    def _opened(self) -> tuple[measure.Subject, measure.Expectation]:
        if self._subject is None or self._expected is None:
            raise RuntimeError('no subject is open: ask {"do": "open"} first')
        return self._subject, self._expected

    def _open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._expected = measure.Expectation(**request["expected"])
        self._subject = subject = self._factory(request["params"])
        files = system.files_below(subject.files)
        return {
            "dtype": subject.dtype,
            "layout": subject.layout,
            "note": subject.note,
            "bytes": sum(file.stat().st_size for file in files),
        }

    def _verify(self, request: Mapping[str, Any]) -> dict[str, Any]:
        check = measure.verify(*self._opened(), request["seconds"])
        return asdict(check) | {"idle": measure.wait_until_idle()}

    def _warm(self, request: Mapping[str, Any]) -> dict[str, Any]:
        window = measure.warm_window(
            *self._opened(), seconds=request["seconds"], settle=request["settle"]
        )
        return asdict(window) | {"idle": measure.wait_until_idle()}

    def _epochs(self, request: Mapping[str, Any]) -> dict[str, Any]:
        found = measure.whole_epochs(*self._opened(), seconds=request["seconds"])
        rates, cpu = zip(*found, strict=True)
        return {"rates": rates, "cpu_per_image": cpu, "idle": measure.wait_until_idle()}

    def _cold(self, request: Mapping[str, Any]) -> dict[str, Any]:
        subject, _ = self._opened()
        return asdict(measure.cold_window(subject, seconds=request["seconds"]))

    def _extra(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """What only this kind of subject knows of itself: it may have an `extra()`."""
        found: dict[str, Any] = getattr(self._opened()[0], "extra", dict)()
        return found

    def _converted(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._convert is None:
            raise RuntimeError("this subject has nothing to convert")
        start = time.perf_counter()
        told = self._convert(request["params"])
        return {"seconds": time.perf_counter() - start} | told


def _answer_line(host: Host, line: str) -> dict[str, Any]:
    try:
        return {"ok": host.answer(json.loads(line))}
    except Exception as ex:
        # The process that asked decides whether one subject's failure ends the run.
        return {
            "error": f"{type(ex).__name__}: {_one_line(str(ex))}",
            "dishonest": isinstance(ex, measure.DishonestError),
            "trace": traceback.format_exc(),
        }


def _one_line(text: str) -> str:
    """First and last line: an exception passed on by a worker process says most in its last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"


def _own_stdout() -> TextIO:
    """Keep the pipe for answers and send everything that anybody prints to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(factory: Factory, convert: Converter | None = None) -> None:
    """Answer requests from stdin on stdout until told to quit or stdin ends."""
    host, answers = Host(factory, convert), _own_stdout()
    for line in sys.stdin:
        if json.loads(line)["do"] == "quit":
            break
        answers.write(json.dumps(_answer_line(host, line)) + "\n")
        answers.flush()
    host.close()


def main(arguments: list[str] | None = None) -> None:
    """Serve the factory named `module:attribute`: `python -m h5feed.bench.process NAME`."""
    (name,) = sys.argv[1:] if arguments is None else arguments
    module, _, attribute = name.partition(":")
    serve(getattr(importlib.import_module(module), attribute))
    # All is closed and flushed; taking torch apart would cost another half a second each.
    os._exit(0)


if __name__ == "__main__":
    main()


class SubjectError(Exception):
    """A subject could not do what it was asked; `dishonest`: it was caught at not doing it."""

    def __init__(self, message: str, *, dishonest: bool = False, trace: str = "") -> None:
        super().__init__(message)
        self.dishonest = dishonest
        self.trace = trace


class Remote:
    """A started host process. `send` and `receive` let several hosts work at the same time."""

    def __init__(self, command: Sequence[str]) -> None:
        # A file, not a pipe: a loader that prints much must not block on nobody reading it.
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [*command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def send(self, request: Mapping[str, Any]) -> None:
        """Ask without waiting for the answer."""
        assert self._process.stdin is not None
        # It may have died, or have been told to quit: receive() says why.
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def receive(self, timeout: float = 600.0) -> Any:
        """Return the answer to the oldest question.

        Raises:
            SubjectError: The subject failed, died, or was silent for `timeout` seconds.
        """
        assert self._process.stdout is not None
        killer = threading.Timer(timeout, self._process.kill)
        killer.daemon = True  # Ctrl-C may come before the `try`: it must not be waited for then
        killer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            killer.cancel()
        if not line:
            raise SubjectError(self._last_words(timeout))
        answer = json.loads(line)
        if "error" in answer:
            raise SubjectError(
                answer["error"], dishonest=answer["dishonest"], trace=answer["trace"]
            )
        return answer["ok"]

    def ask(self, request: Mapping[str, Any], timeout: float = 600.0) -> Any:
        """Send `request` and return its answer; raises as `receive` does."""
        self.send(request)
        return self.receive(timeout)

    def _last_words(self, timeout: float) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines() or ["it said nothing"]
        return f"its process ended (exit code {code}, allowed {timeout:.0f} s): {lines[-1]}"

    def close(self) -> None:
        """End the process: ask it to quit, and kill it if it does not within 10 s."""
        if self._stderr.closed:
            return
        self.send({"do": "quit"})
        try:
            self._process.communicate(timeout=10)
        except (subprocess.TimeoutExpired, ValueError):
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
