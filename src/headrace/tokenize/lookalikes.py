"""Text in a chat that looks like a control token: finds and marks it, so that it can be told from the template's own.

A mark is a character that occurs nowhere in the chat. It is put behind the first character of every look-alike, also of
one that only begins in a text and could be completed by what the template puts behind it. A rendered prompt then
holds no control token but those that the template wrote; with the marks taken out again it is the prompt as it would
have been. Pure functions of text; knows no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

_CANDIDATES = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))
"""Code points that stand for nothing: first those that Unicode says are no characters, then those for private use."""

_STRUCTURE = frozenset({"role", "type"})
"""Keys whose values templates compare and build control tokens from; `role` is judged before it comes here."""


class Names:
    """A set of texts to look for."""

    def __init__(self, names: Iterable[str]) -> None:
        self.all = frozenset(name for name in names if name)
        self.starts = frozenset(name[:k] for name in self.all for k in range(1, len(name)))
        firsts = "".join(sorted({re.escape(name[0]) for name in self.all}))
        self.first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def lengths(self, text: str, at: int) -> Iterator[tuple[int, bool]]:
        """Each length at which the text from `at` on is the start of a name, and whether it is a whole one."""
        length = 1
        while at + length <= len(text):
            head = text[at : at + length]
            whole, start = head in self.all, head in self.starts
            if not whole and not start:
                return
            yield length, whole
            if not start:
                return
            length += 1


@dataclass(frozen=True)
class Guard:
    """Finds the look-alikes of one tokenizer's control tokens in what is given to one template."""

    names: Names
    literals: tuple[str, ...]
    """Texts that the template may take out of a content, so that what is around them joins."""
    tails: Names
    """What completes a control token whose beginning stands at the end of one of the template's own texts."""

    def places(self, text: str, *, tails: bool) -> list[int]:
        """Where marks are due. `tails`: also in front of a text that completes what the template began."""
        end = len(text.rstrip())
        found = []
        for match in self.names.first.finditer(text):
            at = match.start()
            for length, whole in self.names.lengths(text, at):
                if whole or at + length >= end or text.startswith(self.literals, at + length):
                    found.append(at + 1)
                    break
        if tails and self.tails.all:
            start = len(text) - len(text.lstrip())
            if any(whole or start + length >= end for length, whole in self.tails.lengths(text, start)):
                found.insert(0, start)
        return found


def guard(names: Names, literals: tuple[str, ...]) -> Guard:
    """`literals`: every text that the template itself can write."""
    begun = {head for literal in literals for k in range(1, len(literal) + 1) if (head := literal[-k:]) in names.starts}
    tails = Names(name[len(head) :] for head in begun for name in names.all if name.startswith(head))
    removable = tuple(literal for literal in literals if len(literal) > 1 and not literal.isspace())
    return Guard(names, removable, tails)


def strings(value: Any) -> Iterator[str]:
    """Every string in plain data, keys included."""
    match value:
        case str():
            yield value
        case dict():
            yield from value
            yield from chain.from_iterable(map(strings, value.values()))
        case list():
            yield from chain.from_iterable(map(strings, value))


def free_characters(texts: list[str]) -> Iterator[str]:
    """Characters that occur in none of the texts, neither as such nor as a JSON escape."""
    used = set().union(*texts)
    escaped = any("\\u" in text for text in texts)
    for code in _CANDIDATES:
        char = chr(code)
        if char not in used and not (escaped and any(escape(char) in text.lower() for text in texts)):
            yield char


def escape(char: str) -> str:
    """As JSON in ASCII writes it."""
    return "".join(f"\\u{unit:04x}" for unit in memoryview(char.encode("utf-16-le")).cast("H"))


def mark(value: Any, found: Guard, char: str) -> tuple[Any, bool]:
    """A copy of plain data with the marks in it, and whether there are any."""
    any_marks = False

    def text(string: str, *, tails: bool) -> str:
        nonlocal any_marks
        places = found.places(string, tails=tails)
        if not places:
            return string
        any_marks = True
        edges = [0, *places, len(string)]
        return char.join(string[a:b] for a, b in pairwise(edges))

    return _mapped(value, text), any_marks


def _mapped(value: Any, text: Callable[..., str]) -> Any:
    match value:
        case str():
            return text(value, tails=True)
        case dict():
            return {
                text(key, tails=False): (
                    text(item, tails=False) if key in _STRUCTURE and isinstance(item, str) else _mapped(item, text)
                )
                for key, item in value.items()
            }
        case list():
            return [_mapped(item, text) for item in value]
    return value
