"""The parts of answers that hold calls, as families lay them out: objects one after the other or in a list; a name
with its arguments behind it; keys and values without quotes. Each reads one such part.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from headrace.tokenize.tools.calls import Calls
from headrace.tokenize.tools.steps import SPACE, CallObject, Step, Value

FENCE = "```"
LANGUAGES = ("", "json", "tool_code", "tool_call")
"""What the line of a fence may say, where it holds calls."""
_NAME_CHARS = 128
"""Longest name that is waited for."""
_LITERALS = {"None": "null", "True": "true", "False": "false"}
"""Of Python, which models mix up with those of JSON."""


class Objects:
    """`{"name": ..., "arguments": {...}}`, one or several, as a list or not, up to one of the tags `ends`."""

    def __init__(self, calls: Calls, ends: Collection[str] = (), *, languages: Collection[str] = ()) -> None:
        """`languages`: words that may stand in the line of the beginning, as behind a fence of Markdown."""
        self._calls = calls
        self._ends = frozenset(ends)
        self._languages = frozenset(languages)
        self._language = "" if languages else None
        self._object: CallObject | None = None
        self._any = False
        self._in_list = False
        self._broken = False

    def feed(self, symbol: str) -> Step:
        if symbol in self._ends and (self._object is None or self._broken):
            self._calls.end()
            return Step.OVER if self._any or self._broken else Step.BAD
        if self._language is not None:
            return self._first_line(symbol)
        if self._broken:
            self._calls.add(symbol)
            return Step.MORE
        if self._object is None:
            return self._between(symbol)
        return self._inside(self._object, symbol)

    def _first_line(self, symbol: str) -> Step:
        assert self._language is not None
        if symbol == "\n":
            known = self._language.strip() in self._languages
            self._language = None
            return Step.MORE if known else Step.BAD
        self._language += symbol
        return Step.MORE if len(self._language) <= _NAME_CHARS else Step.BAD

    def _between(self, symbol: str) -> Step:
        if symbol == "{":
            self._object = CallObject(self._calls)
            return Step.MORE
        if symbol in SPACE:
            return Step.MORE
        if symbol == "[" and not self._any and not self._in_list:
            self._in_list = True
            return Step.MORE
        if not self._any:
            return Step.BAD
        if symbol == "]" and self._in_list and not self._ends:
            return Step.OVER
        return Step.MORE if symbol in (",", ";", "]", "}") else Step.UNREAD  # also brackets too many

    def _inside(self, call: CallObject, symbol: str) -> Step:
        for at, char in enumerate(symbol):
            step = call.feed(char)
            if step is Step.BAD:
                if not self._calls.is_open:
                    return step
                self._broken = True
                if symbol in self._ends:
                    return self.feed(symbol)
                self._calls.add(symbol[at:])
                return Step.MORE
            if step is not Step.MORE:
                self._object, self._any = None, True
                if step is Step.UNREAD:
                    return self.feed(symbol)  # only a tag has several characters, and none that ends an object
        return Step.MORE


def fenced(calls: Calls) -> Objects:
    """Objects behind a fence of Markdown, whose line may name a language that tells nothing else."""
    return Objects(calls, {FENCE}, languages=LANGUAGES)


class Named:
    """`name[ARGS]{...}`: a name, one of the tags `breaks` or nothing, and an object."""

    def __init__(
        self, calls: Calls, breaks: Collection[str], *, skips: Collection[str] = (), next_ones: Collection[str] = ()
    ) -> None:
        """`skips`: tags that begin something between the name and `breaks` that is left out, an id. `next_ones`: tags
        that begin another call, where this one cannot be read."""
        self._calls = calls
        self._breaks = frozenset(breaks)
        self._skips = frozenset(skips)
        self._next_ones = frozenset(next_ones)
        self._name: str | None = ""
        self._skipped: int | None = None
        self._value = Value()
        self._begun = self._broken = False

    def feed(self, symbol: str) -> Step:
        if self._name is not None:
            return self._naming(self._name, symbol)
        if self._broken and symbol in self._next_ones:
            self._calls.end()
            return Step.UNREAD
        for char in symbol:
            step = self._argument(char)
            if step is not Step.MORE:
                return step
        return Step.MORE

    def _naming(self, name: str, symbol: str) -> Step:
        if symbol in self._breaks or symbol == "{":
            if not self._calls.takes(name.strip()):
                return Step.BAD
            self._calls.begin(name.strip())
            self._name = None
            return self.feed(symbol) if symbol == "{" else Step.MORE
        if symbol in self._skips:
            self._skipped = 0
        elif self._skipped is not None:
            self._skipped += 1
            return Step.MORE if self._skipped <= _NAME_CHARS else Step.BAD
        elif len(symbol) > 1 or len(name) > _NAME_CHARS:
            return Step.BAD
        else:
            self._name = name + symbol
        return Step.MORE

    def _argument(self, char: str) -> Step:
        if not self._begun:
            if char in SPACE:
                return Step.MORE
            self._begun, self._broken = True, char != "{"
        step = Step.MORE if self._broken else self._value.feed(char)
        if step is Step.BAD:
            self._broken, step = True, Step.MORE
        self._calls.add(char)
        if step is Step.OVER:
            self._calls.end()
            return step
        return Step.MORE


class Keyed:
    """`call:name{key:value,...}`: strings stand between two of the tag `quote`, keys stand bare. Told as JSON."""

    def __init__(self, calls: Calls, quote: str, ends: Collection[str]) -> None:
        self._calls = calls
        self._quote = quote
        self._ends = frozenset(ends)
        self._head: str | None = ""
        self._open: list[str] = []
        self._word: str | None = None
        """A bare key or value that is being read."""
        self._keys: list[bool] = []
        """For each open bracket: does a key come next?"""
        self._string: str | None = None
        """What ends the string that is being read."""
        self._escaped = False
        self._is_over = False

    def feed(self, symbol: str) -> Step:
        if self._head is not None:
            return self._naming(self._head, symbol)
        if self._is_over:
            if symbol in self._ends:
                return Step.OVER
            return Step.MORE if symbol in SPACE else Step.UNREAD
        if symbol in self._ends:
            self._calls.end()
            return Step.OVER
        if self._string is not None:
            return self._in_string(symbol)
        return self._plain(symbol)

    def _naming(self, head: str, symbol: str) -> Step:
        if symbol == "{":
            marker, _, name = head.strip().partition(":")
            if marker != "call" or not self._calls.takes(name.strip()):
                return Step.BAD
            self._calls.begin(name.strip())
            self._head = None
            return self._plain(symbol)
        self._head = head + symbol
        return Step.BAD if len(symbol) > 1 or len(head) > _NAME_CHARS else Step.MORE

    def _in_string(self, symbol: str) -> Step:
        if symbol == self._string and not self._escaped:
            self._string = None
            self._calls.add('"')
        elif self._string == '"':  # as JSON has it already
            self._escaped = symbol == "\\" and not self._escaped
            self._calls.add(symbol)
        else:
            self._calls.add(json.dumps(symbol, ensure_ascii=False)[1:-1])
        return Step.MORE

    def _plain(self, symbol: str) -> Step:
        if symbol == self._quote or (symbol == '"' and not (self._word or "").strip()):
            self._end_word(key=False)
            self._string = symbol
            self._calls.add('"')
            return Step.MORE
        if symbol == ":" and self._keys and self._keys[-1]:
            self._end_word(key=True)
            self._keys[-1] = False
            self._calls.add(":")
            return Step.MORE
        if symbol in "{[":
            self._open.append("}" if symbol == "{" else "]")
            self._keys.append(symbol == "{")
        elif self._open and symbol == self._open[-1]:
            self._end_word(key=False)
            self._open.pop()
            self._keys.pop()
        elif symbol == "," and self._open:
            self._end_word(key=False)
            self._keys[-1] = self._open[-1] == "}"
        else:
            self._word = (self._word or "") + symbol
            return Step.MORE
        self._calls.add(symbol)
        if not self._open:
            self._calls.end()
            self._is_over = True
        return Step.MORE

    def _end_word(self, *, key: bool) -> None:
        word, self._word = (self._word or "").strip(), None
        if word:
            word = _LITERALS.get(word, word)
            self._calls.add(json.dumps(word, ensure_ascii=False) if key or not _is_literal(word) else word)


def _is_literal(word: str) -> bool:
    """A number, true, false or null as JSON has them."""
    try:
        json.loads(word, parse_constant=lambda name: json.loads(""))
    except ValueError:
        return False
    return True
