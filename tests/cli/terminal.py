"""A program on a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time
from collections.abc import Mapping, Sequence


class Terminal:
    """Starts a program that believes to sit at a terminal; types and reads."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], term: str = "dumb") -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], list(command), {**env, "TERM": term, "COLUMNS": "200"})
        self.text = ""
        self.read_until = 0

    def expect(self, pattern: str, timeout: float = 60) -> str:
        """Read until `pattern` shows up after what was expected before; what stood before it and itself."""
        deadline = time.monotonic() + timeout
        while not (found := re.search(pattern, self.text[self.read_until :])):
            if not self._read(deadline):
                raise AssertionError(f"no {pattern!r} in {self.text[self.read_until :]!r}")
        start = self.read_until
        self.read_until += found.end()
        return self.text[start : self.read_until]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self, pattern: str) -> None:
        """Ctrl-C until `pattern` shows up: CPython's input() loses one that comes while it switches the terminal to
        readline, right after the prompt."""
        for _ in range(20):
            self.type("\x03")
            try:
                self.expect(pattern, timeout=3)
                return
            except AssertionError:
                continue
        raise AssertionError(f"no {pattern!r} after Ctrl-C")

    def end(self) -> int:
        """Wait until the program ends; its exit code. AssertionError, and the program is killed, where it does not."""
        deadline = time.monotonic() + 60
        while self._read(deadline):
            pass
        if time.monotonic() >= deadline:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise AssertionError(f"the program did not end; it wrote {self.text[self.read_until :]!r}")
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code

    def _read(self, deadline: float) -> bool:
        if not select.select([self.fd], [], [], max(0, deadline - time.monotonic()))[0]:
            return False
        try:
            read = os.read(self.fd, 65536)
        except OSError:  # the other end is gone
            return False
        self.text += read.decode(errors="replace")
        return bool(read)
