"""Past load of one model: how long requests were and how many came at once, kept between runs for the memory plan.

Owns the counts and their file. Only lengths are counted, in coarse steps: never a text, a token id or a time of day.
Nothing here is ever an error for the user: what cannot be read is left out, what cannot be kept is logged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.cache.plan import Demand
from headrace.loading.checkpoint import Checkpoint
from headrace.paths import cache_home
from headrace.scheduler.messages import Delta

log = logging.getLogger(__name__)

VERSION = 1
FILE_BYTES = 1 << 16
"""Larger files are not ours."""
LEAST = 50
"""Fewer requests prove nothing."""
MOST = 100_000
"""From so many requests on old ones count for half, so that the evidence follows the load."""
NEARLY_ALL = 0.99
SAVE_S = 300
"""Between two savings of a running engine."""
_STEPS = 4
"""Counted lengths per doubling."""


def step_of(number: int) -> int:
    """In which step a number is counted: small ones alone, from 8 on four steps for each doubling."""
    octave = max(0, number.bit_length() - 3)
    return _STEPS * octave + (number >> octave)


def top_of(step: int) -> int:
    """The largest number that is counted in a step."""
    octave = max(0, step // _STEPS - 1)
    return ((step - _STEPS * octave + 1) << octave) - 1


@dataclass(slots=True)
class Counts:
    """How often numbers of each step came."""

    steps: dict[int, int] = field(default_factory=dict)
    most: int = 0
    """The largest number."""

    def add(self, number: int) -> None:
        step = step_of(number)
        self.steps[step] = self.steps.get(step, 0) + 1
        self.most = max(self.most, number)

    def take(self, other: Counts) -> None:
        for step, count in other.steps.items():
            self.steps[step] = self.steps.get(step, 0) + count
        self.most = max(self.most, other.most)

    def halve(self) -> None:
        self.steps = {step: count // 2 for step, count in self.steps.items() if count > 1}

    @property
    def total(self) -> int:
        return sum(self.steps.values())

    def within(self, share: float) -> int:
        """What so large a share of the numbers does not exceed, never too little; 0 where there are none."""
        left = share * self.total
        for step in sorted(self.steps):
            left -= self.steps[step]
            if left <= 0:
                return min(top_of(step), self.most)
        return self.most


@dataclass(slots=True)
class Seen:
    """What is known of the load of one model."""

    prompt: Counts = field(default_factory=Counts)
    """Tokens of each request's prompt, at most the context, as everywhere here."""
    answer: Counts = field(default_factory=Counts)
    """Tokens of each choice's answer."""
    length: Counts = field(default_factory=Counts)
    """Both together, of each choice."""
    at_once: Counts = field(default_factory=Counts)
    """Choices under way when one came, itself counted."""
    since: str = ""
    """The day of the first request, as 2026-01-31."""

    @property
    def requests(self) -> int:
        """Choices that ended, older ones counted for less."""
        return self.length.total

    def demand(self) -> Demand | None:
        """For the memory plan; None where too little was seen."""
        if self.requests < LEAST:
            return None
        return Demand(self.length.within(NEARLY_ALL), self.at_once.within(NEARLY_ALL))

    def take(self, other: Seen) -> None:
        for mine, theirs in zip(self._counts(), other._counts(), strict=True):
            mine.take(theirs)
        self.since = min(filter(None, (self.since, other.since)), default="")
        while self.requests > MOST:
            for counts in self._counts():
                counts.halve()

    def described(self) -> dict[str, Any]:
        """For people and programs: what nearly all requests stayed within, and the most."""
        counts = {"prompt": self.prompt, "answer": self.answer, "length": self.length, "at_once": self.at_once}
        most = {name: {"nearly_all": c.within(NEARLY_ALL), "most": c.most} for name, c in counts.items()}
        return {"requests": self.requests, "since": self.since, **most}

    def _counts(self) -> tuple[Counts, ...]:
        return self.prompt, self.answer, self.length, self.at_once

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        names = ("prompt", "answer", "length", "at_once")
        lines = {
            n: {"most": c.most, "steps": sorted(c.steps.items())} for n, c in zip(names, self._counts(), strict=True)
        }
        return {"version": VERSION, "since": self.since, **lines}

    @classmethod
    def of(cls, told: object) -> Seen:
        """What `told` gave; ValueError for anything else."""
        match told:
            case {"version": 1, "since": str(since), **lines} if len(since) <= 10:
                prompt, answer, length, at_once = (
                    _counts(lines.get(n)) for n in ("prompt", "answer", "length", "at_once")
                )
                return cls(prompt, answer, length, at_once, since)
        raise ValueError("it is no record of past load, or one of another version")


def _counts(told: object) -> Counts:
    match told:
        case {"most": int(most), "steps": list(steps)} if 0 <= most < 2**40:
            for pair in steps:
                match pair:
                    case [int(step), int(count)] if 0 <= step < 200 and 0 < count < 2**50:
                        continue
                raise ValueError("its counts are broken")
            return Counts(dict(map(tuple, steps)), most)
    raise ValueError("its counts are broken")


def load_folder() -> Path:
    return cache_home() / "load"


def load_file(checkpoint: Checkpoint) -> Path:
    """One for each place of a model."""
    key = hashlib.sha256(os.path.realpath(checkpoint.path).encode(errors="surrogateescape")).hexdigest()[:12]
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in checkpoint.name)[:64]
    return load_folder() / f"{name}-{key}.json"


def read_seen(checkpoint: Checkpoint) -> Seen | None:
    """None where nothing is known; a file that is not whole is told of, and left out."""
    path = load_file(checkpoint)
    try:
        return _read(path)
    except (OSError, ValueError, RecursionError) as error:
        log.warning("past load in %s is not used: %s", path, error)
        return None


def _read(path: Path) -> Seen | None:
    """None where there is no such file. OSError, ValueError, RecursionError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        data = file.read(FILE_BYTES + 1)
    if len(data) > FILE_BYTES:
        raise ValueError("it is too large")
    return Seen.of(json.loads(data))


class LoadKeeper:
    """Counts the requests of one engine, and keeps the counts now and then and at its end."""

    def __init__(self, checkpoint: Checkpoint, context: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = load_file(checkpoint)
        self._context = context
        self._clock = clock
        self._saved = clock()
        self._lock = threading.Lock()
        self._new = Seen()
        self._live: dict[int, tuple[int, dict[int, int]]] = {}
        """By request: tokens of the prompt; by choice tokens of the answer so far."""
        self._choices = 0
        """Of all that live."""

    def begin(self, request: int, prompt: int, choices: int) -> None:
        """A request comes; from any thread, before the engine has it. Texts longer than the context, which go on in
        windows, need no more than the context."""
        prompt = min(prompt, self._context)
        with self._lock:
            self._live[request] = prompt, dict.fromkeys(range(choices), 0)
            self._choices += choices
            self._new.prompt.add(prompt)
            self._new.at_once.add(self._choices)

    def forget(self, request: int) -> None:
        """It was not taken."""
        with self._lock:
            if request in self._live:
                self._choices -= len(self._live.pop(request)[1])

    def watching(self, deliver: Callable[[list[Delta]], None]) -> Callable[[list[Delta]], None]:
        """`deliver`, the deltas counted before it gets them."""

        def watched(deltas: list[Delta]) -> None:
            self.count(deltas)
            deliver(deltas)

        return watched

    def count(self, deltas: list[Delta]) -> None:
        """What a step gave; on the engine's thread."""
        with self._lock:
            for delta in deltas:
                if (known := self._live.get(delta.request)) is None or delta.choice not in known[1]:
                    continue
                prompt, answers = known
                answers[delta.choice] += len(delta.tokens)
                if delta.finish is not None:
                    answer = answers.pop(delta.choice)
                    self._choices -= 1
                    if not answers:
                        del self._live[delta.request]
                    if delta.finish != "error":
                        self._new.answer.add(min(answer, self._context))
                        self._new.length.add(min(prompt + answer, self._context))
            due = self._new.requests and self._clock() - self._saved >= SAVE_S
        if due:
            self._saved = self._clock()
            threading.Thread(target=self.save, name="headrace-past-load", daemon=True).start()

    def save(self) -> None:
        """Add what is new to the file. Where another process is just doing so, that waits for the next time."""
        with self._lock:
            new, self._new = self._new, Seen()
        if not new.requests or not self._add(new):
            with self._lock:
                self._new.take(new)

    def _add(self, new: Seen) -> bool:
        """Whether it was added, or never will be."""
        folder = self._path.parent
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _alone(folder) as alone:
                if not alone:
                    return False
                whole = Seen()
                with suppress(OSError, ValueError, RecursionError):  # what is broken was told of, and is replaced
                    whole = _read(self._path) or whole
                new.since = time.strftime("%Y-%m-%d")
                whole.take(new)
                part.write_text(json.dumps(whole.told()), encoding="utf-8")
                part.replace(self._path)
        except OSError as error:
            log.warning("past load is not kept in %s: %s", folder, error)
            with suppress(OSError):
                part.unlink(missing_ok=True)
        return True


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no other process writes there; waits for one at most a second."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(20):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
                continue
            yield True
            return
        yield False
    finally:
        os.close(descriptor)
