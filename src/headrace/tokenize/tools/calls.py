"""What a reader of tool calls tells, call by call. Owns their numbers and ids; knows no form."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallDelta:
    """An addition to one tool call of an answer."""

    index: int
    """Calls are numbered as they begin, from 0."""
    arguments: str = ""
    """More of its arguments, which are JSON."""
    id: str | None = None
    """With the first addition, as is the name."""
    name: str | None = None


Event = str | CallDelta
"""Content, or an addition to a call."""


def call_id() -> str:
    """A new id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


class Calls:
    """The calls of one answer so far. Forms report to it; `events` is taken by the reader."""

    def __init__(self, names: Collection[str], most: int | None = None, new_id: Callable[[], str] = call_id) -> None:
        """`names`: of the tools that were offered; what names another one is no call. `most`: how many there may be."""
        self.events: list[Event] = []
        self.count = 0
        """How many have begun."""
        self.is_open = False
        """Has the last one begun and not ended?"""
        self.names = frozenset(names)
        self._most = most
        self._new_id = new_id

    def takes(self, name: str) -> bool:
        """May a call of this tool begin?"""
        return name in self.names and (self._most is None or self.count < self._most)

    def begin(self, name: str) -> None:
        assert self.takes(name)
        self.events.append(CallDelta(self.count, "", self._new_id(), name))
        self.count += 1
        self.is_open = True

    def add(self, arguments: str) -> None:
        """To the one that is open."""
        assert self.is_open
        self.events.append(CallDelta(self.count - 1, arguments))

    def end(self) -> None:
        self.is_open = False
