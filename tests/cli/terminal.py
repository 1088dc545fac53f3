"""A command that runs at a terminal, as its bars and its Ctrl-C need one."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios


class AtTerminal:
    """A running module whose stderr is a terminal of `columns`; stdout is a pipe.

    It leads a process group of its own, as a command does that a shell started.
    """

    def __init__(self, module, *args, columns=100):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))
        self.shown = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, args)],
            stderr=theirs,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # A shell has its background commands ignore it, and they pass that on.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)

    def read_until(self, text=None):
        """Read what it shows until `text` was seen, or to the end."""
        while text is None or text not in self.shown:
            try:
                more = os.read(self._ours, 4096)
            except OSError:  # the other end is closed
                more = b""
            if not more:
                assert text is None, self.shown.decode()
                return
            self.shown += more

    def press_ctrl_c(self):
        """Interrupt it and the processes it started, as a terminal does."""
        os.killpg(self.process.pid, 2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        self.process.stdout.close()
        os.close(self._ours)
