"""What the commands write: answers to standard output, everything about them to standard error. Knows no engine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.loading.progress import Progress, silent

if TYPE_CHECKING:
    import rich.progress

PIPE_CLOSED = 141
"""Exit code where the reader of standard output went away: what the shell reports for SIGPIPE."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def out(text: str) -> None:
    """Write to standard output at once.

    Control characters other than newline and tab do not reach a terminal: a model's answer must not move its cursor.
    A reader that went away ends the program quietly. HeadraceError where it cannot be written, as on a full disk.
    """
    try:
        sys.stdout.write(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        if isinstance(error, BrokenPipeError):
            raise SystemExit(PIPE_CLOSED) from None
        raise HeadraceError(f"cannot write to standard output: {error.strerror}") from None


def note(text: str) -> None:
    """A line beside the answer, on standard error; dim on a terminal."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    Console(stderr=True, highlight=False).print(text, style="dim", markup=False, soft_wrap=True)


def fail(text: str) -> None:
    """An error, in one line on standard error."""
    print("error:", " ".join(text.split()), file=sys.stderr, flush=True)


class Bars:
    """A `Progress` that draws a bar on standard error for the task under way, and wipes it off when that is done."""

    def __init__(self) -> None:
        self._task: str | None = None
        self._done: set[str] = set()
        self._drawn: rich.progress.Progress | None = None

    def __call__(self, task: str, done: int, total: int) -> None:
        if task in self._done:
            return
        if task != self._task or self._drawn is None:
            self.close()
            self._task, self._drawn = task, _bar(counted=total > 0)
            self._drawn.add_task(task, total=total or None)
            self._drawn.start()
        self._drawn.update(self._drawn.task_ids[0], completed=done, total=total or None)
        if total and done >= total:
            self._done.add(task)
            self.close()

    def close(self) -> None:
        """Wipe off what is drawn."""
        if self._drawn is not None:
            self._drawn.stop()
            self._drawn = None


def _bar(*, counted: bool) -> rich.progress.Progress:
    """`counted`: it is known how many bytes there are in all; else the bar only shows that something goes on."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description}", markup=False)
    bytes_done = (DownloadColumn(), TimeRemainingColumn()) if counted else ()
    return Progress(text, BarColumn(bar_width=20), *bytes_done, console=Console(stderr=True), transient=True)


@contextmanager
def bars() -> Iterator[Progress]:
    """`Bars` while it runs; nothing is drawn where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield silent
        return
    drawn = Bars()
    try:
        yield drawn
    finally:
        drawn.close()


def size(nbytes: int) -> str:
    """Bytes for people, in decimal units."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"
