"""The log as lines on standard error: text or JSON, one object a line, written by a thread of its own.

Owns that thread. Knows only `logging`: whoever has something to say says it there, an event with fields through
`event`. As a library Headrace changes no logging; the `serve` command begins with `logging_to`.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO

from headrace.serve.options import ServerOptions

LINES = 10_000
"""Lines that wait to be written; where the reader of standard error stands still, more are lost and counted."""
LAST_S = 2.0
"""How long the end of the process waits for lines that are not yet written."""
LOGGERS = ("headrace", "uvicorn")


def event(log: logging.Logger, level: int, name: str, fields: Mapping[str, Any]) -> None:
    """Something that happened, with what is known of it. A value may be a function: it is called where the line is
    written, on another thread, if it is written at all."""
    if log.isEnabledFor(level):
        log.log(level, "%s", name, extra={"event": name, "fields": fields})


Fields = Mapping[str, Any]


class _Line(logging.Formatter):
    """What a record tells, time, level, event and fields, as `write` writes it."""

    def __init__(self, write: Callable[[str, str, str, Fields], str]) -> None:
        super().__init__()
        self._write = write

    def format(self, record: logging.LogRecord) -> str:
        told = vars(record)
        fields: dict[str, Any] = {
            name: value() if callable(value) else value for name, value in told.get("fields", {}).items()
        }
        if "event" not in told:
            fields = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return self._write(at, record.levelname.lower(), told.get("event", "message"), fields)


def _json_line(at: str, level: str, name: str, fields: Fields) -> str:
    """One JSON object a line; null and empty fields are left out."""
    told = {k: v for k, v in fields.items() if v is not None and v != []}
    return json.dumps({"time": at, "level": level, "event": name, **told}, ensure_ascii=False, default=str)


def _text_line(at: str, level: str, name: str, fields: Fields) -> str:
    """time level event name=value ..., values with spaces or control characters as JSON; a message as it is."""
    words = [at, level]
    if "message" in fields:
        words.append(_plain(str(fields["message"])))
    else:
        words += [name, *(f"{k}={_value(v)}" for k, v in fields.items() if v is not None and v != [])]
    line = " ".join(words)
    return f"{line}\n{fields['exception']}" if "message" in fields and "exception" in fields else line


def _plain(text: str) -> str:
    """On one line, without characters that steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def _value(value: Any) -> str:
    if isinstance(value, str):
        bare = value.isprintable() and value and not any(char in value for char in ' "=')
        return value if bare else json.dumps(value, ensure_ascii=not value.isprintable())
    if isinstance(value, list):
        return ",".join(map(_value, value))
    return str(value)


class _Writer(logging.Handler):
    """Hands records to a thread that writes them; never waits."""

    def __init__(self, stream: TextIO, form: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(form)
        self._stream = stream
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(LINES)
        self._lost = 0
        self._thread = threading.Thread(target=self._write_all, name="headrace-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._lost += 1

    def finish(self) -> None:
        """Write what waits, as far as the time allows."""
        try:
            self._records.put(None, timeout=LAST_S)
        except queue.Full:
            return
        self._thread.join(LAST_S)

    def _write_all(self) -> None:
        while (record := self._records.get()) is not None:
            self._write(record)
            if self._lost:
                lost, self._lost = self._lost, 0
                extra = {"event": "lines_lost", "fields": {"lost": lost}}
                self._write(logging.makeLogRecord({"levelname": "WARNING", "name": __name__, **extra}))
            del record  # it may hold an exception, and with that an engine that died

    def _write(self, record: logging.LogRecord) -> None:
        try:
            self._stream.write(self.format(record) + "\n")
            self._stream.flush()
        except Exception:
            self._lost += 1  # a disk that is full, a reader that left: there is nowhere to say it


@contextmanager
def logging_to(options: ServerOptions, stream: TextIO | None = None) -> Iterator[None]:
    """While it runs, what Headrace and uvicorn log goes to `stream` (standard error), as the options say."""
    writer = _Writer(stream or sys.stderr, _Line(_json_line if options.log_format == "json" else _text_line))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(log.level, log.propagate) for log in loggers]
    for log in loggers:
        log.addHandler(writer)
        log.propagate = False
    loggers[0].setLevel(options.log_level.upper())
    try:
        yield
    finally:
        for log, (level, propagate) in zip(loggers, before, strict=True):
            log.removeHandler(writer)
            log.setLevel(level)
            log.propagate = propagate
        writer.finish()
