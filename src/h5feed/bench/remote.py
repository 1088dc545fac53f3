"""A subject's process seen from the process that measures: one question, one answer."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

__all__ = ["Remote", "SubjectError"]


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
