"""What of a choice may be shown, step by step: its text, and log-probabilities of the tokens that make up that text.

The one place that holds a token's entry back until its text is out, so that joined entries are always the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Protocol

from headrace.engine.outputs import Chunk, Logprob
from headrace.tokenize.tools.calls import CallDelta


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of the shown text."""

    token: int
    text: str
    """What it added; empty inside a character, for an end token and for hidden control tokens."""
    position: dict[int, Logprob] | None
    """Log-probabilities there, the token's own first; None for the first token of a prompt."""


@dataclass(frozen=True, slots=True)
class Part:
    """An addition to one choice: what one streamed chunk carries, or the whole of an answer."""

    index: int
    text: str
    entries: tuple[Entry, ...] = ()
    """Joined they are `text`; empty where no log-probabilities are asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None
    """With the last part."""
    reasoning: str = ""
    """What the model thought."""
    calls: tuple[CallDelta, ...] = ()
    """Additions to tool calls."""
    thought: int = 0
    """Tokens of thinking that came with it."""

    @property
    def shows(self) -> bool:
        """Is there anything to tell?"""
        return bool(self.text or self.reasoning or self.calls or self.finish_reason)


def joined(parts: Iterable[Part]) -> Part:
    """All parts of one choice, in order, as one."""
    every = list(parts)
    return replace(
        every[-1],
        text="".join(part.text for part in every),
        entries=tuple(entry for part in every for entry in part.entries),
        reasoning="".join(part.reasoning for part in every),
        calls=merged(call for part in every for call in part.calls),
    )


def merged(calls: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """Additions to calls as one for each call."""
    out: dict[int, CallDelta] = {}
    for call in calls:
        first = out.get(call.index)
        out[call.index] = call if first is None else replace(first, arguments=first.arguments + call.arguments)
    return tuple(out.values())


class Split(Protocol):
    """Tells what a choice holds: `splitting.Split`."""

    def add(self, part: Part) -> Part:
        """What of a part, with all its tokens as entries, can be told."""


class Shown:
    """How far one choice has been shown."""

    def __init__(self, index: int, seed: int, split: Split | None = None) -> None:
        """`split`: tells thinking, content and tool calls apart; None: all is content."""
        self._index = index
        self._seed = seed
        self._split = split
        self._waiting: deque[Entry] = deque()
        self._ahead = 0
        """Characters of shown text that no released entry covers yet."""

    def add(self, chunk: Chunk, echo: str = "", echoed: tuple[Entry, ...] = ()) -> Part | None:
        """What to show for a chunk, after the echoed prompt; None where it brings neither text nor the end."""
        if chunk.logprobs is not None or self._split is not None:
            positions: Iterable[dict[int, Logprob] | None] = chunk.logprobs or repeat(None)
            self._waiting.extend(map(Entry, chunk.token_ids, chunk.pieces, positions))
            if isinstance(chunk.stop_reason, str) and self._waiting and not self._waiting[-1].text:
                self._waiting.pop()  # it only completed the stop string, and nothing of that is shown
        if not (chunk.text or echo or chunk.finish_reason):
            return None
        part = Part(
            index=self._index,
            text=echo + chunk.text,
            entries=(*echoed, *self._release(chunk.text, last=chunk.finish_reason is not None)),
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            seed=self._seed if chunk.finish_reason else None,
        )
        return part if self._split is None else self._split.add(part)

    def _release(self, text: str, *, last: bool) -> list[Entry]:
        """Entries whose text is now out. At the end a token that a stop string cuts is cut, others are left."""
        self._ahead += len(text)
        out = []
        while self._waiting and len(self._waiting[0].text) <= self._ahead:
            entry = self._waiting.popleft()
            self._ahead -= len(entry.text)
            out.append(entry)
        if last and self._waiting and self._ahead:
            cut = self._waiting.popleft()
            out.append(Entry(cut.token, cut.text[: self._ahead], cut.position))
        return out
