"""How a model thinks before it answers: read off its template and the tokenizer's tokens. Knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.tokenize.facts import Facts

_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class Tokens(Protocol):
    """The part of a tokenizer that is needed here."""

    @property
    def facts(self) -> Facts: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def added_id(self, name: str) -> int | None:
        """The id of a token that is matched whole in texts, by its name."""

    def piece(self, token: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Thinking:
    """The two tokens that stand around a model's thinking."""

    begin: int
    end: int
    begin_tag: str
    end_tag: str

    def is_begun(self, prompt: Sequence[int], tokens: Tokens) -> bool:
        """Does a prompt that ends where an answer begins end inside the thinking? Its template then has begun it, with
        nothing but spaces behind."""
        for token in reversed(prompt):
            if token == self.begin:
                return True
            if token == self.end or tokens.piece(token).strip():
                return False
        return False

    def is_open_in(self, text: str) -> bool:
        """Does a text that is to be continued end inside the thinking?"""
        return text.rfind(self.begin_tag) > text.rfind(self.end_tag)


def thinking_of(tokens: Tokens) -> Thinking | None:
    """The tags that the model's template names, where they are one token each; None for a model that does not think."""
    sources = tokens.facts.templates.values()
    for begin_tag, end_tag in _PAIRS:
        begin, end = tokens.added_id(begin_tag), tokens.added_id(end_tag)
        if begin is not None and end is not None and any(tag in s for s in sources for tag in (begin_tag, end_tag)):
            return Thinking(begin, end, begin_tag, end_tag)
    return None
