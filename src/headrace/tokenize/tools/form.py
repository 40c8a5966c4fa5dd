"""`Form`: one family's way to write tool calls, as data. Knows no reader and no request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.tokenize.tools.calls import Calls, call_id
from headrace.tokenize.tools.steps import Region


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of an object: the arguments."""
    strict: bool = False
    """Must its arguments satisfy the schema even where the model chooses freely whether to call it?"""
    at: str = "tools"
    """What errors call it."""
    judged: Mapping[str, Any] | None = None
    """`parameters` as a grammar in JSON may hold them; None where nothing is held to them."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a grammar names tags: control tokens by their ids, all else as text."""

    ids: Mapping[str, int]
    """Of the tags that are control tokens."""

    def __call__(self, tag: str) -> str:
        return f"<[{self.ids[tag]}]>" if tag in self.ids else quoted(tag)

    def is_text(self, tag: str) -> bool:
        return tag not in self.ids


def quoted(text: str) -> str:
    """A literal of the grammar, or of JSON: they are written alike."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of calls an answer must hold."""

    required: bool = False
    """At least one."""
    several: bool = True
    """There may be more than one."""
    content: str = ""
    """What an answer without calls must be, as a rule's body; empty: any text. Not for forms that have `firsts`."""


class Grammar(Protocol):
    """Writes what an answer may be, in llguidance's Lark."""

    def __call__(self, tools: Sequence[Tool], wanted: Wanted, spelling: Spelling) -> str:
        """RequestError where a schema cannot be held in this form."""


@dataclass(frozen=True)
class Form:
    """How a family writes calls."""

    name: str
    region: Callable[[str, Calls], Region]
    """Reads what follows one of `begins`, or of `firsts`; an opening bracket is told to it."""
    grammar: Grammar
    begins: frozenset[str]
    """Tags that begin a call: control tokens where the tokenizer has them as such, else text."""
    ends: frozenset[str] = frozenset()
    inner: frozenset[str] = frozenset()
    """Other tags."""
    firsts: frozenset[str] = frozenset()
    """Brackets and tags that begin a call only where an answer begins."""
    loose: frozenset[str] = frozenset()
    """More of them, for answers of any text: models forget what they were shown. Where a grammar holds the answer, what
    begins so is held as `opening` has it."""
    single: bool = False
    """The template takes back one call a turn, and so answers that are held to a grammar have one."""
    new_id: Callable[[], str] = call_id
    fit_id: Callable[[str], str] | None = None
    """Makes of any id one that the template takes, the same of the same; None: it takes any."""
    described: Described | None = None
    """Where the template knows no tools: how messages say what it cannot."""

    @property
    def tags(self) -> frozenset[str]:
        return self.begins | self.ends | self.inner | {tag for tag in self.firsts | self.loose if len(tag) > 1}


@dataclass(frozen=True)
class Described:
    """How tools, calls and results are written into plain messages."""

    tools: Callable[[Sequence[Mapping[str, Any]]], str]
    """The text of the system message, from the tools in OpenAI's form."""
    calls: Callable[[Sequence[Mapping[str, Any]]], str]
    """The text of an assistant's message, from its calls."""
    results: Callable[[Sequence[tuple[str, str]]], str]
    """The text of a user's message, from names and results of tools."""
    in_first_message: bool = False
    """Where there is no system message the tools stand in the first one of the user: the template takes no other."""
