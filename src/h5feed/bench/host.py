"""One subject in a process of its own, asked and answering in lines of JSON.

A process each, so that CPU seconds and memory are the subject's own and no loader's thread
settings reach another one. The same lines are spoken by our own subjects and by the rivals'
adapters in tools/peers, whose Python is another one.

    {"do": "open", "params": {…}, "expected": {…}}   → {"dtype", "layout", "note", "bytes"}
    {"do": "verify", "seconds": s}                   → fields of measure.Check
    {"do": "warm", "seconds": s, "settle": s}        → fields of measure.Window, "idle"
    {"do": "epochs", "seconds": s}                   → {"rates": images per second of each, "idle"}
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
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TextIO

from . import cache, measure

__all__ = ["Host", "main", "serve"]

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
        expected = dict(request["expected"])
        counts = expected.get("label_counts")
        expected["label_counts"] = None if counts is None else tuple(counts)
        self._expected = measure.Expectation(**expected)
        self._subject = subject = self._factory(request["params"])
        files = cache.files_below(subject.files)
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
        rates = measure.whole_epochs(*self._opened(), seconds=request["seconds"])
        return {"rates": rates, "idle": measure.wait_until_idle()}

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
    """Serve the factory named `module:attribute`: `python -m h5feed.bench.host NAME`."""
    (name,) = sys.argv[1:] if arguments is None else arguments
    module, _, attribute = name.partition(":")
    serve(getattr(importlib.import_module(module), attribute))
    # All is closed and flushed; taking torch apart would cost another half a second each.
    os._exit(0)


if __name__ == "__main__":
    main()
